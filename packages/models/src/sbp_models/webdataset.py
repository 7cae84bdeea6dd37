"""The data set `webdataset`: images in tar files ("shards") in the format of that library.

    shard-0.tar    cat/0001.jpg  cat/0001.cls  cat/0002.jpg  cat/0002.cls ...

Files with one name, up to the first dot, are one sample: an image, and a `.cls` with its class in
digits. Hidden files, and names with neither, are skipped. The shards are scanned once for the
positions of their files, so samples are read in any order; images are decoded on access. Nothing is
unpickled and nothing unpacked.
"""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path, PurePosixPath

from sbp_core.errors import ConfigError
from sbp_core.serialize import open_file
from sbp_core.user_paths import user_path
from sbp_models.configs import WebDatasetConfig
from sbp_models.local_files import files_of, is_held_out, is_hidden, read_bytes
from sbp_models.pictures import SUFFIXES, ImageFiles, Pictures, StoredImage

#: Bytes of a block of a tar file; headers and the zeros at the end are whole blocks.
_BLOCK = 512

#: Largest size of a file `.cls`, in bytes.
_MOST_LABEL_BYTES = 32


class WebDataset(ImageFiles):
    """Images and their classes. Implements `sbp_torch.kinds.Dataset`.

    Raises:
        ConfigError: a shard is broken or cut off (names the byte), or a split is empty.
    """

    def __init__(self, config: WebDatasetConfig) -> None:
        pictures = Pictures(config, needed_by="data=webdataset")
        shards = files_of(
            user_path(config.path, key="data.path"), key="data.path", suffixes={".tar"}
        )
        images: dict[str, list[StoredImage]] = {"train": [], "validation": []}
        for shard in shards:
            for key, image in _samples(shard, config.num_classes):
                held = is_held_out(f"{shard.name} {key}", config.held_out)
                images["validation" if held else "train"].append(image)
        super().__init__(
            images,
            pictures,
            label=f"{len(shards)} shard{'s' if len(shards) != 1 else ''} of {config.path}",
            accepted="more samples, or another data.held_out",
        )


def _samples(shard: Path, num_classes: int) -> Iterator[tuple[str, StoredImage]]:
    """Yield the samples of a shard with their names."""
    files: dict[str, dict[str, tarfile.TarInfo]] = {}
    for member in _members(shard):
        name = PurePosixPath(member.name)
        stem, _, suffix = name.name.partition(".")
        if member.isfile() and stem and not is_hidden(name.parts):
            files.setdefault(str(name.parent / stem), {})[f".{suffix.lower()}"] = member
    for key, own in files.items():
        images = [suffix for suffix in own if suffix in SUFFIXES]
        if not images and ".cls" not in own:
            continue  # such as a README
        if len(images) != 1 or ".cls" not in own:
            given = ", ".join(f"{key}{suffix}" for suffix in own)
            first = min(member.offset for member in own.values())
            raise ConfigError(
                f"{shard} has a sample that is no image with a class: {given}",
                where=f"{shard}, byte {first}",
                accepted=f"one image ({', '.join(sorted(SUFFIXES))}) and one .cls of a name",
            )
        image, label = own[images[0]], own[".cls"]
        yield (
            key,
            StoredImage(
                file=shard,
                label=_class(shard, label, num_classes),
                name=image.name,
                begin=image.offset_data,
                size_bytes=image.size,
            ),
        )


def _members(shard: Path) -> Iterator[tarfile.TarInfo]:
    """Yield all files of a shard, or raise an error if it is broken."""
    end = 0
    try:
        size = shard.stat().st_size
        with BufferedReader(open_file(shard)) as whole, tarfile.open(shard, "r:", whole) as tar:
            for member in tar:
                end = member.offset_data + -(-member.size // _BLOCK) * _BLOCK
                if member.offset_data + member.size > size:
                    raise ConfigError(
                        f"{shard} is cut off in the file {member.name}",
                        where=f"{shard}, byte {size}",
                        accepted=f"{member.offset_data + member.size} bytes or more",
                    )
                yield member
        # tarfile may take a broken header for the end, and skip all following files.
        with open_file(shard) as opened:
            opened.seek(end)
            if any(opened.read(_BLOCK)):
                raise tarfile.ReadError("a file has an invalid header")
    except (OSError, tarfile.TarError) as error:
        raise ConfigError(
            f"{shard} cannot be read as a tar file: {error}",
            where=f"{shard}, byte {end}",
            accepted="a .tar file that is whole and not compressed",
        ) from error


def _class(shard: Path, member: tarfile.TarInfo, num_classes: int) -> int:
    size_bytes = min(member.size, _MOST_LABEL_BYTES)
    content = read_bytes(shard, begin=member.offset_data, size_bytes=size_bytes)
    text = content.decode("utf-8-sig", errors="replace").strip()
    if not text.isdecimal() or not text.isascii() or int(text) >= num_classes:
        raise ConfigError(
            f"{shard} has the class {text!r}, and data.num_classes={num_classes}",
            where=f"{shard}, byte {member.offset_data}, file {member.name}",
            accepted=f"digits of an integer in 0 to {num_classes - 1}",
            todo="set model.num_classes, which data.num_classes follows"
            if text.isdecimal()
            else "",
        )
    return int(text)


def build(config: WebDatasetConfig) -> WebDataset:
    """Build the data set."""
    return WebDataset(config)

"""A data set of images in tar files ("shards"), as the library `webdataset` writes them.

    shard-0.tar    cat/0001.jpg  cat/0001.cls  cat/0002.jpg  cat/0002.cls ...

Files of one name, up to the first dot, are one sample: an image, and a `.cls` that says its class
in digits. The shards are read once for where their files lie, so samples come in any order; images
are decoded when they are asked for. Nothing is unpickled and nothing unpacked.
"""

from __future__ import annotations

import tarfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import numpy as np
import numpy.typing as npt
import torch

from sbp_core.errors import ConfigError
from sbp_models.configs import WebDatasetConfig
from sbp_models.local_files import files_of, is_held_out
from sbp_models.pictures import SUFFIXES, Pictures
from sbp_models.splits import checked_numbers, size_of

#: Bytes of a block of a tar file, of which headers and zeros at the end have some.
_BLOCK = 512

#: Most bytes of a file `.cls`.
_MOST_LABEL_BYTES = 32


@dataclass(frozen=True, slots=True)
class _Image:
    """Where the image of a sample lies, and its class."""

    shard: Path
    name: str
    begin: int
    size: int
    label: int


class WebDataset:
    """Images and their classes. Fulfils `sbp_torch.kinds.Dataset`.

    Raises:
        ConfigError: a shard is broken or cut off (names the byte), or a split has no samples.
    """

    def __init__(self, config: WebDatasetConfig) -> None:
        self._pictures = Pictures(
            image_size=config.image_size, channels=config.channels, needed_by="data=webdataset"
        )
        shards = files_of(Path(config.path).expanduser(), key="data.path", suffixes={".tar"})
        self._label = f"{len(shards)} shard{'s' if len(shards) != 1 else ''} of {config.path}"
        self._images: dict[str, list[_Image]] = {"train": [], "validation": []}
        for shard in shards:
            for key, image in _samples(shard, config.num_classes):
                held = is_held_out(f"{shard.name} {key}", config.held_out)
                self._images["validation" if held else "train"].append(image)
        for split, own in self._images.items():
            if not own:
                raise ConfigError(
                    f"data.path={config.path} has no sample for the split {split!r}",
                    accepted="more samples",
                    todo="raise data.held_out" if split == "validation" else "",
                )
        self._splits = {split: len(own) for split, own in self._images.items()}

    def num_samples(self, split: str = "train") -> int:
        """Return how many images a split has."""
        return size_of(self._splits, split, where=self._label)

    def samples(
        self, numbers: npt.NDArray[np.int64], split: str = "train"
    ) -> Mapping[str, torch.Tensor]:
        """Return images of `train` or `validation`.

        Returns:
            `images`, float32 (n, channels, image_size, image_size), in [-1, 1]; `labels`, int64
            (n,).

        Raises:
            ConfigError: a shard cannot be read, or an image is not whole: names the byte.
        """
        found = checked_numbers(numbers, self._splits, split, where=self._label)
        asked = [self._images[split][number] for number in found]
        images = [
            self._pictures.decoded(
                _read(image.shard, image.begin, image.size),
                f"{image.shard}, file {image.name}",
                image.begin,
            )
            for image in asked
        ]
        labels = torch.tensor([image.label for image in asked])
        return {"images": torch.stack(images), "labels": labels}

    def describe(self) -> str:
        """Return one line: how many shards and samples there are."""
        counts = ", ".join(f"{size:,} {split}" for split, size in self._splits.items())
        return f"{self._label}: {counts}"


def _samples(shard: Path, num_classes: int) -> Iterator[tuple[str, _Image]]:
    """Yield the samples of a shard with their names."""
    files: dict[str, dict[str, tarfile.TarInfo]] = {}
    for member in _members(shard):
        if member.isfile():
            name = PurePosixPath(member.name)
            stem, _, suffix = name.name.partition(".")
            files.setdefault(str(name.with_name(stem)), {})[f".{suffix.lower()}"] = member
    for key, own in files.items():
        images = [suffix for suffix in own if suffix in SUFFIXES]
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
            _Image(
                shard, image.name, image.offset_data, image.size, _class(shard, label, num_classes)
            ),
        )


def _members(shard: Path) -> Iterator[tarfile.TarInfo]:
    """Yield the files of a shard; its last ones, too, or an error where it is broken."""
    end = 0
    try:
        size = shard.stat().st_size
        with tarfile.open(shard, "r:") as tar:
            for member in tar:
                end = member.offset_data + -(-member.size // _BLOCK) * _BLOCK
                if member.offset_data + member.size > size:
                    raise ConfigError(
                        f"{shard} is cut off in the file {member.name}",
                        where=f"{shard}, byte {size}",
                        accepted=f"{member.offset_data + member.size} bytes or more",
                    )
                yield member
        # tarfile may take a broken header for the end, and leave out all that follows.
        if any(_read(shard, end, _BLOCK, may_be_less=True)):
            raise tarfile.ReadError("the header of a file is none")
    except (OSError, tarfile.TarError) as error:
        raise ConfigError(
            f"{shard} is no tar file that can be read: {error}",
            where=f"{shard}, byte {end}",
            accepted="a .tar file that is whole and not compressed",
        ) from error


def _class(shard: Path, member: tarfile.TarInfo, num_classes: int) -> int:
    content = _read(shard, member.offset_data, min(member.size, _MOST_LABEL_BYTES))
    text = content.decode("ascii", errors="replace").strip()
    if not text.isdecimal() or not text.isascii() or int(text) >= num_classes:
        raise ConfigError(
            f"{shard} says the class {text!r}, and data.num_classes={num_classes}",
            where=f"{shard}, byte {member.offset_data}, file {member.name}",
            accepted=f"digits of an integer in 0 to {num_classes - 1}",
            todo="set model.num_classes, which data.num_classes follows"
            if text.isdecimal()
            else "",
        )
    return int(text)


def _read(shard: Path, begin: int, size: int, *, may_be_less: bool = False) -> bytes:
    try:
        with shard.open("rb") as file:
            file.seek(begin)
            found = file.read(size)
    except OSError as error:
        raise ConfigError(
            f"{shard} cannot be read: {error.strerror}", where=f"{shard}, byte {begin}"
        ) from error
    if len(found) < size and not may_be_less:
        raise ConfigError(
            f"{shard} has been cut off since it was listed", where=f"{shard}, byte {begin}"
        )
    return found


def build(config: WebDatasetConfig) -> WebDataset:
    """Make the data set."""
    return WebDataset(config)

"""Images of files: folders, tar files, digits; and files that are broken, named with the byte."""

from __future__ import annotations

import io
import struct
import tarfile
import zlib
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import webdataset as library
from PIL import Image

from sbp_core.errors import ConfigError
from sbp_models import digits, image_folder, webdataset
from sbp_models.configs import (
    AugmentConfig,
    DigitsConfig,
    ImageFolderConfig,
    VitConfig,
    WebDatasetConfig,
)
from sbp_torch.testing.data import DatasetConformance

#: Where an image of a border of one pixel may be cut.
PLACES = list(product(range(3), repeat=2))


def picture(number: int, width: int = 12, height: int = 10, kind: str = "PNG") -> bytes:
    """Return an image file whose colour tells its number."""
    values = np.full((height, width, 3), (5 * number % 256, 80, 255 - number), np.uint8)
    values[number % height, number % width] = 0
    stream = io.BytesIO()
    Image.fromarray(values).save(stream, kind)
    return stream.getvalue()


def write_folders(root: Path, count: int = 60) -> Path:
    for number in range(count):
        folder = root / ("cats", "dogs", "owls")[number % 3]
        folder.mkdir(parents=True, exist_ok=True)
        kind = ("PNG", "JPEG", "BMP")[number % 3]
        (folder / f"{number}.{kind.lower()}").write_bytes(picture(number, kind=kind))
    return root


def write_shards(root: Path, count: int = 60) -> Path:
    root.mkdir(exist_ok=True)
    for shard in range(2):
        with library.TarWriter(str(root / f"shard-{shard}.tar")) as sink:
            for number in range(shard, count, 2):
                key = f"sample{number:04}"
                sink.write({"__key__": key, "png": picture(number), "cls": str(number % 3)})
    return root


class TestImageFolder(DatasetConformance):
    splits = ("train", "validation")

    @pytest.fixture(autouse=True)
    def _write(self, tmp_path: Path) -> None:
        self.root = write_folders(tmp_path)

    def make_dataset(self) -> image_folder.ImageFolder:
        augment = AugmentConfig(flip=True, pad=2)
        config = ImageFolderConfig(path=str(self.root), image_size=8, held_out=0.2, augment=augment)
        return image_folder.build(config)


class TestWebDataset(DatasetConformance):
    splits = ("train", "validation")

    @pytest.fixture(autouse=True)
    def _write(self, tmp_path: Path) -> None:
        self.root = write_shards(tmp_path / "shards")

    def make_dataset(self) -> webdataset.WebDataset:
        return webdataset.build(WebDatasetConfig(path=str(self.root), image_size=8, held_out=0.2))


class TestDigits(DatasetConformance):
    splits = ("train", "validation")

    def make_dataset(self) -> digits.Digits:
        return digits.Digits(DigitsConfig())


def test_images_are_scaled_and_labelled_by_their_folder(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "a").mkdir()
    Image.new("RGB", (30, 20), (255, 0, 255)).save(tmp_path / "b" / "x.png")
    for number in range(30):
        Image.new("L", (9, 9), 0).save(tmp_path / "a" / f"{number}.png")
    data = image_folder.build(ImageFolderConfig(path=str(tmp_path), image_size=4, held_out=0.3))

    found = {
        split: data.samples(np.arange(data.num_samples(split)), split)
        for split in ("train", "validation")
    }

    labels = torch.cat([batch["labels"] for batch in found.values()])
    images = torch.cat([batch["images"] for batch in found.values()])
    assert data.classes == ["a", "b"]
    assert labels.sum() == 1
    assert images.shape == (31, 3, 4, 4)
    assert images[labels == 1].mean((0, 2, 3)).tolist() == [1, -1, 1]
    assert images[labels == 0].unique().tolist() == [-1]


def test_what_is_held_out_does_not_depend_on_where_the_folder_is(tmp_path: Path) -> None:
    found = []
    for name in ("one", "other"):
        root = write_folders(tmp_path / name)
        data = image_folder.build(ImageFolderConfig(path=str(root), held_out=0.3))
        found.append(data.samples(np.arange(data.num_samples("validation")), "validation"))

    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_folders_of_splits_are_the_splits(tmp_path: Path) -> None:
    write_folders(tmp_path / "train", 9)
    write_folders(tmp_path / "validation", 3)

    data = image_folder.build(ImageFolderConfig(path=str(tmp_path), channels=1))

    assert (data.num_samples("train"), data.num_samples("validation")) == (9, 3)
    assert data.samples(np.arange(3))["images"].shape == (3, 1, 32, 32)
    assert data.describe().endswith("9 train, 3 validation, 3 classes")


def broken_folder(tmp_path: Path, content: bytes) -> image_folder.ImageFolder:
    for split in ("train", "validation"):
        (tmp_path / split / "cats").mkdir(parents=True)
        (tmp_path / split / "cats" / "x.png").write_bytes(content)
    return image_folder.build(ImageFolderConfig(path=str(tmp_path)))


def bomb(side: int = 20_000) -> bytes:
    """Return a small PNG that says that it is huge."""
    header = struct.pack(">IIBBBBB", side, side, 8, 0, 0, 0, 0)
    chunks = [
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        for name, data in ((b"IHDR", header), (b"IDAT", b""))
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


@pytest.mark.parametrize(
    "content",
    [b"", b"no image", picture(3)[:-40], picture(3)[:60], b"%!PS-Adobe", picture(1, kind="TIFF")],
)
def test_an_image_that_is_broken_is_named_with_the_byte(tmp_path: Path, content: bytes) -> None:
    data = broken_folder(tmp_path, content)

    with pytest.raises(ConfigError, match="is no image that can be decoded") as caught:
        data.samples(np.arange(1))

    name, _, byte = caught.value.where[0].partition(", byte ")
    assert name == str(tmp_path / "train" / "cats" / "x.png")
    assert 0 <= int(byte) <= len(content)


def test_a_flipped_byte_of_a_png_is_found_by_its_checksum(tmp_path: Path) -> None:
    content = bytearray(picture(3, 40, 40))
    content[content.index(b"IDAT") + 20] ^= 1

    with pytest.raises(ConfigError, match="no image that can be decoded"):
        broken_folder(tmp_path, bytes(content)).samples(np.arange(1))


@pytest.mark.parametrize("side", [9_000, 11_000, 20_000])  # Pillow says nothing, warns, refuses
def test_a_file_that_says_that_it_is_huge_is_refused(tmp_path: Path, side: int) -> None:
    data = broken_folder(tmp_path, bomb(side))

    said = "an image of 9000 x 9000 pixels" if side == 9_000 else "no image that can be decoded"
    with pytest.raises(ConfigError, match=rf"x\.png is {said}"):
        data.samples(np.arange(1))


def test_what_is_no_folder_of_classes_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.png").write_bytes(picture(1))

    with pytest.raises(ConfigError, match="is not in the folder of a class"):
        image_folder.build(ImageFolderConfig(path=str(tmp_path)))
    with pytest.raises(ConfigError, match="does not exist"):
        image_folder.build(ImageFolderConfig(path=str(tmp_path / "no")))
    with pytest.raises(ConfigError, match=r"holds no \*.bmp"):
        (tmp_path / "x.png").unlink()
        image_folder.build(ImageFolderConfig(path=str(tmp_path)))


def test_more_classes_than_the_model_knows_are_refused(tmp_path: Path) -> None:
    root = write_folders(tmp_path)

    with pytest.raises(ConfigError, match=r"has 3 folders of images, and data\.num_classes=2"):
        image_folder.build(ImageFolderConfig(path=str(root), num_classes=2))


def test_shards_hold_what_webdataset_has_written(tmp_path: Path) -> None:
    root = write_shards(tmp_path / "shards", 40)
    data = webdataset.build(WebDatasetConfig(path=str(root), image_size=10, held_out=0.3))
    assert data.num_samples("train") + data.num_samples("validation") == 40

    seen = set()
    for split in ("train", "validation"):
        batch = data.samples(np.arange(data.num_samples(split)), split)
        for image, label in zip(batch["images"], batch["labels"].tolist(), strict=True):
            blue = torch.mode(((image[2] + 1) * 127.5).round().flatten()).values
            number = 255 - int(blue)
            assert label == number % 3
            seen.add(number)
    assert seen == set(range(40))


def one_shard(tmp_path: Path) -> Path:
    file = write_shards(tmp_path / "shards", 20) / "shard-0.tar"
    (file.parent / "shard-1.tar").unlink()
    return file


def test_names_of_a_sample_end_at_their_first_dot(tmp_path: Path) -> None:
    with library.TarWriter(str(tmp_path / "x.tar")) as sink:
        for number in range(40):
            files = {"png": picture(number), "mask.png": picture(0), "cls": str(number % 3)}
            sink.write({"__key__": f"sample{number}", **files})

    data = webdataset.build(WebDatasetConfig(path=str(tmp_path), held_out=0.2))

    assert data.num_samples("train") + data.num_samples("validation") == 40


@pytest.mark.parametrize("cut", [700, 5000])
def test_a_shard_that_is_cut_off_is_refused(tmp_path: Path, cut: int) -> None:
    file = one_shard(tmp_path)
    file.write_bytes(file.read_bytes()[:cut])

    with pytest.raises(ConfigError) as caught:
        webdataset.build(WebDatasetConfig(path=str(file)))

    assert f"{file}, byte " in str(caught.value)


def test_a_shard_that_ends_in_a_file_is_named_with_that_file(tmp_path: Path) -> None:
    file = one_shard(tmp_path)
    with tarfile.open(file) as tar:
        member = tar.getmember("sample0006.png")
    file.write_bytes(file.read_bytes()[: member.offset_data + member.size - 1])

    with pytest.raises(ConfigError, match=r"is cut off in the file sample0006\.png") as caught:
        webdataset.build(WebDatasetConfig(path=str(file)))

    assert caught.value.where == (f"{file}, byte {member.offset_data + member.size - 1}",)


@pytest.mark.parametrize("name", [b"sample0006.", b""])  # in the second header of a file, the first
def test_a_broken_header_in_a_shard_is_not_taken_for_its_end(tmp_path: Path, name: bytes) -> None:
    file = one_shard(tmp_path)
    content = bytearray(file.read_bytes())
    with tarfile.open(file) as tar:
        begin = tar.getmember("sample0006.cls").offset
    content[content.index(name, begin) + 3] ^= 1
    file.write_bytes(content)

    with pytest.raises(ConfigError, match="cannot be read as a tar file") as caught:
        webdataset.build(WebDatasetConfig(path=str(file)))

    assert caught.value.where == (f"{file}, byte {begin}",)


def test_a_broken_image_in_a_shard_is_named_with_shard_file_and_byte(tmp_path: Path) -> None:
    file = one_shard(tmp_path)
    content = bytearray(file.read_bytes())
    at = content.index(b"\x89PNG")
    content[at : at + 60] = bytes(60)
    file.write_bytes(content)
    data = webdataset.build(WebDatasetConfig(path=str(file), held_out=0.3))

    with pytest.raises(ConfigError, match="no image") as caught:
        for split in ("train", "validation"):
            data.samples(np.arange(data.num_samples(split)), split)

    assert caught.value.where[0].startswith(f"{file}, file sample0000.png, byte ")
    assert int(caught.value.where[0].rpartition(" ")[2]) >= at


@pytest.mark.parametrize("label", ["3", "-1", "cat", "", "1e9", "²"])
def test_a_class_that_the_model_does_not_know_is_refused(tmp_path: Path, label: str) -> None:
    with library.TarWriter(str(tmp_path / "x.tar")) as sink:
        sink.write({"__key__": "a", "png": picture(1), "cls": label.encode()})

    with pytest.raises(ConfigError, match=r"has the class .* and data\.num_classes=3"):
        webdataset.build(WebDatasetConfig(path=str(tmp_path), num_classes=3))


def test_a_sample_without_a_class_is_refused_and_pickles_are_not_opened(tmp_path: Path) -> None:
    with library.TarWriter(str(tmp_path / "x.tar")) as sink:
        sink.write({"__key__": "a", "png": picture(1), "pyd": {"x": 1}})

    with pytest.raises(ConfigError, match=r"no image with a class: a\.png, a\.pyd"):
        webdataset.build(WebDatasetConfig(path=str(tmp_path)))


def test_digits_are_scaled_by_whole_numbers_and_fit_a_model() -> None:
    data = digits.Digits(DigitsConfig(image_size=16, channels=3))
    plain = digits.Digits(DigitsConfig())

    batch, small = data.samples(np.arange(5)), plain.samples(np.arange(5))

    assert batch["images"].shape == (5, 3, 16, 16)
    assert torch.equal(batch["images"][:, 1, ::2, 1::2], small["images"][:, 0])
    assert small["images"].min() == -1 and small["images"].max() == 1
    assert plain.num_samples() + plain.num_samples("validation") == 1797
    VitConfig(image_size=16, channels=3).check_combination(
        {"data": DigitsConfig(image_size=16, channels=3)}
    )
    with pytest.raises(ConfigError, match=r"data\.image_size=8, and model=vit takes 16"):
        VitConfig(image_size=16).check_combination({"data": DigitsConfig()})


@pytest.mark.parametrize("kind", ["image_folder", "webdataset"])
def test_images_of_which_none_are_held_out_are_refused(tmp_path: Path, kind: str) -> None:
    root = write_folders(tmp_path / "x") if kind == "image_folder" else write_shards(tmp_path / "x")

    with pytest.raises(ConfigError, match="60 samples, and none for the split 'validation'"):
        if kind == "image_folder":
            image_folder.build(ImageFolderConfig(path=str(root), held_out=0.0))
        else:
            webdataset.build(WebDatasetConfig(path=str(root), held_out=0.0))


def test_a_shard_that_is_cut_off_while_it_is_used_is_named_with_the_byte(tmp_path: Path) -> None:
    file = one_shard(tmp_path)
    data = webdataset.build(WebDatasetConfig(path=str(file), image_size=8, held_out=0.3))
    last = data.num_samples() - 1
    file.write_bytes(file.read_bytes()[:600])

    with pytest.raises(ConfigError, match="has been cut off since it was listed") as caught:
        data.samples(np.array([last]))

    assert caught.value.where[0].startswith(f"{file}, byte ")


def augmented(root: Path, numbers: list[int], epochs: list[int], **settings: Any) -> torch.Tensor:
    config = ImageFolderConfig(path=str(root), image_size=8, augment=AugmentConfig(**settings))
    data = image_folder.build(config)
    asked = np.array(numbers)
    found = data.augment(data.samples(asked), asked, np.array(epochs))
    assert torch.equal(found["labels"], data.samples(asked)["labels"])
    return found["images"]


def test_images_are_as_they_are_unless_they_are_to_be_augmented(tmp_path: Path) -> None:
    root, numbers = write_folders(tmp_path), list(range(20))

    plain = image_folder.build(ImageFolderConfig(path=str(root), image_size=8))

    wanted = plain.samples(np.array(numbers))["images"]
    assert torch.equal(augmented(root, numbers, [0, 1] * 10), wanted)


def test_each_image_is_mirrored_in_about_half_of_the_epochs(tmp_path: Path) -> None:
    root = write_folders(tmp_path)
    plain = augmented(root, [7, 9] * 100, [0] * 200)

    found = augmented(root, [7, 9] * 100, [place // 2 for place in range(200)], flip=True)

    is_same = (found == plain).all((1, 2, 3))
    is_mirrored = (found == plain.flip(-1)).all((1, 2, 3))
    assert (is_same ^ is_mirrored).all()
    for one in (is_same[::2], is_same[1::2]):
        assert 30 < one.sum() < 70
    assert not torch.equal(is_same[::2], is_same[1::2])


def test_images_are_cut_anywhere_from_a_border_of_grey(tmp_path: Path) -> None:
    root = write_folders(tmp_path)
    plain = augmented(root, [3] * 200, [0] * 200)

    found = augmented(root, [3] * 200, list(range(200)), pad=1)

    padded = torch.nn.functional.pad(plain[0], (1, 1, 1, 1))
    windows = {(top, left): padded[:, top : top + 8, left : left + 8] for top, left in PLACES}
    seen = {p for image in found for p, cut in windows.items() if torch.equal(image, cut)}
    assert seen == set(PLACES)
    assert all(any(torch.equal(image, cut) for cut in windows.values()) for image in found)


def test_what_is_drawn_depends_on_seed_epoch_and_sample_alone(tmp_path: Path) -> None:
    root = write_folders(tmp_path)
    together = augmented(root, [1, 2, 3, 1, 2, 3], [0, 0, 0, 1, 1, 1], flip=True, pad=3)

    alone = [
        augmented(root, [number], [epoch], flip=True, pad=3)
        for epoch in (0, 1)
        for number in (1, 2, 3)
    ]

    assert torch.equal(torch.cat(alone), together)
    assert not torch.equal(together[:3], together[3:])
    other = augmented(root, [1, 2, 3, 1, 2, 3], [0, 0, 0, 1, 1, 1], flip=True, pad=3, seed=1)
    assert not torch.equal(other, together)


@pytest.mark.parametrize("settings", [{"pad": -1}, {"seed": -1}])
def test_settings_of_augmentation_that_are_negative_are_refused(settings: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="=-1 is negative"):
        AugmentConfig(**settings)

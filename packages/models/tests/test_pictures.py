"""Images as a viewer shows them: EXIF, 16 bits, transparency; and archives made on a Mac."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps

from sbp_core.errors import ConfigError
from sbp_models import image_folder, webdataset
from sbp_models.configs import ImageFolderConfig, WebDatasetConfig
from sbp_models.pictures import Pictures

RAMP = np.tile(np.linspace(0, 65535, 16).astype(np.uint16), (16, 1))


def saved(picture: Any, kind: str, **settings: Any) -> bytes:
    stream = io.BytesIO()
    picture.save(stream, kind, **settings)
    return stream.getvalue()


def decoded(content: bytes, channels: int = 3) -> Any:
    config = ImageFolderConfig(path="x", image_size=16, channels=channels)
    return Pictures(config, needed_by="a test").decoded(content, "x.png").numpy()


def turned(orientation: int, **settings: Any) -> bytes:
    picture = Image.new("RGB", (16, 16), "blue")
    picture.paste((255, 0, 0), (0, 0, 8, 16))
    picture.paste((0, 255, 0), (0, 0, 16, 3))
    exif = Image.Exif()
    exif[0x0112] = orientation
    return saved(picture, "JPEG", exif=exif, quality=95, **settings)


@pytest.mark.parametrize("orientation", range(9))
def test_an_image_is_turned_as_its_exif_says(orientation: int) -> None:
    content = turned(orientation)

    found = decoded(content)

    wanted = np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(content))), np.float32)
    assert np.allclose(found, wanted.transpose(2, 0, 1) / 127.5 - 1)


@pytest.mark.parametrize("orientation", [0, 9, 65535])
def test_an_orientation_that_is_none_turns_nothing(orientation: int) -> None:
    assert (decoded(turned(orientation)) == decoded(turned(1))).all()


def test_exif_that_is_broken_turns_nothing() -> None:
    content = turned(6).replace(b"MM\0*", b"MM\0?").replace(b"II*\0", b"II?\0")

    assert (decoded(content) == decoded(turned(1))).all()


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("kind", ["png", "pgm", "pgm of 12 bits"])
def test_grey_of_16_bits_is_scaled_by_its_range(kind: str, channels: int) -> None:
    content = {
        "png": saved(Image.fromarray(RAMP), "PNG"),
        "pgm": b"P5\n16 16\n65535\n" + RAMP.astype(">u2").tobytes(),
        "pgm of 12 bits": b"P5\n16 16\n4095\n" + (RAMP // 16).astype(">u2").tobytes(),
    }[kind]

    found = decoded(content, channels)

    assert found.shape == (channels, 16, 16)
    assert np.abs(found - np.linspace(-1, 1, 16)).max() < 0.01


def test_floats_have_no_white_and_are_refused() -> None:
    content = b"Pf\n16 16\n-1.0\n" + np.ones((16, 16), "<f4").tobytes()

    with pytest.raises(ConfigError, match="floats, and it does not say which value is white"):
        decoded(content)


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "palette", "grey"])
def test_what_is_transparent_is_white(kind: str) -> None:
    values = np.zeros((16, 16, 4), np.uint8)
    values[..., 0] = 255  # red, which is transparent on the left
    values[:, 8:, 3] = 255
    if kind in ("PNG", "WEBP"):
        content = saved(Image.fromarray(values), kind, lossless=True, exact=True)
    elif kind == "grey":
        grey = Image.fromarray(values[..., [3, 3]] // 255 * np.array([76, 255], np.uint8))
        content = saved(grey, "PNG")
    else:
        picture = Image.fromarray(values[..., 3] // 255).convert("P")
        picture.putpalette([0, 0, 0, 255, 0, 0] + [0] * 762)
        content = saved(picture, "PNG", transparency=0)

    found = decoded(content)

    assert (found[:, :, :8] == 1).all()
    right = [76 / 127.5 - 1] * 3 if kind == "grey" else [1, -1, -1]
    assert np.allclose(found[:, 4, 12], right, atol=1e-6)


def test_half_transparent_is_half_white() -> None:
    content = saved(Image.new("RGBA", (16, 16), (0, 0, 0, 128)), "PNG")

    assert np.abs(decoded(content)).max() < 0.01


#: What archives hold beside samples, on a Mac above all.
STRAYS = (
    "cats/._0001.png",
    "._cats",
    ".DS_Store",
    "./.DS_Store",
    "__MACOSX/cats/0001.png",
    "cats/Thumbs.db",
    "README",
    "/",
    "..",
    ".",
)


@pytest.mark.parametrize("stray", STRAYS)
def test_what_is_no_sample_in_a_shard_is_left_out(tmp_path: Path, stray: str) -> None:
    def add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
        member = tarfile.TarInfo(name)
        member.size = len(content)
        tar.addfile(member, io.BytesIO(content))

    with tarfile.open(tmp_path / "x.tar", "w") as tar:
        for number in range(40):
            add(tar, f"cats/{number:04}.png", saved(Image.new("L", (4, 4)), "PNG"))
            # PowerShell puts a byte order mark before what it writes.
            add(tar, f"cats/{number:04}.cls", "1".encode("utf-8-sig"))
        add(tar, stray, b"\0" * 163)

    data = webdataset.build(WebDatasetConfig(path=str(tmp_path), held_out=0.3))

    assert data.num_samples("train") + data.num_samples("validation") == 40
    assert data.samples(np.arange(1))["labels"].tolist() == [1]


def test_what_a_mac_adds_to_a_folder_is_no_class(tmp_path: Path) -> None:
    for name in ("train/cats", "validation/cats", "train/__MACOSX/cats", "train/.Trashes"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "x.png").write_bytes(saved(Image.new("L", (4, 4)), "PNG"))
        (tmp_path / name / "._x.png").write_bytes(b"\0" * 163)

    data = image_folder.build(ImageFolderConfig(path=str(tmp_path)))

    assert data.classes == ["cats"]
    assert data.num_samples("train") == 1

"""Decode image files with Pillow (`Pictures`), and a base class of image data sets (`ImageFiles`).

The error for a broken image names the file and the byte. Images look as in a viewer: turned by
their EXIF orientation, on white where they are transparent, and 16-bit grey scaled over its whole
range.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from sbp_core.errors import ConfigError
from sbp_models.configs import ImageFilesConfig
from sbp_models.counter_based_random import below, key_of
from sbp_models.extras import library
from sbp_models.local_files import read_bytes
from sbp_models.splits import SplitDataset

#: Formats that are decoded, and the suffixes of their files; no decoder starts a program.
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "WEBP")
SUFFIXES = frozenset({".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".webp"})

#: Most pixels of an image: a small file can claim a huge size.
MOST_PIXELS = 2**26

#: Modes of Pillow for grey of 16 bits, whose white is `_WHITE_16`.
_GREY_16 = frozenset({"I", "I;16", "I;16B", "I;16L", "I;16N"})
_WHITE_16 = 2**16 - 1

#: The EXIF tag of the orientation, and the name of `Image.Transpose` for each of its values.
_ORIENTATION = 0x0112
_TURNS = {
    2: "FLIP_LEFT_RIGHT",
    3: "ROTATE_180",
    4: "FLIP_TOP_BOTTOM",
    5: "TRANSPOSE",
    6: "ROTATE_270",
    7: "TRANSVERSE",
    8: "ROTATE_90",
}


class Pictures:
    """Decodes images to one size.

    Args:
        config: Size and channels of the images.
        needed_by: Option that needs it, such as `data=image_folder`.

    Raises:
        ConfigError: Pillow is not installed.
    """

    def __init__(self, config: ImageFilesConfig, *, needed_by: str) -> None:
        self._image: Any = library("PIL.Image", extra="images", needed_by=needed_by)
        self._ops: Any = library("PIL.ImageOps", extra="images", needed_by=needed_by)
        self._size = (config.image_size, config.image_size)
        self._mode = "RGB" if config.channels == 3 else "L"
        self._augment = config.augment

    def decoded(self, content: bytes, name: str, begin: int = 0) -> torch.Tensor:
        """Return an image, resized by its shorter side and centre-cropped.

        Args:
            content: Content of a file.
            name: Name of the file, for messages.
            begin: Byte of that file where `content` begins.

        Returns:
            float32 (channels, height, width), in [-1, 1].

        Raises:
            ConfigError: it is no image, broken, or has too many pixels; the message names the byte.
        """
        stream = io.BytesIO(content)
        try:
            picture = self._image.open(stream, formats=FORMATS)
            pixels = picture.width * picture.height
            if pixels <= MOST_PIXELS:
                shown = self._shown(picture).convert(self._mode)
                picture = self._ops.fit(shown, self._size)
        # Decoders raise all of these for broken files.
        except (
            OSError,
            SyntaxError,
            ValueError,
            EOFError,
            IndexError,
            struct.error,
            self._image.DecompressionBombError,
            self._image.DecompressionBombWarning,  # where warnings are errors
        ) as error:
            raise ConfigError(
                f"{name} is no image that can be decoded: {error}",
                where=f"{name}, byte {begin + stream.tell()}",
                accepted=f"a whole image: {', '.join(FORMATS)}",
            ) from error
        if pixels > MOST_PIXELS:
            raise ConfigError(
                f"{name} is an image of {picture.width} x {picture.height} pixels",
                accepted=f"at most {MOST_PIXELS} pixels",
            )
        found = np.asarray(picture, dtype=np.float32).reshape(*self._size, -1)
        return torch.from_numpy(found.transpose(2, 0, 1) / np.float32(127.5) - 1).contiguous()

    def _shown(self, picture: Any) -> Any:
        """Return an image upright, of 8 bits and without transparency.

        Raises:
            ValueError: the image cannot be converted.
        """
        if picture.mode == "F":
            raise ValueError("its values are floats, and it does not say which value is white")
        picture.load()  # here, so that a broken image is not mistaken for broken EXIF
        orientation = None
        # `ImageOps.exif_transpose` also rewrites EXIF, and fails if any other tag is broken.
        with suppress(Exception):
            orientation = picture.getexif().get(_ORIENTATION)
        if orientation in _TURNS:
            turn = self._image.Transpose[_TURNS[orientation]]
            picture = picture.transpose(turn)
        if picture.mode in _GREY_16:
            if "transparency" in picture.info:
                raise ValueError("it is a 16-bit grey image with a transparent grey")
            grey = np.asarray(picture).astype(np.float32) * np.float32(255 / _WHITE_16)
            return self._image.fromarray(np.clip(np.rint(grey), 0, 255).astype(np.uint8))
        if picture.has_transparency_data:
            white = self._image.new("RGBA", picture.size, "white")
            return self._image.alpha_composite(white, picture.convert("RGBA"))
        return picture

    def augmented(
        self, images: torch.Tensor, numbers: npt.NDArray[np.int64], epochs: npt.NDArray[np.int64]
    ) -> torch.Tensor:
        """Return images, randomly cropped and flipped: (n, channels, height, width), in order.

        The random choices for an image depend only on the seed, its number and its epoch.
        """
        config = self._augment
        (height, width), pad = self._size, config.pad
        if not (config.flip or pad):
            return images
        padded = torch.nn.functional.pad(images, (pad, pad, pad, pad))
        found = torch.empty_like(images)
        for epoch in np.unique(epochs).tolist():
            here = np.flatnonzero(epochs == epoch)
            counts = numbers[here].astype(np.uint64)
            tops, lefts, flips = (
                below(key_of(config.seed, what, epoch), counts, bound).tolist()
                for what, bound in (("top", 2 * pad + 1), ("left", 2 * pad + 1), ("flip", 2))
            )
            for row, top, left, flip in zip(here.tolist(), tops, lefts, flips, strict=True):
                cut = padded[row, :, top : top + height, left : left + width]
                found[row] = cut.flip(-1) if config.flip and flip else cut
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredImage:
    """An image in a file, and its class.

    Args:
        file: The file with the image.
        label: The number of its class.
        name: Name of the member of `file`, for messages; empty if `file` is the image.
        begin: Its first byte in `file`.
        size_bytes: Number of its bytes; None for all that follow.
    """

    file: Path
    label: int
    name: str = ""
    begin: int = 0
    size_bytes: int | None = None


class ImageFiles(SplitDataset):
    """A data set of image files, decoded on access.

    Implements `sbp_torch.kinds.AugmentedDataset`.

    Args:
        images: The images of each split.
        pictures: Decodes them.
        label: Name of the data set in `describe`.
        accepted: Requirement, for the error about an empty split.

    Raises:
        ConfigError: a split has no images.
    """

    def __init__(
        self,
        images: Mapping[str, Sequence[StoredImage]],
        pictures: Pictures,
        *,
        label: str,
        accepted: str,
    ) -> None:
        sizes = {split: len(own) for split, own in images.items()}
        super().__init__(sizes, label=label, accepted=accepted)
        self._images, self._pictures = images, pictures

    def samples(
        self, numbers: npt.NDArray[np.int64], split: str = "train"
    ) -> Mapping[str, torch.Tensor]:
        """Return images of `train` or `validation`.

        Returns:
            `images`, float32 (n, channels, image_size, image_size), in [-1, 1]; `labels`, int64
            (n,).

        Raises:
            ConfigError: a file cannot be read, or an image is cut off; the message names the byte.
        """
        asked = [self._images[split][number] for number in self._checked(numbers, split)]
        images = [
            self._pictures.decoded(
                read_bytes(image.file, begin=image.begin, size_bytes=image.size_bytes),
                f"{image.file}, file {image.name}" if image.name else str(image.file),
                image.begin,
            )
            for image in asked
        ]
        labels = torch.tensor([image.label for image in asked])
        return {"images": torch.stack(images), "labels": labels}

    def augment(
        self,
        samples: Mapping[str, torch.Tensor],
        numbers: npt.NDArray[np.int64],
        epochs: npt.NDArray[np.int64],
    ) -> Mapping[str, torch.Tensor]:
        """Return images, randomly flipped and cropped for their epochs, and unchanged labels."""
        return {**samples, "images": self._pictures.augmented(samples["images"], numbers, epochs)}

    def describe(self) -> str:
        """Return a line with the name and the number of the images."""
        return f"{self._label}: {self._counts()}"

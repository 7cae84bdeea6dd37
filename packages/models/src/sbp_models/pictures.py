"""Images of files as tensors, decoded by Pillow; an image that is broken is named with the byte."""

from __future__ import annotations

import io
import struct
from typing import Any

import numpy as np
import torch

from sbp_core.errors import ConfigError
from sbp_models.extras import library

#: Formats that are decoded, and the suffixes of their files: none of them runs a program.
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "WEBP")
SUFFIXES = frozenset({".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".webp"})

#: Most pixels of an image: a few bytes of a file can say that there are many more.
MOST_PIXELS = 2**26


class Pictures:
    """Decodes images to one size.

    Args:
        image_size: Height and width, in pixels.
        channels: 3 for colours, 1 for grey.
        needed_by: Option that needs it, such as `data=image_folder`.

    Raises:
        ConfigError: Pillow is not installed.
    """

    def __init__(self, *, image_size: int, channels: int, needed_by: str) -> None:
        self._image: Any = library("PIL.Image", extra="images", needed_by=needed_by)
        self._ops: Any = library("PIL.ImageOps", extra="images", needed_by=needed_by)
        self._size, self._mode = (image_size, image_size), "RGB" if channels == 3 else "L"

    def decoded(self, content: bytes, name: str, begin: int = 0) -> torch.Tensor:
        """Return an image scaled to the size on its shorter side, and cut in the middle.

        Args:
            content: Of a file.
            name: Of the file, for messages.
            begin: Byte of that file where `content` begins.

        Returns:
            float32 (channels, height, width), in [-1, 1].

        Raises:
            ConfigError: it is no image, broken, or has too many pixels; names the byte.
        """
        stream = io.BytesIO(content)
        try:
            picture = self._image.open(stream, formats=FORMATS)
            pixels = picture.width * picture.height
            if pixels <= MOST_PIXELS:
                picture = self._ops.fit(picture.convert(self._mode), self._size)
        # Decoders raise all of these for files that are broken.
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

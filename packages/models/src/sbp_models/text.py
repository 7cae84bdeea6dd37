"""Data sets of bytes: the running Python's own standard library, or the user's text.

Files are ordered by a hash of their path (so that neighbours in a folder are spread evenly), and
joined by newlines; the last 5 % of the bytes are held out. A sample is a window of `context + 1`
bytes at a position drawn by a counter-based hash, so that a batch is a pure function of the seed,
the split and its index, and every batch size sees the same sequence of samples.
All bytes are kept in memory.
"""

from __future__ import annotations

import logging
import os
import platform
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from sbp_core.errors import ConfigError, SbpValueError, unknown_name
from sbp_core.units import format_bytes
from sbp_models.configs import StdlibConfig, TextConfig

logger = logging.getLogger(__name__)

#: The splits, and the part of the bytes that each has.
SPLITS = {"train": 0.95, "validation": 0.05}

#: Folders below the standard library that are not the library itself.
NOT_LIBRARY = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
)


class ByteText:
    """A text as bytes; a token is a byte. Fulfils `sbp_core.plugins.kinds.TextDataset`.

    Args:
        files: Name and content of each file; names are unique.
        context: Tokens of one sample.
        seed: Seed of the order of the samples.
        label: What `describe` calls the text.

    Raises:
        ConfigError: a split is shorter than one sample.
    """

    vocabulary = 256

    def __init__(
        self, files: Sequence[tuple[str, bytes]], *, context: int, seed: int, label: str
    ) -> None:
        ordered = sorted(files, key=lambda file: _file_key(file[0]))
        text = np.frombuffer(b"\n".join(content for _, content in ordered), dtype=np.uint8)
        cut = round(len(text) * SPLITS["train"])
        self._splits = {"train": text[:cut], "validation": text[cut:]}
        self._window = context + 1
        self._seed = seed
        self._label = f"{label}: {len(files)} file{'s' if len(files) != 1 else ''}"
        shortest = min(map(len, self._splits.values()))
        if shortest < self._window:
            needed = int(self._window / SPLITS["validation"]) + 1
            raise ConfigError(
                f"{label} has {len(text)} bytes, of which {shortest} are held out, "
                f"and one sample takes data.context + 1 = {self._window}",
                accepted=f"about {needed} bytes or more",
                todo="give more text, or a smaller data.context",
            )

    def batch(
        self, index: int, batch_size: int, split: str = "train"
    ) -> Mapping[str, torch.Tensor]:
        """Return batch `index` of a split.

        Row i is sample `index * batch_size + i`, whatever the batch size.

        Args:
            index: Number of the batch, >= 0.
            batch_size: Samples, >= 1.
            split: `train` or `validation`.

        Returns:
            `tokens` and `targets`, int64 (batch_size, context) each; targets are one byte ahead.

        Raises:
            SbpLookupError: no such split.
            SbpValueError: `index` is negative or `batch_size` not positive.
        """
        if split not in self._splits:
            raise unknown_name("split", split, self._splits, where=self._label)
        if index < 0 or batch_size < 1:
            raise SbpValueError(
                f"batch({index}, {batch_size}) names no batch",
                accepted="index >= 0 and batch_size >= 1",
            )
        text = self._splits[split]
        start = index * batch_size
        positions = _draw(
            key=_split_key(self._seed, split),
            samples=np.arange(start, start + batch_size, dtype=np.uint64),
            bound=len(text) - self._window + 1,
        )
        windows = text[positions[:, None] + np.arange(self._window)].astype(np.int64)
        return {
            "tokens": torch.from_numpy(np.ascontiguousarray(windows[:, :-1])),
            "targets": torch.from_numpy(np.ascontiguousarray(windows[:, 1:])),
        }

    def describe(self) -> str:
        """Return one line: what the text is and how large each split is."""
        sizes = ", ".join(
            f"{format_bytes(len(text))} {split}" for split, text in self._splits.items()
        )
        return f"{self._label}, {sizes}, a token is a byte"

    def encode(self, text: str) -> list[int]:
        """Return the bytes of a text in UTF-8."""
        return list(text.encode("utf-8", errors="replace"))

    def decode(self, tokens: Iterable[int]) -> str:
        """Return the text of bytes in UTF-8, with U+FFFD for whatever is none."""
        # 255 occurs in no UTF-8 text, so tokens that are no bytes are replaced as well.
        return bytes(min(token, 255) for token in tokens).decode("utf-8", errors="replace")


def build_stdlib(config: StdlibConfig) -> ByteText:
    """Make the data set of the running Python's own standard library.

    Raises:
        ConfigError: this Python came without the source of its library.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    files = [
        (name, path.read_bytes())
        for name, path in _files_below(folder, leave_out=NOT_LIBRARY.__contains__)
        if name.endswith(".py")
    ]
    if not files:
        raise ConfigError(
            f"this Python came without the source of its standard library (looked in {folder})",
            accepted="a folder with *.py files",
            todo="choose data=text data.path=FILE_OR_FOLDER",
        )
    label = f"standard library of Python {platform.python_version()}"
    return ByteText(files, context=config.context, seed=config.seed, label=label)


def build_text(config: TextConfig) -> ByteText:
    """Make the data set of a file, or of every UTF-8 file below a folder.

    Files and folders whose names start with a dot are left out.

    Raises:
        ConfigError: the path does not exist or holds no text.
    """
    path = Path(config.path).expanduser()
    if path.is_file():
        files = [(path.name, path.read_bytes())]
    elif path.is_dir():
        files = _read_folder(path)
    else:
        raise ConfigError(
            f"data.path={config.path} does not exist (seen from {Path.cwd()})",
            accepted="a file, or a folder of text files",
            todo="correct data.path, or choose data=stdlib",
        )
    if not any(content for _, content in files):
        raise ConfigError(
            f"data.path={config.path} holds no text",
            accepted="a file with content, or a folder with UTF-8 files (not .hidden ones)",
            todo="correct data.path, or choose data=stdlib",
        )
    return ByteText(files, context=config.context, seed=config.seed, label=str(path))


def _read_folder(folder: Path) -> list[tuple[str, bytes]]:
    files, refused = [], []
    for name, path in _files_below(folder, leave_out=lambda part: part.startswith(".")):
        content = path.read_bytes()
        try:
            content.decode("utf-8")
        except UnicodeDecodeError:
            refused.append(name)
        else:
            files.append((name, content))
    if refused:
        logger.warning(
            "%d files below %s are no UTF-8 text and are left out, such as %s",
            len(refused),
            folder,
            ", ".join(refused[:3]),
        )
    return files


def _files_below(folder: Path, *, leave_out: Callable[[str], bool]) -> Iterator[tuple[str, Path]]:
    """Yield the relative and the whole path of each file, but what has a name to leave out."""
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not leave_out(name)]
        for name in names:
            path = Path(parent, name)
            if not leave_out(name) and path.is_file():
                yield path.relative_to(folder).as_posix(), path


def _file_key(name: str) -> tuple[bytes, str]:
    return blake2b(name.encode(errors="surrogateescape"), digest_size=8).digest(), name


def _split_key(seed: int, split: str) -> int:
    return int.from_bytes(blake2b(f"{seed} {split}".encode(), digest_size=8).digest(), "little")


def _draw(*, key: int, samples: npt.NDArray[np.uint64], bound: int) -> npt.NDArray[np.int64]:
    """Return a pseudo-random position in [0, bound) for each sample number.

    Source: the finaliser of SplitMix64, in Steele, Lea and Flood, "Fast splittable pseudorandom
    number generators", OOPSLA 2014, figure 17, applied to a counter.
    """
    # Arrays of uint64 wrap around silently, which is the arithmetic modulo 2**64 that is meant.
    z = samples * np.uint64(0x9E3779B97F4A7C15) + np.uint64(key)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z = z ^ (z >> np.uint64(31))
    return (z % np.uint64(bound)).astype(np.int64)

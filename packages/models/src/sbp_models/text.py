"""The data sets of bytes: `stdlib`, source of Python's library, and `text`, the user's text.

Files are ordered by a hash of their path (so that neighbours in a folder are spread evenly), and
joined by newlines; the last 5 % of the bytes are held out. The samples of a split are its windows
one after the other, so an epoch covers every byte once; an incomplete window at the end of a split
is left out. All bytes are kept in memory.

`tokens` and `targets` depend on the task (`context` 4, the window `the fox`):

    next        "the "  ->  "he f"     a window of context + 1 bytes; the next begins with its last
    masked      "th▢ "  ->  "··e·"     of context; token 256 masks, target -100 means no target
    continue    "the "  ->  "fox…"     of 2 context; the second half is the target
"""

from __future__ import annotations

import errno
import logging
import os
import platform
import sysconfig
from codecs import BOM_UTF8, getincrementaldecoder
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from sbp_core.errors import ConfigError
from sbp_core.machine_memory import room_bytes
from sbp_core.serialize import open_file
from sbp_core.units import format_bytes
from sbp_core.user_paths import user_path
from sbp_models.configs import StdlibConfig, TextConfig, TextTask, text_task
from sbp_models.configs.text_data import VOCABULARY
from sbp_models.counter_based_random import hashes, key_of, members
from sbp_models.local_files import encoding_of
from sbp_models.splits import SplitDataset

logger = logging.getLogger(__name__)

#: The splits, and the fraction of the bytes in each.
SPLITS = {"train": 0.95, "validation": 0.05}

#: Largest number of files in a warning or error.
_MOST_NAMED = 3

#: Bytes that are checked together for valid UTF-8.
_PIECE_BYTES = 2**20

#: The mask token.
MASK = 256

#: The fraction of the tokens that is masked.
MASKED_PART = 0.15

#: The target of tokens without one, as in `torch.nn.functional.cross_entropy`.
NO_TARGET = -100

#: Folders below the standard library that are not the library itself.
NOT_LIBRARY = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
)


class ByteText(SplitDataset):
    """A text as bytes; a token is a byte. Implements `sbp_torch.kinds.TextDataset`.

    Args:
        files: Name and content of each file; names are unique.
        context: Tokens of one sample.
        seed: Seed of the masked places.
        label: Name of the text in `describe`.
        task: Defines tokens and targets; see the module docstring.
        given: Name of the text in errors; `label` if empty.

    Raises:
        ConfigError: a split is shorter than one sample.
    """

    def __init__(
        self,
        files: Sequence[tuple[str, bytes]],
        *,
        context: int,
        seed: int,
        label: str,
        task: TextTask = "next",
        given: str = "",
    ) -> None:
        self.vocabulary = VOCABULARY[task]
        ordered = sorted(files, key=lambda file: _file_key(file[0]))
        text = np.frombuffer(b"\n".join(content for _, content in ordered), dtype=np.uint8)
        cut = round(len(text) * SPLITS["train"])
        self._texts = {"train": text[:cut], "validation": text[cut:]}
        self._window = {"next": context + 1, "masked": context, "continue": 2 * context}[task]
        self._stride = {"next": context, "masked": context, "continue": 2 * context}[task]
        self._context, self._task = context, task
        self._seed = seed
        shortest = min(map(len, self._texts.values()))
        if shortest < self._window:
            needed = int(self._window / SPLITS["validation"]) + 1
            raise ConfigError(
                f"{given or label} has {len(text)} bytes, of which {shortest} are held out, "
                f"and one sample of data.context={context} takes {self._window}",
                accepted=f"about {needed} bytes or more",
                todo="give more text, or a smaller data.context",
            )
        sizes = {
            split: (len(part) - self._window) // self._stride + 1
            for split, part in self._texts.items()
        }
        files_of = f"{len(files)} file{'s' if len(files) != 1 else ''}"
        super().__init__(sizes, label=f"{label}: {files_of}")

    def samples(
        self, numbers: npt.NDArray[np.int64], split: str = "train"
    ) -> Mapping[str, torch.Tensor]:
        """Return windows of `train` or `validation`.

        Returns:
            `tokens` and `targets`, int64 (n, context) each; see the module docstring.
        """
        found = self._checked(numbers, split)
        places = found[:, None] * self._stride + np.arange(self._window)
        windows = self._texts[split][places].astype(np.int64)
        if self._task == "masked":
            key = key_of(self._seed, split, "mask")
            tokens, targets = self._mask(windows, key, found.astype(np.uint64))
        else:
            tokens, targets = windows[:, : self._context], windows[:, -self._context :]
        return {
            "tokens": torch.from_numpy(np.ascontiguousarray(tokens)),
            "targets": torch.from_numpy(np.ascontiguousarray(targets)),
        }

    def _mask(
        self, windows: npt.NDArray[np.int64], key: int, samples: npt.NDArray[np.uint64]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Mask equally many tokens of every sample: a mean over tokens is then a mean over samples.

        Args:
            windows: int64 (n, context).
            key: Key of the random places.
            samples: uint64 (n,).
        """
        number = max(1, round(MASKED_PART * self._context))
        order = np.argsort(hashes(key, members(samples, self._context)), axis=1)
        hidden = np.zeros(windows.shape, dtype=bool)
        np.put_along_axis(hidden, order[:, :number], True, axis=1)
        return np.where(hidden, MASK, windows), np.where(hidden, windows, NO_TARGET)

    def describe(self) -> str:
        """Return a line with the name of the text and the size of each split."""
        sizes = ", ".join(
            f"{format_bytes(len(text))} {split}" for split, text in self._texts.items()
        )
        return f"{self._label}, {sizes}, a token is a byte"

    def encode(self, text: str) -> list[int]:
        """Return the bytes of a text in UTF-8."""
        return list(text.encode("utf-8", errors="replace"))

    def decode(self, tokens: Iterable[int]) -> str:
        """Decode bytes as UTF-8, with U+FFFD for invalid bytes."""
        # 255 never occurs in UTF-8, so tokens that are not bytes are replaced as well.
        return bytes(min(token, 255) for token in tokens).decode("utf-8", errors="replace")


def build_stdlib(config: StdlibConfig) -> ByteText:
    """Build the data set from the source of the running Python's standard library.

    Raises:
        ConfigError: this Python was installed without the source of its library.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    files = [
        (name, _content(path))
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
    return ByteText(
        files, context=config.context, seed=config.seed, label=label, task=text_task(config.task)
    )


def build_text(config: TextConfig) -> ByteText:
    """Build the data set from a file, or from every UTF-8 file below a folder.

    Files and folders whose names start with a dot are skipped. Files that cannot be read or are not
    text are skipped with a warning. If the path is a file, it is read as it is, without its byte
    order mark.

    Raises:
        ConfigError: the path does not exist, cannot be read, or holds too little text.
    """
    path = user_path(config.path, key="data.path")
    given = f"data.path={config.path}"
    if path.is_dir():
        files, left_out = _read_folder(path)
    elif path.is_file():
        files, left_out = [(path.name, _read_file(path, given))], []
        if not _is_utf8(files[0][1]):
            kind = encoding_of(files[0][1])
            logger.warning(
                "%s is not UTF-8 text; its bytes are used as they are (it may be %s)",
                given,
                kind,
            )
    else:
        raise ConfigError(
            f"{given} is neither a file nor a folder (seen from {Path.cwd()})"
            if path.exists()
            else f"{given} does not exist (seen from {Path.cwd()})",
            accepted="a file, or a folder of text files",
            todo="correct data.path, or choose data=stdlib",
        )
    if left_out:
        some = "; ".join(left_out[:_MOST_NAMED]) + ("; ..." if left_out[_MOST_NAMED:] else "")
        logger.warning("%s: left out of the text: %d (%s)", given, len(left_out), some)
    if not any(content for _, content in files):
        raise ConfigError(
            f"{given} holds no text",
            where=left_out[:_MOST_NAMED],
            accepted="a file with content, or a folder with UTF-8 files (not .hidden ones)",
            todo="correct data.path, or choose data=stdlib",
        )
    return ByteText(
        files,
        context=config.context,
        seed=config.seed,
        label=str(path),
        task=text_task(config.task),
        given=given,
    )


def _content(path: Path, held_bytes: int = 0) -> bytes:
    """Return the content of a file, without a byte order mark.

    Args:
        path: Path of the file.
        held_bytes: Bytes of other files that are in memory already.

    Raises:
        OSError: the file cannot be read.
        ConfigError: there is not enough memory.
    """
    with open_file(path) as file:
        needed_bytes, room = held_bytes + os.fstat(file.fileno()).st_size, room_bytes()
        if room is not None and needed_bytes > room:
            raise ConfigError(
                f"the text is kept in memory, and there is not enough: it has "
                f"{format_bytes(needed_bytes)} with {path}, and {format_bytes(room)} are free",
                where=str(path),
                accepted=f"at most {format_bytes(room)} of text on this machine now",
                todo="data=tokens reads text of any size in pieces, and keeps tokens on disk; or "
                "give less text",
            )
        return file.read().removeprefix(BOM_UTF8)


def _read_file(path: Path, given: str) -> bytes:
    try:
        return _content(path)
    except OSError as error:
        raise ConfigError(
            f"{given} cannot be read: {error.strerror}",
            accepted="a file that this user may read",
            todo="correct data.path, or the permissions of the file",
        ) from error


def _read_folder(folder: Path) -> tuple[list[tuple[str, bytes]], list[str]]:
    """Return the texts below a folder by name, and the skipped files with the reason."""
    files: list[tuple[str, bytes]] = []
    left_out: list[str] = []
    held_bytes = 0

    def unread(error: OSError, path: Path) -> None:
        left_out.append(f"{path.relative_to(folder).as_posix()}: {error.strerror}")

    for name, path in _files_below(
        folder, leave_out=lambda part: part.startswith("."), unread=unread
    ):
        try:
            content = _content(path, held_bytes)
        except OSError as error:
            unread(error, path)
            continue
        if _is_utf8(content):
            files.append((name, content))
            held_bytes += len(content)
        else:
            left_out.append(f"{name}: not UTF-8")
    return files, sorted(left_out)


def _is_utf8(content: bytes) -> bool:
    # In pieces: a str takes up to four times as much memory as its bytes.
    decoder, view = getincrementaldecoder("utf-8")(), memoryview(content)
    try:
        for begin in range(0, len(view), _PIECE_BYTES):
            decoder.decode(view[begin : begin + _PIECE_BYTES])
        decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        return False
    return True


def _files_below(
    folder: Path,
    *,
    leave_out: Callable[[str], bool],
    unread: Callable[[OSError, Path], None] = lambda error, path: None,
) -> Iterator[tuple[str, Path]]:
    """Yield the relative and the full path of each file below a folder.

    Args:
        folder: The folder.
        leave_out: Whether to skip a file or folder of this name.
        unread: Called with each folder that cannot be listed and each link to nothing.
    """

    def unlisted(error: OSError) -> None:
        unread(error, Path(error.filename))

    for parent, folders, names in os.walk(folder, onerror=unlisted):
        folders[:] = [name for name in folders if not leave_out(name)]
        for name in names:
            path = Path(parent, name)
            if leave_out(name):
                continue
            if path.is_symlink() and not path.exists():
                unread(OSError(errno.ENOENT, "a link to nothing"), path)
            else:  # special files are refused when they are opened
                yield path.relative_to(folder).as_posix(), path


def _file_key(name: str) -> tuple[bytes, str]:
    return blake2b(name.encode(errors="surrogateescape"), digest_size=8).digest(), name

"""List and read the user's files for the data sets, with clear errors for unreadable files."""

from __future__ import annotations

import codecs
import errno
import os
from collections.abc import Collection, Iterable
from hashlib import blake2b
from pathlib import Path
from shlex import quote

from sbp_core.errors import ConfigError
from sbp_core.serialize import open_file

#: Largest size of a file that is read whole, such as an image or a tokenizer file, in bytes.
MOST_BYTES = 2**30


def files_of(path: Path, *, key: str, suffixes: Collection[str] = ()) -> list[Path]:
    """Return a file, or all files below a folder except hidden ones, sorted by name.

    Args:
        path: Path of the file or folder.
        key: The setting with the path, for messages.
        suffixes: Suffixes of the files to take in a folder, in lower case (`.csv`); all if empty.

    Raises:
        ConfigError: it does not exist, cannot be listed, or has no such file.
    """
    if path.is_file():
        return [path]
    if not path.is_dir():
        what = "is neither a file nor a folder" if path.exists() else "does not exist"
        raise ConfigError(
            f"{key}={path} {what} (seen from {Path.cwd()})",
            accepted="a file or a folder",
            todo=f"correct {key}",
        )
    found: list[Path] = []

    def unlisted(error: OSError) -> None:
        raise ConfigError(
            f"{error.filename} cannot be listed: {error.strerror}",
            where=f"{key}={path}",
            accepted="folders that this user may read",
        ) from error

    for parent, folders, names in os.walk(path, onerror=unlisted):
        folders[:] = sorted(name for name in folders if not is_hidden([name]))
        found += [
            Path(parent, name)
            for name in names
            if not is_hidden([name]) and (not suffixes or Path(name).suffix.lower() in suffixes)
        ]
    if not found:
        wanted = f"*{', *'.join(sorted(suffixes))}" if suffixes else "files"
        raise ConfigError(
            f"{key}={path} holds no {wanted}", accepted=f"a folder with {wanted} (not .hidden ones)"
        )
    return sorted(found, key=lambda file: file.relative_to(path).parts)


def is_hidden(parts: Iterable[str]) -> bool:
    """Return whether a path leads to a hidden file, or to metadata in archives made by macOS."""
    return any(part == "__MACOSX" or (part[:1] == "." and part != "..") for part in parts)


def read_bytes(
    file: Path, *, key: str = "", begin: int = 0, size_bytes: int | None = None
) -> bytes:
    """Return the content of a file, or a part of it.

    Args:
        file: The file to read.
        key: The setting with the path, for messages.
        begin: First byte to read.
        size_bytes: Number of bytes to read; all that follow if None.

    Raises:
        ConfigError: the file cannot be read, or is too short.
    """
    try:
        with open_file(file) as opened:
            size = os.fstat(opened.fileno()).st_size
            if size_bytes is None and size - begin > MOST_BYTES:
                raise OSError(errno.EFBIG, f"it has {size} bytes, more than {MOST_BYTES}")
            opened.seek(begin)
            found = opened.read(-1 if size_bytes is None else size_bytes)
    except OSError as error:
        raise ConfigError(
            f"{f'{key}=' if key else ''}{file} cannot be read: {error.strerror}",
            where=f"{file}, byte {begin}" if begin else "",
            accepted="a plain file that this user may read",
        ) from error
    if size_bytes is not None and len(found) < size_bytes:
        raise ConfigError(
            f"{file} has been cut off since it was listed", where=f"{file}, byte {begin}"
        )
    return found


def is_held_out(name: str, part: float) -> bool:
    """Return whether a hash of a sample's name selects it for the fraction that is held out."""
    key = blake2b(name.encode(errors="surrogateescape"), digest_size=8).digest()
    return int.from_bytes(key, "little") < part * 2.0**64


def not_utf8(file: Path, content: bytes, begin: int) -> ConfigError:
    """Return the error for a file that is not UTF-8, with a guess of its encoding.

    Args:
        file: The file.
        content: Bytes of the file, from its start or around the wrong byte.
        begin: Position of the first byte that is not UTF-8.
    """
    encoding = encoding_of(content)
    name = "ISO-8859-1" if encoding.startswith("Latin-1") else encoding
    return ConfigError(
        f"{file} is no UTF-8 text; it looks like {encoding}",
        where=f"{file}, byte {begin}",
        accepted="text in UTF-8",
        todo=f"convert it: iconv -f {name} -t UTF-8 {quote(str(file))} > NEW_FILE",
    )


def encoding_of(content: bytes) -> str:
    """Guess the encoding of a text that is not UTF-8, from its start."""
    if content.startswith((codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE)):
        return "UTF-32"
    if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) or b"\0" in content:
        return "UTF-16"
    return "Latin-1 or another encoding of one byte a letter, such as Windows-1252"

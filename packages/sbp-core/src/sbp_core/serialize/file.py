"""Read untrusted files safely, such as plans and checkpoints: plain files, up to a size.

A file that another file names has to be inside a given folder (`file_within`).
"""

from __future__ import annotations

import errno
import os
import stat
from io import BufferedReader, FileIO
from pathlib import Path, PurePosixPath, PureWindowsPath

from sbp_core.errors import SbpError, SbpValueError
from sbp_core.serialize.lines import in_line
from sbp_core.serialize.misfit import is_unicode, shown
from sbp_core.units import format_bytes

#: The most bytes of a file that is read whole, if its kind sets no other limit.
MOST_BYTES = 16 * 2**20

#: The most bytes of a file name that systems accept.
_MOST_NAME_BYTES = 255

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def open_file(path: Path, *, follow: bool = True) -> FileIO:
    """Open a file to read it, if it is a regular file: all untrusted files are opened here.

    The kind is checked after opening, on the open file: a pipe would block, a device would never
    end, and a name may refer to another file a moment later.

    Args:
        path: The path of the file.
        follow: Whether a link is followed, such as for a path that the user has given.

    Raises:
        OSError: it does not exist, may not be read, is not a regular file, or its name is invalid.
    """
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)
    try:
        handle = os.open(path, flags | (0 if follow else os.O_NOFOLLOW))
    except ValueError as cause:  # a name with a NUL
        raise OSError(errno.EINVAL, str(cause), str(path)) from cause
    try:
        mode = os.fstat(handle).st_mode
        if not stat.S_ISREG(mode):
            kind = _KINDS.get(stat.S_IFMT(mode), "no file")
            raise OSError(errno.EINVAL, f"it is {kind}, no plain file", str(path))
        return FileIO(handle, "rb")
    except BaseException:
        os.close(handle)
        raise


def read_bytes(
    path: Path,
    *,
    most_bytes: int = MOST_BYTES,
    error: type[SbpError] = SbpValueError,
    todo: str = "",
) -> bytes:
    """Return the content of a file.

    Its kind and size are checked before it is read: a pipe or a device would never end.

    Args:
        path: The path of the file, as the user has given it; a link is followed.
        most_bytes: The largest allowed size.
        error: The class of errors.
        todo: The advice in errors.

    Raises:
        SbpError: `error`: it does not exist, may not be read, is not a regular file, or too large.
    """
    try:
        with BufferedReader(open_file(path)) as file:
            given_bytes = os.fstat(file.fileno()).st_size
            # A file of the kernel reports a size of 0 bytes.
            data = file.read(min(given_bytes or MOST_BYTES, most_bytes) + 1)
    except OSError as cause:
        raise error(
            f"the file cannot be read: {cause.strerror or cause}",
            where=str(path),
            accepted="a file",
            todo=todo,
        ) from cause
    if max(given_bytes, len(data)) > most_bytes:
        raise error(
            f"the file is too large: {format_bytes(max(given_bytes, len(data)))}",
            where=str(path),
            accepted=f"at most {format_bytes(most_bytes)}",
            todo=todo,
        )
    return data


def read_text(
    path: Path,
    *,
    most_bytes: int = MOST_BYTES,
    error: type[SbpError] = SbpValueError,
    todo: str = "",
) -> str:
    """Return the text of a file; see `read_bytes`.

    Raises:
        SbpError: `error`: it cannot be read, is not text, or is empty.
    """
    data = read_bytes(path, most_bytes=most_bytes, error=error, todo=todo)
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as cause:
        place = in_line(str(path), data.count(b"\n", 0, cause.start) + 1)
        what = f"the file is no text: {cause.reason} (byte {cause.start})"
        raise error(what, where=place, accepted="UTF-8", todo=todo) from cause
    if not text.strip():
        raise error("the file is empty", where=str(path), todo=todo)
    # As Python reads text files.
    return text.replace("\r\n", "\n").replace("\r", "\n")


def file_within(
    folder: Path,
    name: str,
    *,
    where: str = "",
    error: type[SbpError] = SbpValueError,
    todo: str = "",
) -> Path:
    """Return the path of a file that another file names, if it is in a folder.

    Args:
        folder: The folder that it may not leave, neither by its name nor by links.
        name: The name as it is written: parts with `/` between them.
        where: The file and the place that names it, for messages.
        error: The class of errors.
        todo: The advice in errors.

    Raises:
        SbpError: `error`: the name is not a file name in that folder, or leads out of it by a link.
    """
    parts = PurePosixPath(name).parts
    is_plain = bool(parts) and is_unicode(name) and "\0" not in name and "\\" not in name
    is_plain = is_plain and all(len(part.encode()) <= _MOST_NAME_BYTES for part in parts)
    # `C:x` is relative to the unknown current folder of a drive.
    if not is_plain or ".." in parts or parts[0][0] == "/" or PureWindowsPath(name).drive:
        raise error(
            f"{shown(name)} names no file of this folder",
            where=where,
            accepted=f"names of files in {folder}, without '..' and not beginning with '/'",
            todo=todo,
        )
    path = folder.joinpath(*parts)
    try:
        home, found = folder.resolve(), path.resolve()
        if found.is_symlink():  # from Python 3.13 on, circular links are not resolved
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
    except (OSError, RuntimeError) as cause:  # circular links, a name that is too long
        raise error(f"{shown(name)} cannot be found: {cause}", where=where, todo=todo) from cause
    if not found.is_relative_to(home) or found == home:
        raise error(
            f"{shown(name)} leads out of its folder, to {found}",
            where=where,
            accepted=f"files in {folder}, and links to such",
            todo=todo,
        )
    return path

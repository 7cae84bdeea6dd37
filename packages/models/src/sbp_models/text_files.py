"""Read the documents of text files as a stream, so that no file has to fit in memory.

A document is a text file, or a line of a `.jsonl` file. A document of more than `PIECE_BYTES` is
yielded in pieces, which end at the last line break that fits, or else between two characters. A
byte order mark is not part of a text. Used by `token_text`.
"""

from __future__ import annotations

import json
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from io import BufferedReader, BytesIO
from pathlib import Path

from sbp_core.errors import ConfigError
from sbp_core.serialize import open_file
from sbp_core.units import format_bytes
from sbp_models.local_files import not_utf8

#: Most bytes of a piece.
PIECE_BYTES = 4 * 2**20

#: Most bytes of a line of a `.jsonl` file, which has to be read as a whole.
MOST_LINE_BYTES = 256 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentPiece:
    """A piece of a document.

    Args:
        text: Text of the piece.
        is_last: Whether the document ends after it.
        read_bytes: Bytes of the files that have been read so far.
    """

    text: str
    is_last: bool
    read_bytes: int


def pieces(
    files: Sequence[Path], field: str, *, piece_bytes: int = PIECE_BYTES
) -> Iterator[DocumentPiece]:
    """Yield the documents of files in order, each in one piece or more.

    Args:
        files: The files.
        field: Name of the field with the text in a line of a `.jsonl` file.
        piece_bytes: Most bytes of a piece.

    Raises:
        ConfigError: a file cannot be read, or is not UTF-8 or JSON; names the byte or line.
    """
    before = 0
    for file in files:
        at = 0
        try:
            with BufferedReader(open_file(file)) as opened:
                if file.suffix == ".jsonl":
                    for text, end in _lines(file, opened.readline, field):
                        at = end
                        content = text.encode("utf-8")
                        for _, part, is_last in _cut(BytesIO(content).read, piece_bytes):
                            yield DocumentPiece(
                                text=part.decode("utf-8"), is_last=is_last, read_bytes=before + at
                            )
                else:
                    if opened.read(len(BOM_UTF8)) == BOM_UTF8:
                        at = len(BOM_UTF8)
                    opened.seek(at)
                    for begin, part, is_last in _cut(opened.read, piece_bytes, at):
                        at = begin + len(part)
                        text = _text(file, part, begin)
                        yield DocumentPiece(text=text, is_last=is_last, read_bytes=before + at)
        except OSError as error:
            raise ConfigError(
                f"{file} cannot be read: {error.strerror}",
                where=f"{file}, byte {at}" if at else "",
                accepted="a file that this user may read",
            ) from error
        before += at


def _cut(
    read: Callable[[int], bytes], piece_bytes: int, begin: int = 0
) -> Iterator[tuple[int, bytes, bool]]:
    """Yield the first byte and the content of each piece, and whether it is the last one."""
    rest = b""
    while block := read(piece_bytes):
        rest += block
        while len(rest) > piece_bytes:
            # Cut after the last line break; else before a byte that begins a character.
            end = rest.rfind(b"\n", 0, piece_bytes) + 1 or piece_bytes
            while end > 1 and rest[end] & 0xC0 == 0x80 and piece_bytes - end < 3:
                end -= 1
            yield begin, rest[:end], False
            begin, rest = begin + end, rest[end:]
    yield begin, rest, True


def _text(file: Path, content: bytes, begin: int) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise not_utf8(file, content, begin + error.start) from error


def _lines(file: Path, read_line: Callable[[int], bytes], field: str) -> Iterator[tuple[str, int]]:
    """Yield the text of each line of a `.jsonl` file, and the byte after the line."""
    begin = number = 0
    while line := read_line(MOST_LINE_BYTES + 1):
        number += 1
        if line.strip():
            where = f"{file}, line {number}, byte {begin}"
            if len(line) > MOST_LINE_BYTES:
                raise ConfigError(
                    f"{file} has a line of more than {format_bytes(MOST_LINE_BYTES)}",
                    where=where,
                    accepted="shorter lines, or text files, which may be as long as you like",
                )
            yield _field(file, line, begin, where, field), begin + len(line)
        begin += len(line)


def _field(file: Path, line: bytes, begin: int, where: str, field: str) -> str:
    """Return the text of a line."""
    accepted = f'a JSON object a line, such as {{"{field}": "..."}}'
    try:
        # Some tools write a byte order mark before each part of a concatenated file.
        mark = len(BOM_UTF8) if line.startswith(BOM_UTF8) else 0
        begin += mark
        value = json.loads(_text(file, line[mark:].rstrip(b"\n"), begin))
    except (ValueError, RecursionError) as error:
        if isinstance(error, ConfigError):
            raise
        at = getattr(error, "pos", 0)
        raise ConfigError(
            f"{file} has a line that is no JSON: {error}",
            where=f"{where.rpartition(' ')[0]} {begin + at}",
            accepted=accepted,
        ) from error
    if not isinstance(value, dict) or not isinstance(value.get(field), str):
        known = ", ".join(map(str, value)) if isinstance(value, dict) else ""
        raise ConfigError(
            f"{file} has a line without the text {field!r}",
            where=where,
            accepted=accepted,
            todo=f"set data.field to one of {known}" if known else "",
        )
    text: str = value[field]
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"{file} has a line with half of a surrogate pair: {text[error.start]!a}",
            where=where,
            accepted="text that can be written in UTF-8",
        ) from error
    return text

"""Read Parquet and CSV files of logged clicks as pyarrow batches, and find errors in them.

For the data set `click_log`. CSV is in UTF-8, with or without a byte order mark; a quoted value may
contain line breaks. In a column of categories only an empty field is missing: `NA` is a category.
In a column of numbers, the words that pyarrow and pandas use for missing values are missing values.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from io import BufferedReader, FileIO, TextIOWrapper
from pathlib import Path
from typing import Any

from sbp_core.errors import ConfigError, suggestion
from sbp_core.serialize import open_file
from sbp_models.configs import ClickLogConfig
from sbp_models.extras import library
from sbp_models.local_files import not_utf8

#: Suffixes of the files that are read in a folder.
SUFFIXES = frozenset({".csv", ".parquet"})

#: Rows of a Parquet file that are read at once, and size of the read buffer of a column.
_ROWS_AT_ONCE = 2**16
_BUFFER_BYTES = 2**20

#: Bytes of a CSV file that are read at once; most bytes of a row.
_CSV_BYTES = 2**23


class ClickFiles:
    """Reads the columns that a config names.

    Args:
        arrow: The library `pyarrow`.
        config: The columns.
    """

    def __init__(self, arrow: Any, config: ClickLogConfig) -> None:
        self.arrow, self.config = arrow, config
        self.numbers = [config.label, *config.dense]
        self.columns = [*self.numbers, *config.sparse]

    def batches(self, file: Path) -> Iterator[tuple[Any, int]]:
        """Yield batches of a file, each with the number of bytes read so far.

        Raises:
            ConfigError: the file is broken, or lacks a column.
        """
        return self._csv(file) if file.suffix.lower() == ".csv" else self._parquet(file)

    def _parquet(self, file: Path) -> Iterator[tuple[Any, int]]:
        """Yield batches of a file, each with the number of bytes read so far."""
        parquet = library("pyarrow.parquet", extra="clicks", needed_by="data=click_log")
        size_bytes = 0
        with ExitStack() as files:
            try:
                # The size of the opened file; the name may refer to another file by now.
                source = files.enter_context(open_file(file))
                size_bytes = os.fstat(source.fileno()).st_size
                # Buffered and not read ahead: a row group may be as large as the file.
                opened = files.enter_context(
                    parquet.ParquetFile(
                        f"/dev/fd/{source.fileno()}",
                        page_checksum_verification=True,
                        pre_buffer=False,
                        buffer_size=_BUFFER_BYTES,
                    )
                )
                names = opened.schema_arrow.names
            except (self.arrow.ArrowException, OSError, ValueError) as error:
                at = max(0, size_bytes - 8)
                raise ConfigError(
                    f"{file} cannot be read as a Parquet file: {error}",
                    where=f"{file}, byte {at}: where Parquet has the table of contents",
                    accepted="whole Parquet files",
                ) from error
            self._check_columns(file, names)
            read_rows, num_rows = 0, opened.metadata.num_rows
            for group in range(opened.num_row_groups):
                try:
                    for batch in opened.iter_batches(
                        _ROWS_AT_ONCE, row_groups=[group], columns=self.columns
                    ):
                        # The fraction of the rows approximates the fraction of the bytes.
                        read_rows += batch.num_rows
                        yield batch, size_bytes * read_rows // max(num_rows, read_rows)
                except (self.arrow.ArrowException, OSError, ValueError) as error:
                    raise self._broken_group(file, opened, group, error) from error

    def _broken_group(self, file: Path, opened: Any, group: int, error: Exception) -> ConfigError:
        """Name the column of a row group that cannot be read, and where its pages begin."""
        where = f"{file}, row group {group}"
        for index in range(opened.metadata.num_columns):
            path = opened.schema.column(index).path
            try:
                opened.read_row_group(group, columns=[path])
            except (self.arrow.ArrowException, OSError, ValueError) as of_column:
                where += f", column {path}"
                # The metadata of a column may be broken, too: then reading it kills the process.
                if "page" in str(of_column):
                    column = opened.metadata.row_group(group).column(index)
                    begin = column.dictionary_page_offset or column.data_page_offset
                    where += f", byte {begin}"
                break
        return ConfigError(f"{file} is broken: {error}", where=where, accepted="whole files")

    def _csv(self, file: Path) -> Iterator[tuple[Any, int]]:
        """Yield batches of a file, each with the number of bytes read so far."""
        library_csv = library("pyarrow.csv", extra="clicks", needed_by="data=click_log")
        names = _header(file)
        self._check_columns(file, names)
        types = dict.fromkeys(self.columns, self.arrow.float64())
        types |= dict.fromkeys(self.config.sparse, self.arrow.string())
        options = library_csv.ConvertOptions(include_columns=self.columns, column_types=types)
        try:
            with (
                _CountsQuotes(file) as opened,
                library_csv.open_csv(
                    opened,
                    convert_options=options,
                    parse_options=library_csv.ParseOptions(newlines_in_values=True),
                    read_options=library_csv.ReadOptions(block_size=_CSV_BYTES),
                ) as reader,
            ):
                for batch in reader:
                    yield batch, opened.tell()
                # A quoted value that is never closed swallows all following rows.
                if opened.quotes % 2:
                    self._check_rows(file, names, options.null_values)
        except (self.arrow.ArrowException, OSError) as error:
            self._check_rows(file, names, options.null_values, str(error))
            raise ConfigError(
                f"{file} is broken: {error}", where=str(file), accepted=_accepted(names)
            ) from error

    def _check_rows(
        self, file: Path, names: Sequence[str], missing: Sequence[str], reason: str = ""
    ) -> None:
        """Refuse the first invalid row, with its line and byte.

        Args:
            file: The file, which is read again.
            names: Names of its columns.
            missing: Texts that stand for a missing number.
            reason: The error message of pyarrow.

        Raises:
            ConfigError: there is an invalid row.
        """
        numbers = [names.index(name) for name in self.numbers]
        used = [names.index(name) for name in self.columns]
        for line, begin, fields in _rows(file):
            wrong = ""
            if isinstance(fields, csv.Error):
                wrong = str(fields)
            elif line == 1 or not fields:
                continue
            elif len(fields) != len(names):
                wrong = f"{len(fields)} values where the header has {len(names)}"
            elif sum(map(len, fields)) > _CSV_BYTES:
                wrong = f"a row of more than {_CSV_BYTES} bytes"
            elif any(_is_escaped(fields[place]) for place in used):
                raise not_utf8(file, "".join(fields).encode("utf-8", "surrogateescape"), begin)
            else:
                for place in numbers:
                    if fields[place] not in missing and not _is_number(fields[place]):
                        wrong = f"{names[place]!r} has {fields[place]!r}, which is no number"
            if wrong:
                raise ConfigError(
                    f"{file} is broken: {wrong}" + (f" ({reason})" if reason else ""),
                    where=f"{file}, line {line}, byte {begin}",
                    accepted=_accepted(names),
                )

    def _check_columns(self, file: Path, names: Sequence[str]) -> None:
        for key, columns in (
            ("label", [self.config.label]),
            ("dense", self.config.dense),
            ("sparse", self.config.sparse),
        ):
            for column in columns:
                if column not in names:
                    raise ConfigError(
                        f"data.{key} names {column!r}, which is no column of {file}",
                        accepted=", ".join(names),
                        todo=suggestion(column, names),
                    )
                if names.count(column) > 1:
                    raise ConfigError(
                        f"{file} has {names.count(column)} columns that are called {column!r}",
                        accepted="names that only one column has",
                        todo="rename the other columns in the file",
                    )


class _CountsQuotes(FileIO):
    """A file that counts the quotes in the bytes that were read."""

    quotes = 0

    def read(self, size: int | None = -1, /) -> bytes:
        found = super().read(-1 if size is None else size)
        self.quotes += found.count(b'"')
        return found


def _accepted(names: Sequence[str]) -> str:
    return (
        f"{len(names)} values a row, numbers in the columns of data.dense, quotes that are closed"
    )


def _header(file: Path) -> list[str]:
    try:
        with open_file(file) as opened:
            start = opened.read(4)
        for _, _, fields in _rows(file):
            if isinstance(fields, csv.Error):
                raise fields
            if fields:
                break
        else:
            fields = []
    except (OSError, csv.Error) as error:
        raise ConfigError(
            f"{file} has no header that can be read: {error}",
            where=f"{file}, byte 0",
            accepted="a first line with the names of columns",
        ) from error
    text = ",".join(fields)
    if _is_escaped(text) or "\0" in text:
        raise not_utf8(file, start + text.encode("utf-8", "surrogateescape"), 0)
    return fields


def _rows(file: Path) -> Iterator[tuple[int, int, list[str] | csv.Error]]:
    """Yield line, first byte and values of each row, an empty one for an empty line.

    Bytes that are not UTF-8 are escaped. An error of the library is yielded last.
    """
    lines, size_bytes = 0, 0

    def read() -> Iterator[str]:
        nonlocal lines, size_bytes
        whole = BufferedReader(open_file(file))
        with TextIOWrapper(whole, "utf-8", errors="surrogateescape", newline="") as opened:
            for line in opened:
                lines += 1
                size_bytes += len(line.encode("utf-8", "surrogateescape"))
                yield line.removeprefix("\ufeff") if lines == 1 else line

    most = csv.field_size_limit(2 * _CSV_BYTES)
    reader = csv.reader(read(), strict=True)
    try:
        while True:
            line, begin = lines + 1, size_bytes
            try:
                yield line, begin, next(reader)
            except csv.Error as error:
                yield line, begin, error
                return
            except StopIteration:
                return
    finally:
        csv.field_size_limit(most)


def _is_escaped(text: str) -> bool:
    return any("\udc80" <= letter <= "\udcff" for letter in text)


def _is_number(text: str) -> bool:
    """Return whether pyarrow can read a text as a number."""
    with suppress(ValueError):
        float(text)
        return text.isascii() and "_" not in text
    return False

"""A data set of clicks that were logged, in Parquet or CSV files, read through pyarrow.

    label, I1, I2, C1, C2             dense   log(1 + I), 0 for what is missing
    1,     3,  ,   a9, 17             sparse  a9 hashed to the rows of its table, 17 as it is
    0,     ,   7,  b2, 4              clicks  label

All files are read when the data set is built, once and a part at a time: `record_cache` keeps the
rows, 4 bytes for a number or category. The last rows are held out, as logs go on in time.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from io import BufferedReader, TextIOWrapper
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from sbp_core.errors import ConfigError, nearest
from sbp_core.serialize import open_file
from sbp_core.user_cache import user_path
from sbp_models.configs import ClickLogConfig
from sbp_models.extras import library
from sbp_models.local_files import files_of
from sbp_models.record_cache import Chunk, Recipe, load_records
from sbp_models.splits import SplitDataset

#: The files that are read in a folder.
SUFFIXES = frozenset({".csv", ".parquet"})

#: Rows of a Parquet file that are read at once, and bytes of each of its columns.
_ROWS_AT_ONCE = 2**16
_BUFFER_BYTES = 2**20

#: Row of the table that a category which is missing has.
MISSING = 0


class ClickLog(SplitDataset):
    """Logged clicks. Fulfils `sbp_torch.kinds.Dataset`.

    Args:
        records: Of `dtype_of`, one a row.
        num_clicked: How many rows were clicked on.
        held_out: Part of the rows that is held out: the last ones.
        label: What `describe` calls it.

    Raises:
        ConfigError: a split has no rows.
    """

    def __init__(
        self,
        records: npt.NDArray[Any],
        *,
        num_clicked: int,
        held_out: float,
        label: str,
    ) -> None:
        self._records, self._num_clicked = records, num_clicked
        self._cut = len(records) - round(held_out * len(records))
        super().__init__(
            {"train": self._cut, "validation": len(records) - self._cut},
            label=f"clicks of {label}",
            accepted="more rows, or another data.held_out",
        )

    def samples(
        self, numbers: npt.NDArray[np.int64], split: str = "train"
    ) -> Mapping[str, torch.Tensor]:
        """Return rows of `train` or `validation`.

        Returns:
            `dense`, float32 (n, numbers); `sparse`, int64 (n, features, 1), below the rows of the
            feature; `clicks`, float32 (n,), 0 or 1.
        """
        found = self._checked(numbers, split)
        rows = found + (self._cut if split == "validation" else 0)
        records = self._records[rows]
        return {
            "dense": torch.from_numpy(np.ascontiguousarray(records["dense"])),
            "sparse": torch.from_numpy(records["sparse"].astype(np.int64)[:, :, None]),
            "clicks": torch.from_numpy(np.ascontiguousarray(records["clicks"])),
        }

    def describe(self) -> str:
        """Return one line: how many rows, numbers and features there are."""
        fields = self._records.dtype
        return (
            f"{self._label}: {self._counts()}; {fields['dense'].shape[0]} numbers, "
            f"{fields['sparse'].shape[0]} features, "
            f"{self._num_clicked / len(self._records):.1%} clicked"
        )


def build(config: ClickLogConfig) -> ClickLog:
    """Make the data set of a file or folder.

    Raises:
        ConfigError: a file is broken (names the byte), or has not the columns or values.
        RunError: the cache cannot be written.
    """
    arrow = library("pyarrow", extra="clicks", needed_by="data=click_log")
    files = files_of(user_path(config.path, key="data.path"), key="data.path", suffixes=SUFFIXES)
    recipe = Recipe(
        kind="clicks",
        files=files,
        settings={
            name: getattr(config, name) for name in ("label", "dense", "sparse", "rows", "log")
        },
        dtype=dtype_of(config),
        chunks=_Reader(arrow, config, files).chunks,
    )
    records = load_records(recipe, config.cache)
    return ClickLog(
        records.values,
        num_clicked=records.counts.get("clicked", 0),
        held_out=config.held_out,
        label=config.path,
    )


def dtype_of(config: ClickLogConfig) -> np.dtype[Any]:
    """Return what is kept of a row: what a sample takes lies side by side."""
    return np.dtype(
        [
            ("dense", "<f4", (len(config.dense),)),
            ("sparse", "<i4", (len(config.sparse),)),
            ("clicks", "<f4"),
        ]
    )


class _Reader:
    """Reads files part by part, as records."""

    def __init__(self, arrow: Any, config: ClickLogConfig, files: Sequence[Path]) -> None:
        self.arrow, self.config, self.files = arrow, config, files
        self.columns = [config.label, *config.dense, *config.sparse]
        self.dtype = dtype_of(config)
        #: Rows of the file that have been read before.
        self.row = 0

    def chunks(self) -> Iterator[Chunk]:
        before = 0
        for file in self.files:
            self.row = 0
            batches = self._csv(file) if file.suffix.lower() == ".csv" else self._parquet(file)
            for batch, read_bytes in batches:
                records = self._records(file, batch)
                self.row += batch.num_rows
                yield Chunk(
                    records=records,
                    counts={"clicked": int(np.count_nonzero(records["clicks"]))},
                    read_bytes=before + read_bytes,
                )
            before += file.stat().st_size

    def _parquet(self, file: Path) -> Iterator[tuple[Any, int]]:
        """Yield batches of a file, and its bytes that have been read by then."""
        parquet = library("pyarrow.parquet", extra="clicks", needed_by="data=click_log")
        try:
            # Buffered and not read ahead: a row group may be as large as the file.
            open_file(file).close()  # no pipe, for which pyarrow would wait
            opened = parquet.ParquetFile(
                file, page_checksum_verification=True, pre_buffer=False, buffer_size=_BUFFER_BYTES
            )
            names = opened.schema_arrow.names
        except (self.arrow.ArrowException, OSError, ValueError) as error:
            size = file.stat().st_size
            raise ConfigError(
                f"{file} is no Parquet file that can be read: {error}",
                where=f"{file}, byte {max(0, size - 8)}: where Parquet says what is in a file",
                accepted="whole Parquet files",
            ) from error
        with opened:
            self._check_columns(file, names)
            num_rows, size_bytes = opened.metadata.num_rows, file.stat().st_size
            for group in range(opened.num_row_groups):
                try:
                    for batch in opened.iter_batches(
                        _ROWS_AT_ONCE, row_groups=[group], columns=self.columns
                    ):
                        # The share of the rows is near enough to that of the bytes.
                        read_rows = self.row + batch.num_rows
                        yield batch, size_bytes * read_rows // max(num_rows, read_rows)
                except (self.arrow.ArrowException, OSError, ValueError) as error:
                    raise self._broken_group(file, opened, group, error) from error

    def _broken_group(self, file: Path, opened: Any, group: int, error: Exception) -> ConfigError:
        """Name the column of a row group that cannot be read, and where in the file it begins."""
        metadata = opened.metadata.row_group(group)
        where = f"{file}, row group {group}"
        for index in range(metadata.num_columns):
            column = metadata.column(index)
            try:
                opened.read_row_group(group, columns=[column.path_in_schema])
            except (self.arrow.ArrowException, OSError, ValueError):
                begin = column.dictionary_page_offset or column.data_page_offset
                where = f"{file}, row group {group}, column {column.path_in_schema}, byte {begin}"
                break
        return ConfigError(f"{file} is broken: {error}", where=where, accepted="whole files")

    def _csv(self, file: Path) -> Iterator[tuple[Any, int]]:
        """Yield batches of a file, and its bytes that have been read by then."""
        csv_library = library("pyarrow.csv", extra="clicks", needed_by="data=click_log")
        names = _header(file)
        self._check_columns(file, names)
        types = dict.fromkeys(self.columns, self.arrow.float64())
        types |= dict.fromkeys(self.config.sparse, self.arrow.string())
        options = csv_library.ConvertOptions(
            include_columns=self.columns, column_types=types, strings_can_be_null=True
        )
        try:
            with (
                open_file(file) as opened,
                csv_library.open_csv(opened, convert_options=options) as reader,
            ):
                for batch in reader:
                    yield batch, opened.tell()
        except (self.arrow.ArrowException, OSError) as error:
            raise ConfigError(
                f"{file} is broken: {error}",
                where=_bad_line(file, names, [self.config.label, *self.config.dense]),
                accepted=f"{len(names)} values a line, numbers in the columns of data.dense",
            ) from error

    def _check_columns(self, file: Path, names: Sequence[str]) -> None:
        for key, columns in (
            ("label", [self.config.label]),
            ("dense", self.config.dense),
            ("sparse", self.config.sparse),
        ):
            for column in columns:
                if column not in names:
                    near = nearest(column, names)
                    raise ConfigError(
                        f"data.{key} names {column!r}, which is no column of {file}",
                        accepted=", ".join(names),
                        todo=f"did you mean {near}?" if near else "",
                    )

    def _records(self, file: Path, table: Any) -> npt.NDArray[Any]:
        config = self.config
        clicks = self._numbers(file, table, config.label)
        wrong = ~((clicks == 0) | (clicks == 1))
        if wrong.any():
            at = int(np.flatnonzero(wrong)[0])
            raise ConfigError(
                f"{file} has the {config.label} {clicks[at]:g}",
                where=f"{file}, row {self.row + at} (from 0, without a header)",
                accepted="0 or 1",
                todo="set data.label to the column that says whether one clicked",
            )
        dense = [np.nan_to_num(self._numbers(file, table, name)) for name in config.dense]
        if config.log:
            dense = [np.log1p(np.maximum(column, 0)) for column in dense]
        sparse = [
            self._categories(table.column(name), rows, name)
            for name, rows in zip(config.sparse, config.rows, strict=True)
        ]
        records = np.empty(len(clicks), self.dtype)
        records["dense"] = np.stack(dense, axis=1)
        records["sparse"] = np.stack(sparse, axis=1)
        records["clicks"] = clicks
        return records

    def _numbers(self, file: Path, table: Any, name: str) -> npt.NDArray[np.float64]:
        """Return a column as numbers: NaN where it has none."""
        column = table.column(name)
        try:
            found = column.cast(self.arrow.float64())
        except self.arrow.ArrowException as error:
            raise ConfigError(
                f"the column {name!r} of {file} has no numbers: {error}",
                accepted="a column of numbers",
                todo="name columns of categories in data.sparse",
            ) from error
        values: npt.NDArray[np.float64] = found.to_numpy(zero_copy_only=False).astype(np.float64)
        return values

    def _categories(self, column: Any, rows: int, name: str) -> npt.NDArray[np.int32]:
        """Return the row of its table for each value of a column of categories."""
        if isinstance(column, self.arrow.ChunkedArray):
            column = column.combine_chunks()
        encoded = column if hasattr(column, "dictionary") else column.dictionary_encode()
        values = [_row_of(value, rows, name) for value in encoded.dictionary.to_pylist()]
        table = np.array([MISSING, *values], dtype=np.int32)
        places = encoded.indices.fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int64)
        found: npt.NDArray[np.int32] = table[places + 1]
        return found


def _row_of(value: object, rows: int, name: str) -> int:
    """Return the row of the table of a feature for a category.

    Integers that are rows stay what they are, also where a CSV file has them as text.
    """
    text = str(value)
    if text.isascii() and text.isdecimal() and len(text) < 19 and int(text) < rows:
        return int(text)
    if value is None:
        return MISSING
    return int.from_bytes(blake2b(f"{name} {text}".encode(), digest_size=8).digest()) % rows


def _header(file: Path) -> list[str]:
    try:
        with TextIOWrapper(BufferedReader(open_file(file)), "utf-8", newline="") as opened:
            return next(csv.reader(opened), [])
    except (OSError, ValueError, csv.Error) as error:
        raise ConfigError(
            f"{file} has no header that can be read: {error}",
            where=f"{file}, byte 0",
            accepted="a first line with the names of columns",
        ) from error


def _bad_line(file: Path, names: Sequence[str], numbers: Sequence[str]) -> str:
    """Return where the first line is that cannot be meant: file, line and byte."""
    places = [names.index(name) for name in numbers]
    begin = 0
    with BufferedReader(open_file(file)) as opened:
        for number, line in enumerate(opened, start=1):
            try:
                fields = next(csv.reader([line.decode("utf-8")]), [])
                if number > 1 and fields:
                    if len(fields) != len(names):
                        raise ValueError
                    for place in places:
                        float(fields[place] or 0)
            except (ValueError, csv.Error):
                return f"{file}, line {number}, byte {begin}"
            begin += len(line)
    return str(file)

"""The data set `click_log`: logged clicks in Parquet or CSV files, read through pyarrow.

    label, I1, I2, C1, C2             dense   log(1 + I), 0 if missing
    1,     3,  ,   a9, 17             sparse  a9 hashed to the rows of its table, 17 as it is,
    0,     ,   7,  ,   4                      missing values to the last row, which is reserved
                                      clicks  label

A category is the same in CSV and Parquet, and as text, integer or float: see `categories`. When the
data set is built, all files are read once, part by part. `record_cache` keeps the rows, with 4
bytes for each number or category. The last rows are held out for validation, because logs are
ordered by time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from sbp_core.errors import ConfigError
from sbp_core.user_paths import user_path
from sbp_models.categories import Categories
from sbp_models.click_files import SUFFIXES, ClickFiles
from sbp_models.configs import ClickLogConfig
from sbp_models.extras import library
from sbp_models.local_files import files_of
from sbp_models.record_cache import Chunk, Recipe, load_records
from sbp_models.splits import SplitDataset


class ClickLog(SplitDataset):
    """Logged clicks. Implements `sbp_torch.kinds.Dataset`.

    Args:
        records: Array of dtype `dtype_of(config)`, one record for each row.
        num_clicked: Number of rows with label 1.
        held_out: Fraction of the rows that is held out: the last ones.
        label: Name of the data set in `describe`.

    Raises:
        ConfigError: a split has no rows.
    """

    def __init__(
        self, records: npt.NDArray[Any], *, num_clicked: int, held_out: float, label: str
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
            `dense`, float32 (n, numbers); `sparse`, int64 (n, features, 1), rows of the tables;
            `clicks`, float32 (n,), 0 or 1.
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
        """Return a line with the numbers of rows, dense columns and features."""
        fields = self._records.dtype
        return (
            f"{self._label}: {self._counts()}; {fields['dense'].shape[0]} numbers, "
            f"{fields['sparse'].shape[0]} features, "
            f"{self._num_clicked / len(self._records):.1%} clicked"
        )


def build(config: ClickLogConfig) -> ClickLog:
    """Build the data set from a file or folder.

    Raises:
        ConfigError: a file is broken (the message names the byte), or lacks columns or has invalid
            values; or the last row of a table is needed for a category and for missing values.
        RunError: the cache cannot be written.
    """
    arrow = library("pyarrow", extra="clicks", needed_by="data=click_log")
    files = files_of(user_path(config.path, key="data.path"), key="data.path", suffixes=SUFFIXES)
    recipe = Recipe(
        kind="clicks",
        files=files,
        settings={
            name: getattr(config, name)
            for name in ("label", "dense", "sparse", "rows", "log_transform")
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
    """Return the dtype of a stored row: the values of one sample, next to each other."""
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
        self.dtype = dtype_of(config)
        self.categories = [
            Categories(arrow, name, rows)
            for name, rows in zip(config.sparse, config.rows, strict=True)
        ]

    def chunks(self) -> Iterator[Chunk]:
        before = 0
        opened = ClickFiles(self.arrow, self.config)
        for file in self.files:
            row = 0
            for batch, read_bytes in opened.batches(file):
                records = self._records(file, row, batch)
                row += batch.num_rows
                yield Chunk(
                    records=records,
                    counts={"clicked": int(np.count_nonzero(records["clicks"]))},
                    read_bytes=before + read_bytes,
                )
            before += file.stat().st_size
        for column in self.categories:
            column.check_rows(self.config.path)

    def _records(self, file: Path, row: int, table: Any) -> npt.NDArray[Any]:
        """Return rows of a file, of which the first one has the number `row`."""
        config = self.config
        clicks = self._numbers(file, row, table, config.label)
        self._check(file, row, config.label, clicks, (clicks == 0) | (clicks == 1))
        records = np.empty(len(clicks), self.dtype)
        records["clicks"] = clicks
        for place, name in enumerate(config.dense):
            given = self._numbers(file, row, table, name)
            values = np.nan_to_num(given, posinf=np.inf, neginf=-np.inf)
            with np.errstate(over="ignore"):  # values too large for float32 are refused below
                records["dense"][:, place] = (
                    np.log1p(np.maximum(values, 0)) if config.log_transform else values
                )
            fits = np.isfinite(values) & np.isfinite(records["dense"][:, place])
            self._check(file, row, name, given, fits)
        for place, column in enumerate(self.categories):
            records["sparse"][:, place] = column.rows_of(table.column(column.name), file, row)
        return records

    def _numbers(self, file: Path, row: int, table: Any, name: str) -> npt.NDArray[np.float64]:
        """Return a column as numbers; NaN for missing values."""
        column = table.column(name)
        number = self.arrow.float64()
        try:
            # Not safe: a large integer is rounded to the nearest float64.
            found = column.cast(number, safe=False)
        except self.arrow.ArrowException as error:
            raise ConfigError(
                f"the column {name!r} of {file} has no numbers: {error}",
                where=f"{file}, rows {row} to {row + len(column) - 1} (from 0, without a header)",
                accepted="a column of numbers",
                todo="name columns of categories in data.sparse",
            ) from error
        values: npt.NDArray[np.float64] = found.to_numpy(zero_copy_only=False).astype(np.float64)
        return values

    def _check(
        self,
        file: Path,
        row: int,
        name: str,
        values: npt.NDArray[np.float64],
        fits: npt.NDArray[np.bool_],
    ) -> None:
        """Refuse the first invalid value.

        Raises:
            ConfigError: there is one.
        """
        if fits.all():
            return
        at = int(np.flatnonzero(~fits)[0])
        is_label = name == self.config.label
        raise ConfigError(
            f"{file} has the {name} {values[at]:g}",
            where=f"{file}, row {row + at} (from 0, without a header)",
            accepted="0 or 1" if is_label else "numbers that float32 has, or nothing",
            todo="set data.label to the column with 1 for a click" if is_label else "",
        )

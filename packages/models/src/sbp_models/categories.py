"""Map the categories of a Parquet or CSV column to the rows of an embedding table.

For the data set `click_log`. A category is identified by its text. Integers, and floats and
decimals without a fraction, have the text of the integer, because in pandas a column of integers
with a null becomes a column of floats:

    Parquet   17   17.0   Decimal("17.00")   "17"   "007"   "NA"   1.5     null  NaN  ""
    CSV       17   17.0   17.00              "17"   007     NA     1.5     an empty field
    row       17   17     17                 17     hash    hash   hash    the last row

An integer below the number of the last row has that row. All other categories are hashed to these
rows.
"""

from __future__ import annotations

import re
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from sbp_core.errors import ConfigError

#: A text that is an integer, also one that was written as a float: 17 and 17.0, not 007 or 1e3.
_INTEGER = re.compile(r"(-?(?:0|[1-9][0-9]*))(?:\.0+)?")

#: Types of columns whose values are converted to text, by their names in `pyarrow.types`.
_KINDS = (
    *("null", "boolean", "integer", "floating", "decimal", "date"),
    *("string", "large_string", "string_view"),
    *("binary", "large_binary", "binary_view", "fixed_size_binary"),
)


class Categories:
    """Finds the table rows of the categories of a column, and remembers which kinds it has seen.

    Args:
        arrow: The library `pyarrow`.
        name: Name of the column.
        rows: Number of rows of its table, >= 2; the last one is for missing values.
    """

    def __init__(self, arrow: Any, name: str, rows: int) -> None:
        self.name, self._arrow, self._rows = name, arrow, rows
        #: Whether the integer of the last row was seen; whether other categories were hashed.
        self._has_next = self._has_hashed = False

    def rows_of(self, column: Any, file: Path, row: int) -> npt.NDArray[np.int32]:
        """Return the row of the table for each value of a column, int32 (n,).

        Args:
            column: An array of pyarrow, or a chunked one.
            file: The file with the column, for messages.
            row: Number of its first row in the file, for messages.

        Raises:
            ConfigError: a value is no category; the message names column and row.
        """
        if isinstance(column, self._arrow.ChunkedArray):
            column = column.combine_chunks()
        if self._arrow.types.is_dictionary(column.type):
            column = column.dictionary_decode()
        if not any(getattr(self._arrow.types, f"is_{kind}")(column.type) for kind in _KINDS):
            raise ConfigError(
                f"the column {self.name!r} of {file} has values of the type {column.type}",
                accepted="integers, text, or numbers, booleans and dates, taken as their text",
                todo="leave it out of data.sparse, or write its values as text",
            )
        encoded = column.dictionary_encode()
        places = encoded.indices.fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int64)
        table = []
        for place, value in enumerate(self._values(encoded.dictionary)):
            text = _text(value)
            if text is None:
                where = f"{file}, row {row + int(np.argmax(places == place))}"
                raise ConfigError(
                    f"the column {self.name!r} of {file} has the category {value!r}",
                    where=f"{where} (from 0, without a header)",
                    accepted="integers, UTF-8 text; floats in the range of exact integers",
                    todo="write its categories as integers or text",
                )
            table.append(self._row_of(text))
        found = np.array([*table, self._rows - 1], dtype=np.int32)
        values: npt.NDArray[np.int32] = found[places]  # null is -1, which is the last row
        return values

    def check_rows(self, path: str) -> None:
        """Refuse a table that has a row for each integer, and none for missing values.

        Args:
            path: The file or folder, for the message.

        Raises:
            ConfigError: the table has no row for missing values.
        """
        if self._has_next and not self._has_hashed:
            raise ConfigError(
                f"the column {self.name!r} has categories up to {self._rows - 1}, and data.rows "
                f"{self._rows}, of which the last one is for missing values",
                where=("data.rows", path),
                accepted=f"{self._rows + 1} or more for {self.name!r}",
                todo="set model.rows, which data.rows follows",
            )

    def _row_of(self, text: str) -> int:
        last = self._rows - 1
        if not text:
            return last
        if text.isdecimal() and len(text) < 19 and int(text) <= last and text == str(int(text)):
            if int(text) < last:
                return int(text)
            self._has_next = True
        else:
            self._has_hashed = True
        hashed = blake2b(f"{self.name} {text}".encode(), digest_size=8).digest()
        return int.from_bytes(hashed) % last

    def _values(self, distinct: Any) -> list[Any]:
        """Return the values of an array; floats keep their precision (as numpy scalars)."""
        if self._arrow.types.is_floating(distinct.type):
            return list(distinct.to_numpy(zero_copy_only=False))
        values: list[Any] = distinct.to_pylist()
        return values


def _text(value: Any) -> str | None:
    """Return the text of a category, empty where it is missing; None if it is no category."""
    if value is None:
        return ""
    if isinstance(value, bytes):
        try:
            value = value.decode("utf-8")
        except UnicodeDecodeError:
            return None
    elif isinstance(value, np.floating):
        if np.isnan(value):
            return ""
        # Such floats round larger integers, so several integers would become one category.
        if abs(value) > 2.0 ** (np.finfo(value.dtype).nmant + 1):
            return None
        value = int(value) if value.is_integer() else value
    text = str(value)
    whole = _INTEGER.fullmatch(text)
    if whole is None:
        return text
    return "0" if whole[1] == "-0" else whole[1]

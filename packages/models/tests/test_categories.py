"""Categories of clicks: one row in CSV and Parquet, as text, integer and float; what is refused."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as arrow
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from sbp_core.errors import ConfigError
from sbp_models.categories import Categories
from sbp_models.click_log import build
from sbp_models.configs import ClickLogConfig

#: What pyarrow and pandas take for missing where they are not told otherwise.
WORDS = ("NA", "NULL", "null", "nan", "NaN", "n/a", "N/A", "#N/A", "-nan", "1.#IND", "None")


def rows_of(values: Any, rows: int = 1000) -> list[int]:
    return Categories(arrow, "C1", rows).rows_of(values, Path("x.parquet"), 0).tolist()


def rows_of_file(path: Path, rows: int = 1000) -> list[int]:
    config = ClickLogConfig(
        path=str(path), dense=("I1",), sparse=("C1",), rows=(rows,), held_out=0.5
    )
    data = build(config)
    found: list[int] = []
    for split in ("train", "validation"):
        samples = data.samples(np.arange(data.num_samples(split)), split)
        found += samples["sparse"].flatten().tolist()
    return found


def write_csv(path: Path, fields: list[str]) -> Path:
    path.write_text("label,I1,C1\n" + "".join(f"1,3,{field}\n" for field in fields), "utf-8")
    return path


@pytest.mark.parametrize("quote", ["", '"'])
def test_words_for_missing_are_categories_in_csv_as_in_parquet(tmp_path: Path, quote: str) -> None:
    table = {"label": [1] * 12, "I1": [3] * 12, "C1": [*WORDS, None]}
    parquet.write_table(arrow.table(table), tmp_path / "x.parquet")
    write_csv(tmp_path / "x.csv", [f"{quote}{word}{quote}" for word in [*WORDS, ""]])

    found = rows_of_file(tmp_path / "x.csv")

    assert found == rows_of_file(tmp_path / "x.parquet")
    assert found[-1] == 999 and 999 not in found[:-1]


@pytest.mark.parametrize(
    "values",
    [
        arrow.array([17, None, 0, 250], arrow.int64()),
        arrow.array([17, None, 0, 250], arrow.uint8()),
        arrow.array([17.0, None, 0.0, 250.0]),
        arrow.array([17.0, float("nan"), -0.0, 250.0], arrow.float32()),
        arrow.array(["17", "", "0", "250"]),
        arrow.array(["17.0", None, "-0.0", "250.00"], arrow.large_string()),
        arrow.array([b"17", None, b"0", b"250"]),
        arrow.array([Decimal("17.00"), None, Decimal("0.00"), Decimal("250.00")]),
        arrow.array(["17", None, "0", "250"]).dictionary_encode(),
        arrow.chunked_array([[17, None], [0, 250]]),
    ],
    ids=lambda values: str(values.type),
)
def test_an_integer_has_its_row_in_every_type(values: Any) -> None:
    assert rows_of(values) == [17, 999, 0, 250]


def test_integers_of_csv_are_those_that_a_null_made_floats(tmp_path: Path) -> None:
    integers = write_csv(tmp_path / "i.csv", ["17", "", "0", "5000"])
    floats = write_csv(tmp_path / "f.csv", ["17.0", "", "0.0", "5000.0"])

    assert rows_of_file(integers) == rows_of_file(floats)
    assert rows_of_file(integers)[:3] == [17, 999, 0]


def test_text_that_only_looks_like_an_integer_is_text() -> None:
    texts = ["007", "1e3", "17.5", "+7", "7 ", "٧", "0x7", "7.", "-"]

    found = rows_of(arrow.array(texts), rows=2**31 - 1)

    assert not {7, 1000, 17} & set(found)
    assert len(set(found)) == len(texts)


@given(st.integers(-(2**63), 2**63 - 1), st.integers(2, 2**31 - 1))
def test_a_row_is_in_the_table_and_never_that_of_missing_values(value: int, rows: int) -> None:
    (found,) = rows_of(arrow.array([value]), rows)

    assert 0 <= found < rows - 1
    if 0 <= value < rows - 1:
        assert found == value
    assert rows_of(arrow.array([str(value)]), rows) == [found]


@pytest.mark.parametrize(
    "value", [float("inf"), float("-inf"), 2.0**53 + 2, b"\xff"], ids=lambda value: repr(value)
)
def test_what_is_no_category_is_refused_with_column_and_row(value: object) -> None:
    column = arrow.array([type(value)(), type(value)(), value])

    with pytest.raises(ConfigError, match=r"the column 'C1' of x\.parquet has the ") as caught:
        Categories(arrow, "C1", 10).rows_of(column, Path("x.parquet"), 40)

    assert caught.value.where == ("x.parquet, row 42 (from 0, without a header)",)


def test_a_float32_that_may_have_been_another_integer_is_refused() -> None:
    assert rows_of(arrow.array([2.0**24], arrow.float32()), 2**25) == [2**24]
    with pytest.raises(ConfigError, match="floats in the range of exact integers"):
        rows_of(arrow.array([2.0**24 + 2], arrow.float32()), 2**25)


@pytest.mark.parametrize(
    "values",
    [arrow.array([[1]]), arrow.array([{"a": 1}]), arrow.array([1], arrow.timestamp("s"))],
    ids=lambda values: str(values.type),
)
def test_types_that_are_no_categories_are_refused(values: Any) -> None:
    with pytest.raises(ConfigError, match=r"the column 'C1' of .* has values of the type"):
        rows_of(values)


def test_a_table_that_is_one_row_too_small_for_its_integers_is_refused(tmp_path: Path) -> None:
    fields = [str(number) for number in range(10)]
    file = write_csv(tmp_path / "x.csv", fields)

    with pytest.raises(ConfigError, match="categories up to 9") as caught:
        rows_of_file(file, rows=10)

    assert caught.value.accepted == "11 or more for 'C1'"
    assert rows_of_file(file, rows=11) == list(range(10))
    # Here others are hashed, and so is the last one.
    assert 9 not in rows_of_file(write_csv(tmp_path / "y.csv", [*fields, "12"]), rows=10)

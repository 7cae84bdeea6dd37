"""CSV files of clicks: encodings, line breaks in values, columns, and the line that is named."""

from __future__ import annotations

import os
from io import FileIO
from pathlib import Path

import numpy as np
import pyarrow as arrow
import pytest
from pyarrow import parquet
from test_click_log import config, everything

from sbp_core.errors import ConfigError
from sbp_models import click_files
from sbp_models.click_log import build


def read(path: Path, log: bool = False) -> dict[str, list[float]]:
    settings = {"dense": ("I1",), "sparse": ("C1",), "rows": (1000,), "held_out": 0.5}
    return {
        name: v.flatten().tolist()
        for name, v in everything(build(config(path, log_transform=log, **settings))).items()
    }


def write(path: Path, note: str = "x", count: int = 10, encoding: str = "utf-8") -> Path:
    """Write rows whose second column has a note; the others have their numbers."""
    lines = [f"{number % 2},{note},{number % 9},{number % 7}\n" for number in range(count)]
    path.write_text("label,note,I1,C1\n" + "".join(lines), encoding)
    return path


def test_a_byte_order_mark_is_no_part_of_the_first_column(tmp_path: Path) -> None:
    marked = write(tmp_path / "marked.csv", encoding="utf-8-sig")

    assert read(marked) == read(write(tmp_path / "plain.csv"))


@pytest.mark.parametrize(
    ("encoding", "name"),
    [("utf-16", "UTF-16"), ("utf-16-le", "UTF-16"), ("utf-32", "UTF-32")],
)
def test_another_encoding_is_named_with_the_way_out(
    tmp_path: Path, encoding: str, name: str
) -> None:
    file = write(tmp_path / "x.csv", encoding=encoding)

    with pytest.raises(ConfigError, match=f"no UTF-8 text; it looks like {name}") as caught:
        read(file)

    assert f"iconv -f {name} -t UTF-8" in caught.value.todo


@pytest.mark.parametrize("place", ["header", "value"])
def test_latin_1_is_named_where_it_is_in_what_is_read(tmp_path: Path, place: str) -> None:
    file = tmp_path / "x.csv"
    header, value = ("C1,Größe", "a") if place == "header" else ("C1,other", "Zürich")
    text = f"label,I1,{header}\n1,2,b,c\n1,2,{value},c\n"
    file.write_text(text, "latin-1")

    with pytest.raises(ConfigError, match="it looks like Latin-1") as caught:
        read(file)

    assert caught.value.where == (f"{file}, byte {0 if place == 'header' else 26}",)


def test_a_column_of_bytes_that_is_not_read_does_not_matter(tmp_path: Path) -> None:
    file = write(tmp_path / "x.csv", "Zürich", encoding="latin-1")

    assert read(file) == read(write(tmp_path / "y.csv"))


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_a_column_that_is_there_twice_is_refused(tmp_path: Path, kind: str) -> None:
    file = tmp_path / f"x.{kind}"
    if kind == "csv":
        file.write_text("label,I1,C1,I1\n1,2,3,4\n")
    else:
        columns = [arrow.array([value]) for value in (1, 2, 3, 4)]
        parquet.write_table(arrow.table(columns, ["label", "I1", "C1", "I1"]), file)

    with pytest.raises(ConfigError, match="2 columns that are called 'I1'"):
        read(file)


@pytest.mark.parametrize("count", [10, 3000])
def test_values_with_line_breaks_are_values_over_blocks_too(
    tmp_path: Path, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(click_files, "_CSV_BYTES", 2**10)
    note = '"' + "\n".join(["a line, with a comma"] * 20) + '"'

    found = read(write(tmp_path / "x.csv", note, count))

    assert found == read(write(tmp_path / "y.csv", "x", count))
    assert len(found["clicks"]) == count


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_the_line_of_a_wrong_number_is_named_behind_line_breaks(tmp_path: Path, end: str) -> None:
    file = write(tmp_path / "x.csv", '"a\nb"', 20)
    text = file.read_text().replace('0,"a\nb",1,3\n', '0,"a\nb",x7,3\n', 1).replace("\n", end)
    file.write_bytes(text.encode())

    with pytest.raises(ConfigError, match="'I1' has 'x7', which is no number") as caught:
        read(file)

    begin = text.index(f'0,"a{end}b",x7')
    assert caught.value.where == (f"{file}, line {2 + 2 * 10}, byte {begin}",)


def test_words_for_missing_are_no_numbers_and_not_named(tmp_path: Path) -> None:
    file = tmp_path / "x.csv"
    lines = ["label,I1,C1", "1,NA,a", "0,,b", "1,nan,c", "0,3,d"]
    file.write_text("\n".join(lines))
    assert read(file)["dense"] == [0, 0, 0, 3]

    file.write_text("\n".join([*lines, "1,1_0,e"]))
    with pytest.raises(ConfigError, match="'I1' has '1_0'") as caught:
        read(file)
    assert caught.value.where[0].startswith(f"{file}, line 6, ")


def test_a_quote_that_is_never_closed_loses_no_rows_in_silence(tmp_path: Path) -> None:
    file = tmp_path / "x.csv"
    file.write_text('label,I1,C1\n1,2,a\n1,2,"b\n1,2,c\n1,2,d\n')

    with pytest.raises(ConfigError, match="is broken") as caught:
        read(file)

    assert caught.value.where == (f"{file}, line 3, byte 18",)


@pytest.mark.parametrize("size", [2000, 4000])
def test_a_row_that_is_too_large_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr(click_files, "_CSV_BYTES", 2**10)
    file = tmp_path / "x.csv"
    file.write_text("label,note,I1,C1\n" + "1,x,2,3\n" * 400 + "1," + "x" * size + ",2,3\n")

    with pytest.raises(
        ConfigError, match=r"a row of more than 1024 bytes|larger than field limit"
    ) as caught:
        read(file)

    assert caught.value.where[0].startswith(f"{file}, line 402, ")


@pytest.mark.parametrize("value", ["inf", "-inf", "1e39", "1e400"])
@pytest.mark.parametrize("log", [False, True])
def test_a_number_that_float32_does_not_hold_is_named(
    tmp_path: Path, value: str, log: bool
) -> None:
    file = tmp_path / "x.csv"
    file.write_text(f"label,I1,C1\n1,3,a\n0,{value},b\n")
    if log and value == "1e39":
        assert np.isclose(read(file, log=True)["dense"][1], np.log(1e39))
        return

    with pytest.raises(ConfigError, match="has the I1 ") as caught:
        read(file, log=log)

    assert caught.value.where == (f"{file}, row 1 (from 0, without a header)",)


def test_integers_that_float64_has_not_are_rounded_as_other_numbers(tmp_path: Path) -> None:
    table = {"label": [0, 1], "I1": [2**60 + 1, 5], "C1": [1, 2]}
    parquet.write_table(arrow.table(table), tmp_path / "x.parquet")

    assert read(tmp_path / "x.parquet")["dense"] == [2.0**60, 5]


def test_a_parquet_file_that_is_exchanged_behind_the_look_is_not_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "x.parquet"
    parquet.write_table(arrow.table({"label": [0, 1], "I1": [3, 5], "C1": [1, 2]}), file)
    looked_at = click_files.open_file

    def exchanged(path: Path) -> FileIO:
        opened = looked_at(path)
        path.unlink()
        os.mkfifo(path)
        return opened

    monkeypatch.setattr(click_files, "open_file", exchanged)
    reader = click_files.ClickFiles(arrow, config(file, dense=("I1",), sparse=("C1",), rows=(9,)))

    ((batch, _),) = reader.batches(file)

    assert batch.column("I1").to_pylist() == [3, 5]

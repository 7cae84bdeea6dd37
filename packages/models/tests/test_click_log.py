"""Logged clicks: the values of Parquet and CSV files, and files that are broken."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as arrow
import pytest
import torch
from pyarrow import csv, parquet

from sbp_core.errors import ConfigError
from sbp_models.click_log import ClickLog, build
from sbp_models.configs import ClickLogConfig, DlrmConfig
from sbp_torch.testing.data import DatasetConformance


def table_of(count: int = 100) -> Any:
    rows = range(count)
    return arrow.table(
        {
            "label": [number % 3 == 0 for number in rows],
            "I1": [None if number % 7 == 0 else number for number in rows],
            "I2": [number / 4 - 3 for number in rows],
            "C1": [None if number % 5 == 4 else f"word {number % 11}" for number in rows],
            "C2": [number % 9 for number in rows],
            "other": ["x"] * count,
        }
    )


def config(path: Path, **settings: Any) -> ClickLogConfig:
    known = {"dense": ("I1", "I2"), "sparse": ("C1", "C2"), "rows": (6, 5), "held_out": 0.2}
    return ClickLogConfig(path=str(path), **{**known, **settings})


def written(folder: Path, kind: str, count: int = 100) -> Path:
    file = folder / f"log.{kind}"
    table = table_of(count)
    if kind == "csv":
        table = table.set_column(0, "label", table["label"].cast("int8"))
        csv.write_csv(table, file)
    else:
        parquet.write_table(table, file, row_group_size=30, write_page_checksum=True)
    return file


@pytest.mark.parametrize("kind", ["parquet", "csv"])
class TestClickLog(DatasetConformance):
    splits = ("train", "validation")

    @pytest.fixture(autouse=True)
    def _write(self, tmp_path: Path, kind: str) -> None:
        self.file = written(tmp_path, kind)

    def make_dataset(self) -> ClickLog:
        return build(config(self.file))


def everything(data: ClickLog) -> dict[str, torch.Tensor]:
    parts = [
        data.samples(np.arange(data.num_samples(split)), split) for split in ("train", "validation")
    ]
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def test_parquet_and_csv_are_the_same_data(tmp_path: Path) -> None:
    first, second = (everything(build(config(written(tmp_path, k)))) for k in ("parquet", "csv"))

    assert all(torch.equal(first[name], second[name]) for name in first)


def test_values_are_those_of_the_file(tmp_path: Path) -> None:
    found = everything(build(config(written(tmp_path, "parquet"))))

    rows = np.arange(100)
    numbers = np.where(rows % 7 == 0, 0, rows), np.maximum(rows / 4 - 3, 0)
    assert np.allclose(found["dense"].numpy(), np.log1p(np.stack(numbers, axis=1)))
    assert found["clicks"].tolist() == (rows % 3 == 0).astype(float).tolist()
    sparse = found["sparse"][:, :, 0].numpy()
    assert found["sparse"].shape == (100, 2, 1)
    assert ((sparse[:, 0] == 5) == (rows % 5 == 4)).all()
    assert sparse.min() == 0 and sparse[:, 1].max() < 4
    kept = rows % 9 < 4
    assert (sparse[kept, 1] == (rows % 9)[kept]).all()
    for word in range(11):  # a category has one row, wherever it is
        assert len(set(sparse[(rows % 11 == word) & (rows % 5 != 4), 0])) == 1


def test_numbers_are_as_they_are_without_log(tmp_path: Path) -> None:
    found = everything(build(config(written(tmp_path, "csv"), log_transform=False)))

    assert np.allclose(found["dense"][:, 1].numpy(), np.arange(100) / 4 - 3)


def test_the_files_of_a_folder_are_taken_by_name_and_the_last_rows_held_out(tmp_path: Path) -> None:
    for name, value in (("b", 1), ("a", 0)):
        table = arrow.table({"label": [value] * 50, "I1": [1] * 50, "C1": ["x"] * 50})
        parquet.write_table(table, tmp_path / f"{name}.parquet")

    data = build(config(tmp_path, dense=("I1",), sparse=("C1",), rows=(3,), held_out=0.5))

    assert data.samples(np.arange(50))["clicks"].sum() == 0
    assert data.samples(np.arange(50), "validation")["clicks"].sum() == 50


def test_a_column_that_is_not_there_is_refused_with_the_nearest(tmp_path: Path) -> None:
    file = written(tmp_path, "csv")

    with pytest.raises(
        ConfigError, match=r"data\.label names 'lable', which is no column"
    ) as caught:
        build(config(file, label="lable"))

    assert caught.value.accepted == "label, I1, I2, C1, C2, other"
    assert caught.value.todo == "did you mean 'label'?"


@pytest.mark.parametrize(
    ("line", "says"),
    [("1,2,3,a", "broken"), ("1,2,3,a,b,c,d", "broken"), ("1,two,3,a,4,x", "broken")],
)
def test_a_line_of_csv_that_is_broken_is_named_with_its_byte(
    tmp_path: Path, line: str, says: str
) -> None:
    file = written(tmp_path, "csv", 10)
    lines = file.read_text().splitlines()
    lines.insert(4, line)
    file.write_text("\n".join(lines))

    with pytest.raises(ConfigError, match=says) as caught:
        build(config(file))

    begin = len("\n".join(lines[:4])) + 1
    assert caught.value.where == (f"{file}, line 5, byte {begin}",)


@pytest.mark.parametrize("value", ["2", "0.5", ""])
def test_a_label_that_is_neither_0_nor_1_is_named_with_its_row(tmp_path: Path, value: str) -> None:
    file = written(tmp_path, "csv", 10)
    lines = file.read_text().splitlines()
    lines[4] = value + lines[4][1:]
    file.write_text("\n".join(lines))

    with pytest.raises(ConfigError, match="has the label") as caught:
        build(config(file))

    assert caught.value.where == (f"{file}, row 3 (from 0, without a header)",)


def test_rows_are_counted_over_the_row_groups_of_a_file(tmp_path: Path) -> None:
    table = table_of(100)
    labels = [int(value) for value in table["label"].to_pylist()]
    labels[70] = 2  # of the third group
    file = tmp_path / "log.parquet"
    at = table.column_names.index("label")
    parquet.write_table(table.set_column(at, "label", [labels]), file, row_group_size=30)

    with pytest.raises(ConfigError, match="has the label 2") as caught:
        build(config(file))

    assert caught.value.where == (f"{file}, row 70 (from 0, without a header)",)


def test_a_flipped_byte_of_parquet_names_row_group_column_and_byte(tmp_path: Path) -> None:
    file = written(tmp_path, "parquet")
    column = parquet.ParquetFile(file).metadata.row_group(2).column(2)
    content = bytearray(file.read_bytes())
    begin = column.dictionary_page_offset or column.data_page_offset
    content[begin + column.total_compressed_size - 3] ^= 0xFF
    file.write_bytes(content)

    with pytest.raises(ConfigError, match="is broken") as caught:
        build(config(file))

    assert f"{file}, row group 2, column I2, byte {begin}" == caught.value.where[0]


@pytest.mark.parametrize("content", [b"", b"PAR1", b"nonsense" * 100])
def test_what_is_no_parquet_is_refused(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "x.parquet"
    file.write_bytes(content)

    with pytest.raises(ConfigError, match="cannot be read as a Parquet file") as caught:
        build(config(file))

    assert str(file) in caught.value.where[0]


def test_half_a_file_of_parquet_is_refused(tmp_path: Path) -> None:
    file = written(tmp_path, "parquet")
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])

    with pytest.raises(ConfigError, match="cannot be read as a Parquet file"):
        build(config(file))


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"rows": (6,)}, "one integer >= 2 for each column"),
        ({"rows": (6, 1)}, "one integer >= 2"),
        ({"sparse": ("C1", "C1")}, "'C1' twice"),
        ({"dense": ("label", "I1")}, "'label' twice"),
        ({"dense": ()}, "dense is empty"),
        ({"held_out": 1.0}, "held_out"),
    ],
)
def test_settings_that_do_not_fit_each_other_are_refused(
    settings: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        config(Path("x"), **settings)


def test_columns_that_do_not_fit_the_model_are_refused() -> None:
    DlrmConfig(num_dense=2, rows=(6, 5)).check_combination({"data": config(Path("x"))})
    with pytest.raises(ConfigError, match=r"data\.dense names 2 columns, and model=dlrm takes 3"):
        DlrmConfig(num_dense=3, rows=(6, 5)).check_combination({"data": config(Path("x"))})
    with pytest.raises(ConfigError, match="has tables of"):
        DlrmConfig(num_dense=2, rows=(6, 4)).check_combination({"data": config(Path("x"))})


@pytest.mark.parametrize("kind", ["parquet", "csv"])
def test_rows_of_a_cache_are_those_in_memory(tmp_path: Path, kind: str) -> None:
    file, cache = written(tmp_path, kind), tmp_path / "cache"

    found = [build(config(file, cache=one)) for one in (None, str(cache), str(cache))]

    assert len(list(cache.glob("clicks-*/records.bin"))) == 1
    wanted = everything(found[0])
    for other in found[1:]:
        given = everything(other)
        assert all(torch.equal(given[name], wanted[name]) for name in wanted)
    assert len({data.describe() for data in found}) == 1
    assert "34.0% clicked" in found[0].describe()


def test_other_columns_have_rows_of_their_own_and_another_part_held_out_has_not(
    tmp_path: Path,
) -> None:
    file, cache = written(tmp_path, "parquet"), str(tmp_path / "cache")

    build(config(file, cache=cache))
    build(config(file, cache=cache, held_out=0.5))
    assert len(list(tmp_path.glob("cache/clicks-*/records.bin"))) == 1
    build(config(file, cache=cache, log_transform=False))
    build(config(file, cache=cache, rows=(6, 6)))

    assert len(list(tmp_path.glob("cache/clicks-*/records.bin"))) == 3


def test_a_log_without_rows_is_refused(tmp_path: Path) -> None:
    file = written(tmp_path, "csv", 1)
    file.write_text(file.read_text().splitlines()[0] + "\n")

    for cache in (None, str(tmp_path / "cache")):
        with pytest.raises(ConfigError, match="0 samples, and none for the split 'train'"):
            build(config(file, cache=cache))


@pytest.mark.parametrize("size", [70_000])
def test_a_row_group_is_read_in_batches_and_rows_counted_over_them(
    tmp_path: Path, size: int
) -> None:
    labels = np.zeros(size, np.int8)
    labels[size - 5] = 3  # behind the first batch of the only group
    table = arrow.table({"label": labels, "I1": np.arange(size), "C1": np.arange(size)})
    file = tmp_path / "log.parquet"
    parquet.write_table(table, file)

    with pytest.raises(ConfigError, match="has the label 3") as caught:
        build(config(file, dense=("I1",), sparse=("C1",), rows=(size,)))

    assert caught.value.where == (f"{file}, row {size - 5} (from 0, without a header)",)


@pytest.mark.parametrize("name", [b"other", b"label"])
def test_a_name_of_a_column_that_is_no_text_is_refused(tmp_path: Path, name: bytes) -> None:
    file = written(tmp_path, "parquet")
    file.write_bytes(file.read_bytes().replace(name, b"\xff" * len(name)))

    with pytest.raises(ConfigError, match=re.escape(str(file))):
        build(config(file))

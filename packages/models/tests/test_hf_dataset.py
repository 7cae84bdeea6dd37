"""Folders that the library `datasets` has saved: rows as tensors, and files that are broken."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest

from sbp_core.errors import ConfigError
from sbp_models.configs import HfDatasetConfig
from sbp_models.hf_dataset import HfDataset, build
from sbp_torch.testing.data import DatasetConformance


def rows(count: int, first: int = 0) -> Any:
    return datasets.Dataset.from_dict(
        {
            "input_ids": [[first + number, 1, 2] for number in range(count)],
            "score": [0.5 * (first + number) for number in range(count)],
            "name": [f"row {number}" for number in range(count)],
        }
    )


def made(path: Path, **settings: Any) -> HfDataset:
    columns = {"tokens": "input_ids", "y": "score"}
    return build(HfDatasetConfig(path=str(path), **{"columns": columns, **settings}))


class TestHfDataset(DatasetConformance):
    splits = ("train", "validation")

    @pytest.fixture(autouse=True)
    def _write(self, tmp_path: Path) -> None:
        rows(100).save_to_disk(tmp_path / "saved")
        self.path = tmp_path / "saved"

    def make_dataset(self) -> HfDataset:
        return made(self.path)


def test_rows_are_the_columns_by_their_names_in_a_batch(tmp_path: Path) -> None:
    rows(100).save_to_disk(tmp_path)

    data = made(tmp_path, held_out=0.1)

    batch = data.samples(np.array([3, 0]), "validation")
    assert batch["tokens"].tolist() == [[93, 1, 2], [90, 1, 2]]
    assert batch["y"].tolist() == [46.5, 45.0]
    assert data.describe() == f"{tmp_path}: 90 train, 10 validation; columns input_ids, score"


def test_saved_splits_are_the_splits(tmp_path: Path) -> None:
    saved = datasets.DatasetDict({"train": rows(8), "test": rows(4, first=50)})
    saved.save_to_disk(tmp_path)

    data = made(tmp_path, validation="test")

    assert (data.num_samples("train"), data.num_samples("validation")) == (8, 4)
    assert data.samples(np.array([1]), "validation")["tokens"][0, 0] == 51
    with pytest.raises(ConfigError, match=r"data\.validation=validation is no split") as caught:
        made(tmp_path)
    assert caught.value.accepted == "test, train"


def test_a_column_that_is_not_there_is_refused_with_the_nearest(tmp_path: Path) -> None:
    rows(10).save_to_disk(tmp_path)

    with pytest.raises(ConfigError, match=r"data\.columns\.y=scores is no column") as caught:
        made(tmp_path, columns={"y": "scores"}, held_out=0.2)

    assert caught.value.todo == "did you mean 'score'?"


def test_columns_that_are_no_tensors_are_refused(tmp_path: Path) -> None:
    saved = datasets.Dataset.from_dict({"x": [[0] * (n % 3) for n in range(20)], "t": ["a"] * 20})
    saved.save_to_disk(tmp_path)

    for column, says in (("x", r"shapes \(0,\), \(1,\)"), ("t", "it has no numbers")):
        data = made(tmp_path, columns={"x": column}, held_out=0.2)
        with pytest.raises(ConfigError, match=says):
            data.samples(np.arange(10))


def test_an_arrow_file_that_is_cut_off_is_named_with_its_byte(tmp_path: Path) -> None:
    rows(100).save_to_disk(tmp_path)
    file = next(tmp_path.glob("*.arrow"))
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])

    with pytest.raises(ConfigError, match="is broken") as caught:
        made(tmp_path)

    assert caught.value.where[0].startswith(f"{file}, byte ")


def test_an_arrow_file_whose_texts_end_outside_of_it_is_refused(tmp_path: Path) -> None:
    rows(100).save_to_disk(tmp_path)
    file = next(tmp_path.glob("*.arrow"))
    ends = np.cumsum([0, *(len(f"row {number}") for number in range(100))]).astype(np.int32)
    content = file.read_bytes()
    assert content.count(ends.tobytes()) == 1
    ends[50] = 2**30
    begin = content.index(ends[:50].tobytes())
    file.write_bytes(content[:begin] + ends.tobytes() + content[begin + ends.nbytes :])

    with pytest.raises(ConfigError, match="is broken") as caught:
        made(tmp_path)

    assert caught.value.where[0].startswith(f"{file}, byte ")


def test_an_arrow_file_that_is_none_is_named(tmp_path: Path) -> None:
    rows(100).save_to_disk(tmp_path)
    file = next(tmp_path.glob("*.arrow"))
    file.write_bytes(b"nonsense" * 100)

    with pytest.raises(ConfigError, match="is broken") as caught:
        made(tmp_path)

    assert caught.value.where == (f"{file}, byte 0",)


@pytest.mark.parametrize("kind", ["pipe", "empty"])
def test_an_arrow_file_that_is_no_plain_one_is_not_waited_for(tmp_path: Path, kind: str) -> None:
    rows(100).save_to_disk(tmp_path)
    file = next(tmp_path.glob("*.arrow"))
    file.unlink()
    if kind == "pipe":
        os.mkfifo(file)
    else:
        file.touch()

    with pytest.raises(ConfigError, match="it is a pipe" if kind == "pipe" else "is broken"):
        made(tmp_path)


def test_json_that_is_broken_is_named_with_its_byte(tmp_path: Path) -> None:
    rows(100).save_to_disk(tmp_path)
    (tmp_path / "state.json").write_text('{"a": 1,}')

    with pytest.raises(ConfigError, match="is no JSON") as caught:
        made(tmp_path)

    assert caught.value.where[0].startswith(f"{tmp_path / 'state.json'}, byte ")


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text("x")

    with pytest.raises(ConfigError, match=r"holds no \*.json"):
        made(tmp_path)
    with pytest.raises(ConfigError, match="does not exist"):
        made(tmp_path / "no")

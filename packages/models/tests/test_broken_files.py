"""Files of data sets, cut off or changed at random: read, or refused by an error of ours."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from test_click_log import config as click_config
from test_click_log import written as write_log
from test_hf_dataset import rows as hf_rows
from test_image_files import write_folders, write_shards
from test_token_text import train_tokenizer, write_texts

from sbp_core.errors import SbpError
from sbp_models import click_log, hf_dataset, image_folder, token_text, webdataset
from sbp_models.configs import (
    HfDatasetConfig,
    ImageFolderConfig,
    TokensConfig,
    WebDatasetConfig,
)

Build = Callable[[Path], Any]


def write_tokens(folder: Path) -> None:
    write_texts(folder, 20)
    train_tokenizer(folder)
    lines = "\n".join(f'{{"text": "line {number} of some"}}' for number in range(30))
    (folder / "texts" / "more.jsonl").write_text(lines, "utf-8")


def build_tokens(folder: Path) -> Any:
    tokenizer = str(folder / "tokenizer.json")
    return token_text.build(
        TokensConfig(path=str(folder / "texts"), tokenizer=tokenizer, context=4)
    )


def build_hf(folder: Path) -> Any:
    columns = {"tokens": "input_ids", "y": "score"}
    return hf_dataset.build(HfDatasetConfig(path=str(folder), columns=columns))


KINDS: dict[str, tuple[Callable[[Path], object], Build]] = {
    "tokens": (write_tokens, build_tokens),
    "image_folder": (
        lambda folder: write_folders(folder, 30),
        lambda folder: image_folder.build(ImageFolderConfig(path=str(folder), held_out=0.3)),
    ),
    "webdataset": (
        lambda folder: write_shards(folder, 30),
        lambda folder: webdataset.build(WebDatasetConfig(path=str(folder), held_out=0.3)),
    ),
    "parquet": (
        lambda folder: write_log(folder, "parquet"),
        lambda folder: click_log.build(click_config(folder)),
    ),
    "csv": (
        lambda folder: write_log(folder, "csv"),
        lambda folder: click_log.build(click_config(folder)),
    ),
    "hf_dataset": (lambda folder: hf_rows(60).save_to_disk(folder), build_hf),
}


def edited(content: bytes, draw: random.Random) -> bytes:
    """Return a file cut off, with bytes changed, taken out, put in or doubled."""
    at, size = draw.randrange(len(content) + 1), draw.choice([1, 1, 4, 100])
    noise = draw.choice([draw.randbytes(size), bytes(size), b"\xff" * size])
    return {
        "cut": content[:at],
        "change": content[:at] + noise + content[at + size :],
        "take out": content[:at] + content[at + size :],
        "put in": content[:at] + noise + content[at:],
        "double": content[:at] + content[max(0, at - size) :],
    }[draw.choice(["cut", "change", "change", "change", "take out", "put in", "double"])]


def read_all(data: Any) -> None:
    for split in ("train", "validation"):
        data.samples(np.arange(data.num_samples(split)), split)


def attempts(kind: str, folder: Path, seeds: Sequence[int]) -> int:
    """Return how many edits were refused; whatever is no error of ours is raised."""
    write, build = KINDS[kind]
    whole = folder / "whole"
    whole.mkdir()
    write(whole)
    read_all(build(whole))
    refused = 0
    for seed in seeds:
        draw = random.Random(seed)
        part = folder / "edited"
        shutil.copytree(whole, part)
        file = draw.choice(sorted(path for path in part.rglob("*") if path.is_file()))
        file.write_bytes(edited(file.read_bytes(), draw))
        try:
            read_all(build(part))
        except SbpError as error:
            refused += 1
            assert str(part) in str(error), f"seed {seed}: {error}"
        except BaseException as error:
            error.add_note(f"seed {seed}, {file.relative_to(part)}")
            raise
        shutil.rmtree(part)
    return refused


@pytest.fixture(autouse=True)
def _quiet() -> None:
    datasets.disable_progress_bars()


#: Seeds of edits that once ended the process, or named no file.
ONCE_WRONG = {"parquet": (1571,), "csv": (1091,)}


@pytest.mark.parametrize("kind", KINDS)
def test_a_broken_file_is_refused_by_name_or_read(kind: str, tmp_path: Path) -> None:
    assert attempts(kind, tmp_path, [*ONCE_WRONG.get(kind, ()), *range(25)]) >= 5


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", KINDS)
def test_many_broken_files_are_refused_by_name_or_read(kind: str, tmp_path: Path) -> None:
    assert attempts(kind, tmp_path, range(1000, 3000)) >= 400

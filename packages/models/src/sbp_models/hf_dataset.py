"""The data set `hf_dataset`: a folder written by `save_to_disk` of the library `datasets`.

The rows stay in their Arrow files, which are mapped into memory and read in any order. Nothing is
downloaded, and no code of a data set is run.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from sbp_core.errors import ConfigError, nearest, suggestion
from sbp_core.serialize import open_file
from sbp_core.user_paths import user_path
from sbp_models.configs import HfDatasetConfig
from sbp_models.extras import library
from sbp_models.local_files import files_of, read_bytes
from sbp_models.splits import SplitDataset


class HfDataset(SplitDataset):
    """Rows as tensors. Implements `sbp_torch.kinds.Dataset`.

    Args:
        splits: `train` and `validation`, each a `datasets.Dataset` and the range of its rows.
        columns: Column by its name in a batch.
        label: Name of the data set in `describe`.

    Raises:
        ConfigError: a split has no rows.
    """

    def __init__(
        self, splits: Mapping[str, tuple[Any, range]], columns: Mapping[str, str], label: str
    ) -> None:
        self._columns = dict(columns)
        self._rows = {split: rows for split, (_, rows) in splits.items()}
        super().__init__({split: len(rows) for split, rows in self._rows.items()}, label=label)
        self._data = {
            split: data.select_columns(list(dict.fromkeys(columns.values()))).with_format("torch")
            for split, (data, _) in splits.items()
        }

    def samples(
        self, numbers: npt.NDArray[np.int64], split: str = "train"
    ) -> Mapping[str, torch.Tensor]:
        """Return rows of `train` or `validation`: the columns as tensors.

        Raises:
            ConfigError: a column has no numbers, or rows of different lengths.
        """
        found = self._checked(numbers, split)
        rows = self._data[split][(found + self._rows[split].start).tolist()]
        for name, column in self._columns.items():
            value = rows[column]
            if not torch.is_tensor(value):
                lengths = {tuple(row.shape) for row in value if torch.is_tensor(row)}
                shapes = ", ".join(map(str, sorted(lengths)[:3]))
                raise ConfigError(
                    f"the column {column!r} of {self._label} cannot be a tensor: "
                    + (f"its rows have the shapes {shapes}" if lengths else "it has no numbers"),
                    where=f"data.columns.{name}",
                    accepted="columns of numbers, all rows of one shape",
                    todo="convert the column with map() before the data set is saved",
                )
        return {name: rows[column] for name, column in self._columns.items()}

    def describe(self) -> str:
        """Return a line with the number of rows, and the columns."""
        return f"{self._label}: {self._counts()}; columns {', '.join(self._columns.values())}"


def build(config: HfDatasetConfig) -> HfDataset:
    """Build the data set from a folder.

    Raises:
        ConfigError: the folder is no data set, a file is broken (the message names the byte), or a
            split or column is missing.
    """
    datasets = library("datasets", extra="datasets", needed_by="data=hf_dataset")
    folder = user_path(config.path, key="data.path")
    _check_files(folder)
    try:
        loaded = datasets.load_from_disk(str(folder))
    except Exception as error:  # the library raises whatever its parts raise
        raise ConfigError(
            f"data.path={config.path} is no data set that can be read: {error}",
            accepted="a folder that save_to_disk of the library datasets has written",
        ) from error
    if isinstance(loaded, datasets.DatasetDict):
        chosen = {"train": config.train, "validation": config.validation}
        for key, name in chosen.items():
            if name not in loaded:
                near = nearest(name, loaded)
                raise ConfigError(
                    f"data.{key}={name} is no split of {config.path}",
                    accepted=", ".join(sorted(loaded)),
                    todo=f"did you mean data.{key}={near}?" if near else "",
                )
        splits = {key: (loaded[name], range(len(loaded[name]))) for key, name in chosen.items()}
    else:
        cut = len(loaded) - round(config.held_out * len(loaded))
        splits = {"train": (loaded, range(cut)), "validation": (loaded, range(cut, len(loaded)))}
    for data, _ in splits.values():
        _check_columns(config, data.column_names)
    first = splits["train"][0].column_names
    columns = config.columns or {name: name for name in first}
    return HfDataset(splits, columns, config.path)


def _check_columns(config: HfDatasetConfig, known: list[str]) -> None:
    for name, column in config.columns.items():
        if column not in known:
            raise ConfigError(
                f"data.columns.{name}={column} is no column of {config.path}",
                accepted=", ".join(known),
                todo=suggestion(column, known),
            )


def _check_files(folder: Path) -> None:
    """Check every JSON and Arrow file whole, because the library maps the files unchecked.

    Raises:
        ConfigError: a file is broken or cut off; the message names the byte.
    """
    arrow = library("pyarrow", extra="datasets", needed_by="data=hf_dataset")
    for state in files_of(folder, key="data.path", suffixes={".json"}):
        try:
            json.loads(read_bytes(state))
        except (ValueError, RecursionError) as error:
            raise ConfigError(
                f"{state} is no JSON: {error}", where=f"{state}, byte {getattr(error, 'pos', 0)}"
            ) from error
    for file in files_of(folder, key="data.path", suffixes={".arrow"}):
        at = 0
        try:
            with open_file(file) as opened:
                # Mapped, not read: a wrong length in a broken file then allocates no memory.
                mapped = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
            source = arrow.BufferReader(arrow.py_buffer(mapped))
            reader = arrow.ipc.open_stream(source)
            at = source.tell()
            while True:
                reader.read_next_batch().validate(full=True)
                at = source.tell()
        except StopIteration:
            continue
        except (arrow.ArrowException, OSError, ValueError) as error:
            raise ConfigError(
                f"{file} is broken: {error}",
                where=f"{file}, byte {at}",
                accepted="Arrow files as save_to_disk of the library datasets writes them",
            ) from error

"""The settings of the data sets of bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sbp_core.errors import ConfigError
from sbp_models.configs.checks import check_positive, check_seed

#: What a model is to do with a window of text; see `sbp_models.text.ByteText`.
TextTask = Literal["next", "masked", "continue"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StdlibConfig:
    """Settings of the data set `stdlib`.

    Args:
        context: Tokens of one sample.
        task: `next`: predict each next token; `masked`: those that are masked; `continue`: the
            text that follows.
        seed: Seed of the order of the samples.

    Raises:
        ConfigError: `context` is not positive or `seed` is negative.
    """

    context: int = 128
    task: TextTask = "next"
    seed: int = 0

    def __post_init__(self) -> None:
        check_positive(self, "context")
        check_seed(self.seed)


@dataclass(frozen=True, slots=True, kw_only=True)
class TextConfig:
    """Settings of the data set `text`.

    Args:
        path: A file, taken as raw bytes, or a folder, of which every UTF-8 file is taken.
        context: Tokens of one sample.
        task: `next`: predict each next token; `masked`: those that are masked; `continue`: the
            text that follows.
        seed: Seed of the order of the samples.

    Raises:
        ConfigError: `path` is empty, `context` is not positive or `seed` is negative.
    """

    path: str
    context: int = 128
    task: TextTask = "next"
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.path:
            raise ConfigError(
                "path is empty",
                accepted="a file, or a folder of text files",
                todo="set data.path=FILE_OR_FOLDER",
            )
        check_positive(self, "context")
        check_seed(self.seed)

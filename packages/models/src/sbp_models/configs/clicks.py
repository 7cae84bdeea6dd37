"""The settings of the recommendation model and of the data set of clicks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sbp_models.configs.checks import check_positive, check_seed, check_sizes

#: Rows of the tables of the defaults: a few large ones and many small ones, as in practice.
ROWS = (4000, 2000, 1000, 500, 100, 50, 10, 4)


@dataclass(frozen=True, slots=True, kw_only=True)
class DlrmConfig:
    """Settings of `sbp_models.dlrm.Dlrm`; the defaults make 0.13 million parameters.

    Args:
        num_dense: Numbers of one sample.
        rows: Different values of each categorical feature: rows of its table.
        bag: Values that a sample has of each categorical feature.
        lookup: `bag` sums the rows of a feature by `nn.EmbeddingBag`; `embedding` looks them up by
            `nn.Embedding` and sums after.
        hidden: Width of a row.
        bottom: Widths of the hidden layers for the numbers; one to `hidden` follows.
        top: Widths of the hidden layers behind the interaction; one to the logit follows.

    Raises:
        ConfigError: a size is not positive, or there is no table.
    """

    num_dense: int = 13
    rows: tuple[int, ...] = ROWS
    bag: int = 1
    lookup: Literal["bag", "embedding"] = "bag"
    hidden: int = 16
    bottom: tuple[int, ...] = (64, 32)
    top: tuple[int, ...] = (64, 32)

    def __post_init__(self) -> None:
        check_positive(self, "num_dense", "bag", "hidden")
        check_sizes("rows", self.rows)
        check_sizes("bottom", self.bottom, at_least=0)
        check_sizes("top", self.top, at_least=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClicksConfig:
    """Settings of the data set `clicks`.

    Args:
        num_dense: Numbers of one sample.
        rows: Different values of each categorical feature.
        bag: Values that a sample has of each categorical feature.
        seed: Seed of the samples and of the rule that makes the labels.

    Raises:
        ConfigError: a size is not positive, there is no feature, or `seed` is negative.
    """

    num_dense: int = 13
    rows: tuple[int, ...] = ROWS
    bag: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        check_positive(self, "num_dense", "bag")
        check_sizes("rows", self.rows)
        check_seed(self.seed)

"""Settings of the recommendation model DLRM."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from sbp_models.configs.checks import check_positive, check_sizes
from sbp_models.configs.compatibility import check_clicks
from sbp_models.configs.synthetic_data import ROWS


@dataclass(frozen=True, slots=True, kw_only=True)
class DlrmConfig:
    """Settings of `sbp_models.dlrm.Dlrm`; the defaults make 0.13 million parameters.

    Args:
        num_dense: Count of dense numbers in a sample.
        rows: Number of values of each categorical feature: rows of its table.
        bag: Number of values of each categorical feature in a sample.
        lookup: `bag` sums the rows of a feature by `nn.EmbeddingBag`; `embedding` looks them up by
            `nn.Embedding` and sums after.
        hidden: Width of a row.
        bottom: Widths of the hidden layers for the numbers; a layer to `hidden` follows.
        top: Widths of the hidden layers after the interaction; a layer to the logit follows.

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

    def check_combination(self, others: Mapping[str, object]) -> None:
        """Refuse a data set that does not fit; see `sbp_core.plugins.ChecksCombination`."""
        check_clicks(others.get("data"), model="dlrm", num_dense=self.num_dense, rows=self.rows)

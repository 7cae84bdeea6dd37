"""A data set that notes what it is asked for, and plans that only say how batches are split."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sbp_core.compile import PhysicalPlan
from sbp_core.placement import Placement
from sbp_core.plugins import Factory, PluginEntry
from sbp_core.testing.plans import batch_plan
from sbp_launch.data import SampleSource

ENTRY = PluginEntry(
    kind="data",
    name="mine",
    distribution="my-dist",
    version="1.2",
    api_version=2,
    factory=Factory(build="my_package.data:build"),
)


class Noting:
    """Sample `i` is `x` = (i, i) and `y` = -i; `asked` has the numbers of every call."""

    def __init__(self, size: int, before: Callable[[list[int]], None] = lambda numbers: None):
        self.size, self.before = size, before
        self.asked: list[list[int]] = []

    def num_samples(self, split: str = "train") -> int:
        return self.size

    def samples(self, numbers: npt.NDArray[np.int64], split: str = "train") -> Mapping[str, Tensor]:
        self.before(numbers.tolist())
        self.asked.append(numbers.tolist())
        found = torch.from_numpy(numbers)
        return {"x": torch.stack([found, found], dim=1), "y": -found}

    def describe(self) -> str:
        return "numbers"


def source_of(data: Noting) -> SampleSource:
    """Return the source of a data set."""
    return SampleSource(data=data, plugin=ENTRY, dtype=torch.float32)


LINE, PAIR = Placement([0, 1, 2, 3], ("data",)), Placement([0, 1], ("data",))
GRID = Placement([[0, 1], [2, 3]], ("data", "tensor"))

#: Stages, and where `x` and `y` are and how they are split: 1, 2 and 4 ranks.
LAYOUTS: Mapping[str, tuple[list[Placement], tuple[int, str], tuple[int, str]]] = {
    "one rank": ([Placement([0], ("data",))], (0, "B"), (0, "B")),
    "data": ([PAIR], (0, "S(0)"), (0, "S(0)")),
    "data on four": ([LINE], (0, "S(0)"), (0, "S(0)")),
    "tensor": ([PAIR], (0, "B"), (0, "B")),
    "columns": ([PAIR], (0, "S(1)"), (0, "B")),
    "data and tensor": ([GRID], (0, "S(0), B"), (0, "S(0), B")),
    "both axes": ([GRID], (0, "S(0), S(0)"), (0, "S(0), S(0)")),
    "differently": ([GRID], (0, "S(0), B"), (0, "B, S(0)")),
    "pipeline": (
        [Placement([0, 1], ("data",)), Placement([2, 3], ("data",))],
        (0, "S(0)"),
        (1, "S(0)"),
    ),
    "one a stage": ([Placement([0], ("data",)), Placement([1], ("data",))], (0, "B"), (1, "B")),
    "whole behind": ([PAIR, Placement([2], ("data",))], (0, "S(0)"), (1, "B")),
    "nothing between": (
        [Placement([0], ("data",)), Placement([1], ("data",)), Placement([2], ("data",))],
        (0, "B"),
        (2, "B"),
    ),
}


def layout(name: str, size: int, count: int) -> PhysicalPlan:
    """Return the plan of a layout, with `count` micro-batches of `size` samples."""
    stages, (x_stage, x_sbp), (y_stage, y_sbp) = LAYOUTS[name]
    tensors = {"x": (x_stage, x_sbp, (size, 2)), "y": (y_stage, y_sbp, (size,))}
    return batch_plan(stages, tensors, count)

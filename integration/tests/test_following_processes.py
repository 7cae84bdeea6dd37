"""What a loop changes on one of several processes, or on all of them."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import changing_ranks
import pytest
from programs import registry

from sbp_core.boxing import BoxingBackend
from sbp_core.processes import Line, supervise


@cache
def said_by(boxing: str) -> Mapping[int, Mapping[str, str]]:
    """Run the program as two processes; return what each rank was told, by what was changed."""
    backend: Any = registry().make("boxing", boxing, {})
    assert isinstance(backend, BoxingBackend)
    found: dict[int, dict[str, str]] = {0: {}, 1: {}}
    lines: list[Line] = []
    command = [sys.executable, str(Path(changing_ranks.__file__)), *changing_ranks.CHANGES]
    ended = supervise(backend.launch_specs(2, command), timeout_s=240, on_line=lines.append)
    assert ended.error() is None, "\n".join(map(str, lines))
    for line in lines:
        if line.text.startswith("{"):
            one = json.loads(line.text)
            found[one["rank"]][one["change"]] = one["said"]
    return found


#: What ranks are told, of changes on one of them or on both.
SAID = {
    "beta here": ("ConfigError: the ranks differ in the step: rank 0: as it was planned first, ",)
    * 2,
    "beta everywhere": ("off by 0e+00",) * 2,
    "beta of each": (
        "ConfigError: the ranks differ in the number self.beta: rank 0: 2.0; rank 1: 3.0",
    )
    * 2,
    "mode here": ("ConfigError: the ranks differ in the step: rank 0: as it was planned first, ",)
    * 2,
    "a size here": ("ConfigError: the ranks differ in the step: rank 0: as it was planned first, ",)
    * 2,
    "a size everywhere": ("off by 0e+00",) * 2,
    "frozen everywhere": ("off by 0e+00",) * 2,
    "a module here": (
        "ConfigError: the ranks differ in the step: rank 0: as it was planned first, ",
        "RunError: model.0 is another module",
    ),
    "rate here": ("ConfigError: the ranks differ in lr: rank 0: 0.1; rank 1: 0.2",) * 2,
    "batch here": ("ConfigError: the ranks differ in the batch: rank 0: ",) * 2,
    "weights here": (
        "ConfigError: the ranks differ in the values written to model and optimizer: rank 0: none",
    )
    * 2,
    "weights everywhere": ("off by 0e+00",) * 2,
    "momentum everywhere": ("off by 0e+00",) * 2,
    "shards everywhere": ("RunError: '0.weight' of the model is asked for, and ranks of other",)
    * 2,
    "whole from shards": ("off by 0e+00",) * 2,
}


@pytest.mark.parametrize("boxing", ["torch", pytest.param("mpi", marks=pytest.mark.slow)])
def test_ranks_of_several_processes_change_alike_or_are_told(boxing):
    for rank, change in product((0, 1), changing_ranks.CHANGES):
        said = said_by(boxing)[rank][change]
        if said.startswith("off by"):
            assert float(said.split()[-1]) <= 1e-15, change
        else:
            assert said.startswith(SAID[change][rank]), (change, said)


def test_of_a_step_that_differs_it_is_said_what_has_changed() -> None:
    said = said_by("torch")[0]

    assert "; rank 1: self.beta is 2.0, and was 1.0, for batches 'x' [4, 4]" in said["beta here"]
    assert "; rank 1: batches 'x' [2, 4], 'y' [2, 2] (form " in said["a size here"]

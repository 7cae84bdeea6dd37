"""`parallelize` over real processes: as plain PyTorch, as with threads, and refused together."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import parallel_ranks
import pytest
from programs import registry

from sbp_core.boxing import BoxingBackend
from sbp_core.processes import Line, supervise

#: The boxing that fits processes with torchrun's variables.
TORCH = ("torch", parallel_ranks.QUICK)

#: Both kinds of processes, and every layout.
EVERY = [(boxing, tuple(parallel_ranks.LAYOUTS)) for boxing in ("torch", "mpi")]

RUNS = [TORCH, *(pytest.param(*run, marks=pytest.mark.exhaustive) for run in EVERY)]


@cache
def ranks_of(boxing: str, layouts: tuple[str, ...]) -> Mapping[int, dict[str, Any]]:
    """Run the program as two processes; return what each rank printed."""
    backend: Any = registry().make("boxing", boxing, {})
    assert isinstance(backend, BoxingBackend)
    lines: list[Line] = []
    with TemporaryDirectory() as folder:
        command = [sys.executable, str(Path(parallel_ranks.__file__)), folder, *layouts]
        ended = supervise(backend.launch_specs(2, command), timeout_s=240, on_line=lines.append)
    assert ended.error() is None, "\n".join(map(str, lines))
    found = [json.loads(line.text) for line in lines if line.text.startswith("{")]
    return {one.pop("rank"): one for one in found}


@cache
def with_threads(layout: str) -> dict[str, Any]:
    return parallel_ranks.trained(layout)


@pytest.mark.slow
@pytest.mark.parametrize(("boxing", "layouts"), RUNS)
def test_processes_equal_plain_pytorch_and_threads_bit_for_bit(
    boxing: str, layouts: tuple[str, ...]
) -> None:
    for layout in layouts:
        threads = with_threads(layout)
        for rank in (0, 1):
            found = ranks_of(boxing, layouts)[rank][layout]
            assert max(found["worst"], threads["worst"]) <= 1e-9, layout
            assert found["states where they go"], layout
            for what in ("losses", "evaluated", "states"):
                assert found[what] == threads[what], (layout, what)


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(("boxing", "layouts"), RUNS)
def test_the_values_of_rank_0_are_taken_where_nobody_seeded(
    boxing: str, layouts: tuple[str, ...]
) -> None:
    found = [ranks_of(boxing, layouts)[rank]["started differently"] for rank in (0, 1)]

    assert [one["differs"] for one in found] == [False, True]
    assert all(one["begins with those of rank 0"] for one in found)


@pytest.mark.parametrize(("boxing", "layouts"), RUNS)
def test_ranks_with_other_programs_are_told_the_difference(
    boxing: str, layouts: tuple[str, ...]
) -> None:
    for rank in (0, 1):
        said = ranks_of(boxing, layouts)[rank]["refusals"]
        assert said["other code"].startswith("the ranks differ in the captured step: rank 0: ")
        assert said["other settings"].startswith("the ranks differ in seed: rank 0: 0; rank 1: 1")
        wanted = "ranks 0 and 1 were given different values for all samples of 'x'"
        assert said["other batches"].startswith(wanted)
        sides = [f"rank {one}: local: 'x' torch.float32 ({2 + one}, 3)" for one in (0, 1)]
        wanted = "the ranks differ in the batch to evaluate: " + "; ".join(sides)
        assert said["other evaluations"].startswith(wanted)


@pytest.mark.parametrize(("boxing", "layouts"), RUNS)
def test_a_call_that_one_rank_makes_alone_is_named_on_both_sides(
    boxing: str, layouts: tuple[str, ...]
) -> None:
    for call in parallel_ranks.CALLS:
        for rank in (0, 1):
            said = ranks_of(boxing, layouts)[rank]["on rank 0 alone"][call]
            wanted = f"the ranks differ in the call: rank 0: {call}; rank 1: step(batch)"
            assert said.startswith(wanted)
            assert "make this call on all ranks" in said


@pytest.mark.parametrize(("boxing", "layouts"), RUNS)
def test_a_call_that_one_rank_makes_alone_as_the_last_one_says_who_has_left(
    boxing: str, layouts: tuple[str, ...]
) -> None:
    ((call, said),) = ranks_of(boxing, layouts)[0]["at the end"].items()

    assert said.startswith(f"{call}: boxing step 'vote ")
    assert "has closed its boxing backend and left; all ranks must make the same calls" in said
    assert set(ranks_of(boxing, layouts)[1]["at the end"].values()) == {"trained"}


@pytest.mark.parametrize(("boxing", "layouts"), RUNS)
def test_a_checkpoint_that_one_process_finds_damaged_is_passed_over_by_all(
    boxing: str, layouts: tuple[str, ...]
) -> None:
    found = [ranks_of(boxing, layouts)[rank]["damaged"] for rank in (0, 1)]

    damage = "the checkpoint step-00000002 is damaged: the xxh3_128 of tensor '"
    for load in ("load", "load first"):
        assert sorted("says: " in one[load] for one in found) == [False, True]
        assert all(damage in one[load] for one in found)
        assert all("step-00000002/rank-00001.safetensors" in one[load] for one in found)
    manifest = "the manifest does not end in its checksum\n  in "
    assert found[0]["manifest"].startswith(f"rank 1 says: {manifest}")
    assert found[1]["manifest"].startswith(manifest)
    assert all("copy/step-00000002/manifest.json" in one["manifest"] for one in found)
    for one in found:
        assert one["kept"]
        assert one["step"].startswith("this parallel step has no states")
        assert one["goes on behind"] == 1
    assert found[0]["losses"] == found[1]["losses"]

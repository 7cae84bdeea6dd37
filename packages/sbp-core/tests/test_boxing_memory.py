"""What ranks hold while a step runs."""

from __future__ import annotations

import pytest

from sbp_core.boxing import BoxingStep, StepKind, route
from sbp_core.boxing.memory import step_memory_bytes
from sbp_core.placement import Placement
from sbp_core.sbp import NdSbp

T = 16 * 16 * 4

LINE = Placement.grid((4,), ("x",))


def held(source: str, target: str, after: Placement = LINE) -> dict[int, int]:
    states = (LINE, NdSbp.parse(source)), (after, NdSbp.parse(target))
    (step,) = route((16, 16), "float32", *states).steps
    return step_memory_bytes(step)


@pytest.mark.parametrize(
    ("source", "target", "shards", "buffers"),
    [
        ("B", "S(0)", T + T // 4, 0),
        ("S(0)", "P", T // 4 + T, 0),
        ("B", "P", T, 0),
        ("P", "B", 2 * T, 0),
        ("P", "S(1)", T + T // 4, T),
        ("S(0)", "B", T // 4 + T, 3 * T // 4),
        ("S(0)", "S(1)", T // 2, 2 * (3 * T // 16)),
    ],
)
def test_a_rank_holds_both_shards_and_the_buffers_of_the_step(
    source: str, target: str, shards: int, buffers: int
) -> None:
    assert held(source, target) == dict.fromkeys(range(4), shards + buffers)


def test_a_transfer_packs_a_copy_for_each_receiver() -> None:
    found = held("S(0)", "S(1)", Placement([4, 5]))

    # Each sender has a quarter and packs all of it; each receiver wants half and gets half.
    assert found == dict.fromkeys(range(4), T // 4 + T // 4) | {4: T, 5: T}


def test_every_term_of_a_transfer_is_there_before_it_is_reduced() -> None:
    pair = Placement([0, 1])
    step = BoxingStep(
        kind=StepKind.TRANSFER,
        shape=(16, 16),
        dtype="float32",
        source=(pair, NdSbp.parse("P")),
        target=(Placement([2]), NdSbp.parse("B")),
        axes=(),
        size_bytes=2 * T,
    )

    assert step_memory_bytes(step) == {0: T + T, 1: T + T, 2: T + 2 * T}


def test_of_routes_with_equal_bytes_the_one_with_less_memory_is_taken() -> None:
    mesh = Placement.grid((2, 2))

    found = route((16, 16), "float32", (mesh, NdSbp.parse("B, P")), (mesh, NdSbp.parse("S(0), B")))

    # Cutting first moves as much as reducing the whole would not: half of it.
    assert found.steps[0].target[1][0] == NdSbp.parse("S(0), P")[0]
    assert all(max(step_memory_bytes(step).values()) < 2 * T for step in found.steps)

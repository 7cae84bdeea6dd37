"""How values lie in the flat buffer of a bucket."""

from __future__ import annotations

import numpy as np

from sbp_core.boxing import BoxingStep, StepKind
from sbp_core.compile import Instruction
from sbp_core.compile.packing import PackedLayout, PackedPart, flat_step, pack_instructions
from sbp_core.graph.ir import map_refs
from sbp_core.graph.primitives import CAT, PERMUTE, RESHAPE
from sbp_core.placement import Placement
from sbp_core.sbp import B, NdSbp, P, S, Sbp

_PAIR = Placement.grid((2,), ("data",))


def _step(
    kind: StepKind, shape: tuple[int, ...], source: Sbp, target: Sbp, mesh: Placement = _PAIR
) -> BoxingStep:
    return BoxingStep(
        kind=kind,
        shape=shape,
        dtype="float32",
        source=(mesh, NdSbp(source)),
        target=(mesh, NdSbp(target)),
        axes=(0,),
        size_bytes=0,
    )


def _run(instruction: Instruction, values: dict[str, np.ndarray]) -> np.ndarray:
    first, argument = map_refs(instruction.args, lambda ref: values[ref.name])
    done = {RESHAPE: np.reshape, PERMUTE: np.transpose, CAT: np.concatenate}[instruction.op]
    return done(first, argument)


def test_a_part_knows_its_shards_and_the_dim_that_is_cut() -> None:
    step = _step(StepKind.REDUCE_SCATTER, (3, 4), P, S(1))

    part = PackedPart.of(step)

    assert part == PackedPart(before=(3, 4), after=(3, 2), dim=1)
    assert part.num_elements == 12


def test_what_has_no_row_for_each_of_several_ranks_is_no_part() -> None:
    alone = Placement.grid((1,), ("data",))

    assert PackedPart.of(_step(StepKind.ALL_REDUCE, (4,), P, B, alone)) is None
    assert PackedPart.of(_step(StepKind.ALL_REDUCE, (0, 4), P, B)) is None


def test_the_rows_of_a_scattered_buffer_are_what_ranks_end_with() -> None:
    steps = [
        _step(StepKind.REDUCE_SCATTER, (3, 2), P, S(1)),
        _step(StepKind.REDUCE_SCATTER, (4,), P, S(0)),
    ]
    parts = [part for part in map(PackedPart.of, steps) if part is not None]
    layout = PackedLayout.of(steps[0], parts)
    values = {"a": np.arange(6).reshape(3, 2), "b": np.arange(10, 14)}

    for instruction in pack_instructions("pack", ("a", "b"), "flat", layout):
        values[instruction.outputs[0]] = _run(instruction, values)

    assert values["flat"].tolist() == [0, 2, 4, 10, 11, 1, 3, 5, 12, 13]


def test_a_flat_buffer_has_a_dim_for_each_other_mesh_axis() -> None:
    mesh = Placement.grid((2, 4), ("data", "tensor"))

    flat = flat_step(StepKind.ALL_REDUCE, mesh, (0,), "float32", 10)

    assert flat.shape == (4, 10)
    assert flat.source[1] == NdSbp(P, S(0)) and flat.target[1] == NdSbp(B, S(0))

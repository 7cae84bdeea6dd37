"""Single steps on tensors: order of sums, sharing, contiguity, and what is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from sbp_core.boxing import BoxingStep, StepKind, route
from sbp_core.boxing.slices import transfer_pieces
from sbp_core.errors import BoxingError, SbpTypeError, SbpValueError
from sbp_core.placement import Placement
from sbp_core.sbp import B, NdSbp, P, S
from sbp_torch.boxing.execute import (
    apply_step,
    assemble,
    combine,
    local_step,
    reduce_in_order,
    shard,
    torch_dtype,
)

LINE = Placement.grid((3,), ("x",))
MESH = Placement.grid((2, 2), ("x", "y"))


def only_step(
    source: str,
    target: str,
    shape: tuple[int, ...] = (6, 3),
    dtype: str = "float32",
    mesh: Placement = LINE,
) -> BoxingStep:
    ends = (mesh, NdSbp.parse(source)), (mesh, NdSbp.parse(target))
    (step,) = route(shape, dtype, *ends).steps
    return step


def test_sums_are_made_in_mesh_order() -> None:
    mesh = Placement([2, 0, 1], ("x",))
    step = only_step("P", "B", (1,), mesh=mesh)
    # In float32, (1e8 + -1e8) + 1 is 1, while (1 + 1e8) + -1e8 is 0.
    values = {2: 1e8, 0: -1e8, 1: 1.0}

    result = apply_step(step, {rank: torch.tensor([values[rank]]) for rank in (0, 1, 2)})

    assert result[0].item() == 1.0


def test_a_sum_in_parts_has_the_bits_of_the_whole_sum() -> None:
    generator = torch.Generator().manual_seed(0)
    parts = {rank: torch.randn(6, 3, generator=generator) for rank in range(3)}

    whole = apply_step(only_step("P", "B"), parts)
    scattered = apply_step(only_step("P", "S(0)"), parts)

    for rank, part in shard(whole[0], LINE, NdSbp(S(0))).items():
        assert torch.equal(scattered[rank], part)


def test_all_ranks_share_a_sum_and_a_gathered_tensor() -> None:
    for source in ("P", "S(1)"):
        step = only_step(source, "B")
        before = shard(torch.ones(6, 3), LINE, NdSbp.parse(source))

        after = apply_step(step, before)

        assert after[0] is after[1] is after[2]


def test_several_groups_may_be_run_at_once() -> None:
    step = only_step("B, P", "B, B", mesh=MESH)
    parts = {rank: torch.full((6, 3), float(rank)) for rank in range(4)}

    after = apply_step(step, parts)

    assert [after[rank][0, 0].item() for rank in range(4)] == [1.0, 1.0, 5.0, 5.0]


@pytest.mark.parametrize(
    ("source", "target"),
    [("P", "S(1)"), ("S(0)", "S(1)"), ("S(1)", "B"), ("B", "S(1)"), ("P", "B")],
)
def test_results_are_contiguous_even_if_shards_are_not(source: str, target: str) -> None:
    step = only_step(source, target)
    before = {
        rank: part.t().contiguous().t()
        for rank, part in shard(torch.rand(6, 3), LINE, NdSbp.parse(source)).items()
    }

    after = apply_step(step, before)

    assert all(part.is_contiguous() for part in after.values())


@pytest.mark.parametrize(("reduction", "expected"), [("max", True), ("min", False)])
def test_truth_values_have_maxima_and_minima(reduction: str, expected: bool) -> None:
    step = only_step(f"P({reduction})", "B", (2,), "bool")
    parts = {rank: torch.tensor([rank == 1, True]) for rank in range(3)}

    assert apply_step(step, parts)[2].tolist() == [expected, True]


def test_a_partial_sum_is_kept_once_and_a_partial_maximum_everywhere() -> None:
    logical = torch.ones(6, 3)

    sums = apply_step(only_step("B", "P"), shard(logical, LINE, NdSbp(B)))
    maxima = apply_step(only_step("B", "P(max)"), shard(logical, LINE, NdSbp(B)))

    assert [part.sum().item() for part in sums.values()] == [18.0, 0.0, 0.0]
    assert all(torch.equal(part, logical) for part in maxima.values())


def test_a_slice_is_padded_with_zeros_to_a_partial_sum() -> None:
    step = only_step("S(0)", "P", (3, 2))

    after = local_step(step, 1, torch.ones(1, 2))

    assert after.tolist() == [[0, 0], [1, 1], [0, 0]]


def test_a_rank_that_receives_nothing_of_a_sum_holds_zeros() -> None:
    before, after = Placement([0]), Placement([1, 2])
    (step,) = route((2,), "int64", (before, NdSbp(B)), (after, NdSbp(P))).steps

    result = apply_step(step, {0: torch.tensor([3, 4])})

    assert result[1].tolist() == [3, 4]
    assert result[2].tolist() == [0, 0]
    assert result[2].dtype == torch.int64


def test_pieces_may_come_one_by_one() -> None:
    before, after = Placement([0, 1]), Placement([2])
    (step,) = route((4,), "float32", (before, NdSbp(S(0))), (after, NdSbp(B))).steps
    parts = {0: torch.tensor([1.0, 2.0]), 1: torch.tensor([3.0, 4.0])}

    received = [
        (piece, parts[piece.sender][piece.source_slices].clone()) for piece in transfer_pieces(step)
    ]

    assert step.kind is StepKind.TRANSFER
    assert combine(step, 2, received).tolist() == [1.0, 2.0, 3.0, 4.0]


def test_a_rank_that_is_not_there_is_named() -> None:
    parts = {rank: torch.ones(6, 3) for rank in (0, 2)}

    with pytest.raises(BoxingError, match=r"there is none of \[1\]"):
        apply_step(only_step("P", "B"), parts)


@pytest.mark.parametrize(
    "part", [torch.ones(3, 6), torch.ones(6, 3, dtype=torch.float64), torch.ones(18)]
)
def test_a_shard_of_another_shape_or_dtype_is_refused(part: torch.Tensor) -> None:
    with pytest.raises(BoxingError, match=r"accepted here: shape \(6, 3\) and float32"):
        local_step(only_step("B", "S(0)"), 0, part)


def test_a_shard_of_a_rank_outside_the_step_is_refused() -> None:
    with pytest.raises(BoxingError, match="does not start on it"):
        local_step(only_step("B", "S(0)"), 7, torch.ones(6, 3))


def test_putting_together_finds_copies_that_differ() -> None:
    parts = {0: torch.zeros(2), 1: torch.zeros(2), 2: torch.ones(2)}

    assert assemble(parts, LINE, NdSbp(B), (2,)).tolist() == [0, 0]
    with pytest.raises(SbpValueError, match="indices 0 and 2 of mesh axis 0"):
        assemble(parts, LINE, NdSbp(B), (2,), check=True)


def test_putting_together_needs_every_shard() -> None:
    with pytest.raises(SbpValueError, match="rank 1 has no shard"):
        assemble({0: torch.ones(2, 3)}, LINE, NdSbp(S(0)), (6, 3))
    with pytest.raises(SbpValueError, match=r"rank 0 has a shard of shape \(3, 3\)"):
        assemble({0: torch.ones(3, 3)}, LINE, NdSbp(S(0)), (6, 3))


def test_nested_partials_are_reduced_from_the_inner_axis() -> None:
    # Rows are the outer axis (sum), columns the inner one (max).
    values = [[1.0, 5.0], [2.0, 3.0]]
    parts = {rank: torch.tensor(values[at[0]][at[1]]) for rank, at in MESH.coordinates()}

    assert assemble(parts, MESH, NdSbp(P, P("max")), ()).item() == 8.0
    assert assemble(parts, MESH, NdSbp(P("max"), P), ()).item() == 6.0


def test_one_value_reduces_to_itself_and_inputs_stay_as_they_are() -> None:
    parts = [torch.tensor([float(index)]) for index in range(4)]

    assert reduce_in_order(parts[:1], "sum") is parts[0]
    assert reduce_in_order(parts, "sum").item() == 6.0
    assert reduce_in_order(parts, "min").item() == 0.0
    assert [part.item() for part in parts] == [0.0, 1.0, 2.0, 3.0]


def test_only_dtypes_are_dtypes() -> None:
    assert torch_dtype("bfloat16") is torch.bfloat16
    with pytest.raises(SbpTypeError, match="'nn' names no dtype"):
        torch_dtype("nn")


@pytest.mark.parametrize(
    ("reduction", "expected"), [("sum", torch.add), ("max", torch.maximum), ("min", torch.minimum)]
)
def test_terms_that_come_in_pieces_are_reduced_where_they_belong(
    reduction: str, expected: Callable[..., torch.Tensor]
) -> None:
    source = (MESH, NdSbp.parse(f"P({reduction}), S(0)"))
    target = (Placement([4, 5], ("x",)), NdSbp(B))
    step = BoxingStep(
        kind=StepKind.TRANSFER,
        shape=(5, 2),
        dtype="float32",
        source=source,
        target=target,
        axes=(),
        size_bytes=0,
    )
    partials = torch.randn(2, 5, 2, generator=torch.Generator().manual_seed(0))
    parts = {
        rank: partials[at[0]][:3] if at[1] == 0 else partials[at[0]][3:]
        for rank, at in MESH.coordinates()
    }

    after = apply_step(step, parts)

    assert torch.equal(after[4], expected(partials[0], partials[1]))
    assert torch.equal(after[5], after[4])


def test_a_reduction_may_be_made_in_the_memory_of_a_part() -> None:
    parts = [torch.full((3,), float(number)) for number in (1, 2, 4)]

    for place in (0, 1):
        given = [part.clone() for part in parts]
        result = reduce_in_order(given, "sum", out=given[place])

        assert result is given[place] and result.tolist() == [7.0] * 3
        assert torch.equal(given[2], parts[2])
    single = torch.empty(3)
    assert reduce_in_order(parts[:1], "max", out=single) is single
    assert torch.equal(single, parts[0])

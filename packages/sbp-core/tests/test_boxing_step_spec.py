from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, combinations, product

import pytest
from boxing_oracle import single_steps

from sbp_core.boxing import BoxingStep, StepKind
from sbp_core.boxing.step_spec import verify_step
from sbp_core.errors import SbpValueError
from sbp_core.placement import Placement
from sbp_core.sbp import B, NdSbp, P, Partial, S, Sbp, all_nd_sbps

MESHES = [
    Placement.grid((2,)),
    Placement.grid((3,)),
    Placement.grid((2, 2)),
    Placement.grid((1, 2)),
]
PAIR = Placement.grid((2,))
OTHERS = Placement([2, 3, 4])


def _is_legal(step: BoxingStep) -> bool:
    try:
        verify_step(step)
    except SbpValueError:
        return False
    return True


def _all_steps(
    shape: tuple[int, ...], source: tuple[Placement, NdSbp], target: tuple[Placement, NdSbp]
) -> Iterator[BoxingStep]:
    """Yield steps of every kind and on all sets of axes, most of them wrong."""
    every = range(source[0].num_axes)
    for axes in chain.from_iterable(combinations(every, size) for size in range(len(every) + 1)):
        for kind in StepKind:
            yield BoxingStep(
                kind=kind, shape=shape, dtype="float32", source=source, target=target, axes=axes,
                size_bytes=0,
            )  # fmt: skip


@pytest.mark.parametrize("mesh", MESHES, ids=lambda mesh: str(mesh.mesh_shape))
@pytest.mark.parametrize("shape", [(4, 4), (3, 2), (1,), (0, 2)])
def test_the_steps_that_routes_are_made_of_are_legal_and_no_others(
    mesh: Placement, shape: tuple[int, ...]
) -> None:
    states = all_nd_sbps(len(shape), mesh.num_axes, ("sum", "max"))

    for one, other in product(states, repeat=2):
        right = {
            (step.kind, step.axes): step
            for step in single_steps(shape, "float32", (mesh, one), (mesh, other))
        }
        for step in _all_steps(shape, (mesh, one), (mesh, other)):
            known = right.get((step.kind, step.axes))
            assert _is_legal(step if known is None else known) == (known is not None), step
            if known is not None:
                assert not _is_legal(replace(known, size_bytes=known.size_bytes + 1)), step


@pytest.mark.parametrize("shape", [(4, 4), (3,)])
def test_only_a_transfer_leads_to_another_mesh(shape: tuple[int, ...]) -> None:
    states = all_nd_sbps(len(shape), 1, ("sum", "max"))

    for one, other in product(states, repeat=2):
        ends = (PAIR, one), (OTHERS, other)
        right = list(single_steps(shape, "float32", *ends))

        assert all(map(_is_legal, right))
        kinds = {step.kind for step in _all_steps(shape, *ends) if _is_legal(step)}
        assert kinds <= {StepKind.TRANSFER}


def _step(before: Sbp, after: Sbp, kind: StepKind, **fields: object) -> BoxingStep:
    made = BoxingStep(
        kind=kind,
        shape=(4,),
        dtype="float32",
        source=(PAIR, NdSbp(before)),
        target=(PAIR, NdSbp(after)),
        axes=(0,),
        size_bytes=0,
    )
    return replace(made, **fields)  # type: ignore[arg-type] # fields of a step


@pytest.mark.parametrize(
    ("step", "what", "accepted"),
    [
        (_step(S(0), B, StepKind.ALL_REDUCE), r"all-reduce from \(S\(0\)\) to \(B\)", "all-gather"),
        (_step(S(0), P, StepKind.ALL_GATHER), r"all-gather from .* to \(P\)", "local"),
        (_step(S(0), Partial("max"), StepKind.LOCAL), "local from", "no step of one kind"),
        (_step(P, B, StepKind.ALL_REDUCE), "says that it moves 0 bytes", "32 bytes"),
        (_step(P, B, StepKind.ALL_REDUCE, dtype="bool"), "bool values have no P", "max"),
        (_step(B, B, StepKind.LOCAL), r"local from \(B\) to where it is", ""),
        (_step(P, B, StepKind.ALL_REDUCE, axes=()), r"axes \[\] of a mesh of 1", "at least one"),
        (_step(P, B, StepKind.ALL_REDUCE, axes=(0, 0)), r"axes \[0, 0\] of a mesh", "ascending"),
        (_step(P, B, StepKind.TRANSFER), r"on axes \[0\]", "no axes"),
        (
            _step(P, B, StepKind.ALL_REDUCE, target=(OTHERS, NdSbp(B))),
            "all-reduce from",
            "only a transfer",
        ),
    ],
)
def test_what_is_wrong_with_a_step_is_named(step: BoxingStep, what: str, accepted: str) -> None:
    with pytest.raises(SbpValueError, match=what) as refused:
        verify_step(step)

    assert accepted in refused.value.accepted


def test_a_change_on_an_axis_that_the_step_does_not_work_on_is_refused() -> None:
    mesh = Placement.grid((2, 2))
    step = _step(B, B, StepKind.ALL_REDUCE, source=(mesh, NdSbp(P, P)), target=(mesh, NdSbp(B, B)))

    with pytest.raises(SbpValueError, match=r"\(P, P\) -> \(B, B\)") as refused:
        verify_step(step)

    assert refused.value.accepted == "a change on axis 'axis0'"

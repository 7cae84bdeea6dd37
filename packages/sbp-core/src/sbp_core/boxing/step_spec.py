"""Check that a `BoxingStep` (collective, transfer, local step) is legal.

`compile.plan_spec` does so for each step of a plan. A step may come from a plan that somebody
edited. Executors rely on the checks made here: that the kind of the step matches its source and
target on its mesh axes, and that every rank of a group finds all of its inputs there.

    kind              before, on its axes          after, on its axes
    all-reduce        one P, or P(max), P(min)     B
    reduce-scatter    one P, or P(max), P(min)     S
    all-gather        S                            B
    all-to-all        S                            S
    local, one axis   B                            S or any P
                      S                            P
                      anything, on one rank        anything
    transfer          no P                         anything
                      P of one kind                S, B, P of that kind
"""

from __future__ import annotations

from functools import lru_cache

from sbp_core.boxing.slices import (
    can_transfer,
    collective_bytes,
    is_realisable,
    itemsize,
    transfer_bytes,
    uniform_bytes,
)
from sbp_core.boxing.step import BoxingStep, StepKind
from sbp_core.errors import SbpValueError
from sbp_core.placement import Placement
from sbp_core.sbp import B, NdSbp, P, Partial, Split, check_sbp

_CACHED = 4096


@lru_cache(maxsize=_CACHED)
def verify_step(step: BoxingStep) -> None:
    """Check that a step can be executed, and moves as many bytes as it declares.

    Raises:
        SbpValueError: its tensor is not legal, or does not fit the meshes; its kind does not lead
            from source to target on these axes; ranks lack data that they need; or a different
            number of bytes is moved.
    """
    if any(extent < 0 for extent in step.shape):
        raise SbpValueError(f"a tensor {step.dtype}{list(step.shape)}", accepted="extents >= 0")
    for placement, sbp in (step.source, step.target):
        check_sbp(step.shape, sbp, placement.mesh_shape)
        check_reductions(step.dtype, sbp)
    if step.source == step.target:
        raise SbpValueError(f"{step.kind.value} from ({step.source[1]}) to where it is")
    if step.kind is not StepKind.TRANSFER:
        moved_bytes = _moved_in_groups(step)
    elif step.axes or not can_transfer(step.source[1], step.target[1]):
        raise SbpValueError(
            f"transfer from ({step.source[1]}) to ({step.target[1]}) on axes {list(step.axes)}",
            accepted="no axes; partial values of one reduction at most, and after it of no other",
        )
    else:
        moved_bytes = transfer_bytes(step)
    if step.size_bytes != moved_bytes:
        raise SbpValueError(
            f"it says that it moves {step.size_bytes} bytes", accepted=f"{moved_bytes} bytes"
        )


def check_reductions(dtype: str, sbp: NdSbp) -> None:
    """Check that values of a dtype can be reduced as in an nd-SBP.

    Raises:
        SbpValueError: no such dtype, or it has no such partial values.
    """
    itemsize(dtype)
    ordered, adds = not dtype.startswith("complex"), dtype != "bool"
    for entry in sbp:
        if isinstance(entry, Partial) and not (adds if entry.reduction == "sum" else ordered):
            raise SbpValueError(
                f"{dtype} values have no {entry!r}: they cannot be "
                + ("added" if entry.reduction == "sum" else "ordered"),
                accepted='S(dim), B, P("max"), P("min")' if ordered else "S(dim), B, P",
            )


def _moved_in_groups(step: BoxingStep) -> int:
    """Check a collective or local step, and return the bytes that it moves."""
    (mesh, source), (after, target) = step.source, step.target
    if mesh != after:
        raise SbpValueError(
            f"{step.kind.value} from {mesh} to {after}",
            accepted="one placement before and after; only a transfer changes it",
        )
    if not step.axes or list(step.axes) != sorted({*step.axes} & {*range(mesh.num_axes)}):
        raise SbpValueError(
            f"axes {list(step.axes)} of a mesh of {mesh.num_axes}",
            accepted="axes of the mesh, ascending, at least one",
        )
    others = [axis for axis in range(mesh.num_axes) if axis not in step.axes]
    if any(source[axis] != target[axis] for axis in others):
        raise SbpValueError(f"({source}) -> ({target})", accepted=f"a change on {step.axis_names}")
    kind = _kind(mesh, source, target, step.axes)
    if kind is not step.kind:
        raise SbpValueError(
            f"{step.kind.value} from ({source}) to ({target}) on {step.axis_names}",
            accepted="no step of one kind does that" if kind is None else kind.value,
        )
    moved_bytes = uniform_bytes(step)
    if moved_bytes is not None:
        return moved_bytes
    if not is_realisable(step):
        raise SbpValueError(
            f"{step} of a tensor of shape {step.shape}: ranks need data that their group "
            "does not hold",
            accepted="a transfer",
        )
    return collective_bytes(step)


def _kind(mesh: Placement, source: NdSbp, target: NdSbp, axes: tuple[int, ...]) -> StepKind | None:
    """Return the kind that leads from source to target on these axes; None if there is none."""
    before, after = {source[axis] for axis in axes}, {target[axis] for axis in axes}
    if all(mesh.mesh_shape[axis] == 1 for axis in axes):
        return StepKind.LOCAL if len(axes) == 1 else None
    is_split = all(isinstance(entry, Split) for entry in before)
    becomes_split = all(isinstance(entry, Split) for entry in after)
    first = source[axes[0]]
    if isinstance(first, Partial):
        # A max over a sum is not a sum over a max: inner axes are reduced first.
        inner = {entry for entry in source[axes[0] :] if isinstance(entry, Partial)}
        if before != {first} or inner != {first}:
            return None
        if after == {B}:
            return StepKind.ALL_REDUCE
        return StepKind.REDUCE_SCATTER if becomes_split else None
    if is_split and (becomes_split or after == {B}):
        return StepKind.ALL_TO_ALL if becomes_split else StepKind.ALL_GATHER
    # A rank slices its shard, keeps it for all, or puts zeros around it.
    if len(axes) == 1 and (before == {B} or (is_split and after == {P})):
        return StepKind.LOCAL
    return None

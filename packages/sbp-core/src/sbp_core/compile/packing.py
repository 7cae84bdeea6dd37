"""Lay out small tensors in a flat buffer, a bucket, and make the calls that pack and unpack it.

A layout is worked out once, when `buckets` forms a bucket. The bucket's items keep it for the
prices of packing (`program`) and the calls of ranks (`instructions`). On n ranks, a buffer that is
scattered or was gathered has n rows, one for each rank of the group:

    reduce-scatter of a (2, 3) split by rows and b (4,)     rank 0 | a[0], b[:2]
                                                            rank 1 | a[1], b[2:]
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

from sbp_core.boxing import BoxingStep, StepKind
from sbp_core.boxing.slices import bounds_of, collective_bytes
from sbp_core.compile.actors import Instruction
from sbp_core.graph.ir import Ref, Symbol
from sbp_core.graph.primitives import CAT, CLONE, PERMUTE, RESHAPE, SPLIT_WITH_SIZES, VIEW
from sbp_core.placement import Placement
from sbp_core.sbp import B, NdSbp, Partial, S, Sbp, local_shape


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedPart:
    """One value of a flat buffer, with the same layout on every rank.

    Args:
        before: Shape of a rank's shard before the step.
        after: Shape of its shard after the step.
        dim: The dim that a reduce-scatter cuts or an all-gather joins; 0 for an all-reduce.
    """

    before: tuple[int, ...]
    after: tuple[int, ...]
    dim: int

    @classmethod
    def of(cls, step: BoxingStep) -> PackedPart | None:
        """Return the layout of the value of a step; None if it is not one row for each rank.

        Args:
            step: An all-reduce, reduce-scatter or all-gather with equal shards on all ranks.
        """
        if _num_rows(step) < 2 or not prod(step.shape):
            return None
        first = (0,) * step.source[0].num_axes
        before, after = (
            local_shape(step.shape, sbp, mesh.mesh_shape, first)
            for mesh, sbp in (step.source, step.target)
        )
        dim = _split_dim(step, before, after)
        return None if dim is None else cls(before=before, after=after, dim=dim)

    @property
    def num_elements(self) -> int:
        """Elements in the buffer: the larger of a rank's shards before and after."""
        return max(prod(self.before), prod(self.after))


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedLayout:
    """The layout of all values of a bucket in its flat buffer.

    Args:
        kind: Kind of the steps that the bucket replaces.
        rows: Ranks of a group.
        num_outer_dims: Dims of the buffer before its dim of elements; see `flat_step`.
        parts: The values, one after the other.
    """

    kind: StepKind
    rows: int
    num_outer_dims: int
    parts: tuple[PackedPart, ...]

    @classmethod
    def of(cls, like: BoxingStep, parts: Sequence[PackedPart]) -> PackedLayout:
        """Return the layout of values whose steps are of the kind, mesh and axes of `like`."""
        return cls(
            kind=like.kind,
            rows=_num_rows(like),
            num_outer_dims=len(_outer_axes(like.source[0], like.axes)),
            parts=tuple(parts),
        )

    @property
    def scatters(self) -> bool:
        """Whether the buffer has a row for each rank before the step."""
        return self.kind is StepKind.REDUCE_SCATTER

    @property
    def gathers(self) -> bool:
        """Whether the buffer has a row of each rank after the step."""
        return self.kind is StepKind.ALL_GATHER


def flat_step(
    kind: StepKind,
    mesh: Placement,
    axes: tuple[int, ...],
    dtype: str,
    num_elements: int,
    like: NdSbp | None = None,
) -> BoxingStep:
    """Return the step of a flat buffer.

    Its last dim holds the elements. Each other mesh axis has a separate dim that it splits, because
    ranks along it hold other values.

    Args:
        kind: Kind of the steps that it replaces.
        mesh: Mesh of the stage.
        axes: The axes along which ranks take part.
        dtype: Dtype of the elements.
        num_elements: Elements of the larger of a rank's shards before and after.
        like: The nd-SBP of one replaced tensor before, which has the reduction; sums if None.
    """
    # An all-reduce along `data` of 10 elements a rank, on a mesh (data: 2, tensor: 4):
    #
    #     shape (4, 10)    dim 0: S(0) along tensor    dim 1: along data P before, B after
    others = _outer_axes(mesh, axes)
    shape = (*(mesh.mesh_shape[axis] for axis in others), num_elements)
    whole: list[Sbp] = [B] * mesh.num_axes
    for dim, axis in enumerate(others):
        whole[axis] = S(dim)
    partial, split = list(whole), list(whole)
    for axis in axes:
        partial[axis] = like[axis] if like is not None else Partial()
        split[axis] = S(len(others))
    before = split if kind is StepKind.ALL_GATHER else partial
    after = split if kind is StepKind.REDUCE_SCATTER else whole
    step = BoxingStep(
        kind=kind,
        shape=shape,
        dtype=dtype,
        source=(mesh, NdSbp(*before)),
        target=(mesh, NdSbp(*after)),
        axes=axes,
        size_bytes=0,
    )
    return replace(step, size_bytes=collective_bytes(step))


def _outer_axes(mesh: Placement, axes: tuple[int, ...]) -> list[int]:
    """Return the mesh axes that have a dim of a flat buffer, before its dim of elements."""
    return [a for a, extent in enumerate(mesh.mesh_shape) if a not in axes and extent > 1]


def _num_rows(step: BoxingStep) -> int:
    """Return the number of ranks in a group of a step."""
    return prod(step.source[0].mesh_shape[axis] for axis in step.axes)


def _split_dim(step: BoxingStep, before: Sequence[int], after: Sequence[int]) -> int | None:
    """Return the dim that a reduce-scatter cuts or an all-gather joins, 0 for an all-reduce.

    None if it is not one dim, in as many equal parts as there are ranks, in their order.
    """
    if step.kind is StepKind.ALL_REDUCE:
        return 0
    small, large = step.target, step.source
    if step.kind is StepKind.ALL_GATHER:
        small, large = large, small
    # Row i of the buffer goes to the i-th rank of the group, or comes from it. So the i-th rank
    # must have the i-th part of a value too, in whatever order mesh axes split it.
    dims = [dim for dim in range(len(step.shape)) if before[dim] != after[dim]]
    if len(dims) != 1:
        return None
    (dim,) = dims
    parts, wholes = bounds_of(step.shape, *small), bounds_of(step.shape, *large)
    for group in step.source[0].groups(*step.axes):
        start, stop = wholes[group[0]][dim]
        each = (stop - start) // len(group)
        wanted = [(start + i * each, start + (i + 1) * each) for i in range(len(group))]
        if [parts[rank][dim] for rank in group] != wanted:
            return None
    return dim


# The instructions of ranks.


def pack_instructions(
    node: str, keys: Sequence[str], flat: str, layout: PackedLayout
) -> Iterator[Instruction]:
    """Yield the instructions that put values into a flat buffer; the same on every rank.

    Args:
        node: Name of the node that the calls belong to.
        keys: Keys of the values, in the order of the layout.
        flat: The key of the buffer.
        layout: Layout of the buffer.
    """
    # If the buffer is scattered, a row for each rank; else the values one after the other. For two:
    #
    #     all-reduce, all-gather    a (2, 3) -> (6,)                      b (4,) -> (4,)      (10,)
    #     reduce-scatter by dim 1   a (3, 2) -> (3, 2, 1) -> (2, 3, 1)    b (4,) -> (2, 2)    (2, 5)
    row = (layout.rows, -1) if layout.scatters else (-1,)
    rows = []
    for index, (key, part) in enumerate(zip(keys, layout.parts, strict=True)):
        value = key
        if layout.scatters:
            # One dim is cut into rows, which come first: (a, rows b, c) -> (rows, a, b, c).
            value, dim, shape = f"{flat}.{index}.rows", part.dim, part.before
            cut = (*shape[:dim], layout.rows, shape[dim] // layout.rows, *shape[dim + 1 :])
            order = (dim, *range(dim), *range(dim + 1, len(cut)))
            yield _call(node, RESHAPE, (Ref(key), cut), f"{value}.cut")
            yield _call(node, PERMUTE, (Ref(f"{value}.cut"), order), value)
        rows.append(f"{flat}.{index}")
        yield _call(node, RESHAPE, (Ref(value), row), rows[-1])
    joined = f"{flat}.joined"
    yield _call(node, CAT, (tuple(map(Ref, rows)), 1 if layout.scatters else 0), joined)
    # Along each other mesh axis a rank has one entry, its own: see `flat_step`.
    yield _call(node, RESHAPE, (Ref(joined), (*(1,) * layout.num_outer_dims, -1)), flat)


def unpack_instructions(
    node: str, flat: str, keys: Sequence[str], layout: PackedLayout
) -> Iterator[Instruction]:
    """Yield the instructions that take values out of a flat buffer; the same on every rank.

    Args:
        node: Name of the node that the calls belong to.
        flat: The key of the buffer.
        keys: Keys of the values, in the order of the layout.
        layout: Layout of the buffer.
    """
    gathers, rows = layout.gathers, layout.rows
    sizes = tuple(prod(part.before if gathers else part.after) for part in layout.parts)
    table = f"{node}.table"
    yield _call(node, VIEW, (Ref(flat), (rows, -1) if gathers else (-1,)), table)
    names = tuple(f"{node}.{index}" for index in range(len(sizes)))
    yield Instruction(
        op=SPLIT_WITH_SIZES, args=(Ref(table), sizes, 1 if gathers else 0), outputs=names, node=node
    )
    for name, key, part in zip(names, keys, layout.parts, strict=True):
        # A rank has one row, in which each value is in one piece.
        if not gathers:
            yield _call(node, VIEW, (Ref(name), part.after), key)
            continue
        # Back from rows, the inverse of packing: (rows, a, b, c) -> (a, rows, b, c), which is then
        # seen as (a, rows b, c).
        cut = (rows, *part.before)
        order = (*range(1, part.dim + 1), 0, *range(part.dim + 1, len(cut)))
        yield _call(node, VIEW, (Ref(name), cut), f"{name}.rows")
        yield _call(node, PERMUTE, (Ref(f"{name}.rows"), order), f"{name}.back")
        # A copy in any case: a view would keep the whole buffer alive.
        yield Instruction(
            op=CLONE,
            args=(Ref(f"{name}.back"),),
            kwargs={"memory_format": Symbol("memory_format", "contiguous_format")},
            outputs=(f"{name}.own",),
            node=node,
        )
        yield _call(node, VIEW, (Ref(f"{name}.own"), part.after), key)


def _call(node: str, op: str, args: tuple[object, ...], made: str) -> Instruction:
    return Instruction(op=op, args=args, outputs=(made,), node=node)

"""Run one boxing step, such as an all-gather, on tensors: for a whole group, or for one rank.

The boxing backends and the runtimes use it. All functions are pure: inputs are never changed, and
results may share memory with inputs and with each other (a broadcast copy is the same tensor on
every rank). A receiver gets pieces, which are grouped into terms: pieces of one term are placed
next to each other, and terms are reduced. For example, from two partials, each split by rows on two
ranks, to B:

    term 0    rows 0-3 of rank 0         placed: the result so far
              rows 4-7 of rank 1
    term 1    rows 0-3 of rank 2         added to that
              rows 4-7 of rank 3

Terms are always reduced in mesh order, never in order of arrival. Floating-point sums depend on
their order, and every run, every backend and the reference runtime have to get the same bits. A
backend of several processes needs its transport and `fill`, which puts received pieces together.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from math import prod

import torch

from sbp_core.boxing import (
    Bounds,
    BoxingStep,
    StepKind,
    TransferPiece,
    bounds_of,
    collective_pieces,
    local_transition,
    partial_axes,
    transfer_pieces,
)
from sbp_core.errors import BoxingError, SbpTypeError, SbpValueError
from sbp_core.placement import Placement
from sbp_core.sbp import Broadcast, NdSbp, Partial, Split, check_sbp

_REDUCE: dict[str, Callable[..., torch.Tensor]] = {
    "sum": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
}


def torch_dtype(name: str) -> torch.dtype:
    """Return the torch dtype of a dtype name such as `float32`.

    Raises:
        SbpTypeError: torch has no such dtype.
    """
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise SbpTypeError(f"{name!r} names no dtype of torch", accepted="float32, int64, ...")
    return dtype


def apply_step(step: BoxingStep, shards: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
    """Run a step for all ranks of one or more of its groups.

    Args:
        step: A step of any kind.
        shards: By rank, tensors of the local shapes of `step.source`: whole groups for a
            collective, all source ranks for a `TRANSFER`, any ranks for a local step.

    Returns:
        By rank, the shards under `step.target`. They are contiguous, except that a local step may
        return its input.

    Raises:
        BoxingError: a rank of a group is missing, or a shard has another shape or dtype.
    """
    if step.kind is StepKind.TRANSFER:
        return _transfer(step, shards)
    results: dict[int, torch.Tensor] = {}
    for rank in shards:
        if rank in results:
            continue
        if step.kind is StepKind.LOCAL:
            results[rank] = local_step(step, rank, shards[rank])
        else:
            results.update(_collective(step, step.group(rank), shards))
    return {rank: results[rank] for rank in shards}


def check_shard(step: BoxingStep, rank: int, shard: torch.Tensor) -> None:
    """Check one rank's shard before a step.

    Raises:
        BoxingError: the shape or the dtype differs from that of `step.source`.
    """
    bounds = bounds_of(step.shape, *step.source).get(rank)
    if bounds is None:
        raise BoxingError(
            f"rank {rank} gives a shard to a step that does not start on it",
            where=str(step),
            accepted=f"shards of ranks {step.source[0].ranks}",
        )
    shape = tuple(stop - start for start, stop in bounds)
    if tuple(shard.shape) != shape or shard.dtype != torch_dtype(step.dtype):
        raise BoxingError(
            f"rank {rank} gives a shard of shape {tuple(shard.shape)} and {shard.dtype}",
            where=str(step),
            accepted=f"shape {shape} and {step.dtype}",
        )


def detach_shard(shard: torch.Tensor) -> torch.Tensor:
    """Return a shard detached from the autograd graph, because boxing has no gradients."""
    return shard.detach() if shard.requires_grad else shard


def _require_shards(
    step: BoxingStep, ranks: Iterable[int], shards: Mapping[int, torch.Tensor]
) -> list[torch.Tensor]:
    ranks = tuple(ranks)
    absent = [rank for rank in ranks if rank not in shards]
    if absent:
        raise BoxingError(
            f"a boxing step needs the shards of ranks {list(ranks)}; there is none of {absent}",
            where=str(step),
        )
    for rank in ranks:
        check_shard(step, rank, shards[rank])
    return [shards[rank] for rank in ranks]


def _collective(
    step: BoxingStep, group: tuple[int, ...], shards: Mapping[int, torch.Tensor]
) -> dict[int, torch.Tensor]:
    parts = _require_shards(step, group, shards)
    if step.kind is StepKind.ALL_REDUCE:
        total = reduce_in_order(parts, reduction_of(step))
        return dict.fromkeys(group, total.contiguous())
    pieces = collective_pieces(step, group)
    if step.kind is StepKind.ALL_GATHER:
        # Each rank gets the same values, so one tensor serves all ranks.
        received = _pieces_of(pieces, group[0], shards)
        return dict.fromkeys(group, combine(step, group[0], received, device=parts[0].device))
    return {
        rank: combine(step, rank, _pieces_of(pieces, rank, shards), device=shards[rank].device)
        for rank in group
    }


def _transfer(step: BoxingStep, shards: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
    parts = _require_shards(step, step.source[0].rank_list, shards)
    results: dict[int, torch.Tensor] = {}
    for rank in step.target[0].rank_list:
        device = (shards[rank] if rank in shards else parts[0]).device
        results[rank] = transferred_shard(step, rank, shards, device=device)
    return results


def transferred_shard(
    step: BoxingStep,
    rank: int,
    shards: Mapping[int, torch.Tensor],
    *,
    device: torch.device | None = None,
) -> torch.Tensor:
    """Return the shard of one rank after a `TRANSFER`.

    Args:
        step: The transfer.
        rank: The receiver.
        shards: By rank, the shards of all ranks that send a piece to it.
        device: See `combine`.
    """
    return combine(step, rank, _pieces_of(transfer_pieces(step), rank, shards), device=device)


def _pieces_of(
    pieces: Iterable[TransferPiece], receiver: int, shards: Mapping[int, torch.Tensor]
) -> list[tuple[TransferPiece, torch.Tensor]]:
    """Return the pieces of one receiver, each with its slice of the sender's shard (a view)."""
    return [
        (piece, shards[piece.sender][piece.source_slices])
        for piece in pieces
        if piece.receiver == receiver
    ]


def combine(
    step: BoxingStep,
    rank: int,
    pieces: Sequence[tuple[TransferPiece, torch.Tensor]],
    *,
    device: torch.device | None = None,
) -> torch.Tensor:
    """Put together what one rank receives in a step: place the pieces of each term, reduce terms.

    Args:
        step: An all-gather, all-to-all, reduce-scatter or `TRANSFER`.
        rank: The receiver.
        pieces: All its pieces (`collective_pieces`, `transfer_pieces`), ordered by term; each with
            a tensor of the piece's shape.
        device: The device of the result if there are no pieces; else it is the device of these.

    Returns:
        The rank's shard under `step.target`, contiguous; zeros if it receives nothing. It shares
        memory with a piece that is the whole shard.
    """
    bounds = bounds_of(step.shape, *step.target)[rank]
    shape = tuple(stop - start for start, stop in bounds)
    if not pieces:
        return torch.zeros(shape, dtype=torch_dtype(step.dtype), device=device)
    first, part = pieces[0]
    if len(pieces) == 1 and tuple(part.shape) == shape:
        return part.contiguous()
    # If the target is P(sum), a term need not fill the shard: the partial of this rank is zero
    # outside of the received pieces, and later terms are added to the result of the first term.
    filled = sum(part.numel() for piece, part in pieces if piece.term == first.term) == prod(shape)
    result = part.new_empty(shape) if filled else part.new_zeros(shape)
    reduces = any(piece.term != first.term for piece, _ in pieces)
    fill(result, pieces, reduction_of(step) if reduces else None)
    return result


def fill(
    result: torch.Tensor,
    pieces: Sequence[tuple[TransferPiece, torch.Tensor | None]],
    reduction: str | None = None,
) -> None:
    """Place the pieces of the first term in a shard, and reduce the pieces of later terms into it.

    Args:
        result: The receiver's shard; zero wherever the first term has no piece.
        pieces: Ordered by term; each with a tensor of the piece's shape. None instead of a tensor
            means that the piece is already in place; only pieces of the first term may be None.
        reduction: `sum`, `max` or `min`; None if there is one term.
    """
    parts = [result if part is None else part for _, part in pieces]
    whole = all(part.shape == result.shape for part in parts)
    if reduction is not None and whole and len({piece.term for piece, _ in pieces}) == len(pieces):
        # Each piece is a term and fills the shard: the first two are added directly into it,
        # instead of copying the first and adding the second. The sums and their order are equal.
        reduce_in_order(parts, reduction, out=result)
        return
    for piece, part in pieces:
        place = result[piece.target_slices]
        if piece.term != pieces[0][0].term:
            assert reduction is not None and part is not None, "later terms are reduced"
            _REDUCE[reduction](place, part, out=place)
        elif part is not None:
            place.copy_(part)


def _reduction(entry: object) -> str:
    assert isinstance(entry, Partial), "only partial values are reduced"
    return entry.reduction


def reduction_of(step: BoxingStep) -> str:
    """Return the reduction of a step that reduces partial values: `sum`, `max` or `min`.

    Args:
        step: An all-reduce, a reduce-scatter, or a `TRANSFER` from partial values.
    """
    # All axes that one step reduces have the same reduction.
    axis = step.axes[0] if step.axes else partial_axes(step.source[1])[0]
    return _reduction(step.source[1][axis])


def reduce_in_order(
    parts: Sequence[torch.Tensor], reduction: str, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Reduce tensors of one shape elementwise, from the first to the last.

    Args:
        parts: At least one tensor; none is changed, except one that is `out`. Without `out`, a
            single tensor is returned itself.
        reduction: `sum`, `max` or `min`.
        out: The tensor for the result; it may be one of the first two parts.
    """
    if len(parts) == 1:
        return parts[0] if out is None else out.copy_(parts[0])
    function = _REDUCE[reduction]
    total = function(parts[0], parts[1], out=out)
    for part in parts[2:]:
        function(total, part, out=total)
    return total


def local_step(step: BoxingStep, rank: int, shard: torch.Tensor) -> torch.Tensor:
    """Run a local step on one rank: slice, pad with zeros, or keep.

    Args:
        step: A step of kind `LOCAL`.
        rank: Any rank of its placement.
        shard: The rank's part under `step.source`.

    Returns:
        The rank's part under `step.target`; if possible, the shard itself or a view of it.

    Raises:
        BoxingError: the shard has another shape or dtype.
    """
    check_shard(step, rank, shard)
    shard = detach_shard(shard)
    placement, sbp = step.source
    (axis,) = step.axes
    source, target = sbp[axis], step.target[1][axis]
    if placement.mesh_shape[axis] == 1:
        return shard
    before, after = local_transition(step, rank)
    if isinstance(target, Split):  # from B: each rank has the whole, and keeps its slice
        return shard[_slices(before)].contiguous()
    bounds = bounds_of(step.shape, *step.target)[rank]
    if isinstance(source, Split):  # to P(sum): zeros elsewhere add up to the whole
        padded = shard.new_zeros(tuple(stop - start for start, stop in bounds))
        padded[_slices(after)] = shard
        return padded
    # From B to P(sum), one rank keeps the values. For max and min, all ranks may keep them.
    keeps = _reduction(target) != "sum" or placement.coordinate(rank)[axis] == 0
    return shard if keeps else torch.zeros_like(shard)


def _slices(bounds: Bounds) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in bounds)


def shard(
    tensor: torch.Tensor, placement: Placement, sbp: NdSbp, ranks: Container[int] | None = None
) -> dict[int, torch.Tensor]:
    """Cut a logical tensor into the shards of ranks.

    Args:
        tensor: Any shape and dtype.
        placement: The mesh of ranks.
        sbp: How the tensor is placed on it.
        ranks: The ranks whose parts to make; None for all ranks.

    Returns:
        By rank, its part under `sbp`: contiguous, and sharing memory with `tensor` if possible.
        `P` keeps the values at coordinate 0 of its axis and has zeros elsewhere; `P("max")` and
        `P("min")` keep them everywhere.

    Raises:
        SbpValueError: `sbp` does not fit the shape or the mesh.
    """
    shape = tuple(tensor.shape)
    parts: dict[Bounds, torch.Tensor] = {}  # ranks with equal bounds share a tensor
    result: dict[int, torch.Tensor] = {}
    bounds = bounds_of(shape, placement, sbp)
    for rank, at in placement.coordinates():
        if ranks is not None and rank not in ranks:
            continue
        part = parts.get(bounds[rank])
        if part is None:
            part = parts[bounds[rank]] = tensor[_slices(bounds[rank])].contiguous()
        zero = any(
            isinstance(entry, Partial) and entry.reduction == "sum" and index > 0
            for entry, index in zip(sbp, at, strict=True)
        )
        result[rank] = torch.zeros_like(part) if zero else part
    return result


def assemble(
    shards: Mapping[int, torch.Tensor],
    placement: Placement,
    sbp: NdSbp,
    shape: Sequence[int],
    *,
    check: bool = False,
) -> torch.Tensor:
    """Put a logical tensor together from the parts of all ranks: gather and reduce.

    Args:
        shards: By rank, tensors of the local shapes under `sbp`.
        placement: The mesh of ranks.
        sbp: How the tensor is placed on it.
        shape: Shape of the logical tensor.
        check: Also compare the copies along `B` axes.

    Returns:
        The logical tensor; it may share memory with the shards.

    Raises:
        SbpValueError: a shard is missing or has another shape, or (with `check`) copies differ.
    """
    shape = tuple(shape)
    check_sbp(shape, sbp, placement.mesh_shape)
    bounds = bounds_of(shape, placement, sbp)
    for rank in placement.rank_list:
        local = tuple(stop - start for start, stop in bounds[rank])
        held = tuple(shards[rank].shape) if rank in shards else None
        if held != local:
            raise SbpValueError(
                f"rank {rank} has {'no shard' if held is None else f'a shard of shape {held}'}",
                accepted=f"shape {local}, its part of {shape} under ({sbp})",
            )
    # Undo the axes from the last to the first, because each one split the result of earlier axes.
    parts = {at: shards[rank] for rank, at in placement.coordinates()}
    for axis in reversed(range(len(sbp))):
        joined: dict[tuple[int, ...], torch.Tensor] = {}
        for at in {at[:axis]: None for at in parts}:
            line = [parts[*at, index] for index in range(placement.mesh_shape[axis])]
            joined[at] = _join(line, sbp, axis, check)
        parts = joined
    return parts[()]


def _join(line: list[torch.Tensor], sbp: NdSbp, axis: int, check: bool) -> torch.Tensor:
    """Return the value that the ranks along one axis hold together."""
    entry = sbp[axis]
    if isinstance(entry, Split):
        return torch.cat(line, entry.dim) if len(line) > 1 else line[0]
    if isinstance(entry, Partial):
        return reduce_in_order(line, entry.reduction)
    assert isinstance(entry, Broadcast), "an entry is S, B or P"
    if check:
        for index, part in enumerate(line):
            if not torch.equal(part, line[0]):
                raise SbpValueError(
                    f"the copies at indices 0 and {index} of mesh axis {axis} of ({sbp}) differ",
                    accepted="equal values along every B axis",
                )
    return line[0]

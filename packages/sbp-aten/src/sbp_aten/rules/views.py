"""Operators that put dims into another order, or change nothing at all."""

from __future__ import annotations

from sbp_aten.rules.arrangement import in_order, permuted
from sbp_core.signatures import OpCall, argument, wrap_dim


def _swapped(call: OpCall, num_dims: int) -> list[int]:
    order = list(range(num_dims))
    if num_dims:
        names = ("axis0", "axis1") if call.op == "aten.swapaxes.default" else ("dim0", "dim1")
        first, second = (
            wrap_dim(argument(call, index, name), num_dims) for index, name in enumerate(names, 1)
        )
        order[first], order[second] = order[second], order[first]
    return order


def _moved(call: OpCall, num_dims: int) -> list[int]:
    both = argument(call, 1, "source"), argument(call, 2, "destination")
    dims, places = ((entry,) if isinstance(entry, int) else entry for entry in both)
    placed = {
        wrap_dim(place, num_dims): wrap_dim(dim, num_dims)
        for dim, place in zip(dims, places, strict=True)
    }
    others = iter([dim for dim in range(num_dims) if dim not in placed.values()])
    return [placed[at] if at in placed else next(others) for at in range(num_dims)]


_SAME = permuted(in_order)
_PERMUTE = permuted(
    lambda call, num_dims: [wrap_dim(dim, num_dims) for dim in argument(call, 1, "dims")]
)
_REVERSE = permuted(lambda _, num_dims: range(num_dims)[::-1])
_SWAP = permuted(_swapped)
_MOVE = permuted(_moved)

RULES = {
    "aten.alias.default": _SAME,
    "aten.alias_copy.default": _SAME,
    "aten.detach.default": _SAME,
    "aten.detach_copy.default": _SAME,
    "aten.lift.default": _SAME,
    "aten.lift_fresh.default": _SAME,
    "aten.lift_fresh_copy.default": _SAME,
    "aten.mT.default": permuted(
        lambda _, num_dims: [*range(num_dims - 2), num_dims - 1, num_dims - 2]
    ),
    "aten.moveaxis.int": _MOVE,
    "aten.moveaxis.intlist": _MOVE,
    "aten.movedim.int": _MOVE,
    "aten.movedim.intlist": _MOVE,
    "aten.numpy_T.default": _REVERSE,
    "aten.permute.default": _PERMUTE,
    "aten.permute_copy.default": _PERMUTE,
    "aten.swapaxes.default": _SWAP,
    "aten.swapdims.default": _SWAP,
    "aten.t.default": _REVERSE,
    "aten.t_copy.default": _REVERSE,
    "aten.transpose.int": _SWAP,
    "aten.transpose_copy.int": _SWAP,
}

"""Register operators that update the rows of a table that a step has looked up, and no others.

    sbp.unique_rows(indices, gradients)           -> rows [N], and sums [N, d] for each gradient
    sbp.own_rows(rows, sums, first, length)       -> index [N], and sums [N, d] for each
    sbp.put_rows(table, index, new)               -> the table with new rows
    sbp.row_update(rows, sums, tensors, program, results)    -> new tensors

N is the number of lookups, so all shapes are fixed, although the number of distinct rows is not:

    indices     7  3  7  -1                      -1: a lookup that has no gradient, such as padding
    rows        3  7  -1  -1                     each row once; unused slots are -1
    sums        gradient of 3, of 7, 0, 0

A rank that holds the rows 4 to 8 finds 7 in the second slot. Slots without a row of the rank repeat
a slot that has one: they compute the same new row, and writing it twice changes nothing. Without
any, all slots are row 0 with gradient 0, which an update leaves as it is: see `row_update`.

    own_rows(rows, sums, 4, 4)      index 3 3 3 3    sums all those of row 7

`put_rows` has the in-place form `put_rows_`. `row_update` is the update as one operator of a graph;
plans contain the other three in its place. Importing this module registers the operators.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from sbp_torch.ops import register


def unique_rows(indices: Tensor, gradients: Sequence[Tensor]) -> list[Tensor]:
    """Return the distinct rows among indices, and the sums of the gradients of each.

    Args:
        indices: Integers [...], with N elements; negative ones are left out.
        gradients: Floating [..., d], each with a d of its own.

    Returns:
        Rows [N], then -1 in unused slots; for each gradient its sums [N, d], which are 0 there.
    """
    flat = indices.reshape(-1)
    count = flat.numel()
    parts = [one.reshape(count, one.shape[-1]) for one in gradients]
    if not count:
        return [flat.clone(), *(one.clone() for one in parts)]
    ordered, order = torch.sort(flat, stable=True)
    is_new = torch.ones_like(ordered)
    torch.ne(ordered[1:], ordered[:-1], out=is_new[1:])
    slots = is_new.cumsum_(0).sub_(1)  # of the indices in their sorted order
    rows = torch.full_like(ordered, -1).scatter_(0, slots, ordered)
    slot_of = torch.empty_like(slots).scatter_(0, order, slots)
    unused = (rows < 0).unsqueeze(1)
    sums = (_sums(one, slot_of).masked_fill_(unused, 0) for one in parts)
    return [rows, *sums]


def _sums(parts: Tensor, slots: Tensor) -> Tensor:
    """Return the sums of parts [N, d] by slot, [N, d], added in the order of the parts."""
    if parts.is_cuda:  # there, `index_add` adds in any order
        made: Tensor = torch.ops.aten.embedding_dense_backward(
            parts, slots, slots.numel(), -1, False
        )
        return made
    return torch.zeros_like(parts, memory_format=torch.contiguous_format).index_add_(
        0, slots, parts
    )


def own_rows(rows: Tensor, sums: Sequence[Tensor], first: int, length: int) -> list[Tensor]:
    """Return the rows that are in a window of the table, counted from its first row.

    Args:
        rows: Distinct rows [N]; -1 in unused slots.
        sums: Their gradients, [N, d] each.
        first: First row of the window.
        length: Number of its rows, >= 1.

    Returns:
        Index into the window [N], and gradients [N, d]. A slot without a row of the window repeats
        one that has one; without any, it is row 0 with gradient 0.
    """
    local = rows - first
    if not rows.numel():
        return [local, *(one.clone() for one in sums)]
    inside = (local >= 0).logical_and_(local < length)
    spare = inside.to(torch.uint8).argmax().reshape(1)  # the first slot inside; 0 without any
    slots = torch.where(inside, torch.arange(len(rows), device=rows.device), spare)
    found = inside.index_select(0, slots)
    index = local.index_select(0, slots).masked_fill_(~found, 0)
    gone = ~found.unsqueeze(1)
    return [index, *(one.index_select(0, slots).masked_fill_(gone, 0) for one in sums)]


def put_rows_(table: Tensor, index: Tensor, new: Tensor) -> Tensor:
    """Overwrite rows of a table, and return it.

    Args:
        table: [v, ...].
        index: Rows [N]; those that are equal get equal values.
        new: Their new values, [N, ...].
    """
    return table.index_copy_(0, index.long(), new)  # which takes no int32


def _put_rows(table: Tensor, index: Tensor, new: Tensor) -> Tensor:
    return put_rows_(table.clone(memory_format=torch.contiguous_format), index, new)


def row_update(
    operator_of: Callable[[str], Callable[..., Any]],
    rows: Tensor,
    sums: Sequence[Tensor],
    tensors: Sequence[Tensor],
    program: Sequence[Any],
    results: Sequence[str],
) -> list[Tensor]:
    """Apply an update to some rows of a table and of its states; see `sbp_aten.rules.row_updates`.

    Args:
        operator_of: Returns the function of an operator.
        rows: Distinct rows [N]; -1 in unused slots.
        sums: Their gradients, [N, d] each.
        tensors: The table and its states, [v, ...].
        program: Calls (outputs, operator, args, kwargs) on rows, with names for values. It does not
            change a row whose gradients are 0.
        results: Name of the new rows of each of the first tensors.
    """
    index, *own = own_rows(rows, sums, 0, max(tensors[0].shape[0], 1))
    values: dict[str, Any] = {f"~sums{at}": one for at, one in enumerate(own)}
    values |= {f"~row{at}": one.index_select(0, index) for at, one in enumerate(tensors)}

    def bound(part: Any) -> Any:
        if isinstance(part, list | tuple):
            return [bound(one) for one in part]
        return values.get(part, part) if isinstance(part, str) else part

    for outputs, op, args, named in program:
        kwargs: Mapping[str, Any] = {key: bound(value) for key, value in named}
        made = operator_of(op)(*bound(args), **kwargs)
        values |= zip(outputs, [made] if isinstance(made, Tensor) else made, strict=True)
    pairs = zip(tensors, results, strict=False)
    return [_put_rows(one, index, values[name]) for one, name in pairs]


#: The in-place forms by name. They return the tensors that they overwrite.
IN_PLACE: dict[str, Callable[..., Tensor]] = {"sbp.put_rows_.default": put_rows_}


def _unique_shapes(indices: Tensor, gradients: Sequence[Tensor]) -> list[Tensor]:
    count = indices.numel()
    sums = (one.new_empty((count, one.shape[-1])) for one in gradients)
    return [indices.new_empty((count,)), *sums]


def _own_shapes(rows: Tensor, sums: Sequence[Tensor], first: int, length: int) -> list[Tensor]:
    return [one.new_empty(one.shape) for one in (rows, *sums)]


def _put_shape(table: Tensor, index: Tensor, new: Tensor) -> Tensor:
    return table.new_empty(table.shape)


register("unique_rows(Tensor indices, Tensor[] gradients) -> Tensor[]", unique_rows, _unique_shapes)
register(
    "own_rows(Tensor rows, Tensor[] sums, int first, int length) -> Tensor[]",
    own_rows,
    _own_shapes,
)
register("put_rows(Tensor table, Tensor index, Tensor new) -> Tensor", _put_rows, _put_shape)

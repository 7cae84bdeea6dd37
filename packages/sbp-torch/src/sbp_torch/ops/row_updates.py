"""Register operators that update the rows of a table that a step has looked up, and no others.

    sbp.unique_rows(indices, gradients)           -> rows [N], sums [N, d]
    sbp.own_rows(rows, sums, first, length)       -> index [N], sums [N, d], touched []
    sbp.put_rows(table, index, new)               -> the table with new rows
    sbp.row_update(rows, sums, tensors, program, results, lazy)    -> new tensors

N is the number of lookups, so all shapes are fixed, although the number of distinct rows is not:

    indices     7  3  7  -1                      -1: a lookup that has no gradient, such as padding
    rows        3  7  -1  -1                     each row once; unused slots are -1
    sums        gradient of 3, of 7, 0, 0

A rank that holds the rows 4 to 8 finds 7 in the second slot. Slots without a row of the rank repeat
a slot that has one: they compute the same new row, and writing it twice changes nothing.

    own_rows(rows, sums, 4, 4)      index 3 3 3 3    sums all those of row 7    touched: true

`put_rows` has the in-place form `put_rows_`. `row_update` is the update as one operator of a graph;
plans contain the other three in its place. Importing this module registers the operators.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from sbp_torch.ops import register


def unique_rows(indices: Tensor, gradients: Tensor) -> tuple[Tensor, Tensor]:
    """Return the distinct rows among indices, and the sum of the gradients of each.

    Args:
        indices: Integers [...], with N elements; negative ones are left out.
        gradients: Floating [..., d].

    Returns:
        Rows [N], then -1 in unused slots; sums [N, d], which are 0 there.
    """
    flat, width = indices.reshape(-1), gradients.shape[-1]
    count = flat.numel()
    parts = gradients.reshape(count, width)
    if not count:
        return flat.clone(), parts.clone()
    ordered, order = torch.sort(flat.clamp(min=-1), stable=True)
    is_new = torch.ones_like(ordered)
    is_new[1:] = ordered[1:] != ordered[:-1]
    slots = is_new.cumsum(0) - 1  # of the indices in their sorted order
    rows = torch.full_like(ordered, -1).scatter_(0, slots, ordered)
    slot_of = torch.empty_like(slots).scatter_(0, order, slots)
    # The kernel of the dense gradient, on a table of slots: it adds in the same order.
    sums = torch.ops.aten.embedding_dense_backward(parts, slot_of, count, -1, False)
    return rows, sums.masked_fill_((rows < 0).unsqueeze(1), 0)


def own_rows(rows: Tensor, sums: Tensor, first: int, length: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the rows that are in a window of the table, counted from its first row.

    Args:
        rows: Distinct rows [N]; -1 in unused slots.
        sums: The gradient of each, [N, d].
        first: First row of the window.
        length: Number of its rows, >= 1.

    Returns:
        Index into the window [N]; gradients [N, d]; and a boolean [], whether there is any row. A
        slot without a row of the window repeats one that has one; without any, it is row 0 with
        gradient 0.
    """
    local = rows - first
    inside = (local >= 0).logical_and(local < length)
    if not rows.numel():
        return local, sums.clone(), inside.any()
    touched = inside.any()
    spare = inside.to(torch.uint8).argmax().reshape(1)  # the first slot inside
    row = torch.where(touched, local.index_select(0, spare), 0)
    gradient = torch.where(touched, sums.index_select(0, spare), 0.0)
    return (
        torch.where(inside, local, row),
        torch.where(inside.unsqueeze(1), sums, gradient.to(sums.dtype)),
        touched,
    )


def put_rows_(table: Tensor, index: Tensor, new: Tensor, touched: Tensor | None = None) -> Tensor:
    """Overwrite rows of a table, and return it.

    Args:
        table: [v, ...].
        index: Rows [N]; those that are equal get equal values.
        new: Their new values, [N, ...].
        touched: A boolean []: whether to write anything; None writes.
    """
    if touched is not None:
        new = torch.where(touched, new, table.index_select(0, index))
    return table.index_copy_(0, index, new)


def _put_rows(table: Tensor, index: Tensor, new: Tensor, touched: Tensor | None = None) -> Tensor:
    copy = table.clone(memory_format=torch.contiguous_format)
    return put_rows_(copy, index, new, touched)


def row_update(
    operator_of: Callable[[str], Callable[..., Any]],
    rows: Tensor,
    sums: Tensor,
    tensors: Sequence[Tensor],
    program: Sequence[Any],
    results: Sequence[str],
    lazy: bool,
) -> list[Tensor]:
    """Apply an update to some rows of a table and of its states; see `sbp_aten.rules.row_updates`.

    Args:
        operator_of: Returns the function of an operator.
        rows: Distinct rows [N]; -1 in unused slots.
        sums: Their gradients, [N, d].
        tensors: The table and its states, [v, ...].
        program: Calls (outputs, operator, args, kwargs) on rows, with names for values.
        results: Name of the new rows of each of the first tensors.
        lazy: Whether the update may change a row whose gradient is 0.
    """
    length = tensors[0].shape[0]
    index, own, touched = own_rows(rows, sums, 0, max(length, 1))
    values: dict[str, Any] = {"~sums": own}
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
    only = touched if lazy else None
    return [_put_rows(one, index, values[name], only) for one, name in pairs]


#: The in-place forms by name. They return the tensors that they overwrite.
IN_PLACE: dict[str, Callable[..., Tensor]] = {"sbp.put_rows_.default": put_rows_}


def _unique_shapes(indices: Tensor, gradients: Tensor) -> tuple[Tensor, Tensor]:
    count = indices.numel()
    return indices.new_empty((count,)), gradients.new_empty((count, gradients.shape[-1]))


def _own_shapes(rows: Tensor, sums: Tensor, first: int, length: int) -> tuple[Tensor, ...]:
    touched = rows.new_empty((), dtype=torch.bool)
    return rows.new_empty(rows.shape), sums.new_empty(sums.shape), touched


def _put_shape(table: Tensor, index: Tensor, new: Tensor, touched: Tensor | None = None) -> Tensor:
    return table.new_empty(table.shape)


register(
    "unique_rows(Tensor indices, Tensor gradients) -> (Tensor, Tensor)", unique_rows, _unique_shapes
)
register(
    "own_rows(Tensor rows, Tensor sums, int first, int length) -> (Tensor, Tensor, Tensor)",
    own_rows,
    _own_shapes,
)
register(
    "put_rows(Tensor table, Tensor index, Tensor new, Tensor? touched=None) -> Tensor",
    _put_rows,
    _put_shape,
)

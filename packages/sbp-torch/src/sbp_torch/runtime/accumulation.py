"""Accumulate values over the micro-batches of a step: scaled sums, maxima, minima, or stacks.

`Accumulation` runs the accumulation actor of a plan. The reference runtime and `run_graph` call
`accumulate` themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from sbp_core.compile import Accumulate
from sbp_core.graph import STACK

#: Functions that combine extremes of micro-batches. For booleans they are "any" and "all".
EXTREMES: Mapping[str, Callable[..., Tensor]] = {
    "maximum": torch.maximum,
    "minimum": torch.minimum,
}


def accumulate(total: Tensor | None, part: Tensor, how: float | str | None) -> Tensor:
    """Return a running total with one more part; the memory of a sum is overwritten.

    Args:
        total: The total of the earlier parts; None for the first part.
        part: The value of a micro-batch, of the same shape and dtype.
        how: The factor of each part in the sum; a key of `EXTREMES`; `STACK` for all parts, on a
            new first dim; or None to return the part.
    """
    if how is None:
        return part
    if how == STACK:
        row = part.unsqueeze(0)
        return row.clone() if total is None else torch.cat([total, row])
    if isinstance(how, str):
        return part.clone() if total is None else EXTREMES[how](total, part, out=total)
    return part * how if total is None else total.add_(part, alpha=how)


class Accumulation:
    """Sums over micro-batches, in their order.

    Args:
        actor: The actor of a plan that accumulates.
        num_parts: Number of parts in each sum.
    """

    def __init__(self, actor: Accumulate, num_parts: int) -> None:
        parts = [part for part, _, _ in actor.accumulates]
        self.parts = [
            (part, total, how, part not in parts[turn + 1 :])
            for turn, (part, total, how) in enumerate(actor.accumulates)
        ]
        self.num_parts = num_parts
        self.sums: dict[str, Tensor] = {}

    def add(self, index: int, values: dict[str, Tensor | float | int]) -> dict[str, Tensor]:
        """Add the parts of one firing (execution of the actor); return complete sums, else nothing.

        Args:
            index: Number of the firing. The first part of a sum replaces a total that a failed
                step may have left.
            values: The parts by key; each is removed after its last use.
        """
        number = index % self.num_parts
        for part, total, how, is_last_use in self.parts:
            value = values.pop(part) if is_last_use else values[part]
            assert isinstance(value, Tensor), f"{total} sums tensors"
            self.sums[total] = accumulate(self.sums.get(total) if number else None, value, how)
            del value
        if number + 1 < self.num_parts:
            return {}
        made, self.sums = self.sums, {}
        return made

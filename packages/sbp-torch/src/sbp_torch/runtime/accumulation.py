"""What an accumulation does with the parts of several micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from sbp_core.compile import Accumulate

#: How extremes of micro-batches become that of the step. Of booleans they are "any" and "all".
EXTREMES: Mapping[str, Callable[..., Tensor]] = {
    "maximum": torch.maximum,
    "minimum": torch.minimum,
}


def joined(total: Tensor | None, part: Tensor, how: float | str | None) -> Tensor:
    """Return a sum so far, with one more part; an earlier sum is written over.

    Args:
        total: The sum of the parts before; None for the first part.
        part: Of a micro-batch.
        how: The factor of each part in the sum; a key of `EXTREMES`; or None, which takes the part
            itself.
    """
    if how is None:
        return part
    if isinstance(how, str):
        return part.clone() if total is None else EXTREMES[how](total, part, out=total)
    return part * how if total is None else total.add_(part, alpha=how)


class Accumulation:
    """Sums over micro-batches, in their order.

    Args:
        actor: An accumulation.
        num_parts: Of each sum.
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
        """Add the parts of one firing; return the sums with the last one, else nothing.

        Args:
            index: Of the firing; the first of a sum begins anew, whatever a step that failed has
                left.
            values: The parts by key; each is taken out after its last use.
        """
        number = index % self.num_parts
        for part, total, how, is_last_use in self.parts:
            value = values.pop(part) if is_last_use else values[part]
            assert isinstance(value, Tensor), f"{total} sums tensors"
            self.sums[total] = joined(self.sums.get(total) if number else None, value, how)
            del value
        if number + 1 < self.num_parts:
            return {}
        made, self.sums = self.sums, {}
        return made

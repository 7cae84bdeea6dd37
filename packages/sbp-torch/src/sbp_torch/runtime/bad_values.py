"""Find the operator that makes the first infinite or NaN value of a step.

    watch = BadValueWatch()
    session.watch = watch
    session.step(batch, scalars)
    del session.watch
    watch.found

An operator is the origin of a NaN if none of its inputs has one, and of an infinity if all its
inputs are finite. Intended infinities, such as in a mask, do not count: they are arguments of the
call, or come from such a call. The watch makes every operator call about 0.1 ms slower. It sees
only operators that are called one by one, not those in compiled segments.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sbp_torch._torch_compat import OpOverload
from sbp_torch.ops.operator_calls import OperatorCalls
from sbp_torch.segments.codegen import running_node

#: Kinds of bad values, the worse kind first.
NAN, INFINITY = "NaN", "infinity"

#: Largest number of inputs that are described.
_MOST_INPUTS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class BadValue:
    """The first bad value of a kind on a rank.

    Args:
        rank: The rank.
        kind: `NAN` or `INFINITY`.
        number: Number of the operator call on the rank, from 1.
        op: The operator.
        node: Node of the graph to which the call belongs, if it is known.
        micro_batch: The micro-batch: how often the node had been called before.
        inputs: Type, shape and range of the first tensors among the arguments.
    """

    rank: int
    kind: str
    number: int
    op: str
    node: str
    micro_batch: int
    inputs: tuple[str, ...]


class BadValueWatch:
    """Records the first bad value of each kind on each rank; a `Watch` of a session."""

    def __init__(self) -> None:
        #: By rank and kind.
        self.found: dict[tuple[int, str], BadValue] = {}
        self._calls: Counter[int] = Counter()
        self._calls_of_node: Counter[tuple[int, str]] = Counter()

    def __call__(self, rank: int) -> AbstractContextManager[object]:
        """Return the context in which a rank's work is watched."""
        return OperatorCalls(partial(self._look, rank))

    def _look(
        self, rank: int, op: OpOverload, inputs: Sequence[Any], results: Sequence[Any]
    ) -> None:
        """Check the results of an operator.

        An operator that writes its result over an argument is not found: the argument, which is
        read after the call, has the bad value, too.
        """
        self._calls[rank] += 1
        node = running_node()
        self._calls_of_node[rank, node] += 1
        made = {kind for value in results for kind in _kinds(value)}
        if not made:
            return
        given = {kind for value in inputs for kind in _kinds(value)}
        for kind in made:
            is_origin = kind not in given if kind == NAN else not given
            if is_origin:
                self.found.setdefault(
                    (rank, kind),
                    BadValue(
                        rank=rank,
                        kind=kind,
                        number=self._calls[rank],
                        op=str(op),
                        node=node,
                        micro_batch=self._calls_of_node[rank, node] - 1,
                        inputs=tuple(map(_range_of, _tensors(inputs)[:_MOST_INPUTS])),
                    ),
                )


def _kinds(value: Any) -> set[str]:
    """Return the kinds of bad values that a value has."""
    if isinstance(value, float):
        return set() if math.isfinite(value) else {NAN if math.isnan(value) else INFINITY}
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return set()
    # A finite sum proves that all elements are finite: one pass. The sum itself may overflow.
    if value.numel() == 0 or math.isfinite(value.detach().sum(dtype=torch.float64).item()):
        return set()
    has = {NAN: value.isnan(), INFINITY: value.isinf()}
    return {kind for kind, where in has.items() if where.any()}


def _tensors(values: Sequence[Any]) -> list[Tensor]:
    return [value for value in values if isinstance(value, Tensor)]


def _range_of(value: Tensor) -> str:
    """Return type, shape, and the range of the finite elements."""
    dtype = str(value.dtype).removeprefix("torch.")
    text = f"{dtype} {tuple(value.shape)}"
    if not value.is_floating_point() or not value.numel():
        return text
    finite = value[value.isfinite()]
    span = f"{finite.min().item():.3g} to {finite.max().item():.3g}" if finite.numel() else "none"
    rest = value.numel() - finite.numel()
    return f"{text} from {span}" + (f", {rest} not finite" if rest else "")

"""Whether two captured steps have one loss and one gradient, each of a batch of its own.

    before      loss, gradients, new buffers   of a batch                        [[7, 3, 5]]
    after       loss, gradients, new buffers   of the same batch, padded         [[7, 3, 5, 0]]

Both are run in double precision, from one set of states: what differs by more than rounding is what
padding has changed. What a loss ignores is up to the numbers in a batch, so nothing of it is drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from sbp_core.errors import SbpValueError
from sbp_core.graph import InputKind, LogicalGraph, OutputKind
from sbp_core.units import format_seconds
from sbp_torch.proof.compare import off_by
from sbp_torch.proof.cost import run_s
from sbp_torch.proof.drawing import Draw
from sbp_torch.proof.whole import (
    MUCH,
    Given,
    OutputDifference,
    as_difference,
    changed_states,
    drawn_scalars,
    drawn_states,
    rounding_noise,
)
from sbp_torch.proof.wide import widened
from sbp_torch.runtime.single import run_graph

_HOW = Draw(ignored="none", seed=8)


@dataclass(frozen=True, slots=True, kw_only=True)
class PaddedStep:
    """A training step that was captured twice: of a batch, and of the same batch, padded.

    Args:
        before: Of the batch. Both are of one micro-batch and over the same states.
        after: Of the padded one.
        batch: What `before` takes, by name.
        padded: What `after` takes, by name.
    """

    before: LogicalGraph
    after: LogicalGraph
    batch: Mapping[str, Tensor]
    padded: Mapping[str, Tensor]

    def differences(
        self, states: Callable[[], Mapping[str, Tensor]] = dict, budget_s: float = 10.0
    ) -> list[OutputDifference]:
        """Return the loss, metrics and new states that differ by more than rounding.

        Args:
            states: Returns values of the states. Parameters that have none, as they lie on `meta`
                or are left out, are small random numbers.
            budget_s: Most seconds that running may take, as estimated.

        Raises:
            SbpValueError: it would take longer; it does not run in double precision; or the loss
                of the batch is no number, so that nothing can be said.
        """
        before, after = widened(self.before), widened(self.after)
        each_s = run_s(before, before.nodes) + run_s(after, after.nodes)
        if each_s > budget_s:
            raise SbpValueError(f"it would take about {format_seconds(each_s)}")
        with torch.no_grad():
            try:
                return list(self._differences(before, after, states()))
            except (RuntimeError, IndexError, TypeError, NotImplementedError) as error:
                told = (str(error).splitlines() or [type(error).__name__])[0]
                raise SbpValueError(f"it does not run in double precision: {told}") from error

    def _differences(
        self, before: LogicalGraph, after: LogicalGraph, known: Mapping[str, Tensor]
    ) -> Iterator[OutputDifference]:
        random = _HOW.generator()
        states = drawn_states(before, known, _HOW, random, noise=0.0)
        scalars = drawn_scalars(before, random)
        given: Given = ([_wide(before, self.batch)], scalars, states)
        wanted, old = run_graph(before, states, given[0], scalars)
        found, new = run_graph(after, states, [_wide(after, self.padded)], scalars)
        losses = [out.name for out in before.outputs if out.kind is OutputKind.LOSS]
        if not all(bool(wanted[name].isfinite().all()) for name in losses):
            raise SbpValueError("the loss of the batch is no finite number")
        differences = []
        for out in before.outputs:
            if out.kind is OutputKind.STATE:
                continue
            if off_by(wanted[out.name], found[out.name]):
                pair = wanted[out.name], found[out.name]
                differences.append(as_difference(out.name, out.kind, pair, _HOW, has_loss=True))
        for name, one, other in changed_states(before, after, states, old, new):
            differences.append(
                as_difference(name, OutputKind.STATE, (one, other), _HOW, has_loss=True)
            )
        noise = rounding_noise(before, given) if differences else {}
        yield from (found for found in differences if found.gap > MUCH * noise[found.name])


def _wide(graph: LogicalGraph, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a batch on the CPU, in the dtypes of a graph in double precision."""
    names = [entry.name for entry in graph.inputs if entry.kind is InputKind.BATCH]
    return {
        name: batch[name].detach().cpu().to(getattr(torch, graph.tensor(name).dtype))
        for name in names
    }

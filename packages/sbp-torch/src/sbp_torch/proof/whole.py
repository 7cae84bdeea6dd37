"""Proof of a whole step: both graphs take it on the same numbers, in double precision.

    before      loss, metrics, new states  of the whole batch, or of parts that are accumulated
    after       loss, metrics, new states  of the same rows, part by part

`WholeStep` takes random numbers, and `PaddedStep` a batch and the same batch, padded. What differs
by more than rounding is the fault of the second graph.

States of the optimizer have the magnitudes that a step gives them: an update divides by roots of
some of them, and from zeros on, rounding errors of gradients that cancel would become whole steps.
So a step is taken first, and each state is then drawn around the mean of what it has made.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from sbp_core.errors import SbpValueError
from sbp_core.graph import (
    GraphInput,
    InputKind,
    LogicalGraph,
    OutputKind,
    TensorType,
)
from sbp_core.runtime import Number
from sbp_core.units import format_seconds
from sbp_torch.proof.drawing import Draw, Integers, drawn, integers_of
from sbp_torch.proof.running import TOLERANCE, largest, off_by, run_s, wide, widened
from sbp_torch.runtime.single import run_graph

#: Of what all states of one kind have, as much counts as large in each: less is rounding.
_SMALL = 1e-3

_EPS = torch.finfo(torch.float64).eps

#: Rounding errors of the difference between a new state and the old one, in units of it.
_ROUNDING = 64 * _EPS

#: Inputs are changed by these many units in the last place, to see what rounding makes of outputs.
_NUDGES = (3, -5, 7)

#: Changes of so many times what such a nudge changes are rounding, too: sums in another order.
_MUCH = 64

#: Noise on parameters that are drawn around their known values.
_NEAR = 0.05

#: How steps are drawn: the first is enough where nothing can be ignored.
DRAWS = (
    Draw(ignored="some", seed=4),
    Draw(ignored="none", seed=5),
    Draw(ignored="first", seed=6),
    Draw(ignored="all", seed=7),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputDifference:
    """An output that differs.

    Args:
        name: Of the output, and what it is.
        kind: Loss, metric or state.
        wanted: The number that the first graph gives, where they differ most.
        found: That of the second.
        gap: Their difference; infinite if one of them is no number.
        ignored: Which rows were.
        has_loss: Whether the loss of the first graph is a number there.
        is_rounding: Whether the first graph differs as much from itself, if its inputs change by
            some units in the last place. Nothing can be said then: the output cancels.
    """

    name: str
    kind: OutputKind
    wanted: float
    found: float
    gap: float
    ignored: str
    has_loss: bool
    is_rounding: bool = False


#: Batches, scalars and states of a step.
Given = tuple[list[Mapping[str, Tensor]], dict[str, Number], dict[str, Tensor | Number]]


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeStep:
    """Two graphs of one step, in double precision.

    Args:
        before: Takes the rows of all parts at once, or as the second one takes them.
        after: Takes a step in parts.
        example: A batch of the first one's form, or of another number of rows.
        states: Values of states, where they are known; integers and buffers keep them.
        near: Whether parameters are drawn around their known values, not at random.
    """

    before: LogicalGraph
    after: LogicalGraph
    example: Mapping[str, Tensor]
    states: Mapping[str, Tensor]
    near: bool = False

    def differences(self, draws: Sequence[Draw]) -> Iterator[OutputDifference]:
        """Yield what differs in the first draw in which something does but for rounding errors.

        Raises:
            SbpValueError: the loss is no number in the first draw, so that nothing can be said.
            Exception: what operators raise that do not run on such numbers.
        """
        before, after = self.before, self.after
        states: dict[str, Tensor | Number] = {}
        for how in draws:
            random = how.generator()
            known = integers_of(before)
            batches: list[Mapping[str, Tensor]] = [
                {
                    name: drawn(
                        before.tensor(name),
                        known.get(name, Integers()),
                        how,
                        random,
                        self.example.get(name),
                    )
                    for name in _batch_names(before)
                }
                for _ in range(before.num_micro_batches)
            ]
            scalars = _drawn_scalars(before, random)
            if not states:
                near = _NEAR if self.near else None
                states = _drawn_states(before, self.states, how, random, near)
                _, warm = run_graph(before, states, batches, scalars)
                states = _around(before, states, warm, random)
            parts: list[Mapping[str, Tensor]] = list(batches)
            count = after.num_micro_batches
            if len(batches) != count:  # the parts of the one batch, for the second graph
                (batch,) = batches
                parts = [
                    {
                        name: batch[name]
                        if (size := after.tensor(name).shape) == tuple(batch[name].shape)
                        else batch[name][index * size[0] :][: size[0]]
                        for name in _batch_names(after)
                    }
                    for index in range(count)
                ]
            no_loss = "the loss of the captured step is no number there" * (how is DRAWS[0])
            judged = _judged(before, after, (batches, scalars, states), parts, how, no_loss)
            yield from judged
            if not all(one.is_rounding for one in judged):
                return

    def can_ignore(self) -> bool:
        """Whether rows can be ignored: by a mask, or by a number that targets may be."""
        known = integers_of(self.before)
        for entry in self.before.inputs:
            if entry.kind is not InputKind.BATCH:
                continue
            kind, example = self.before.tensor(entry.name), self.example.get(entry.name)
            is_mask = kind.dtype == "bool"
            if example is not None and "float" in kind.dtype and example.numel():
                is_mask = bool(((example == 0) | (example == 1)).all()) and bool(example.any())
            if is_mask or known.get(entry.name, Integers()).ignored is not None:
                return True
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class PaddedStep:
    """A training step that was captured twice: of a batch, and of the same batch, padded.

    Both are run from one set of states. What a loss ignores is up to the numbers in a batch, so
    nothing of it is drawn.

        before      loss, gradients, new buffers   of a batch                       [[7, 3, 5]]
        after       loss, gradients, new buffers   of the same batch, padded        [[7, 3, 5, 0]]

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
            states: Returns values of the states. Parameters that have none, as they are on `meta`
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
        how = Draw(ignored="none", seed=8)
        random = how.generator()
        batch, padded = (
            {
                name: given[name].detach().cpu().to(getattr(torch, graph.tensor(name).dtype))
                for name in _batch_names(graph)
            }
            for graph, given in ((before, self.batch), (after, self.padded))
        )
        with torch.no_grad():
            try:
                held = _drawn_states(before, states(), how, random, noise=0.0)
                given: Given = ([batch], _drawn_scalars(before, random), held)
                no_loss = "the loss of the batch is no finite number"
                judged = _judged(before, after, given, [padded], how, no_loss)
            except (RuntimeError, IndexError, TypeError, NotImplementedError) as error:
                told = (str(error).splitlines() or [type(error).__name__])[0]
                raise SbpValueError(f"it does not run in double precision: {told}") from error
        return [one for one in judged if not one.is_rounding]


def _judged(
    before: LogicalGraph,
    after: LogicalGraph,
    given: Given,
    parts: list[Mapping[str, Tensor]],
    how: Draw,
    no_loss: str,
) -> list[OutputDifference]:
    """Return the outputs that differ, and whether rounding may be why.

    Args:
        before: One graph, in double precision.
        after: The other one.
        given: Batches, scalars and states of the first.
        parts: Batches of the second.
        how: They were drawn.
        no_loss: What is raised if the loss of the first is no number; empty if it may be none.

    Raises:
        SbpValueError: the loss of the first is no number, and should be one.
    """
    batches, scalars, states = given
    wanted, old = run_graph(before, states, batches, scalars)
    tied: dict[str, Tensor | Number] = {}
    for entry in after.inputs:  # some states of the second graph stand for several of the first
        if entry.kind.is_state and (entry.name in states or entry.stands_for):
            value = states[entry.name if entry.name in states else entry.stands_for[0]]
            tied[entry.name] = value if after.is_tensor(entry.name) else float(value)
    found, new = run_graph(after, tied, parts, scalars)
    losses = (wanted[out.name] for out in before.outputs if out.kind is OutputKind.LOSS)
    has_loss = all(bool(loss.isfinite().all()) for loss in losses)
    if no_loss and not has_loss:
        raise SbpValueError(no_loss)
    off: list[tuple[str, OutputKind, Tensor, Tensor | None]] = []
    for out in before.outputs:
        if out.kind is not OutputKind.STATE:
            made = found.get(out.name)
            if made is None or off_by(wanted[out.name], made):
                off.append((out.name, out.kind, wanted[out.name], made))
    changed = _changed_states(before, after, states, old, new)
    off += [(name, OutputKind.STATE, one, other) for name, one, other in changed]
    noise = _rounding_noise(before, given) if off else {}
    judged = []
    for name, kind, one, other in off:
        numbers = float("nan"), float("nan")
        if other is not None and other.shape == one.shape and one.numel():
            apart = (one.double() - other.double()).abs().nan_to_num(torch.inf).reshape(-1)
            at = int(apart.argmax())  # where they are most apart
            numbers = float(one.reshape(-1)[at]), float(other.reshape(-1)[at])
        gap = abs(numbers[0] - numbers[1])
        gap = gap if gap < math.inf else math.inf  # also of what is no number
        judged.append(
            OutputDifference(
                name=name,
                kind=kind,
                wanted=numbers[0],
                found=numbers[1],
                gap=gap,
                ignored=how.ignored,
                has_loss=has_loss,
                is_rounding=gap <= _MUCH * noise[name],
            )
        )
    return judged


def _drawn_states(
    graph: LogicalGraph,
    known: Mapping[str, Tensor],
    how: Draw,
    random: torch.Generator,
    noise: float | None,
) -> dict[str, Tensor | Number]:
    """Return parameters, buffers as they are, zeros of the optimizer; in double precision.

    Args:
        graph: Whose states.
        known: Values of states, where there are any; others are on `meta`, or left out.
        how: How parameters are drawn.
        random: Draws them.
        noise: Parameters that are known get so much noise, of the size of random ones; None draws
            all of them.
    """
    found: dict[str, Tensor | Number] = {}
    for entry in graph.inputs:
        if not entry.kind.is_state:
            continue
        kind = graph.types[entry.name]
        if not isinstance(kind, TensorType):
            found[entry.name] = float(known.get(entry.name, torch.ones(())))
            continue
        dtype = getattr(torch, kind.dtype)
        is_random = entry.kind is InputKind.PARAMETER and dtype.is_floating_point
        # Values that nobody asks for are not made.
        value = known.get(entry.name) if noise is not None or not is_random else None
        is_known = value is not None and not value.is_meta
        if is_random:
            fan_in = prod(kind.shape[1:]) if len(kind.shape) > 1 else 4
            drawn_values = how.floats(kind.shape, random).to(dtype) / max(fan_in, 1) ** 0.5
            found[entry.name] = drawn_values + (len(kind.shape) < 2)
            if value is not None and is_known:
                assert noise is not None, "else it is not asked for"
                found[entry.name] = value.detach().cpu().to(dtype) + noise * drawn_values
        elif value is not None and is_known:
            found[entry.name] = value.detach().cpu().to(dtype).clone()
        else:
            fill = float(entry.kind is InputKind.BUFFER)
            found[entry.name] = torch.full(kind.shape, fill, dtype=dtype)
    return found


def _batch_names(graph: LogicalGraph) -> list[str]:
    return [entry.name for entry in graph.inputs if entry.kind is InputKind.BATCH]


def _drawn_scalars(graph: LogicalGraph, random: torch.Generator) -> dict[str, Number]:
    """Return what the host says of a step: rates between 0.5 and 0.9, which betas may be, too."""
    found: dict[str, Number] = {"step": 2, "seed": 2}
    for entry in graph.inputs:
        if entry.kind is InputKind.SCALAR and entry.name not in found:
            found[entry.name] = 0.5 + 0.4 * float(torch.rand((), generator=random))
    return found


def _around(
    graph: LogicalGraph,
    states: Mapping[str, Tensor | Number],
    made: Mapping[str, Tensor | Number],
    random: torch.Generator,
) -> dict[str, Tensor | Number]:
    """Return states with those of the optimizer drawn around what a step has made of them."""
    found = dict(states)
    means: dict[str, float] = {}
    of_kind: dict[str, float] = defaultdict(float)
    for entry in graph.inputs:
        value = made.get(entry.name)
        is_float = isinstance(value, Tensor) and value.dtype.is_floating_point and value.dim()
        if entry.kind is InputKind.OPTIMIZER_STATE and is_float:
            assert isinstance(value, Tensor)
            mean = float(value.abs().mean()) if value.numel() else 0.0
            means[entry.name] = mean if mean < float("inf") else 0.0
            key = _key(entry)
            of_kind[key] = max(of_kind[key], means[entry.name])
    for name, mean in means.items():
        shape = torch.as_tensor(states[name]).shape
        size = max(mean, _SMALL * of_kind[_key(graph.input_kinds[name])])
        unit = torch.rand(shape, generator=random, dtype=torch.float64) + 0.5
        found[name] = unit * size
    return found


def _key(entry: GraphInput) -> str:
    return entry.name.removeprefix(f"{entry.of}.") if entry.of else ""


def _rounding_noise(graph: LogicalGraph, given: Given) -> dict[str, float]:
    """Return by how much each output changes if inputs change in their last places.

    All elements of a tensor change by one factor, so that equal ones stay equal.
    """
    batches, scalars, states = given
    most: dict[str, float] = defaultdict(float)
    first = _moves(graph, batches, scalars, states)
    for nudge in _NUDGES:
        factors = itertools.cycle((1 + nudge * _EPS, 1 - nudge * _EPS, 1))
        moved = _moves(
            graph,
            [{name: _times(one, next(factors)) for name, one in part.items()} for part in batches],
            scalars,
            {name: _times(one, next(factors)) for name, one in states.items()},
        )
        for name, value in moved.items():
            most[name] = max(most[name], largest(value - first[name]))
    return most


def _moves(
    graph: LogicalGraph,
    batches: list[Mapping[str, Tensor]],
    scalars: Mapping[str, Number],
    states: Mapping[str, Tensor | Number],
) -> dict[str, Tensor]:
    """Return losses, metrics, and by how much each state changes."""
    found, new = run_graph(graph, states, batches, scalars)
    changes = {
        name: wide(torch.as_tensor(new[name])) - wide(torch.as_tensor(one))
        for name, one in states.items()
    }
    return {name: wide(one) for name, one in found.items()} | changes


def _times(value: Tensor | Number, factor: float) -> Any:
    is_float = value.dtype.is_floating_point if isinstance(value, Tensor) else False
    return value * factor if is_float else value


def _changed_states(
    before: LogicalGraph,
    after: LogicalGraph,
    states: Mapping[str, Tensor | Number],
    old: Mapping[str, Tensor | Number],
    new: Mapping[str, Tensor | Number],
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield the states whose change differs, and their two new values."""
    tied = {name: one.name for one in after.inputs for name in one.stands_for}
    # What the planned step leaves out stays as it is.
    left_out = states.keys() - after.input_kinds.keys() - tied.keys()
    pairs = {
        name: (
            torch.as_tensor(old[name]),
            torch.as_tensor(states[name] if name in left_out else new[tied.get(name, name)]),
        )
        for name in states
    }
    changes: dict[str, tuple[Tensor, Tensor]] = {}
    of_kind: dict[str, float] = defaultdict(float)
    for name, (wanted, found) in pairs.items():
        start = torch.as_tensor(states[name])
        if start.dtype.is_floating_point:
            changes[name] = wanted - start, found - start
            key = _key(before.input_kinds[name])
            of_kind[key] = max(of_kind[key], largest(changes[name][0]))
        elif off_by(wanted, found):
            yield name, wanted, found
    for name, (wanted, found) in changes.items():
        small = _SMALL * of_kind[_key(before.input_kinds[name])]
        scale = max(small, _ROUNDING / TOLERANCE * largest(pairs[name][0]))
        if off_by(wanted, found, scale):
            yield name, *pairs[name]

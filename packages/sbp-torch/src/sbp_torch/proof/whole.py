"""Check that two graphs of a step give equal results, by running both in double precision.

    before      loss, metrics, new states  of the whole batch, or of accumulated micro-batches
    after       loss, metrics, new states  of the same rows, in micro-batches

`WholeStep` uses random numbers, for `proofs`. `PaddedStep` uses a batch and the same batch with
padding, for `sbp_launch.step.neutral`. A difference above rounding is an error of the second graph.

Optimizer states need realistic magnitudes: an update divides by roots of some of them, so with
zeros, rounding errors of gradients that cancel would become large updates. So the first graph takes
a step, and each optimizer state is then drawn around the mean of its new values.
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
from sbp_torch.proof.double_precision import TOLERANCE, graph_to_double, largest, off_by, to_double
from sbp_torch.proof.drawing import Draw, Integers, draw, integers_of
from sbp_torch.proof.parts import run_s
from sbp_torch.runtime.single import run_graph

#: Lower bound of the scale of a state, relative to the largest state of its kind (its key).
_SMALL = 1e-3

_EPS = torch.finfo(torch.float64).eps

#: Rounding error of the difference between a new state and the old one, relative to the new one.
_ROUNDING = 64 * _EPS

#: Changes of inputs, in units in the last place, that show the effect of rounding on outputs.
_NUDGES = (3, -5, 7)

#: A difference is rounding up to this multiple of the effect of a nudge: sums in another order.
_MUCH = 64

#: Noise on parameters that are drawn around their known values, relative to random parameters.
_NEAR = 0.05

#: The draws of whole steps; the first is enough if the loss cannot ignore rows.
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
        name: Name of the output.
        kind: Loss, metric or state.
        wanted: The number of the first graph, at the element that differs most.
        found: The number of the second graph at this element.
        gap: Their difference; infinite if one of them is NaN or infinite.
        ignored: Which rows the loss ignored.
        has_loss: Whether the loss of the first graph is finite.
        is_rounding: Whether the output of the first graph changes as much if its inputs change by
            some units in the last place. Then there is no verdict, because the output cancels.
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
    """Two graphs of one step, in double precision, to compare on random inputs.

    Args:
        before: The graph of the whole batch, or with the micro-batches of the second graph.
        after: The graph in micro-batches.
        example: A batch for the first graph, possibly with another number of rows.
        states: Known values of states; integers and buffers keep them.
        near: Whether parameters are drawn around their known values, not at random.
    """

    before: LogicalGraph
    after: LogicalGraph
    example: Mapping[str, Tensor]
    states: Mapping[str, Tensor]
    near: bool = False

    def differences(self, draws: Sequence[Draw]) -> Iterator[OutputDifference]:
        """Yield the outputs that differ. Stop after the first draw with more than rounding errors.

        Raises:
            SbpValueError: the loss is not finite in the first draw, so there is no verdict.
            Exception: an operator does not run on such numbers.
        """
        before, after = self.before, self.after
        states: dict[str, Tensor | Number] = {}
        for how in draws:
            random = how.generator()
            known = integers_of(before)
            batches: list[Mapping[str, Tensor]] = [
                {
                    name: draw(
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
                states = _draw_around(before, states, warm, random)
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
            judged = _judge(before, after, (batches, scalars, states), parts, how, no_loss)
            yield from judged
            if not all(one.is_rounding for one in judged):
                return

    def can_ignore(self) -> bool:
        """Whether the loss can ignore rows: by a mask, or by a special number in the targets."""
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
    """A training step that was captured twice: with a batch, and with the same batch, padded.

    Both are run from one set of states. The batch is not random, because its numbers decide what
    the loss ignores.

        before      loss, gradients, new buffers   of a batch                       [[7, 3, 5]]
        after       loss, gradients, new buffers   of the same batch, padded        [[7, 3, 5, 0]]

    Args:
        before: The graph for the batch. Both graphs have one micro-batch and the same states.
        after: The graph for the padded batch.
        batch: Inputs of `before`: names -> tensors.
        padded: Inputs of `after`: names -> tensors.
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
            states: Returns values of the states. Parameters without values, because they are on
                `meta` or left out, become small random numbers.
            budget_s: Limit on the estimated seconds of the run.

        Raises:
            SbpValueError: it would take longer; it does not run in double precision; or the loss
                of the batch is not finite, so there is no verdict.
        """
        before, after = graph_to_double(self.before), graph_to_double(self.after)
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
                judged = _judge(before, after, given, [padded], how, no_loss)
            except (RuntimeError, IndexError, TypeError, NotImplementedError) as error:
                told = (str(error).splitlines() or [type(error).__name__])[0]
                raise SbpValueError(f"it does not run in double precision: {told}") from error
        return [one for one in judged if not one.is_rounding]


def _judge(
    before: LogicalGraph,
    after: LogicalGraph,
    given: Given,
    parts: list[Mapping[str, Tensor]],
    how: Draw,
    no_loss: str,
) -> list[OutputDifference]:
    """Return the outputs that differ, and whether rounding may be the cause.

    Args:
        before: The first graph, in double precision.
        after: The second graph.
        given: Batches, scalars and states of the first graph.
        parts: Micro-batches of the second graph.
        how: The draw of these numbers.
        no_loss: Error message if the loss of the first graph is not finite; empty to allow it.

    Raises:
        SbpValueError: the loss of the first graph is not finite, and has to be.
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
            at = int(apart.argmax())  # the element with the largest difference
            numbers = float(one.reshape(-1)[at]), float(other.reshape(-1)[at])
        gap = abs(numbers[0] - numbers[1])
        gap = gap if gap < math.inf else math.inf  # also if it is NaN
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
    """Return random parameters, known buffers and optimizer states, else zeros (buffers: ones).

    Args:
        graph: The graph, in double precision.
        known: Known values of states; unknown ones are on `meta`, or left out.
        how: How parameters are drawn.
        random: The generator.
        noise: Noise on known parameters, relative to random ones; None draws all parameters.
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
        # A mapping may create values on demand, so only needed values are requested.
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
    """Return the scalar inputs of a step: random between 0.5 and 0.9, a range that betas allow."""
    found: dict[str, Number] = {"step": 2, "seed": 2}
    for entry in graph.inputs:
        if entry.kind is InputKind.SCALAR and entry.name not in found:
            found[entry.name] = 0.5 + 0.4 * float(torch.rand((), generator=random))
    return found


def _draw_around(
    graph: LogicalGraph,
    states: Mapping[str, Tensor | Number],
    made: Mapping[str, Tensor | Number],
    random: torch.Generator,
) -> dict[str, Tensor | Number]:
    """Return the states, with optimizer states drawn around the mean of their new values."""
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
    """Return the change of each output if inputs change in their last places.

    All elements of a tensor change by one factor, so equal elements stay equal.
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
    """Return losses, metrics, and the change of each state, in double precision."""
    found, new = run_graph(graph, states, batches, scalars)
    changes = {
        name: to_double(torch.as_tensor(new[name])) - to_double(torch.as_tensor(one))
        for name, one in states.items()
    }
    return {name: to_double(one) for name, one in found.items()} | changes


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
    # States that the planned step lacks stay unchanged.
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

"""Check that two graphs are equal by running only the operators in which they differ.

`proofs` compares the captured graph of a step with the planned one, on random numbers. Values are
numbered in both graphs (`numbering`). If a name has different numbers in the two graphs, the
operators that compute it from values already known to be equal are run in both. If the results are
equal, so are the two values from then on, and a local change needs only a local run:

    before                             after                                 x, w are equal
    y = mm(x, w)                       y = mm(x, w)                          equal: the same call
    m = mean(y)                        s = sum(y); m = div(s, 8)             run, from y to m: equal
    g = expand(1 / 8)                  g = expand(1 / 8)                     equal: the same call

If the results differ, their inputs may be related (a log-softmax and its logits). Then the part
grows: first by the operators that make inputs of only one of the two parts, then by those that
make all inputs.

Source: sweeping with cut points, from hardware equivalence checking: Kuehlmann, Krohm, "Equivalence
checking using cuts and heaps", DAC 1997. They prove equality; random numbers in double precision
show it except for a set of measure 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sbp_core.errors import SbpError
from sbp_core.graph import (
    GraphInput,
    GraphOutput,
    InputKind,
    LogicalGraph,
    Node,
    OutputKind,
    Rate,
    TensorType,
    ValueType,
    map_refs,
)
from sbp_core.runtime import Number
from sbp_core.signatures import OpCall, work_flop
from sbp_torch.proof.double_precision import off_by
from sbp_torch.proof.drawing import Draw, Integers, draw, integers_of
from sbp_torch.proof.numbering import Numbering, Value, number_values
from sbp_torch.runtime.single import run_graph

#: The draws of a part; a part without integers and booleans uses only the first two.
_DRAWS = (
    Draw(ignored="some"),
    Draw(ignored="none", positive=True, seed=1),
    Draw(ignored="first", seed=2),
    Draw(ignored="all", seed=3),
)

#: After this many values that differ, no more are compared: the whole step decides.
_MOST_DIFFERENT = 4

_OUT = "out"


@dataclass(slots=True)
class PartialProof:
    """The result of a proof part by part.

    Args:
        alike: Number of operators of the second graph that the first has, too, on equal values.
        parts: Number of different parts that were run.
        skipped: Operators that would need too much time or memory, or do not run in float64.
        open: Names of outputs that are not shown to be equal.
        first: The node of the first value that differed.
        left_s: Rest of the budget, in estimated seconds.
    """

    left_s: float
    alike: int = 0
    parts: int = 0
    skipped: list[Node] = field(default_factory=list)
    open: list[str] = field(default_factory=list)
    first: Node | None = None


@dataclass(frozen=True, slots=True)
class _Cone:
    """The operators that compute a value, and their inputs, which are equal in both graphs."""

    graph: LogicalGraph
    values: Mapping[str, Value]
    value: str
    nodes: tuple[Node, ...]
    given: tuple[str, ...]

    def as_graph(self) -> LogicalGraph:
        """Return the cone as a graph with one output."""
        inputs = []
        for name in self.given:
            entry = self.graph.input_kinds.get(name)
            kind = InputKind.BUFFER
            if entry is not None and entry.kind is InputKind.RNG:
                kind = InputKind.RNG
            elif self.graph.rate_of(name) is Rate.MICRO and self.graph.is_tensor(name):
                kind = InputKind.BATCH
            inputs.append(GraphInput(name=name, kind=kind))
        output = GraphOutput(name=_OUT, kind=OutputKind.METRIC, value=self.value)
        return self.graph.with_nodes(self.nodes, inputs=tuple(inputs), outputs=(output,))


class Sweep:
    """Compares two graphs in double precision whose inputs and outputs have the same names.

    Args:
        before: The captured graph.
        after: The planned graph.
        budget_s: Limit on the estimated seconds of all runs of parts.
    """

    def __init__(self, before: LogicalGraph, after: LogicalGraph, budget_s: float) -> None:
        self.before, self.after = before, after
        self.numbering = Numbering()
        tied = {old: one.name for one in after.inputs for old in one.stands_for}
        self.old = number_values(before, self.numbering, lambda name: tied.get(name, name))
        self.new: dict[str, Value] = {}
        self.found = PartialProof(left_s=budget_s)
        self._places = [{n.name: at for at, n in enumerate(g.nodes)} for g in (before, after)]
        self._bases = {value.base for value in self.old.values()}
        self._shared: set[int] = set()
        self._verdicts: dict[object, float | None] = {}
        self._different = 0

    def run(self) -> PartialProof:
        """Compare the graphs."""
        self._shared = {self.old[entry.name].base for entry in self.before.inputs}
        number_values(self.after, self.numbering, lambda name: name, self._settle, self.new)
        tied = {old: one.name for one in self.after.inputs for old in one.stands_for}
        replaced = {out.name: out.value for out in self.after.outputs}
        for out in self.before.outputs:
            # A state without a new value keeps its value; tied states have the value of their slot.
            name = out.name if out.name in replaced else tied.get(out.name, out.name)
            new = replaced.get(name, name)
            if self.old[out.value] != self.new[new] and self._off(out.value, new) != 0.0:
                self.found.open.append(out.name)
        return self.found

    def _settle(self, node: Node, made: Iterable[Value]) -> list[Value]:
        """Return the values of the outputs of a node of the second graph, after comparison."""
        values = list(made)
        self.new.update(zip(node.outputs, values, strict=True))
        self.found.alike += all(value.base in self._bases for value in values)
        for index, name in enumerate(node.outputs):
            if values[index].base not in self._bases and self._is_same(node, name):
                values[index] = self.new[name] = self.old[name]
            if values[index].base in self._bases:
                self._shared.add(values[index].base)
        return values

    def _is_same(self, node: Node, name: str) -> bool:
        """Whether a name of both graphs has equal values; False if it differs or cannot be run."""
        kinds = self.before.types.get(name), self.after.types[name]
        if kinds[0] != kinds[1] or self._different >= _MOST_DIFFERENT:
            return False
        off = self._off(name, name)
        if off is None:
            self.found.skipped.append(node)
        elif off:
            self._different += 1
            self.found.first = self.found.first or node
        return not off

    def _off(self, old: str, new: str) -> float | None:
        """Return the relative difference of a value of each graph; None if it is unknown."""
        opened: set[int] = set()
        off: float | None = None
        for turn in range(3):
            pair = (
                self._cone(self.before, self.old, old, opened),
                self._cone(self.after, self.new, new, opened),
            )
            found = self._verdict(pair)
            off = found if found is not None else off
            if off == 0.0 or found is None:
                return off
            bases = [{cone.values[name].base for name in cone.given} for cone in pair]
            opened |= bases[0] ^ bases[1] if turn == 0 else bases[0] | bases[1]
        return off

    def _cone(
        self, graph: LogicalGraph, values: Mapping[str, Value], value: str, opened: set[int]
    ) -> _Cone:
        """Return the operators that compute a value from shared values, except `opened` ones."""
        needed: dict[str, Node] = {}
        given: dict[str, None] = {}
        left = [value]
        while left:
            name = left.pop()
            node = graph.producers.get(name)
            is_shared = values[name].base in self._shared and values[name].base not in opened
            if node is None or (name != value and is_shared):
                given[name] = None
            elif node.name not in needed:
                needed[node.name] = node
                left += node.inputs()
        places = self._places[graph is self.after]
        ordered = sorted(needed.values(), key=lambda node: places[node.name])
        return _Cone(graph, values, value, tuple(ordered), tuple(sorted(given)))

    def _verdict(self, pair: tuple[_Cone, _Cone]) -> float | None:
        """Run two cones, or reuse the result of an equal pair; None if it is too large or fails."""
        key = self._key(pair)
        if key not in self._verdicts:
            # Rows can be ignored where integers or booleans are given.
            kinds = [cone.graph.types[name] for cone in pair for name in cone.given]
            tensors = [one for one in kinds if isinstance(one, TensorType)]
            draws: Sequence[Draw] = _DRAWS
            if all("float" in one.dtype for one in tensors):
                draws = _DRAWS[:2]
            each_s = sum(run_s(cone.graph, cone.nodes) for cone in pair)
            each_s += bytes_s(sum(one.size_bytes for one in tensors))  # to draw them
            draws = draws[: int(self.found.left_s / each_s)]
            if not draws or sum(held_bytes(cone.graph, cone.nodes) for cone in pair) > MOST_BYTES:
                return None
            self.found.left_s -= each_s * len(draws)
            self.found.parts += 1
            try:
                self._verdicts[key] = self._compare(pair, draws)
            except (SbpError, RuntimeError, IndexError, ValueError, TypeError):
                self._verdicts[key] = None
        return self._verdicts[key]

    def _key(self, pair: tuple[_Cone, _Cone]) -> object:
        """Return a key of two cones that does not depend on names."""
        bases: dict[int, int] = {}
        found: list[object] = []
        for cone in pair:
            names: dict[str, object] = {}
            for name in cone.given:
                value = cone.values[name]
                number = bases.setdefault(value.base, len(bases))
                rate = cone.graph.rate_of(name)
                names[name] = (number, value.shape, value.strides, value.offset, rate)
                found.append((names[name], repr(cone.graph.types[name])))
            for node in cone.nodes:
                for index, name in enumerate(node.outputs):
                    names[name] = (node.op, len(names), index)

                def named(argument: object, names: dict[str, object] = names) -> str:
                    return repr(map_refs(argument, lambda ref: ("ref", names[ref.name])))

                kwargs = tuple((k, named(v)) for k, v in sorted(node.kwargs.items()))
                found.append((node.op, node.rate, named(node.args), kwargs))
            found.append(names[cone.value])
        return tuple(found)

    def _compare(self, pair: tuple[_Cone, _Cone], draws: Sequence[Draw]) -> float | None:
        """Return the relative difference of two values on random numbers; None if all are NaN."""
        alone = [(cone, cone.as_graph()) for cone in pair]
        integers: dict[int, Integers] = {}
        for cone, graph in alone:
            for name, found in integers_of(graph).items():
                if name in cone.values:
                    base = cone.values[name].base
                    integers[base] = integers.get(base, Integers()).merge(found)
        worst, says_something = 0.0, False
        for how in draws:
            random = how.generator()
            bases: dict[int, list[Tensor | Number]] = {}
            wanted, made = (
                self._run(cone, graph, integers, bases, how, random) for cone, graph in alone
            )
            worst = max(worst, off_by(wanted, made))
            says_something |= bool(wanted.isfinite().any())
        return worst if says_something else None

    def _run(
        self,
        cone: _Cone,
        graph: LogicalGraph,
        integers: Mapping[int, Integers],
        bases: dict[int, list[Tensor | Number]],
        how: Draw,
        random: torch.Generator,
    ) -> Tensor:
        """Return the value of a cone on random bases, which both cones of a pair share."""
        count = graph.num_micro_batches
        batches: list[dict[str, Tensor]] = [{} for _ in range(count)]
        states: dict[str, Tensor | Number] = {}
        scalars: dict[str, Number] = {"step": 2, "seed": 2}
        for name in cone.given:
            value, kind = cone.values[name], cone.graph.types[name]
            if value.base not in bases:
                known = integers.get(value.base, Integers())
                varies = cone.graph.rate_of(name) is Rate.MICRO
                bases[value.base] = [
                    self._draw(value, kind, known, how, random)
                    for _ in range(count if varies else 1)
                ]
            parts = bases[value.base]
            if isinstance(kind, TensorType):
                dtype = getattr(torch, kind.dtype)
                flat = [torch.as_tensor(part).to(dtype).reshape(-1) for part in parts]
                parts = [value.of(part) for part in flat]
            else:
                parts = [part.item() if isinstance(part, Tensor) else part for part in parts]
            if graph.input_kinds[name].kind is InputKind.BATCH:
                for batch, part in zip(batches, parts, strict=True):
                    assert isinstance(part, Tensor), "a batch holds tensors"
                    batch[name] = part
            elif graph.input_kinds[name].kind is not InputKind.RNG:
                states[name] = parts[0]
        return run_graph(graph, states, list(batches), scalars)[0][_OUT]

    def _draw(
        self, value: Value, kind: ValueType, integers: Integers, how: Draw, random: torch.Generator
    ) -> Tensor | Number:
        if not isinstance(kind, TensorType):  # a host number: a float from 0.5 to 1.5, or a count
            if kind.dtype == "float":
                return 0.5 + float(torch.rand((), generator=random, dtype=torch.float64))
            return True if kind.dtype == "bool" else 2
        size = self.numbering.sizes[value.base]
        whole = TensorType(value.shape, kind.dtype)
        is_whole = torch.Size(value.shape).numel() == size
        return draw(whole if is_whole else TensorType((size,), kind.dtype), integers, how, random)


#: Most bytes that a proof may hold, as estimated. The step of a model with a million classes is
#: split over ranks, whereas a proof runs the whole tensors, in double precision.
MOST_BYTES = 250_000_000


def held_bytes(graph: LogicalGraph, nodes: Iterable[Node]) -> int:
    """Return the bytes of all tensors that nodes read and make, without views."""
    names = {name for node in nodes if "view" not in node.tags for name in node.inputs()}
    names |= {name for node in nodes if "view" not in node.tags for name in node.outputs}
    kinds = (graph.types[name] for name in names)
    return sum(one.size_bytes for one in kinds if isinstance(one, TensorType))


#: Rates of one server core in double precision, in flop/s and bytes/s; and seconds of a call.
#: Only orders of magnitude: a proof has to know whether something takes a second or an hour.
_FLOP_PER_S = 10e9
_BYTES_PER_S = 0.5e9
_CALL_S = 20e-6


def run_s(graph: LogicalGraph, nodes: Iterable[Node]) -> float:
    """Return the estimated seconds of some nodes of a graph in one step of all micro-batches."""
    total_s = 0.0
    for node in nodes:
        each_s = _CALL_S
        if not node.is_host and "view" not in node.tags:
            kinds = [graph.types[name] for name in (*node.inputs(), *node.outputs)]
            each_s += bytes_s(sum(one.size_bytes for one in kinds if isinstance(one, TensorType)))
            with suppress(SbpError):
                each_s += work_flop(OpCall.of(graph, node)) / _FLOP_PER_S
        total_s += graph.repetitions[node.rate] * each_s
    return total_s


def bytes_s(num_bytes: int) -> float:
    """Return the estimated seconds to read or write some bytes."""
    return num_bytes / _BYTES_PER_S

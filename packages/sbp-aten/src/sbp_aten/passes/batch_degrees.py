"""Which power of which sums over the batch a value of a micro-batch is proportional to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from sbp_aten.passes.batch_meaning import (
    RESHAPES,
    TOTAL_WEIGHTS,
    Kind,
    Meaning,
    linear_signatures,
    varying_values,
)
from sbp_aten.traits import TRAITS
from sbp_core.graph import Argument, LogicalGraph, Node, Phase, Rate

#: Operators that divide by a tensor argument, and by which.
_DIVISORS = {
    "aten.div.Tensor": 1,
    "aten.nll_loss_backward.default": -1,
    "aten.nll_loss2d_backward.default": -1,
}

_ZEROS = ("zeros", "zeros_like", "new_zeros")

#: Operators that fill a tensor with a number, and where they take it.
_FILLS = {"full": 1, "full_like": 1, "scalar_tensor": 0}

#: By value: the power of each sum that something is proportional to, without zeros.
Degree = Mapping[str, int]


@dataclass(slots=True)
class Degrees:
    """Of which power of which sums over the batch each value of a micro-batch is.

    A *total* is of no parameter, and of the whole batch: a sum that something is divided by, or
    what is computed of it (`clamp(D, 1)`). `of` has the degrees in totals of what is none.
    """

    graph: LogicalGraph
    meanings: Mapping[str, Meaning]
    of: dict[str, Degree] = field(default_factory=dict)
    #: Sums over the batch that totals are computed of; micro-batches read a nominal value instead.
    roots: dict[str, None] = field(default_factory=dict)
    #: One sum for each number of targets: label smoothing counts by itself what the loss counts.
    counts: dict[tuple[str, Argument], str] = field(default_factory=dict)
    #: Sums of gradients of different degrees, which are added once a step.
    apart: set[str] = field(default_factory=set)
    #: What has no degree, with the reason.
    broken: dict[str, tuple[str, Node]] = field(default_factory=dict)
    #: What differs between micro-batches.
    varying: set[str] = field(default_factory=set)

    def run(self) -> None:
        """Follow the nodes of a micro-batch."""
        self.varying = varying_values(self.graph)
        for node in self.graph.nodes:
            if node.rate is Rate.MICRO and not node.is_host:
                self._add(node)

    def is_total(self, value: str) -> bool:
        """Whether a value is of the whole batch, and of no parameter."""
        meaning = self.meanings.get(value)
        return meaning is not None and meaning.is_reduced and not meaning.trained

    def reads_parts(self, node: Node) -> bool:
        """Whether a node makes a sum (or mean) over the batch of others, part by part."""
        made = self.meanings.get(node.outputs[0]) if node.phase is Phase.FORWARD else None
        return made is not None and made.kind in (Kind.SUM, Kind.MEAN)

    def _power(self, node: Node, value: str) -> Degree:
        if not self.is_total(value) or self.reads_parts(node):
            return self.of.get(value, {})
        if self.meanings[value].kind is Kind.WHOLE:
            return {value: 1}
        self.roots[value] = None
        counted = _counted(self.graph, value)
        return {value if counted is None else self.counts.setdefault(counted, value): 1}

    def _add(self, node: Node) -> None:
        given = self.graph.tensor_inputs(node)
        powers = [self._power(node, value) for value in given]
        reads_no_values = not any(value in self.varying for value in node.outputs)
        if reads_no_values or not (any(powers) or self._unknown(given)):
            return
        if all(self.is_total(value) for value in node.outputs):
            return
        self._follow(node, given, powers)

    def _unknown(self, given: Sequence[str]) -> bool:
        return any(value in self.apart or value in self.broken for value in given)

    def _follow(self, node: Node, given: Sequence[str], powers: list[Degree]) -> None:
        """Find the degree of what a node makes, or that it has none."""
        broken = next((self.broken[value] for value in given if value in self.broken), None)
        wide = [t for power in powers for t in power if self.graph.tensor(t).shape]
        if broken is not None or wide:
            reason = broken or ("samples are divided by several sums over the batch", node)
            self.broken.update(dict.fromkeys(node.outputs, reason))
            return
        inverse: Degree = {}
        if node.op in _DIVISORS:
            at = _DIVISORS[node.op] % len(given)
            inverse = {total: -power for total, power in powers[at].items()}
            powers[at] = {}
        marked = [at for at, one in enumerate(powers) if one or given[at] in self.apart]
        if not marked:
            self._set(node, inverse)
            return
        ways = linear_signatures(self.graph, node, marked)
        if not ways:
            # A product of two, such as of a gradient and a weight of each sample.
            if node.op == "aten.mul.Tensor" and not self._unknown(given):
                self._set(node, _sum(*powers, inverse))
                return
            why = "what is computed of gradients is not linear in them"
            self.broken.update(dict.fromkeys(node.outputs, (why, node)))
            return
        terms = [at for at in ways[0] if not self._is_zero(given[at])]
        same = all(powers[at] == powers[marked[0]] for at in terms)
        if same and not self._unknown(given):
            self._set(node, _sum(powers[marked[0]], inverse))
            return
        others = [value for at, value in enumerate(given) if at not in ways[0]]
        if node.phase is Phase.BACKWARD and not inverse and not self.varying & {*others}:
            self.apart.update(node.outputs)
            return
        why = "gradients of losses that are divided by different sums over the batch meet"
        self.broken.update(dict.fromkeys(node.outputs, (why, node)))

    def _set(self, node: Node, degree: Degree) -> None:
        if degree:
            self.of.update(dict.fromkeys(node.outputs, degree))

    def _is_zero(self, value: str) -> bool:
        """Whether a value is a tensor of zeros, which is of every degree."""
        node = self.graph.producers.get(value)
        if node is None:
            return False
        number = _FILLS.get(node.kind)
        return node.kind in _ZEROS or (number is not None and node.args[number] == 0)


def _counted(graph: LogicalGraph, value: str) -> tuple[str, Argument] | None:
    """Return what a value counts the elements of, and which it leaves out; None if it does not.

    Both `nll_loss_forward(.., target, None, sum, ignored)` and `sum(ne(target, ignored))` count.
    """
    node = graph.producers[value]
    if node.kind in TOTAL_WEIGHTS:
        weight, ignored = node.args[2], node.args[4]
        return None if weight is not None else (_without_views(graph, node.args[1].name), ignored)
    if node.op != "aten.sum.default":
        return None
    mask, wanted = graph.producers.get(_without_views(graph, node.args[0].name)), "ne"
    if mask is not None and mask.kind in ("bitwise_not", "logical_not"):
        mask, wanted = graph.producers.get(_without_views(graph, mask.args[0].name)), "eq"
    if mask is None or mask.op != f"aten.{wanted}.Scalar":
        return None
    return _without_views(graph, mask.args[0].name), mask.args[1]


def _without_views(graph: LogicalGraph, value: str) -> str:
    """Return what a value has the elements of, in another form or dtype."""
    node = graph.producers.get(value)
    while node is not None and (node.kind in RESHAPES or node.kind in TRAITS.copies):
        value = graph.tensor_inputs(node)[0]
        node = graph.producers.get(value)
    return value


def _sum(*degrees: Degree) -> Degree:
    """Return the degree of a product."""
    found: dict[str, int] = {}
    for degree in degrees:
        for total, power in degree.items():
            found[total] = found.get(total, 0) + power
    return {total: power for total, power in found.items() if power}

"""Apply linear operators to values that are sums of terms (coefficient times part), term by term.

The pass `whole_batch_loss` needs it for losses that are ratios N / D of totals over micro-batches:
a gradient is (1 / D) · v, and a micro-batch computes v without D. Gradients of
terms with different divisors are computed separately if an operator is linear, each by its own
call:

    f(a / D + b / E) = f(a) / D + f(b) / E
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from math import prod

from sbp_aten.passes.whole_batch.calls import PartCalls
from sbp_aten.passes.whole_batch.layout import (
    SAME,
    Coefficient,
    LinearTerm,
    PartValue,
    SamplePiece,
    StepConstant,
    Terms,
    Total,
    Unknown,
    Value,
    has_pieces,
    has_samples,
    has_totals,
    inverse,
    multiplied,
    plain,
    single_part,
    times,
)
from sbp_aten.passes.whole_batch.pieces import completed
from sbp_aten.passes.whole_batch.rearranged import is_zero
from sbp_aten.passes.whole_batch.targets import counted_targets
from sbp_core.errors import SignatureError
from sbp_core.graph import LogicalGraph, Node, Rate, Ref, Symbol, TensorType, rename_uses
from sbp_core.sbp import B, P
from sbp_core.signatures import OpCall, derivation

_SUM = P("sum")

#: Largest number of terms of one value: each term repeats its computation.
_MOST_TERMS = 8

_NEGATIVE = {"sum": "sum", "max": "min", "min": "max"}

_DIVISIONS = ("aten.div.Tensor",)
_SUMS = ("aten.add.Tensor", "aten.sub.Tensor")

#: Operators that keep some elements and overwrite the rest.
_FILLS_WITH = ("masked_fill", "where")


@dataclass(slots=True)
class TermCalls:
    """Writes calls of micro-batches term by term.

    Args:
        parts: Writes the calls.
        values: Name of each value of the whole batch -> its description (terms, late, unknown).
    """

    parts: PartCalls
    values: dict[str, Value]
    #: Late values (known once a step) as terms; None if that is impossible.
    lifted: dict[str, Terms | None] = field(default_factory=dict)
    #: Coefficient -> the value that micro-batches use instead of it.
    atoms: dict[str, PartValue] = field(default_factory=dict)
    #: Count of targets -> one name for all values that are equal to it.
    counts: dict[object, str] = field(default_factory=dict)
    #: Divisors of values that zeros overwrite afterwards, so that 0 / 0 does no harm.
    filled: set[str] = field(default_factory=set)

    @property
    def graph(self) -> LogicalGraph:
        """The step on the whole batch."""
        return self.parts.graph

    def call(
        self, node: Node, names: Sequence[str], given: Sequence[Value], *, lift_totals: bool = False
    ) -> list[Terms] | None:
        """Return the results of a node on terms, if it is linear in them.

        A total that is combined with samples is treated as a number of the whole batch; with
        `lift_totals`, all totals are.
        """
        found: list[Terms] = []
        # A total is added to pieces directly; to anything else it is added as a coefficient.
        adds = node.op in _SUMS and all(
            has_totals(one) or has_pieces(one) for one in given if isinstance(one, tuple)
        )
        lift_totals |= any(map(has_samples, given)) and not adds
        for name, one in zip(names, given, strict=True):
            terms = one if isinstance(one, tuple) else self._lift(name)
            if lift_totals and terms is not None and has_totals(terms):
                terms = self._lift(name)
            if terms is None:
                return None
            found.append(terms)
        marked = [at for at, terms in enumerate(found) if single_part(terms) is None]
        if not marked:
            marked = _apart(found)
        factor: Coefficient = ()
        if node.op in _DIVISIONS and 1 in marked:
            if len(found[1]) != 1:
                if self.graph.tensor(names[1]).shape or names[1] not in self.graph.producers:
                    return None
                found[1] = self._atom(names[1])
            factor = inverse(found[1][0].coefficient)
            found[1] = plain(found[1][0].part)
            marked.remove(1)
        exponent = power_of(node)
        if exponent is not None and marked:
            if len(found[0]) != 1:
                return None
            factor = times(*[found[0][0].coefficient] * exponent)
            found[0], marked = plain(found[0][0].part), []
        if node.kind in _FILLS_WITH and marked:
            # Zeros may overwrite some elements, whatever their values.
            number = node.args[2] if node.op == "aten.masked_fill.Scalar" else None
            if number == 0 or (number is None and any(map(self._is_zero, found[1:]))):
                self.filled |= {name for terms in found for t in terms for name, _ in t.coefficient}
        for together in linear_in(self.graph, node, marked) if marked else [frozenset()]:
            made = self._jointly(node, names, found, sorted(together))
            if made is not None:
                return multiplied(made, factor)
        if len(marked) == 2 and all(is_linear(self.graph, node, [at]) for at in marked):
            made = self._product(node, found, marked)
            return None if made is None else multiplied(made, factor)
        return None

    def _jointly(
        self, node: Node, names: Sequence[str], given: Sequence[Terms], together: Sequence[int]
    ) -> list[Terms] | None:
        """Return f(sum of terms), for a node that is linear in some arguments together.

        All arguments of one coefficient are passed at once, with zeros for the rest; if that does
        not work, all arguments of one layout.
        """
        if not together:
            return self._run(node, [single_part(one) for one in given], ())
        coefficients = dict.fromkeys(
            term.coefficient
            for at in together
            if not self._is_zero(given[at])
            for term in given[at]
        )
        results: list[list[Terms]] = []
        for coefficient in coefficients:
            sets = [
                [term for term in given[at] if term.coefficient == coefficient]
                if not self._is_zero(given[at])
                else []
                for at in together
            ]
            found = None
            if all(len(one) <= 1 for one in sets):
                chosen = {at: one[0].part for at, one in zip(together, sets, strict=True) if one}
                found = self._with_zeros(node, names, given, together, chosen, coefficient)
            if found is not None:
                results.append(found)
                continue
            for at, one in zip(together, sets, strict=True):
                for term in one:
                    alone = {at: term.part}
                    found = self._with_zeros(node, names, given, together, alone, coefficient)
                    if found is None:
                        return None
                    results.append(found)
        merged = self._sum(node, results)
        # Pieces have to form one term.
        counts = (
            sum(not isinstance(term.part.layout, SamplePiece) for term in terms) for terms in merged
        )
        return merged if all(count <= _MOST_TERMS for count in counts) else None

    def _sum(self, node: Node, results: Sequence[list[Terms]]) -> list[Terms]:
        """Add up the results of several calls, for each output of a node."""
        return [
            self._merged(node, [term for made in results for term in made[at]])
            for at in range(len(node.outputs))
        ]

    def _with_zeros(
        self,
        node: Node,
        names: Sequence[str],
        given: Sequence[Terms],
        together: Sequence[int],
        chosen: Mapping[int, PartValue],
        coefficient: Coefficient,
    ) -> list[Terms] | None:
        """Run a node with zeros for the linear arguments that are not chosen."""
        absent = [at for at in together if at not in chosen]
        if len(chosen) == 1 and absent and node.op in _SUMS:
            ((at, part),) = chosen.items()
            alone = self._addend(node, names[at], part, negative=at == 1 and node.kind == "sub")
            if alone is not None:
                return [(LinearTerm(coefficient, alone),)]
        near = next(iter(chosen.values()))
        parts = [
            chosen[at]
            if at in chosen
            else single_part(one)
            if at not in absent or self._is_zero(one)
            else self._made_near(
                f"{node.name}.zeros", node, near.name, 0, self.graph.tensor(names[at])
            )
            for at, one in enumerate(given)
        ]
        return self._run(node, parts, coefficient)

    def _is_zero(self, terms: Terms) -> bool:
        part = single_part(terms)
        return part is not None and part.layout == SAME and is_zero(self.graph, part.name)

    def _made_near(
        self, name: str, like: Node, near: str, number: float, kind: TensorType
    ) -> PartValue:
        """Write a constant tensor for a node, on the device of a part."""
        name = self.parts.fresh(name)
        made = Node(
            name=name,
            op="aten.new_full.default",
            args=(Ref(near), kind.shape, number),
            kwargs={"dtype": Symbol("dtype", kind.dtype)},
            outputs=(name,),
            phase=like.phase,
            module=like.module,
            source=like.source,
        )
        self.parts.add_constant(made, kind)
        self.values[name] = plain(PartValue(name))
        return PartValue(name)

    def _addend(
        self, node: Node, name: str, part: PartValue, *, negative: bool
    ) -> PartValue | None:
        """Return a sum with one addend alone; None if shapes or factors differ."""
        kind = self.graph.tensor(name)
        if self.graph.tensor(node.outputs[0]) != kind or node.kwargs or len(node.args) > 2:
            return None
        if not negative:
            return part
        negative_one = replace(
            node,
            op="aten.neg.default",
            args=(Ref(part.name),),
            outputs=(f"{node.outputs[0]}.negative",),
        )
        layout = part.layout
        if isinstance(layout, Total):  # the negative of a maximum is a minimum
            layout = Total(_NEGATIVE[layout.reduction])
        return PartValue(self._written(negative_one, self._type(part), part), layout)

    def _product(
        self, node: Node, given: Sequence[Terms], marked: Sequence[int]
    ) -> list[Terms] | None:
        """Return a product of two values that both have coefficients, one of them a single term.

        A product of two sums could cancel: (a - b)(a - b) of nearly equal numbers.
        """
        left, right = (given[at] for at in marked)
        if min(len(left), len(right)) > 1:
            return None
        results: list[list[Terms]] = []
        for one, other in product(left, right):
            parts = [single_part(terms) for terms in given]
            parts[marked[0]], parts[marked[1]] = one.part, other.part
            found = self._run(node, parts, times(one.coefficient, other.coefficient))
            if found is None:
                return None
            results.append(found)
        return self._sum(node, results)

    def _run(
        self, node: Node, given: Sequence[PartValue | None], coefficient: Coefficient
    ) -> list[Terms] | None:
        parts = [part for part in given if part is not None]
        if len(parts) < len(given):
            return None
        if all(part.layout == SAME for part in parts):
            made = self._same_parts(node, parts)
        else:
            label = "term" if any(value in self.parts.types for value in node.outputs) else ""
            made = self.parts.call(node, parts, label)
        return None if made is None else [(LinearTerm(coefficient, part),) for part in made]

    def _same_parts(self, node: Node, parts: Sequence[PartValue]) -> list[PartValue] | None:
        """Write a node on values that are the same in every micro-batch, under other names.

        They are added to the whole graph, too, so that they can be cut like samples.
        """
        names: dict[str, str] = {}
        for name, part in zip(self.graph.tensor_inputs(node), parts, strict=True):
            if names.setdefault(name, part.name) != part.name:
                return None
        outputs = tuple(self.parts.fresh(f"{value}.term") for value in node.outputs)
        if len(outputs) > 1:
            return None
        made = replace(rename_uses(node, names), name=outputs[0], outputs=outputs)
        self.parts.add_constant(made, self.graph.tensor(node.outputs[0]))
        self.values[outputs[0]] = plain(PartValue(outputs[0]))
        return [PartValue(outputs[0])]

    def _merged(self, node: Node, terms: Sequence[LinearTerm]) -> Terms:
        """Merge terms with equal coefficients and layouts; maxima are not merged."""
        found: dict[tuple[Coefficient, object, str], LinearTerm] = {}
        for number, term in enumerate(terms):
            layout = term.part.layout
            apart = isinstance(layout, Total) and layout != Total()
            key = (term.coefficient, layout, f"{number}" if apart else "")
            if key not in found:
                found[key] = term
                continue
            first = found[key].part
            kind = self._type(first)
            total = replace(
                node,
                op="aten.add.Tensor",
                args=(Ref(first.name), Ref(term.part.name)),
                kwargs={},
                outputs=(f"{node.name}.sum",),
                tags=("pointwise",),
            )
            name = self._written(total, kind, first)
            found[key] = LinearTerm(term.coefficient, PartValue(name, first.layout))
        merged = tuple(found.values())
        made = tuple(completed(self.parts, node, merged))
        for part in (term.part for term in made if term.part.layout == SAME):
            self.values.setdefault(part.name, plain(part))
        return merged if made == merged else self._merged(node, made)

    def _type(self, part: PartValue) -> TensorType:
        kind = self.parts.types[part.name]
        assert isinstance(kind, TensorType), f"{part.name} is no tensor"
        return kind

    def _written(self, node: Node, kind: TensorType, like: PartValue) -> str:
        """Write a node on parts of one layout under a new name, and return the name."""
        if isinstance(like.layout, SamplePiece):
            return self.parts.add_merged(node, [kind])[0]
        name = self.parts.fresh(node.outputs[0])
        node = replace(node, name=name, outputs=(name,))
        if like.layout == SAME:
            self.parts.add_constant(node, kind)
            self.values[name] = plain(PartValue(name))
        else:
            self.parts.add(node, [kind])
        return name

    def _lift(self, value: str) -> Terms | None:
        """Return a value that is known once a step as terms; None if that is impossible.

        A number is a coefficient times 1. A linear function of it, such as its expansion, is that
        coefficient times the function of 1. Other late tensors have no terms.
        """
        if value not in self.lifted:
            self.lifted[value] = self._lifted(value)
        return self.lifted[value]

    def _lifted(self, value: str) -> Terms | None:
        node = self.graph.producers.get(value)
        found = self.values[value]
        is_number = not self.graph.tensor(value).shape
        if isinstance(found, Unknown) or node is None:
            return None
        if isinstance(found, StepConstant) and node.rate is Rate.MICRO and len(node.outputs) == 1:
            names = self.graph.tensor_inputs(node)
            given = [self.values[name] for name in names]
            made = self.call(node, names, given, lift_totals=True)
            # A number with several terms would repeat every product with it.
            if made is not None and not (is_number and len(made[0]) > 1):
                return made[0]
        return self._atom(value) if is_number else None

    def _atom(self, value: str) -> Terms:
        """Return a number that is known once a step as a coefficient times its nominal value."""
        key = counted_targets(self.graph, value)
        if key is not None:
            value = self.counts.setdefault(key, value)
        if value not in self.atoms:
            node, near = self.graph.producers[value], self.near(value)
            self.atoms[value] = self._made_near(
                f"{value}.nominal", node, near, self.nominal(value), self.graph.tensor(value)
            )
        return (LinearTerm(((value, 1),), self.atoms[value]),)

    def nominal(self, value: str) -> float:
        """Return a power of two near the value of a total if all elements count.

        Gradients then have the same magnitude as in the whole batch, which matters for float16;
        multiplying by a power of two is exact.
        """
        node = self.graph.producers[value]
        if node.kind in ("mean", "div", "reciprocal", "rsqrt", "sqrt"):
            return 1
        names = self.graph.tensor_inputs(node)
        sizes = [
            prod(self.graph.tensor(name).shape)
            for name in names[1:]
            if node.kind.startswith("nll_loss")
        ] or [
            prod(self.graph.tensor(name).shape)
            for name in names
            if isinstance(self.values[name], tuple)
            and name not in self.parts.same
            and self.graph.tensor(name).shape
        ]
        if not sizes:
            inner = [name for name in names if name not in self.parts.same]
            return max((self.nominal(name) for name in inner), default=1)
        return 1 << (max(1, *sizes).bit_length() - 1)

    def near(self, value: str) -> str:
        """Return a tensor of the micro-batch near the node of a late value."""
        found = self.values[value]
        if not isinstance(found, StepConstant):
            assert isinstance(found, tuple), f"{value} is unknown"
            return found[0].part.name
        sources = self.graph.tensor_inputs(self.graph.producers[value])
        return next(self.near(name) for name in sources if name not in self.parts.same)


def _apart(given: Sequence[Terms]) -> list[int]:
    """Return the positions of single parts that belong to different samples, if some are pieces."""
    if not any(map(has_pieces, given)):
        return []
    layouts = [terms[0].part.layout for terms in given]
    others = {layout for layout in layouts if layout != SAME}
    alone = len(others) == 1 and not any(
        isinstance(one, SamplePiece) and one.dim is not None for one in others
    )
    return [] if alone else [at for at, layout in enumerate(layouts) if layout != SAME]


def power_of(node: Node) -> int | None:
    """Return the exponent of a node that raises a tensor to an integer power > 0; else None."""
    if node.op != "aten.pow.Tensor_Scalar":
        return None
    exponent = node.args[1]
    is_whole = isinstance(exponent, int | float) and exponent > 0 and exponent % 1 == 0
    return int(exponent) if is_whole else None


def linear_in(graph: LogicalGraph, node: Node, given: Iterable[int]) -> list[frozenset[int]]:
    """Return sets of tensor arguments that contain the given ones and in which a node is linear.

    Small sets come first. Arguments outside of a set are constants of the linear map.
    """
    wanted = frozenset(given)
    found = set()
    try:
        legal = derivation(OpCall.of(graph, node)).legal
    except SignatureError:
        return []
    for signature in legal:
        parts = frozenset(index for index, sbp in enumerate(signature.inputs) if sbp == _SUM)
        others = [sbp for index, sbp in enumerate(signature.inputs) if index not in parts]
        linear = all(sbp == _SUM for sbp in signature.outputs) and all(s == B for s in others)
        if linear and wanted <= parts:
            found.add(parts)
    return sorted(found, key=lambda parts: (len(parts), sorted(parts)))


def is_linear(graph: LogicalGraph, node: Node, given: Iterable[int]) -> bool:
    """Whether a node is linear in exactly these tensor arguments."""
    wanted = frozenset(given)
    return wanted in linear_in(graph, node, wanted)

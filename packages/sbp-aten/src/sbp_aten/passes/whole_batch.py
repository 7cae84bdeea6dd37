"""A step on the whole batch, computed micro-batch by micro-batch.

The whole batch is the specification: the step is captured on it, so that every size, count and
constant is that of the whole batch. What one micro-batch computes follows from the rules by which
ranks compute parts (see `batch_layout`, `batch_calls`); what the parts make together is known once a
step, by `sbp.accumulate`:

    whole      l = div(sum(e), n)                     g = mm(t(dy), x)      w1 = sub(w, g)
    micro      s = sum(e)                             p = mm(t(dy), x)
    step       S = accumulate(s, 1); l = div(S, n)    G = accumulate(p, 1); w1 = sub(w, G)

A value of the whole batch is one of four things:

    `SAME`       of states and numbers alone: the same in every micro-batch
    terms        the sum of c · v: parts v that are samples, totals or the same, and coefficients c
                 that are products of powers of numbers known once a step
    late         of totals: known once a step
    unknown      nothing of that: samples meet each other, or are told apart by their places

A late number meets samples as a coefficient (see `batch_terms`). The gradient of a ratio N / D of
two totals is (1 / D) · v, where v needs no D. Where an operator is linear, it works term by term, so
that gradients of terms with different divisors are computed apart, and each is accumulated by
itself: the backward phase of what the terms share then runs once for each. Whatever is not linear in
a value with coefficients is unknown. A result that is unknown is refused, with the line where the
unknown begins.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod

from sbp_aten.passes.batch_calls import (
    Part,
    PartCalls,
    is_zero,
    signatures_of,
)
from sbp_aten.passes.batch_layout import SAME, Samples, Total, part_type
from sbp_aten.passes.batch_terms import (
    Coefficient,
    Term,
    Terms,
    inverse,
    is_linear,
    linear_in,
    plain,
    power_of,
    times,
)
from sbp_aten.passes.target_counts import counted_targets, divide_losses_ahead
from sbp_core.errors import GraphError
from sbp_core.graph import (
    Argument,
    GraphOutput,
    InputKind,
    LogicalGraph,
    Node,
    OutputKind,
    Phase,
    Rate,
    Ref,
    Symbol,
    TensorType,
    drop_dead,
    rename_uses,
)

_ACCUMULATE = "sbp.accumulate"

_ACCEPTED = (
    "losses, gradients, metrics and buffers that are computed of sums over samples: means, ratios "
    "of sums, sums of these"
)
_TODO = (
    "set trainer.micro_batches=1, or trainer.loss=mean_of_micro_batches to train on the mean of "
    "the losses of micro-batches; of parallelize: micro_batches=1, "
    "loss_is='mean_of_micro_batches'"
)

_BATCH_NORMS = ("_native_batch_norm_legit_functional", "native_batch_norm", "cudnn_batch_norm")

#: Terms of one value: more would repeat what makes it too often.
_MOST_TERMS = 8

_HOW = {"sum": 1, "max": "maximum", "min": "minimum"}


@dataclass(frozen=True, slots=True)
class _Late:
    """Known once a step, under its own name."""


@dataclass(frozen=True, slots=True)
class _Unknown:
    """Not to be had of micro-batches: why, and the node where that begins."""

    why: str
    node: Node


_LATE = _Late()

_Value = Terms | _Late | _Unknown


def whole_batch_loss(graph: LogicalGraph, num_micro_batches: int) -> LogicalGraph:
    """Write a step on the whole batch as one of micro-batches, with the same results.

    before: e = square(x) [8 samples]; l = mean(e); w1 = sub(w, dw(e, 1/8))
    after:  e = square(x) [2 samples]; s = mul(mean(e), 1/4); L = accumulate(s, 1) [step]
            D = accumulate(dw(e, 1/8), 1); w1 = sub(w, D) [step]

    Args:
        graph: A step on the whole batch, whose mean losses are ratios (pass `sum_losses`). The
            samples of a batch input lie along its dim 0; one without dims is the same for all.
        num_micro_batches: Parts of equal size.

    Raises:
        GraphError: a result of the whole batch does not follow from those of micro-batches; names
            it, and the line where samples meet.
    """
    if num_micro_batches == 1 or all(out.kind is not OutputKind.LOSS for out in graph.outputs):
        return graph
    return _Rewriting(divide_losses_ahead(graph), num_micro_batches).run()


@dataclass(slots=True)
class _Rewriting:
    """The state of one rewriting.

    Args:
        graph: A step on the whole batch.
        num_parts: Micro-batches.
    """

    graph: LogicalGraph
    num_parts: int
    parts: PartCalls = field(init=False)
    values: dict[str, _Value] = field(default_factory=dict)
    #: Nodes that run once a step, in their order.
    late: list[Node] = field(default_factory=list)
    #: Once a step: the name of each value of the whole batch that is asked for.
    whole: dict[str, str] = field(default_factory=dict)
    #: Late values as terms; None: they are none.
    lifted: dict[str, Terms | None] = field(default_factory=dict)
    #: What micro-batches compute with in the place of a number that is a coefficient.
    atoms: dict[str, Part] = field(default_factory=dict)
    #: The divisors of gradients, and how much larger each is than what micro-batches compute with.
    ratios: dict[tuple[str, str], str] = field(default_factory=dict)
    #: One name for each number of targets, however it is counted.
    counts: dict[object, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.parts = PartCalls(self.graph, self.num_parts)
        self.graph = self.parts.graph

    def run(self) -> LogicalGraph:
        """Return the graph of micro-batches."""
        graph, parts = self.graph, self.parts
        for entry in graph.inputs:
            self._input(entry.name, entry.kind)
        for node in graph.nodes:
            self._node(node)
        outputs = [replace(out, value=self._output(out)) for out in graph.outputs]
        nodes = (*parts.nodes, *self.late)
        return drop_dead(graph.with_nodes(nodes, outputs=tuple(outputs), types=parts.types))

    def _input(self, name: str, kind: InputKind) -> None:
        if not self.graph.is_tensor(name):
            self.parts.types[name] = self.graph.types[name]
            return
        made = self.graph.tensor(name)
        layout = Samples(0) if kind is InputKind.BATCH and made.shape else SAME
        if isinstance(layout, Samples) and made.shape[0] % self.num_parts:
            raise GraphError(
                f"{name!r} has {made.shape[0]} samples, and there are {self.num_parts} "
                "micro-batches",
                accepted="equally many samples in each",
                todo="choose a number of micro-batches that divides the batch",
            )
        self.parts.types[name] = part_type(made, layout, self.num_parts)
        self.values[name] = plain(Part(name, layout))
        if layout == SAME:
            self.parts.same.add(name)

    # Nodes.

    def _node(self, node: Node) -> None:
        if node.rate is not Rate.MICRO:
            self._once(node)
            return
        names = self.graph.tensor_inputs(node)
        given = [self.values[name] for name in names]
        unknown = next((one for one in given if isinstance(one, _Unknown)), None)
        if unknown is not None:
            self.values.update(dict.fromkeys(node.outputs, unknown))
        elif all(name in self.parts.same for name in names):
            self._same(node)
        elif node.kind in _LIKE and not _has_samples(given[0]):
            self._filled(node, names)
        elif all(
            isinstance(one, _Late) or name in self.parts.same
            for name, one in zip(names, given, strict=True)
        ):
            self._once(node)
        else:
            self._of_terms(node, names, given)

    def _same(self, node: Node) -> None:
        if "seeded" in node.tags:
            why = "numbers are drawn from PyTorch's generator, once for each micro-batch"
            self.values.update(dict.fromkeys(node.outputs, _Unknown(why, node)))
            return
        self.parts.as_it_is(node)
        if not node.is_host:
            self.values.update((value, plain(Part(value))) for value in node.outputs)

    def _once(self, node: Node) -> None:
        """Let a node run once a step, on values of the whole batch."""
        names = () if node.is_host else self.graph.tensor_inputs(node)
        problem = next(filter(None, map(self._problem, names)), None)
        if problem is not None:
            self.values.update(dict.fromkeys(node.outputs, problem))
            return
        if any(value in self.parts.types for value in node.outputs):  # of terms that came to nothing
            made = set(node.outputs)
            self.parts.nodes = [one for one in self.parts.nodes if not made & {*one.outputs}]
        whole = {name: self._whole(name) for name in names}
        self.late.append(rename_uses(self._like(node), whole))
        for value in node.outputs:
            self.parts.types[value] = self.graph.types[value]
            self.values[value], self.whole[value] = _LATE, value

    def _problem(self, value: str) -> _Unknown | None:
        """Return why a value cannot be had once a step; None if it can."""
        found = self.values[value]
        if isinstance(found, _Unknown):
            return found
        if not _has_samples(found):
            return None
        node = self.graph.producers.get(value)
        node = node or Node(name=value, op="batch", args=(), outputs=(value,))
        return _Unknown("there is a number for each sample", node)

    def _like(self, node: Node) -> Node:
        """Return a node that belongs where another does, and runs once a step."""
        if node.rate is not Rate.MICRO:
            return node
        # Of the forward phase, so that a loss is known, and may undo the step, before it commits.
        phase = Phase.FORWARD if node.phase is Phase.FORWARD else Phase.OPTIMIZER
        return replace(node, phase=phase, rate=Rate.STEP, forward="")

    def _filled(self, node: Node, names: Sequence[str]) -> None:
        """Write `ones_like(loss)` as a tensor of ones, which needs no loss."""
        number = _LIKE[node.kind]
        if number is None:
            number = node.args[1 if node.kind == "full_like" else 2]
        (value,) = node.outputs
        made = self.graph.tensor(value)
        full = replace(
            node,
            op="aten.new_full.default",
            args=(Ref(self._micro_tensor(names[0])), made.shape, number),
            kwargs={"dtype": Symbol("dtype", made.dtype)},
        )
        self.parts.declare(full, made)
        self.values[value] = plain(Part(value))

    def _micro_tensor(self, value: str) -> str:
        """Return a tensor that a micro-batch has near the one that makes a late value."""
        found = self.values[value]
        if not isinstance(found, _Late):
            assert isinstance(found, tuple), f"{value} is unknown"
            return found[0].part.name
        sources = self.graph.tensor_inputs(self.graph.producers[value])
        return next(
            self._micro_tensor(name) for name in sources if name not in self.parts.same
        )

    # Terms.

    def _of_terms(self, node: Node, names: Sequence[str], given: Sequence[_Value]) -> None:
        """Write a node of parts: as one call of parts, term by term, or once a step."""
        parts = [_single_part(one) for one in given]
        if node.kind in _LIKE and isinstance(given[0], tuple):
            parts[0] = given[0][0].part
        known = [part for part in parts if part is not None]
        if len(known) == len(parts):
            made = self.parts.call(node, known)
            if made is not None:
                for value, part in zip(node.outputs, made, strict=True):
                    self.values[value] = plain(part)
                    if part.layout == SAME:
                        self.parts.same.add(value)
                return
        samples = any(map(_has_samples, given))
        if samples or not any(isinstance(one, _Late) for one in given):
            terms = self._term_by_term(node, names, given)
            if terms is not None:
                self.values.update(zip(node.outputs, terms, strict=True))
                return
        if samples:
            unknown = _Unknown(self._why(node, given), node)
            self.values.update(dict.fromkeys(node.outputs, unknown))
        else:
            self._once(node)

    def _term_by_term(
        self,
        node: Node,
        names: Sequence[str],
        given: Sequence[_Value],
        *,
        lift_totals: bool = False,
    ) -> list[Terms] | None:
        """Return what a node makes of terms, if it is linear in them.

        A total that meets samples is a number of the whole batch; so are others if that is asked.
        """
        found: list[Terms] = []
        lift_totals |= any(map(_has_samples, given))
        for name, one in zip(names, given, strict=True):
            terms = one if isinstance(one, tuple) else self._lift(name)
            if lift_totals and terms is not None and _has_totals(terms):
                terms = self._lift(name)
            if terms is None:
                return None
            found.append(terms)
        marked = [at for at, terms in enumerate(found) if _single_part(terms) is None]
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
        for together in linear_in(self.graph, node, marked) if marked else [frozenset()]:
            made = self._jointly(node, names, found, sorted(together))
            if made is not None:
                return _multiplied(made, factor)
        if len(marked) == 2 and all(is_linear(self.graph, node, [at]) for at in marked):
            made = self._product(node, found, marked)
            return None if made is None else _multiplied(made, factor)
        return None

    def _jointly(
        self, node: Node, names: Sequence[str], given: Sequence[Terms], together: Sequence[int]
    ) -> list[Terms] | None:
        """Return f(sum of terms), for a node that is linear in some arguments together.

        The arguments of one coefficient go through at once, others of them being zero; if that does
        not work, those of one layout.
        """
        if not together:
            return self._run(node, [_single_part(one) for one in given], ())
        coefficients = dict.fromkeys(
            term.coefficient for at in together if not self._is_zero(given[at]) for term in given[at]
        )
        made: list[list[Term]] = [[] for _ in node.outputs]
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
            if found is None:
                for at, one in zip(together, sets, strict=True):
                    for term in one:
                        alone = self._with_zeros(
                            node, names, given, together, {at: term.part}, coefficient
                        )
                        if alone is None:
                            return None
                        for terms, more in zip(made, alone, strict=True):
                            terms += more
                continue
            for terms, more in zip(made, found, strict=True):
                terms += more
        merged = [self._merged(node, terms) for terms in made]
        return merged if all(len(terms) <= _MOST_TERMS for terms in merged) else None

    def _with_zeros(
        self,
        node: Node,
        names: Sequence[str],
        given: Sequence[Terms],
        together: Sequence[int],
        chosen: Mapping[int, Part],
        coefficient: Coefficient,
    ) -> list[Terms] | None:
        """Run a node with zeros for those of its linear arguments that are not chosen."""
        absent = [at for at in together if at not in chosen]
        if len(chosen) == 1 and absent and node.op in _SUMS:
            ((at, part),) = chosen.items()
            alone = self._addend(node, names[at], part, negative=at == 1 and node.kind == "sub")
            if alone is not None:
                return [(Term(coefficient, alone),)]
        near = next(iter(chosen.values()))
        parts = [
            chosen[at]
            if at in chosen
            else _single_part(one)
            if at not in absent or self._is_zero(one)
            else self._zeros(node, names[at], near)
            for at, one in enumerate(given)
        ]
        return self._run(node, parts, coefficient)

    def _is_zero(self, terms: Terms) -> bool:
        part = _single_part(terms)
        return part is not None and part.layout == SAME and is_zero(self.graph, part.name)

    def _zeros(self, node: Node, like: str, near: Part) -> Part:
        """Return zeros in the shape of a value of the whole batch, made near a part."""
        return self._made_near(f"{node.name}.zeros", node, near.name, 0, self.graph.tensor(like))

    def _made_near(
        self, name: str, like: Node, near: str, number: float, kind: TensorType
    ) -> Part:
        """Write a tensor of equal numbers that belongs where a node does, on the device of a part."""
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
        self.parts.declare(made, kind)
        self.values[name] = plain(Part(name))
        return Part(name)

    def _addend(self, node: Node, name: str, part: Part, *, negative: bool) -> Part | None:
        """Return what a sum makes of one addend alone; None if it is no plain sum of equal forms."""
        kind = self.graph.tensor(name)
        if self.graph.tensor(node.outputs[0]) != kind or node.kwargs or len(node.args) > 2:
            return None
        if not negative:
            return part
        made = self.parts.fresh(f"{node.outputs[0]}.negative")
        self.parts.add(
            replace(
                node,
                name=made,
                op="aten.neg.default",
                args=(Ref(part.name),),
                outputs=(made,),
            ),
            [self.parts.types[part.name]],
        )
        return Part(made, part.layout)

    def _product(
        self, node: Node, given: Sequence[Terms], marked: Sequence[int]
    ) -> list[Terms] | None:
        """Return a product of two values that both have coefficients, one of them a single term.

        Of two sums the product could cancel: (a - b)(a - b) of numbers that are nearly equal.
        """
        left, right = (given[at] for at in marked)
        if min(len(left), len(right)) > 1:
            return None
        made: list[list[Term]] = [[] for _ in node.outputs]
        for one in left:
            for other in right:
                parts = [_single_part(terms) for terms in given]
                parts[marked[0]], parts[marked[1]] = one.part, other.part
                found = self._run(node, parts, times(one.coefficient, other.coefficient))
                if found is None:
                    return None
                for terms, more in zip(made, found, strict=True):
                    terms += more
        return [self._merged(node, terms) for terms in made]

    def _run(
        self, node: Node, given: Sequence[Part | None], coefficient: Coefficient
    ) -> list[Terms] | None:
        parts = [part for part in given if part is not None]
        if len(parts) < len(given):
            return None
        if all(part.layout == SAME for part in parts):
            made = self._same_parts(node, parts)
        else:
            label = "term" if any(value in self.parts.types for value in node.outputs) else ""
            made = self.parts.call(node, parts, label)
        return None if made is None else [(Term(coefficient, part),) for part in made]

    def _same_parts(self, node: Node, parts: Sequence[Part]) -> list[Part] | None:
        """Write a node on values that are the same in every micro-batch, under other names.

        The whole graph knows them, too, so that they can be cut where they meet samples.
        """
        names: dict[str, str] = {}
        for name, part in zip(self.graph.tensor_inputs(node), parts, strict=True):
            if names.setdefault(name, part.name) != part.name:
                return None
        outputs = tuple(self.parts.fresh(f"{value}.term") for value in node.outputs)
        if len(outputs) > 1:
            return None
        made = replace(rename_uses(node, names), name=outputs[0], outputs=outputs)
        self.parts.declare(made, self.graph.tensor(node.outputs[0]))
        self.values[outputs[0]] = plain(Part(outputs[0]))
        return [Part(outputs[0])]

    def _merged(self, node: Node, terms: Sequence[Term]) -> Terms:
        """Add up the terms of equal coefficients and layouts."""
        found: dict[tuple[Coefficient, object], Term] = {}
        for term in terms:
            key = (term.coefficient, term.part.layout)
            if key not in found:
                found[key] = term
                continue
            first = found[key].part
            name = self.parts.fresh(f"{node.name}.sum")
            kind = self.parts.types[first.name]
            self.parts.add(
                replace(
                    node,
                    name=name,
                    op="aten.add.Tensor",
                    args=(Ref(first.name), Ref(term.part.name)),
                    kwargs={},
                    outputs=(name,),
                    tags=("pointwise",),
                ),
                [kind],
            )
            found[key] = Term(term.coefficient, Part(name, first.layout))
        return tuple(found.values())

    def _why(self, node: Node, given: Sequence[_Value]) -> str:
        """Return why what a node makes of samples is unknown."""
        if node.kind in _BATCH_NORMS:
            return "batch normalisation in training takes its statistics of all samples"
        if not signatures_of(self.graph, node, self.num_parts):
            return f"nothing is known of {node.op}"
        if all(_single_part(one) is not None and not _is_total(one) or name in self.parts.same
               for name, one in zip(self.graph.tensor_inputs(node), given, strict=True)):
            return "here samples meet each other, or are told apart by their places"
        return (
            "here samples meet what is known of the whole batch only, such as a mean, and that is "
            "no factor of what is made of them"
        )

    # Late numbers as coefficients.

    def _lift(self, value: str) -> Terms | None:
        """Return a value that is known once a step as terms of what micro-batches have.

        A number is a coefficient times 1, and what is computed of it linearly, such as its
        expansion, is that coefficient times the same of 1. Other late tensors are none.
        """
        if value not in self.lifted:
            self.lifted[value] = self._lifted(value)
        return self.lifted[value]

    def _lifted(self, value: str) -> Terms | None:
        node = self.graph.producers.get(value)
        found = self.values[value]
        is_number = not self.graph.tensor(value).shape
        if isinstance(found, _Unknown) or node is None:
            return None
        if isinstance(found, _Late) and node.rate is Rate.MICRO and len(node.outputs) == 1:
            names = self.graph.tensor_inputs(node)
            given = [self.values[name] for name in names]
            made = self._term_by_term(node, names, given, lift_totals=True)
            # A number of several terms would repeat all that it is multiplied with.
            if made is not None and not (is_number and len(made[0]) > 1):
                return made[0]
        return self._atom(value) if is_number else None

    def _atom(self, value: str) -> Terms:
        """Return a number that is known once a step as itself times a number of its size."""
        key = counted_targets(self.graph, value)
        if key is not None:
            value = self.counts.setdefault(key, value)
        if value not in self.atoms:
            node, near = self.graph.producers[value], self._micro_tensor(value)
            self.atoms[value] = self._made_near(
                f"{value}.nominal", node, near, self._nominal(value), self.graph.tensor(value)
            )
            self._whole(value)
        return (Term(((value, 1),), self.atoms[value]),)

    def _nominal(self, value: str) -> float:
        """Return a power of two near what a total is if all elements count.

        Gradients then have the magnitude that they have in the whole batch, which matters where
        they are float16; a power of two rounds nothing.
        """
        node = self.graph.producers[value]
        if node.kind in ("mean", "div", "reciprocal", "rsqrt", "sqrt"):
            return 1
        names = self.graph.tensor_inputs(node)
        sizes = [
            prod(self.graph.tensor(name).shape)
            for name in names[1:] if node.kind.startswith("nll_loss")
        ] or [prod(self.graph.tensor(name).shape) for name in names
              if isinstance(self.values[name], tuple) and name not in self.parts.same
              and self.graph.tensor(name).shape]
        if not sizes:
            inner = [name for name in names if name not in self.parts.same]
            return max((self._nominal(name) for name in inner), default=1)
        return 1 << (max(sizes).bit_length() - 1)

    # Once a step.

    def _whole(self, value: str) -> str:
        """Return a value of the whole batch, known once a step.

        Raises:
            GraphError: it does not follow from those of micro-batches.
        """
        if value in self.whole or not self.graph.is_tensor(value):
            return self.whole.get(value, value)
        problem = self._problem(value)
        if problem is not None:
            raise _refusal(problem)
        found = self.values[value]
        assert isinstance(found, tuple), f"{value} is late and not made"
        if value in self.parts.same and self.graph.rate_of(value) is Rate.STEP:
            return value
        node = self.graph.producers.get(value)
        like = node or Node(name=value, op=_ACCUMULATE, args=(), outputs=(value,))
        total = ""
        for term in found:
            made = self._accumulated(like, value, term)
            total = self._step(like, "aten.add.Tensor", (total, made), value) if total else made
        self.whole[value] = total
        return total

    def _accumulated(self, like: Node, value: str, term: Term) -> str:
        """Return the total of a term over the micro-batches, with its coefficient."""
        layout = term.part.layout
        how = _HOW[layout.reduction] if isinstance(layout, Total) else None
        name = self.parts.fresh(f"{value}.total" if how else f"{value}.last")
        kind = self.graph.tensor(value)
        self.parts.types[name] = kind
        phase = like.phase if like.phase is Phase.FORWARD else Phase.BACKWARD
        self.late.append(
            replace(
                like,
                name=name,
                op=_ACCUMULATE,
                args=(Ref(term.part.name), how),
                kwargs={},
                outputs=(name,),
                phase=phase,
                rate=Rate.MICRO,
                tags=("pointwise",),
            )
        )
        for atom, power in term.coefficient:
            op = "aten.mul.Tensor" if power > 0 else "aten.div.Tensor"
            for _ in range(abs(power)):
                name = self._step(like, op, (name, self._ratio(atom, kind.dtype)), value)
        return name

    def _step(self, like: Node, op: str, names: Sequence[str], value: str) -> str:
        """Write a pointwise call that runs once a step, and makes a value of the whole batch."""
        name = self.parts.fresh(f"{value}.whole")
        self.parts.types[name] = self.graph.tensor(value)
        self._call(self._like(like), name, op, tuple(map(Ref, names)))
        return name

    def _call(self, like: Node, name: str, op: str, args: tuple[Argument, ...], **kwargs: Argument
              ) -> None:
        self.late.append(
            replace(like, name=name, op=op, args=args, kwargs=kwargs, outputs=(name,),
                    tags=("pointwise",))
        )

    def _ratio(self, atom: str, dtype: str) -> str:
        """Return by how much a number of the whole batch is larger than its nominal value."""
        key = (atom, dtype)
        if key in self.ratios:
            return self.ratios[key]
        # With the total, not with the gradients that it divides: every stage has such, and would
        # wait for the update of the one that computes the ratio.
        like = self._like(self.graph.producers[atom])
        if dtype != "float64":
            wide = self._ratio(atom, "float64")
            name = self.parts.fresh(f"{atom}.ratio")
            self._call(like, name, "aten._to_copy.default", (Ref(wide),),
                       dtype=Symbol("dtype", dtype))
        else:
            name = self.parts.fresh(f"{atom}.float64")
            self._call(like, name, "aten._to_copy.default", (Ref(self._whole(atom)),),
                       dtype=Symbol("dtype", dtype))
            self.parts.types[name] = TensorType((), dtype)
            if counted_targets(self.graph, atom) is not None:
                # Where no target counts, PyTorch computes no gradients at all: not 0 / 0.
                none, safe = (self.parts.fresh(f"{atom}.{one}") for one in ("none", "counted"))
                self._call(like, none, "aten.eq.Scalar", (Ref(name), 0))
                self._call(like, safe, "aten.masked_fill.Scalar", (Ref(name), Ref(none), 1))
                self.parts.types |= {none: TensorType((), "bool"), safe: TensorType((), dtype)}
                name = safe
            total, name = name, self.parts.fresh(f"{atom}.ratio")
            self._call(like, name, "aten.div.Scalar", (Ref(total), self._nominal(atom)))
        self.parts.types[name] = TensorType((), dtype)
        self.ratios[key] = name
        return name

    # Results.

    def _output(self, out: GraphOutput) -> str:
        """Return an output of the whole batch.

        Raises:
            GraphError: see `_whole`; names the output.
        """
        try:
            return self._whole(out.value)
        except GraphError as error:
            named = {
                OutputKind.LOSS: "the loss",
                OutputKind.METRIC: f"metric {out.name!r}",
                OutputKind.STATE: f"the new value of {out.name!r}",
            }[out.kind]
            raise GraphError(
                error.what.replace("a result", named, 1),
                where=error.where,
                accepted=error.accepted,
                todo=error.todo,
            ) from None


_DIVISIONS = ("aten.div.Tensor",)
_SUMS = ("aten.add.Tensor", "aten.sub.Tensor")

#: Factories that take shape, dtype or device of a tensor, and the number that they fill in; None:
#: an argument.
_LIKE = {
    "empty_like": 0,
    "full_like": None,
    "new_empty": 0,
    "new_full": None,
    "new_ones": 1,
    "new_zeros": 0,
    "ones_like": 1,
    "zeros_like": 0,
}


def _single_part(value: _Value) -> Part | None:
    """Return the part of a value that is one term without coefficient."""
    if not isinstance(value, tuple) or len(value) != 1 or value[0].coefficient:
        return None
    return value[0].part


def _is_total(value: _Value) -> bool:
    """Whether a value of the whole batch is known once a step."""
    return isinstance(value, tuple) and not any(
        isinstance(term.part.layout, Samples) for term in value
    )


def _has_totals(terms: Terms) -> bool:
    return any(isinstance(term.part.layout, Total) for term in terms)


def _has_samples(value: _Value) -> bool:
    return isinstance(value, tuple) and any(
        isinstance(term.part.layout, Samples) for term in value
    )


def _multiplied(made: Sequence[Terms], factor: Coefficient) -> list[Terms]:
    if not factor:
        return list(made)
    return [
        tuple(Term(times(term.coefficient, factor), term.part) for term in terms) for terms in made
    ]


def _refusal(unknown: _Unknown) -> GraphError:
    return GraphError(
        f"a result of the whole batch does not follow from its micro-batches: {unknown.why}",
        where=unknown.node.where(),
        accepted=_ACCEPTED,
        todo=_TODO,
    )

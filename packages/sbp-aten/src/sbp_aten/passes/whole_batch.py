"""The loss of micro-batches as that of the whole batch: ratios of sums are ratios of whole sums.

A mean over valid tokens is a ratio N / D of two sums over the batch, and the mean of such ratios of
micro-batches is another number. Gradients of N / D are those of N, divided by D, which is known
behind the last micro-batch only. All that backward does is linear in 1 / D, so each micro-batch
computes with a nominal D', the same for all, and the sum of the gradients is corrected once a step:

    before   loss = div(N, D) [micro]     g = backward(div(1, D)) [micro]      g [step]
    after    loss = div(sum N, sum D)     g = backward(div(1, D')) [micro]     sum g / (D / D')

What is right for the whole batch is said by `batch_meaning`, from the loss down to its terms; the
*degree* of a value is the power of D that it is proportional to. Where values of different degrees
are added, such as the gradient of N / D and that of a penalty on parameters, they are accumulated
apart, and added once a step. That is not possible inside of a network, where N1 / D1 and N2 / D2
meet in the gradient of an activation: this is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod

from sbp_aten.passes.batch_degrees import Degrees
from sbp_aten.passes.batch_meaning import (
    Kind,
    Meaning,
    batch_meanings,
    is_linear,
    micro_batch_size,
)
from sbp_core.errors import GraphError
from sbp_core.graph import (
    Argument,
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
    rename_outputs,
    rename_uses,
)
from sbp_core.passes import GraphWriter

_ACCUMULATE = "sbp.accumulate"

_ACCEPTED = (
    "losses that are a mean or a sum over the samples, a ratio of two such sums whose divisor no "
    "parameter changes, or a sum of these and of penalties on parameters"
)
_TODO = (
    "set trainer.micro_batches=1, or trainer.loss=mean_of_micro_batches to train on the mean of "
    "the losses of micro-batches; of parallelize: micro_batches=1, "
    "loss_is='mean_of_micro_batches'"
)


def whole_batch_loss(graph: LogicalGraph, num_micro_batches: int) -> LogicalGraph:
    """Let the accumulation of a step give the loss and gradients of its whole batch.

    What the accumulation does by itself, the mean over micro-batches, is not touched: a loss that
    is a mean over samples leaves the graph as it is.

    before: l = div(n, d); dx = mul(expand(div(1, d)), m); w1 = sub(w, dw) [step]
    after:  L = div(N, D) [step]; dx = mul(expand(div(1, d')), m); w1 = sub(w, div(DW, r)) [step]
            with N, D, DW = accumulate(n, 1), accumulate(d, 1), accumulate(dw, 1); r = div(D, d')

    Args:
        graph: A step of one micro-batch, whose mean losses are ratios (pass `sum_losses`).
        num_micro_batches: Micro-batches of one step.

    Raises:
        GraphError: the loss of the whole batch does not follow from those of micro-batches.
    """
    if num_micro_batches == 1 or all(out.kind is not OutputKind.LOSS for out in graph.outputs):
        return graph
    meanings = batch_meanings(graph)
    terms = _terms(graph, meanings, graph.loss, divided=False)
    degrees = Degrees(graph, meanings)
    degrees.run()
    scales = _Scales.of(graph, terms, degrees, num_micro_batches)
    return _Rewriting(graph, meanings, degrees, scales).run()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Term:
    """A part of the loss that gradients flow through, and whether sums of the batch divide it."""

    value: str
    meaning: Meaning
    divided: bool


def _terms(
    graph: LogicalGraph, meanings: Mapping[str, Meaning], value: str, *, divided: bool
) -> list[_Term]:
    """Return the sums, means and penalties that a loss is linear in.

    Raises:
        GraphError: it is not.
    """
    meaning = meanings[value]
    node = graph.producers.get(value)
    if meaning.kind in (Kind.MIXED, Kind.SAMPLES):
        cause = meaning.cause or node
        assert cause is not None, f"{value} is a tensor of the batch"
        raise _refusal(
            "the loss of the whole batch does not follow from those of its micro-batches: here "
            "samples meet each other",
            cause,
        )
    if not meaning.trained:
        return []
    if meaning.kind is not Kind.WHOLE:
        return [_Term(value=value, meaning=meaning, divided=divided)]
    assert node is not None, f"{value} is no input"
    given = graph.tensor_inputs(node)
    trained = [at for at, name in enumerate(given) if meanings[name].trained]
    reduced = [at for at in trained if meanings[given[at]].is_reduced]
    factors = next((part for part in (reduced, trained) if is_linear(graph, node, part)), None)
    if factors is None:
        raise _refusal("the loss is not linear in what it sums up over the batch", node)
    divided |= any(meanings[name].is_reduced and not meanings[name].trained for name in given)
    return [term for at in factors for term in _terms(graph, meanings, given[at], divided=divided)]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scales:
    """The factors of micro-batches in accumulated values.

    Args:
        share: Of a mean over the micro-batches: one over their number.
        plain: In gradients that nothing of the batch divides.
        divided: In those of ratios.
    """

    share: float
    plain: float
    divided: float

    @classmethod
    def of(
        cls, graph: LogicalGraph, terms: Sequence[_Term], degrees: Degrees, num_micro_batches: int
    ) -> _Scales:
        """Return the factors that the terms of a loss ask for.

        Raises:
            GraphError: two terms ask for different ones.
        """
        share = 1.0 / num_micro_batches
        found: dict[bool, dict[float, _Term]] = {False: {}, True: {}}
        for term in terms:
            node = graph.producers.get(term.value)
            is_sum = term.meaning.kind is Kind.SUM
            divided = term.divided or bool(degrees.of.get(term.value))
            cause = term.meaning.cause
            if cause is None and is_sum and not divided and micro_batch_size(graph) == 1:
                cause = node  # a factor of one is in no graph
            if is_sum and cause is not None:
                raise _refusal(
                    "a sum over the batch is multiplied by a number, which may be the size of a "
                    "micro-batch",
                    cause,
                    todo="write it as a mean, or as a ratio of two tensors",
                )
            asked = found[divided]
            asked[1.0 if is_sum else share] = term
            if len(asked) > 1:
                assert node is not None, "a parameter is no loss"
                raise _refusal(
                    "the loss adds a sum over the samples to a mean, or to a penalty on "
                    "parameters: their gradients cannot be told apart",
                    node,
                    todo="write both as means",
                )
        plain, ratios = (next(iter(found[divided]), share) for divided in (False, True))
        return cls(share=share, plain=plain, divided=ratios)


def _refusal(what: str, node: Node, todo: str = "") -> GraphError:
    return GraphError(
        what,
        where=node.where(),
        accepted=_ACCEPTED,
        todo=f"{todo}; or {_TODO}" if todo else _TODO,
    )


@dataclass(slots=True)
class _Rewriting:
    """The state of one rewriting.

    Args:
        graph: A step of one micro-batch.
        meanings: Of its forward values.
        degrees: Of all its values.
        scales: Of what is accumulated.
    """

    graph: LogicalGraph
    meanings: Mapping[str, Meaning]
    degrees: Degrees
    scales: _Scales
    #: Once a step: values of the whole batch, by those of micro-batches; with nominal sums; and the
    #: ratios of the two, by total and dtype.
    whole: dict[str, str] = field(default_factory=dict)
    nominal: dict[str, str] = field(default_factory=dict)
    ratios: dict[tuple[str, str], Ref] = field(default_factory=dict)
    writer: GraphWriter = field(init=False)

    def __post_init__(self) -> None:
        self.writer = GraphWriter(self.graph)

    def run(self) -> LogicalGraph:
        """Return the rewritten graph; the graph itself if nothing changes."""
        graph = self.graph
        used = [v for node in graph.nodes if node.rate is Rate.STEP for v in node.inputs()]
        states = [out.value for out in graph.outputs if _is_optimizer_state(graph, out.name)]
        reported = [out.value for out in graph.outputs if out.kind is not OutputKind.STATE]
        for value in dict.fromkeys((*used, *states, *reported)):
            if self._needs_whole(value):
                self._whole(value)
        if not self.whole:
            return graph
        once = self.writer.nodes
        self.writer.nodes = []
        micro = [
            changed
            for node in graph.nodes
            if node.rate is Rate.MICRO
            for changed in self._of_micro_batch(node)
        ]
        step = [rename_uses(n, self.whole) for n in graph.nodes if n.rate is Rate.STEP]
        made = graph.with_nodes(
            (*micro, *once, *step),
            outputs=tuple(
                rename_outputs([out], self.whole)[0]
                if out.kind is not OutputKind.STATE or _is_optimizer_state(graph, out.name)
                else out
                for out in graph.outputs
            ),
            types=self.writer.types,
        )
        return drop_dead(made)

    def _needs_whole(self, value: str) -> bool:
        """Whether the mean over micro-batches is not what the whole batch gives.

        Raises:
            GraphError: what it gives cannot be computed of micro-batches.
        """
        node = self.graph.producers.get(value)
        if node is None or node.rate is Rate.STEP or node.is_host:
            return False
        meaning = self.meanings.get(value)
        if meaning is not None:
            is_loss = value == self.graph.loss and meaning.kind is Kind.SUM
            divided = meaning.is_reduced and bool(self.degrees.of.get(value))
            return meaning.kind is Kind.WHOLE or is_loss or divided
        if value in self.degrees.broken:
            raise _refusal(*self.degrees.broken[value])
        degrees = self.degrees
        special = value in degrees.apart or value in degrees.of
        return special or self.scales.plain != self.scales.share

    def _whole(self, value: str, *, constant: bool = False) -> str:
        """Return a value of the whole batch, made once a step.

        Args:
            value: Of a micro-batch.
            constant: Whether it is the same in all of them.
        """
        node = self.graph.producers.get(value)
        if value in self.whole:
            return self.whole[value]
        if node is None and self.graph.rate_of(value) is Rate.STEP:
            return value
        meaning = self.meanings.get(value)
        again = meaning is not None and meaning.kind is Kind.WHOLE
        if node is not None and (again or value in self.degrees.apart):
            self._repeat(node, self.whole, "whole")
        else:
            self.whole[value] = self._accumulated(value, constant=constant)
        return self.whole[value]

    def _repeat(self, node: Node, made: dict[str, str], label: str) -> None:
        """Compute once a step, of the whole batch or of nominal sums, what a node does."""
        names = {}
        for value in node.inputs():
            if made is self.nominal and self.degrees.is_total(value):
                names[value] = self._nominal(value)
            else:
                fixed = value not in self.degrees.varying
                is_reduced = value in self.meanings and self.meanings[value].is_reduced
                names[value] = self._whole(value, constant=fixed and not is_reduced)
        outputs = tuple(f"{value}.{label}" for value in node.outputs)
        made.update(zip(node.outputs, outputs, strict=True))
        self.writer.types.update(
            zip(outputs, (self.graph.types[value] for value in node.outputs), strict=True)
        )
        self.writer.nodes.append(
            replace(
                rename_uses(node, names),
                name=f"{node.name}.{label}",
                outputs=outputs,
                phase=Phase.FORWARD if node.phase is Phase.FORWARD else Phase.OPTIMIZER,
                rate=Rate.STEP,
                forward="",
            )
        )

    def _accumulated(self, value: str, *, constant: bool) -> str:
        """Return the sum or mean of a value over the micro-batches, with its true divisors."""
        kind = self.graph.tensor(value)
        node = self.graph.producers.get(value)
        like = node or Node(name=value, op=_ACCUMULATE, args=(), outputs=(value,))
        how: float | None = None if constant else self._scale(value)
        if how == 1.0:
            how = 1  # counts stay integers
        phase = like.phase if like.phase is Phase.FORWARD else Phase.BACKWARD
        base = replace(like, name=value, phase=phase, rate=Rate.MICRO)
        label = "last" if constant else "total"
        total = self.writer.call(
            base, _ACCUMULATE, (Ref(value), how), kind, pointwise=True, label=label
        )
        # Of the forward phase, so that a loss is known, and may undo the step, before it commits.
        late = phase if phase is Phase.FORWARD else Phase.OPTIMIZER
        step = replace(base, phase=late, rate=Rate.STEP, forward="")
        for divisor, power in self.degrees.of.get(value, {}).items():
            op = "aten.mul.Tensor" if power > 0 else "aten.div.Tensor"
            for _ in range(abs(power)):
                ratio = self._ratio(divisor, kind.dtype)
                total = self.writer.call(step, op, (total, ratio), kind, pointwise=True)
        return total.name

    def _scale(self, value: str) -> float:
        meaning = self.meanings.get(value)
        if meaning is not None:
            return 1.0 if meaning.kind is Kind.SUM else self.scales.share
        return self.scales.divided if self.degrees.of.get(value) else self.scales.plain

    def _ratio(self, total: str, dtype: str) -> Ref:
        """Return how much larger a total is than the nominal one, a 0-d tensor of a dtype."""
        key = (total, dtype)
        if key not in self.ratios:
            # With the total, not with the gradients that it divides: every stage has such, and
            # would wait for the update of the one that computes the ratio.
            like = self._once(self.graph.producers[total])
            wide = TensorType((), "float64")
            both = [
                self.writer.call(
                    like, "aten._to_copy.default", (Ref(value),), wide, kwargs=_converts("float64")
                )
                for value in (self._whole(total), self._nominal(total))
            ]
            made = self.writer.call(like, "aten.div.Tensor", tuple(both), wide, pointwise=True)
            if dtype != wide.dtype:
                made = self.writer.call(
                    like,
                    "aten._to_copy.default",
                    (made,),
                    TensorType((), dtype),
                    kwargs=_converts(dtype),
                )
            self.ratios[key] = made
        return self.ratios[key]

    def _nominal(self, value: str) -> str:
        """Return, once a step, what a micro-batch has in the place of a total."""
        if value not in self.nominal:
            node = self.graph.producers[value]
            if value in self.degrees.roots:
                self.nominal[value] = self._filled(self._once(node), value, self._whole(value)).name
            else:
                self._repeat(node, self.nominal, "nominal")
        return self.nominal[value]

    def _once(self, node: Node) -> Node:
        """Return what a node is like that belongs to another, and fires once a step."""
        late = Phase.FORWARD if node.phase is Phase.FORWARD else Phase.OPTIMIZER
        return replace(node, phase=late, rate=Rate.STEP, forward="")

    def _filled(self, like: Node, root: str, shaped: str) -> Ref:
        """Return the nominal value of a sum: what it is if all elements count."""
        count = self._num_elements(root) if self.meanings[root].kind is Kind.SUM else 1
        kind = self.graph.tensor(root)
        args: tuple[Argument, ...] = (Ref(shaped), count)
        return self.writer.call(like, "aten.full_like.default", args, kind, label="nominal_total")

    def _num_elements(self, value: str) -> int:
        """Return how many elements of samples a sum over the batch has, >= 1."""
        node = self.graph.producers[value]
        given = self.graph.tensor_inputs(node)
        sizes = [
            prod(self.graph.tensor(name).shape)
            for name in given
            if self.meanings[name].kind is Kind.SAMPLES
        ]
        if node.kind.startswith("nll_loss"):
            sizes = sizes[1:]  # of the targets, not of the scores
        reduced = (name for name in given if self.meanings[name].is_reduced)
        return max(sizes) if sizes else max(map(self._num_elements, reduced), default=1)

    def _of_micro_batch(self, node: Node) -> list[Node]:
        """Return a node of a micro-batch that computes with nominal totals, and these behind it."""
        degrees = self.degrees
        if not degrees.reads_parts(node):
            names = {value: f"{value}.nominal" for value in node.inputs() if value in degrees.roots}
            node = rename_uses(node, names)
        made = [node]
        for value in node.outputs:
            if value in degrees.roots:
                self._filled(node, value, value)
                filled = self.writer.nodes.pop()
                name = f"{value}.nominal"
                self.writer.types[name] = self.graph.types[value]
                made.append(replace(filled, name=name, outputs=(name,)))
        return made


def _converts(dtype: str) -> Mapping[str, Argument]:
    return {"dtype": Symbol("dtype", dtype)}


def _is_optimizer_state(graph: LogicalGraph, name: str) -> bool:
    entry = graph.input_kinds.get(name)
    return entry is not None and entry.kind is InputKind.OPTIMIZER_STATE

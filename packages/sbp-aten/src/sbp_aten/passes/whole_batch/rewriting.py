"""Rewrite a step that was captured on the whole batch into micro-batches with accumulation.

The results are the same, also if the loss is no plain mean over samples (weighted means, ignored
targets). `whole_batch_loss` visits each node once. It writes the node for a micro-batch, or for
once a step if it needs a total over all micro-batches. A result that cannot be computed from
micro-batches is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from sbp_aten.passes.whole_batch.calls import PartCalls, signatures_of
from sbp_aten.passes.whole_batch.layout import (
    LATE,
    SAME,
    LinearTerm,
    PartValue,
    Samples,
    StepConstant,
    Total,
    Unknown,
    Value,
    has_pieces,
    has_samples,
    is_total,
    part_type,
    plain,
    single_part,
)
from sbp_aten.passes.whole_batch.pieces import of_numbers
from sbp_aten.passes.whole_batch.targets import counted_targets, divide_losses_ahead
from sbp_aten.passes.whole_batch.terms import TermCalls
from sbp_aten.traits import filled_with
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
    "losses, gradients, metrics and buffers computed from sums over samples: means, ratios "
    "of sums, sums of these"
)
_TODO = (
    "set trainer.micro_batches=1, or trainer.loss=mean_of_micro_batches to train on the mean of "
    "the losses of micro-batches; of parallelize: micro_batches=1, "
    "MicroBatches(..., loss='mean_of_micro_batches')"
)

_BY_PLACE = "this operator combines samples, or depends on their positions in the batch"

_BATCH_NORMS = ("_native_batch_norm_legit_functional", "native_batch_norm", "cudnn_batch_norm")

_HOW = {"sum": 1, "max": "maximum", "min": "minimum"}

#: Factories that take shape, dtype or device of a tensor.
_LIKE = frozenset(
    {"empty_like", "full_like", "new_empty", "new_full", "new_ones", "new_zeros", "ones_like"}
    | {"zeros_like"}
)


def whole_batch_loss(graph: LogicalGraph, num_micro_batches: int) -> LogicalGraph:
    """Write a step on the whole batch as a step of micro-batches, with the same results.

    `dw(e, c)` stands for the gradient of the weight, with c the gradient of each e:

    before: e = square(x) [8 samples]; l = mean(e); w1 = sub(w, dw(e, 1/8))
    after:  e = square(x) [2 samples]; s = mul(mean(e), 1/4); L = accumulate(s, 1) [step]
            D = accumulate(dw(e, 1/8), 1); w1 = sub(w, D) [step]

    Args:
        graph: A step on the whole batch. Run the pass `sum_losses` before, which writes mean losses
            as sum / count. The samples of a batch input are along its dim 0; an input without dims
            is the same for all.
        num_micro_batches: Number of parts of equal size.

    Raises:
        GraphError: a result of the whole batch cannot be computed from micro-batches; the message
            names it, and the line where samples are combined.
    """
    if num_micro_batches == 1 or all(out.kind is not OutputKind.LOSS for out in graph.outputs):
        return graph
    return _Rewriting(divide_losses_ahead(graph), num_micro_batches).run()


@dataclass(slots=True)
class _Rewriting:
    """Rewrites one graph.

    Args:
        graph: A step on the whole batch.
        num_parts: Number of micro-batches.
    """

    graph: LogicalGraph
    num_parts: int
    values: dict[str, Value] = field(default_factory=dict)
    #: Nodes that run once a step, in their order.
    late: list[Node] = field(default_factory=list)
    #: Value of the whole batch -> its name at rate step.
    whole: dict[str, str] = field(default_factory=dict)
    #: (value, dtype) -> actual value of the whole batch / value assumed in micro-batches.
    ratios: dict[tuple[str, str], str] = field(default_factory=dict)
    parts: PartCalls = field(init=False)
    terms: TermCalls = field(init=False)

    def __post_init__(self) -> None:
        self.parts = PartCalls(self.graph, self.num_parts)
        self.graph = self.parts.graph
        self.terms = TermCalls(self.parts, self.values)

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
        self.values[name] = plain(PartValue(name, layout))
        if layout == SAME:
            self.parts.same.add(name)

    def _node(self, node: Node) -> None:
        if node.rate is not Rate.MICRO:
            self._once(node)
            return
        names = self.graph.tensor_inputs(node)
        given = [self.values[name] for name in names]
        unknown = next((one for one in given if isinstance(one, Unknown)), None)
        if unknown is not None:
            self.values.update(dict.fromkeys(node.outputs, unknown))
        elif all(name in self.parts.same for name in names):
            self._same(node)
        elif node.kind in _LIKE and not has_samples(given[0]):
            self._filled(node, names)
        elif all(
            isinstance(one, StepConstant) or name in self.parts.same
            for name, one in zip(names, given, strict=True)
        ):
            self._once(node)
        else:
            self._of_terms(node, names, given)

    def _same(self, node: Node) -> None:
        if "seeded" in node.tags:
            why = "numbers are drawn from PyTorch's generator, once for each micro-batch"
            self.values.update(dict.fromkeys(node.outputs, Unknown(why, node)))
            return
        pieces = of_numbers(self.parts, node)
        if pieces is not None:
            self.values.update(zip(node.outputs, map(plain, pieces), strict=True))
            return
        self.parts.copy_node(node)
        if not node.is_host:
            self.values.update((value, plain(PartValue(value))) for value in node.outputs)

    def _once(self, node: Node) -> None:
        """Write a node to run once a step, on values of the whole batch."""
        names = () if node.is_host else self.graph.tensor_inputs(node)
        problem = next(filter(None, map(self._problem, names)), None)
        if problem is not None:
            self.values.update(dict.fromkeys(node.outputs, problem))
            return
        if any(
            value in self.parts.types for value in node.outputs
        ):  # remains of a failed attempt by terms
            made = set(node.outputs)
            self.parts.nodes = [one for one in self.parts.nodes if not made & {*one.outputs}]
        whole = {name: self._whole(name) for name in names}
        self.late.append(rename_uses(self._like(node), whole))
        for value in node.outputs:
            self.parts.types[value] = self.graph.types[value]
            self.values[value], self.whole[value] = LATE, value

    def _problem(self, value: str) -> Unknown | None:
        """Return why a value cannot be computed once a step; None if it can."""
        found = self.values[value]
        if isinstance(found, Unknown):
            return found
        if has_pieces(found):
            return self._apart(value)
        if not has_samples(found):
            return None
        node = self.graph.producers.get(value)
        node = node or Node(name=value, op="batch", args=(), outputs=(value,))
        return Unknown("there is a number for each sample", node)

    def _apart(self, value: str) -> Unknown:
        """Return why pieces of samples are not supported here, and the node that takes them."""
        while True:
            node = self.graph.producers[value]
            names = self.graph.tensor_inputs(node)
            earlier = next((name for name in names if has_pieces(self.values[name])), None)
            if earlier is None:
                return Unknown(_BY_PLACE, node)
            value = earlier

    def _like(self, node: Node) -> Node:
        """Return a copy of a node that runs once a step, as a template for new nodes."""
        if node.rate is not Rate.MICRO:
            return node
        # Losses stay in the forward phase, so that a step can be undone by its loss before it
        # commits.
        phase = Phase.FORWARD if node.phase is Phase.FORWARD else Phase.OPTIMIZER
        return replace(node, phase=phase, rate=Rate.STEP, forward="")

    def _filled(self, node: Node, names: Sequence[str]) -> None:
        """Write `ones_like(loss)` and similar factories as constants that do not need the loss."""
        number = 0 if "empty" in node.kind else filled_with(node)
        (value,) = node.outputs
        made = self.graph.tensor(value)
        full = replace(
            node,
            op="aten.new_full.default",
            args=(Ref(self.terms.near(names[0])), made.shape, number),
            kwargs={"dtype": Symbol("dtype", made.dtype)},
        )
        self.parts.add_constant(full, made)
        self.values[value] = plain(PartValue(value))

    def _of_terms(self, node: Node, names: Sequence[str], given: Sequence[Value]) -> None:
        """Write a node of parts: as one call of parts, term by term, or once a step."""
        parts = [single_part(one) for one in given]
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
        samples = any(map(has_samples, given))
        if samples or not any(isinstance(one, StepConstant) for one in given):
            terms = self.terms.call(node, names, given)
            if terms is not None:
                self.values.update(zip(node.outputs, terms, strict=True))
                return
        if samples:
            pieces = next((n for n, one in zip(names, given, strict=True) if has_pieces(one)), None)
            unknown = self._apart(pieces) if pieces else Unknown(self._why(node, given), node)
            self.values.update(dict.fromkeys(node.outputs, unknown))
        else:
            self._once(node)

    def _why(self, node: Node, given: Sequence[Value]) -> str:
        """Return why the result of a node on samples is unknown."""
        if node.kind in _BATCH_NORMS:
            return (
                "batch normalisation in training uses statistics of all samples "
                "(compile.passes.deferred_batch_norm=true, of parallelize compile={'passes': "
                "{'deferred_batch_norm': True}}, normalises micro-batches apart, as GPipe does, "
                "where samples are along dim 0 of the data)"
            )
        if not signatures_of(self.graph, node, self.num_parts):
            return f"no signature of {node.op} is known"
        if all(
            (single_part(one) is not None and not is_total(one)) or name in self.parts.same
            for name, one in zip(self.graph.tensor_inputs(node), given, strict=True)
        ):
            return _BY_PLACE
        return (
            "this operator combines samples with a result of the whole batch, such as a mean, and "
            "that result is not a factor"
        )

    def _whole(self, value: str) -> str:
        """Return a value of the whole batch, known once a step.

        Raises:
            GraphError: it cannot be computed from micro-batches.
        """
        if value in self.whole or not self.graph.is_tensor(value):
            return self.whole.get(value, value)
        problem = self._problem(value)
        if problem is not None:
            raise GraphError(
                "a result of the whole batch cannot be computed from its micro-batches: "
                f"{problem.why}",
                where=problem.node.where(),
                accepted=_ACCEPTED,
                todo=_TODO,
            )
        found = self.values[value]
        assert isinstance(found, tuple), f"{value} is late and not made"
        if value in self.parts.same and self.graph.rate_of(value) is Rate.STEP:
            return value
        node = self.graph.producers.get(value)
        like = node or Node(name=value, op=_ACCUMULATE, args=(), outputs=(value,))
        total = ""
        for term in found:
            made = self._accumulated(like, value, term)
            total = self._step(like, "add.Tensor", (total, made), value) if total else made
        self.whole[value] = total
        return total

    def _accumulated(self, like: Node, value: str, term: LinearTerm) -> str:
        """Return the total of a term over the micro-batches, with its coefficient."""
        layout = term.part.layout
        how = _HOW[layout.reduction] if isinstance(layout, Total) else None
        name = self.parts.fresh(f"{value}.total" if how else f"{value}.last")
        kind = self.graph.tensor(value)
        self.parts.types[name] = kind
        phase = like.phase if like.phase is Phase.FORWARD else Phase.BACKWARD
        source = term.part.name
        if source in self.graph.input_kinds:  # an input, which no actor sends
            source = self.parts.fresh(f"{value}.read")
            args = (Ref(term.part.name),)
            read = replace(like, name=source, op="aten.clone.default", args=args, outputs=(source,))
            self.parts.add(replace(read, phase=phase, tags=("pointwise",)), [kind])
        self.late.append(
            replace(
                like,
                name=name,
                op=_ACCUMULATE,
                args=(Ref(source), how),
                kwargs={},
                outputs=(name,),
                phase=phase,
                rate=Rate.MICRO,
                tags=("pointwise",),
            )
        )
        total = name
        for atom, power in term.coefficient:
            op = "mul.Tensor" if power > 0 else "div.Tensor"
            for _ in range(abs(power)):
                name = self._step(like, op, (name, self._ratio(atom, kind.dtype)), value)
        # If zeros overwrite the quotient, the divisor may be zero because nothing counts: then 0 /
        # 0 has to be zero. The ratio of a number of targets is never zero.
        if any(
            power < 0 and atom in self.terms.filled and counted_targets(self.graph, atom) is None
            for atom, power in term.coefficient
        ):
            flags = TensorType(kind.shape, "bool")
            zeros = self._late(like, f"{value}.zeros", "eq.Scalar", (Ref(total), 0), flags)
            masked = (Ref(name), Ref(zeros), 0)
            name = self._late(like, f"{value}.whole", "masked_fill.Scalar", masked, kind)
        return name

    def _step(self, like: Node, op: str, names: Sequence[str], value: str) -> str:
        """Write a pointwise call that makes a value of the whole batch."""
        kind = self.graph.tensor(value)
        return self._late(like, f"{value}.whole", op, tuple(map(Ref, names)), kind)

    def _late(
        self,
        like: Node,
        name: str,
        op: str,
        args: tuple[Argument, ...],
        kind: TensorType,
        **kwargs: Argument,
    ) -> str:
        """Write a pointwise call of ATen that runs once a step; return the name of its result."""
        name = self.parts.fresh(name)
        self.parts.types[name] = kind
        self.late.append(
            replace(
                self._like(like),
                name=name,
                op=f"aten.{op}",
                args=args,
                kwargs=kwargs,
                outputs=(name,),
                tags=("pointwise",),
            )
        )
        return name

    def _ratio(self, atom: str, dtype: str) -> str:
        """Return the ratio of a number of the whole batch to its nominal value."""
        key = (atom, dtype)
        if key in self.ratios:
            return self.ratios[key]
        # Placed with the total, not with the gradients that it divides: they are on every stage,
        # and each would wait for the update of the stage that computes the ratio.
        like, kind = self.graph.producers[atom], TensorType((), dtype)
        exact = dtype == "float64"
        source = self._whole(atom) if exact else self._ratio(atom, "float64")
        label = f"{atom}.float64" if exact else f"{atom}.ratio"
        cast = Symbol("dtype", dtype)
        name = self._late(like, label, "_to_copy.default", (Ref(source),), kind, dtype=cast)
        if exact:
            if counted_targets(self.graph, atom) is not None:
                # If no target counts, PyTorch computes no gradients, instead of 0 / 0.
                flag = TensorType((), "bool")
                none = self._late(like, f"{atom}.none", "eq.Scalar", (Ref(name), 0), flag)
                args = (Ref(name), Ref(none), 1)
                name = self._late(like, f"{atom}.counted", "masked_fill.Scalar", args, kind)
            nominal = (Ref(name), self.terms.nominal(atom))
            name = self._late(like, f"{atom}.ratio", "div.Scalar", nominal, kind)
        self.ratios[key] = name
        return name

    def _output(self, out: GraphOutput) -> str:
        """Return an output of the whole batch.

        Raises:
            GraphError: see `_whole`; the message names the output.
        """
        try:
            return self._whole(out.value)
        except GraphError as error:
            named = {
                OutputKind.LOSS: "the loss",
                OutputKind.METRIC: f"metric {out.name!r}",
                OutputKind.STATE: f"the new value of {out.name!r}",
            }[out.kind]
            raise error.replaced(
                GraphError, what=error.what.replace("a result", named, 1)
            ) from None

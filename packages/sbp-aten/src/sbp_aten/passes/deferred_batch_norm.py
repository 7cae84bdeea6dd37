"""Normalise by micro-batch, and update running statistics by those of the mini-batch, as GPipe.

In training, each micro-batch is normalised by its own mean and variance. The running statistics,
which evaluation uses, change once per mini-batch (the samples of one update), towards mean and
unbiased variance of all its samples: as `nn.BatchNorm` does that sees the mini-batch at once.

    micro-batch    y, .. = batch_norm(x, w, b)          s = batch_norm_sums(x)
    step           S = accumulate(s); mean, var = moments(S); running' = lerp(running, .., momentum)

Source: Huang et al., "GPipe", NeurIPS 2019, section 2.3. `DeferredBatchNorm` of torchgpipe and of
FairScale differs in one number: it takes the biased variance, (n - 1) / n of that of
`nn.BatchNorm` on n elements of a channel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

from sbp_aten.passes.batch_norm import BACKWARD, FORWARD, BatchNormParts
from sbp_aten.passes.whole_batch.rewriting import whole_batch_loss
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
    TensorType,
    ValueType,
    drop_dead,
)
from sbp_core.passes import GraphWriter

_NORMS = (FORWARD, "aten.native_batch_norm.default")

_SUMS = "sbp.batch_norm_sums.default"

#: Other operators of batch normalisation that may stay: they have no statistics of a batch.
_KEPT = (
    "_batch_norm_no_update",
    "_native_batch_norm_legit_no_training",
    "native_batch_norm_backward",
)

_TODO = "train with one micro-batch, or with compile.passes.deferred_batch_norm=false"


def defer_batch_norm(graph: LogicalGraph, num_micro_batches: int, *, cut: bool) -> LogicalGraph:
    """Write batch normalisation in training by micro-batch, its running statistics by mini-batch.

    before: y, .., mean', var' = batch_norm(x, w, b, mean, var, training); n' = add(n, 1)
    after:  y, .. = batch_norm(x, w, b, mean, var, training); s = mul(batch_norm_sums(x), 1 / count)
            mean' = lerp(mean, s[0], momentum), var' = ..; n' = add(n, 1) [step]

    In a graph of the whole batch, the micro-batches are normalised apart:

    after:  y = cat(batch_norm(x[0:4], w, b, ..), batch_norm(x[4:8], w, b, ..))

    A layer that a step calls twice updates its statistics twice, in the order of the calls.

    Args:
        graph: A step on one micro-batch, or on the whole batch.
        num_micro_batches: Number of micro-batches of a mini-batch.
        cut: Whether the graph is of the whole batch, so that it has to be cut.

    Raises:
        GraphError: forward reads running statistics, or a count of batches, after their change; or
            an unknown operator normalises.
    """
    return _Deferral(graph, num_micro_batches, cut).run() if num_micro_batches > 1 else graph


def deferred_whole_batch(graph: LogicalGraph, num_micro_batches: int) -> LogicalGraph:
    """Write a step on the whole batch as a step of micro-batches that are normalised apart.

    Args:
        graph: See `whole_batch_loss`.
        num_micro_batches: Number of parts of equal size.

    Raises:
        GraphError: see `whole_batch_loss` and `defer_batch_norm`; or dim 0 of normalised data has
            no samples, so that its slices are not those of the micro-batches.
    """
    if all(out.kind is not OutputKind.LOSS for out in graph.outputs):
        return graph
    deferred = defer_batch_norm(graph, num_micro_batches, cut=True)
    made = whole_batch_loss(deferred, num_micro_batches)
    norms = [node for node in made.nodes if _is_forward(node)]
    # Equal calls on samples were merged to one; calls on slices of anything else, such as a value
    # that is known once a step, are still apart.
    if len(norms) > sum(map(_is_forward, graph.nodes)):
        sizes = [made.tensor(node.args[0].name).shape for node in norms]
        raise GraphError(
            f"dim 0 of data of a batch normalisation (shape {sizes[-1]}) has no samples to cut",
            where=norms[-1].where(),
            accepted="data of shape (samples, channels, ...)",
            todo="train with one micro-batch, or with trainer.loss=mean_of_micro_batches",
        )
    return made


def _is_forward(node: Node) -> bool:
    return node.op in _NORMS and node.args[5] is True


class _Deferral:
    """Rewrites one graph."""

    def __init__(self, graph: LogicalGraph, num: int, cut: bool) -> None:
        self.graph, self.num, self.cut = graph, num, cut
        self.writer = GraphWriter(graph)
        #: New running statistics -> the states that they replace.
        self.states: dict[str, str] = {}
        #: Calls whose running statistics change once a step, with moments and number of elements.
        self.late: list[tuple[Node, Ref, int]] = []
        #: Saved mean of a call on the whole batch -> the calls on its micro-batches, and their cat.
        self.pieces: dict[str, tuple[list[Node], Node]] = {}
        #: Values that differ between micro-batches.
        drawn = (InputKind.BATCH, InputKind.RNG)
        self.samples = {one.name for one in graph.inputs if one.kind in drawn}
        for node in graph.nodes:
            if not self.samples.isdisjoint(node.inputs()):
                self.samples.update(node.outputs)

    def run(self) -> LogicalGraph:
        """Return the rewritten graph."""
        micro = [node for node in self.graph.nodes if node.rate is Rate.MICRO]
        counters = self._counters(micro)
        for node in micro:
            if _is_forward(node):
                self._forward(node)
            elif node.op == BACKWARD and node.args[7] is True:
                self._backward(node)
            elif node.name not in counters:
                self._check_known(node)
                self._check_reads(node, self.states)
                self.writer.nodes.append(node)
        for node, moments, count in self.late:
            self._running(node, moments, count)
        once = (replace(node, phase=Phase.OPTIMIZER, rate=Rate.STEP) for node in counters.values())
        late = (node for node in self.graph.nodes if node.rate is not Rate.MICRO)
        self.writer.nodes += [*once, *late]
        return drop_dead(self.writer.written())

    def _counters(self, micro: Sequence[Node]) -> dict[str, Node]:
        """Return the nodes that count batches for the layers, by name."""
        found: dict[str, Node] = {}
        counts: set[str] = set()
        for node in micro:
            if _is_forward(node) and len(node.outputs) == 5 and node.args[3] is not None:
                path = node.args[3].name.rpartition(".")[0]
                counts.add(f"{path}.num_batches_tracked" if path else "num_batches_tracked")
        counts &= self.graph.input_kinds.keys()
        made: dict[str, str] = {}
        for node in micro:
            first = node.args[0].name if node.args and isinstance(node.args[0], Ref) else ""
            if node.op == "aten.add.Tensor" and (first in counts or first in made):
                found[node.name] = node
                made[node.outputs[0]] = first
            else:
                self._check_reads(node, made)
        return found

    def _check_known(self, node: Node) -> None:
        """Refuse another operator of batch normalisation, which would not be deferred.

        Raises:
            GraphError: it is one.
        """
        kept = node.op in _NORMS or node.kind in _KEPT
        if "batch_norm" in node.kind and not kept:
            raise GraphError(
                f"{node.op} cannot be deferred",
                where=node.where(),
                accepted="torch.nn.BatchNorm1d, 2d and 3d, and functional.batch_norm",
                todo=_TODO,
            )

    def _check_reads(self, node: Node, changed: dict[str, str]) -> None:
        """Refuse a node of forward that reads a state after a change that is deferred.

        Raises:
            GraphError: it does.
        """
        for value in node.inputs():
            if value in changed:
                raise GraphError(
                    f"this operator reads {changed[value]!r} in each micro-batch, after a change "
                    f"that is deferred to the end of {self.num} micro-batches",
                    where=node.where(),
                    accepted="running statistics that forward only updates",
                    todo=_TODO,
                )

    def _forward(self, node: Node) -> None:
        """Write a call in training; its running statistics are written later."""
        data, shape = node.args[0], self.graph.tensor(node.args[0].name).shape
        args, outputs = node.args, node.outputs
        if len(outputs) == 5:
            mine = data.name in self.samples and not self.cut
            count = max(1, prod(shape) // max(1, shape[1]))
            pair = TensorType((2, shape[1]), "float64")
            sums = self.writer.call(node, _SUMS, (data,), pair)
            moments = self.writer.pointwise(node, "mul.Scalar", sums, 1 / count)
            self.late.append((node, moments, count * self.num if mine else count))
            for new, old in zip(outputs[3:], args[3:5], strict=True):
                self.states[new] = self.states.get(old.name, old.name)
            args = self._with_states(args)
            outputs = (*outputs[:3], *(f"{value}.of_micro_batch" for value in outputs[3:]))
            for value, old in zip(outputs[3:], node.outputs[3:], strict=True):
                self.writer.types[value] = self.graph.types[old]
        node = replace(node, args=args, outputs=outputs)
        # Instance normalisation is written as that of one sample, of many channels.
        if self.cut and data.name in self.samples and shape[0] % self.num == 0:
            self._cut_forward(node)
        else:
            self.writer.nodes.append(node)

    def _with_states(self, args: tuple[Argument, ...]) -> tuple[Argument, ...]:
        """Return arguments with the running statistics as they were before the step."""
        old = (
            Ref(self.states.get(one.name, one.name)) if isinstance(one, Ref) else one
            for one in args[3:5]
        )
        return (*args[:3], *old, *args[5:])

    def _backward(self, node: Node) -> None:
        node = replace(node, args=self._with_states(node.args))
        saved = node.args[5].name
        if saved in self.pieces:
            self._cut_backward(node, *self.pieces[saved])
        else:
            self.writer.nodes.append(node)

    def _running(self, node: Node, moments: Ref, count: int) -> None:
        """Write new running statistics, once a step."""
        late = replace(node, phase=Phase.OPTIMIZER, rate=Rate.STEP, outputs=node.outputs[3:])
        BatchNormParts(self.writer, late, node.args[0]).update_running(node.args, moments, count)

    # The whole batch, cut into micro-batches

    def _cut_forward(self, node: Node) -> None:
        calls = []
        for at, part in enumerate(self._slices(node, node.args[0])):
            kinds = [self.writer.types[value] for value in node.outputs]
            kinds[0] = self.writer.types[part.name]
            calls.append(self._call(node, at, (part, *node.args[1:]), kinds))
        self.pieces[node.outputs[1]] = (calls, self._cat(node, node.outputs[0], calls))

    def _cut_backward(self, node: Node, calls: Sequence[Node], cat: Node) -> None:
        # As autograd does, the slices belong to the cat whose backward they are.
        slices = self._slices(replace(node, forward=cat.name), node.args[0])
        made = []
        for at, (part, call) in enumerate(zip(slices, calls, strict=True)):
            saved = map(Ref, call.outputs[1:3])
            kinds = [self.writer.types[value] for value in node.outputs]
            if node.args[9][0]:
                kinds[0] = self.writer.types[part.name]
            args = (part, call.args[0], *node.args[2:5], *saved, *node.args[7:])
            made.append(self._call(replace(node, forward=call.name), at, args, kinds))
        for index, value in enumerate(node.outputs):
            if index == 0 and node.args[9][0]:
                self._cat(node, value, made)
                continue
            total, *others = (Ref(call.outputs[index]) for call in made)
            for other in others:
                total = self.writer.pointwise(node, "add.Tensor", total, other)
            self._named(value)

    def _slices(self, like: Node, data: Ref) -> list[Ref]:
        """Write the slices of samples of each micro-batch."""
        kind = self.writer.tensor(data.name)
        size = kind.shape[0] // self.num
        part = TensorType((size, *kind.shape[1:]), kind.dtype)
        bounds = ((at * size, (at + 1) * size) for at in range(self.num))
        op = "aten.slice.Tensor"
        return [self.writer.call(like, op, (data, 0, *one), part) for one in bounds]

    def _call(
        self, node: Node, at: int, args: tuple[Argument, ...], kinds: Sequence[ValueType]
    ) -> Node:
        """Write a call of several outputs on one micro-batch."""
        outputs = tuple(f"{value}.{at}" for value in node.outputs)
        made = replace(node, name=f"{node.name}.{at}", args=args, outputs=outputs)
        self.writer.types.update(zip(outputs, kinds, strict=True))
        self.writer.nodes.append(made)
        return made

    def _cat(self, node: Node, value: str, calls: Sequence[Node]) -> Node:
        """Write a value of all samples, joined from the first outputs of calls."""
        joined = tuple(Ref(call.outputs[0]) for call in calls)
        self.writer.call(node, "aten.cat.default", (joined, 0), self.writer.tensor(value))
        return self._named(value)

    def _named(self, value: str) -> Node:
        """Let the last written node make a value of the graph."""
        last = self.writer.nodes[-1]
        del self.writer.types[last.outputs[0]]
        self.writer.nodes[-1] = replace(last, outputs=(value,))
        return self.writer.nodes[-1]

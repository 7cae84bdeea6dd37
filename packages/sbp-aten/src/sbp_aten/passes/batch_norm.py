"""Rewrite batch normalisation so that the batch may be split: fused kernels, and partial sums.

The operators of PyTorch need the whole batch on every rank, which costs a gather of the
activations. Their parts need to exchange only two numbers a channel in each direction. Each part is
a pass of a fused kernel over the data; r is 1 / sqrt(var + eps), n the number of elements of a
channel:

    sum(x), sum(x^2)    P(sum), then B, float64    `sbp.batch_norm_sums`
    mean, var           from these
    y = batch_norm(x; w, b, mean, var)             split as x is, statistics given
    dw, db              P(sum), then B             the backward kernel, no gradient of x asked for
    dx = w r dy + batch_norm(x; -w r dw / n, -w r db / n, mean, var)

The last line is dx = w r (dy - db / n - (x - mean) r dw / n), written as another normalisation of
x. Both sums are sent between ranks as one tensor, [2, C].

This is synchronised batch normalisation: the statistics are those of the whole micro-batch, as on
one device. Source: Ioffe and Szegedy, "Batch normalization", ICML 2015, section 3.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

from sbp_aten.passes.losses import computed_in
from sbp_core.graph import Argument, LogicalGraph, Node, Ref, TensorType, drop_dead, rename_uses
from sbp_core.passes import GraphWriter

FORWARD = "aten._native_batch_norm_legit_functional.default"
BACKWARD = "aten.native_batch_norm_backward.default"
_FIXED = "aten._native_batch_norm_legit_no_training.default"


def split_batch_norm(graph: LogicalGraph) -> LogicalGraph:
    """Rewrite batch normalisation in training so that a split batch needs only partial sums.

    before: y, m, r, .. = batch_norm(x, w, b, .., training)     dx, dw, db = batch_norm_backward(dy)
    after:  m, v = moments(batch_norm_sums(x)); y = batch_norm(x, w, b, m, v, fixed)
            dw, db = batch_norm_backward(dy, mask = no dx)
            dx = w r dy + batch_norm(x, -w r dw / n, -w r db / n, m, v, fixed)
    """
    writer = GraphWriter(graph)
    for node in graph.nodes:
        if node.op == FORWARD and node.args[5] is True:
            BatchNormParts(writer, node, node.args[0]).forward()
        elif node.op == BACKWARD and node.args[7] is True:
            BatchNormParts(writer, node, node.args[1]).backward()
        else:
            writer.nodes.append(node)
    return drop_dead(writer.written())


class BatchNormParts:
    """Writes the parts of one operator.

    Args:
        writer: The writer that collects them.
        node: The operator.
        data: Its data, (batch, channels, ...).
    """

    def __init__(self, writer: GraphWriter, node: Node, data: Ref) -> None:
        self.writer, self.node, self.data = writer, node, data
        self.start = len(writer.nodes)
        self.full = writer.tensor(data.name)
        self.channels = self.full.shape[1]
        self.count = max(1, prod(self.full.shape) // max(1, self.channels))
        self.dtype = computed_in(self.full.dtype)
        self.flat = TensorType((self.channels,), self.dtype)

    def forward(self) -> None:
        """Write the outputs of the forward operator: data, saved and running statistics."""
        _, weight, bias, old_mean, old_var, _, momentum, eps = self.node.args
        mean, var = self._statistics(self._pointwise("mul.Scalar", self._sums(), 1 / self.count))
        made = self._normalised(
            self.data, self._wide(weight), self._wide(bias), mean, var, momentum, eps
        )
        rooted = self._pointwise("add.Scalar", var, eps)
        running = self._running(old_mean, old_var, mean, var, momentum, self.count)
        spread = self._pointwise("rsqrt.default", rooted)
        self._leave(made, mean, spread, *running)

    def update_running(self, args: tuple[Argument, ...], moments: Ref, count: int) -> None:
        """Write new running statistics, the two outputs of the node.

        Args:
            args: Arguments of the forward operator.
            moments: Means of elements and of their squares, [2, C], float64.
            count: Number of elements of a channel of which they are the means.
        """
        _, _, _, old_mean, old_var, _, momentum, _ = args
        mean, var = self._statistics(moments)
        self._leave(*self._running(old_mean, old_var, mean, var, momentum, count))

    def _sums(self) -> Ref:
        """Return sums of elements and of squares, [2, C], which another pass may have written."""
        op = "sbp.batch_norm_sums.default"
        for node in self.writer.nodes:
            if node.op == op and node.args == (self.data,):
                return Ref(node.outputs[0])
        pair = TensorType((2, self.channels), "float64")
        return self._call(op, self.data, made=pair)

    def _statistics(self, moments: Ref) -> tuple[Ref, Ref]:
        """Write mean and biased variance, [C]."""
        mean, square = self._row(moments, 0), self._row(moments, 1)
        excess = self._pointwise("addcmul.default", square, mean, mean, value=-1)
        # If a channel is constant, rounding may give a negative variance.
        var = self._pointwise("clamp_min.default", excess, 0.0)
        return self._wide(mean), self._wide(var)

    def _running(
        self, old_mean: Ref, old_var: Ref, mean: Ref, var: Ref, momentum: float, count: int
    ) -> list[Ref]:
        """Write new running statistics; the variance is the unbiased one of `count` elements."""
        unbiased = self._pointwise("mul.Scalar", var, count / max(1, count - 1))
        return [
            self._like(old, self._pointwise("lerp.Scalar", self._wide(old), new, momentum))
            for old, new in ((old_mean, mean), (old_var, unbiased))
        ]

    def backward(self) -> None:
        """Write the requested gradients of data, weight and bias."""
        grad, data, weight, _, _, mean, spread, _, eps, mask = self.node.args
        wide_weight, mean, spread = map(self._wide, (weight, mean, spread))
        # The fused operator computes the gradients of weight and bias, [2, C].
        outputs = (f"{self.node.name}.dot", f"{self.node.name}.total")
        wanted = (False, True, True)
        args = (grad, self.data, wide_weight, None, None, mean, spread, True, eps, wanted)
        self._several("sums", BACKWARD, args, outputs, (self.flat, self.flat))
        pair = TensorType((2, self.channels), self.dtype)
        sums = self._call("aten.stack.default", tuple(map(Ref, outputs)), made=pair)
        made = []
        if mask[0]:
            scale = spread
            if weight is not None:
                scale = self._pointwise("mul.Tensor", spread, wide_weight)
            shares = self._pointwise("mul.Scalar", sums, -1 / self.count)
            slopes = self._pointwise("mul.Tensor", shares, scale)
            slope, shift = self._row(slopes, 0), self._row(slopes, 1)
            # This is var + eps, so no eps is added.
            var = self._pointwise("pow.Tensor_Scalar", spread, -2)
            lean = self._normalised(self._wide(data), slope, shift, mean, var, 0.0, 0.0)
            column = TensorType((1, self.channels, *(1 for _ in self.full.shape[2:])), self.dtype)
            factor = self._call("aten.view.default", scale, column.shape, made=column)
            found = self._pointwise("addcmul.default", lean, self._wide(grad), factor)
            made.append(self._like(data, found))
        rows = (self._row(sums, row) for row in (0, 1) if mask[row + 1])
        self._leave(*made, *(row if weight is None else self._like(weight, row) for row in rows))

    def _normalised(
        self, data: Ref, weight: Argument, bias: Argument, mean: Ref, var: Ref, *numbers: float
    ) -> Ref:
        """Write the fused operator for given statistics; its other outputs are empty."""
        name = f"{self.node.name}.fixed"
        empty = TensorType((0,), self.dtype)
        outputs = (name, f"{name}.none0", f"{name}.none1")
        types = (self.writer.tensor(data.name), empty, empty)
        self._several("fixed", _FIXED, (data, weight, bias, mean, var, *numbers), outputs, types)
        return Ref(name)

    def _several(
        self,
        label: str,
        op: str,
        args: tuple[Argument, ...],
        outputs: tuple[str, ...],
        types: tuple[TensorType, ...],
    ) -> None:
        """Write an operator of several outputs."""
        self.writer.types.update(zip(outputs, types, strict=True))
        name = f"{self.node.name}.{label}"
        self.writer.nodes.append(replace(self.node, name=name, op=op, args=args, outputs=outputs))

    def _row(self, pair: Ref, index: int) -> Ref:
        made = TensorType((self.channels,), self.writer.tensor(pair.name).dtype)
        return self._call("aten.select.int", pair, 0, index, made=made)

    def _wide(self, value: Argument) -> Argument:
        """Return a tensor in the dtype of the statistics; None stays None."""
        return value if value is None else self.writer.converted(self.node, value, self.dtype)

    def _like(self, other: Ref, value: Ref) -> Ref:
        return self.writer.converted(self.node, value, self.writer.tensor(other.name).dtype)

    def _pointwise(self, op: str, first: Ref, *others: Argument, **kwargs: Argument) -> Ref:
        return self.writer.pointwise(self.node, op, first, *others, **kwargs)

    def _call(self, op: str, *args: Argument, made: TensorType) -> Ref:
        return self.writer.call(self.node, op, args, made)

    def _leave(self, *made: Ref) -> None:
        """Let the written values become the outputs of the node, in its order.

        Saved statistics have the dtype of statistics, whatever their recorded type is: PyTorch's
        fake tensors have a wrong dtype for data of low precision.
        """
        types, nodes = self.writer.types, self.writer.nodes
        names = dict(zip((value.name for value in made), self.node.outputs, strict=True))
        types.update({new: types.pop(old) for old, new in names.items()})
        for index, node in enumerate(nodes[self.start :], self.start):
            outputs = tuple(names.get(name, name) for name in node.outputs)
            nodes[index] = rename_uses(replace(node, outputs=outputs), names)

"""Batch normalisation whose batch may be split: statistics from sums of parts.

The operators need the whole batch on every rank, which costs a gather of the activations; what they
are made of needs two numbers a channel in each direction:

    mean = sum(x) / n              P(sum), then B       dims of a sum: all but the channels
    var  = sum((x - mean)^2) / n   P(sum), then B
    y    = (x - mean) / sqrt(var + eps) w + b           split as x is
    s, t = sum(dy), sum(dy (x - mean))                  P(sum), then B
    dx   = w r (dy - s / n - (x - mean) r^2 t / n)      r = 1 / sqrt(var + eps)

This is what is called synchronised batch normalisation: statistics are those of the whole
micro-batch, as on one device. Source: Ioffe and Szegedy, "Batch normalization", ICML 2015, section
3.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

from sbp_core.graph import Argument, LogicalGraph, Node, Ref, TensorType, drop_dead
from sbp_core.passes import GraphWriter

_FORWARD = "aten._native_batch_norm_legit_functional.default"
_BACKWARD = "aten.native_batch_norm_backward.default"
_FIXED = "aten._native_batch_norm_legit_no_training.default"

#: Dtypes whose statistics are of the same dtype.
_FULL = ("float32", "float64")


def split_batch_norm(graph: LogicalGraph) -> LogicalGraph:
    """Write batch normalisation in training so that a split batch needs only sums of parts.

    before: y, m, r, .. = batch_norm(x, w, b, .., training)     dx, dw, db = batch_norm_backward(dy)
    after:  m = sum(x) / n; v = sum((x - m)^2) / n; y = batch_norm(x, w, b, m, v, fixed)
            db = sum(dy); dw = sum(dy (x - m)) r; dx = w r (dy - db / n - (x - m) r dw / n)
    """
    writer = GraphWriter(graph)
    for node in graph.nodes:
        if node.op == _FORWARD and node.args[5] is True and _is_full(graph, node.args[0]):
            _Norm(writer, node, node.args[0]).forward()
        elif node.op == _BACKWARD and node.args[7] is True and _is_full(graph, node.args[1]):
            _Norm(writer, node, node.args[1]).backward()
        else:
            writer.nodes.append(node)
    return drop_dead(graph.with_nodes(tuple(writer.nodes), types=writer.types))


def _is_full(graph: LogicalGraph, data: Ref) -> bool:
    return graph.tensor(data.name).dtype in _FULL


class _Norm:
    """The writing of one operator's parts.

    Args:
        writer: What collects them.
        node: The operator.
        data: Its data, (batch, channels, ...).
    """

    def __init__(self, writer: GraphWriter, node: Node, data: Ref) -> None:
        self.writer, self.node, self.data = writer, node, data
        self.full = writer.tensor(data.name)
        self.channels = self.full.shape[1]
        self.dims = (0, *range(2, len(self.full.shape)))
        self.count = prod(self.full.shape) // self.channels
        self.wide = TensorType(
            (1, self.channels, *(1 for _ in self.full.shape[2:])), self.full.dtype
        )
        self.flat = TensorType((self.channels,), self.full.dtype)

    def forward(self) -> None:
        """Write the outputs of the forward operator: data, saved and running statistics."""
        _, weight, bias, old_mean, old_var, _, momentum, eps = self.node.args
        mean = self._scaled(self._sum(self.data), 1 / self.count)
        centred = self._pointwise("sub.Tensor", self.data, mean)
        var = self._scaled(
            self._sum(self._pointwise("mul.Tensor", centred, centred)), 1 / self.count
        )
        spread = self._pointwise("rsqrt.default", self._pointwise("add.Scalar", var, eps, like=var))
        flat_mean, flat_var = self._flat(mean), self._flat(var)
        unbiased = self.count / max(1, self.count - 1)
        names = dict(enumerate(self.node.outputs))
        self._normalised(names[0], weight, bias, flat_mean, flat_var, momentum, eps)
        self._named(names[1], "alias.default", flat_mean)
        self._named(names[2], "alias.default", self._flat(spread))
        for name, old, new in (
            (names[3], old_mean, flat_mean),
            (names[4], old_var, self._scaled(flat_var, unbiased)),
        ):
            kept = self._scaled(old, 1 - momentum)
            self._named(name, "add.Tensor", kept, self._scaled(new, momentum), pointwise=True)

    def backward(self) -> None:
        """Write the gradients of data, weight and bias that are asked for."""
        grad, data, weight, _, _, mean, spread, _, _, mask = self.node.args
        outputs = iter(self.node.outputs)
        mean, spread = self._wide(mean), self._wide(spread)
        centred = self._pointwise("sub.Tensor", data, mean)
        total = self._sum(grad)
        dot = self._sum(self._pointwise("mul.Tensor", grad, centred))
        if mask[0]:
            name = next(outputs)
            shift = self._pointwise("sub.Tensor", grad, self._scaled(total, 1 / self.count))
            square = self._pointwise("mul.Tensor", spread, spread)
            slope = self._scaled(self._pointwise("mul.Tensor", square, dot), 1 / self.count)
            lean = self._pointwise(
                "sub.Tensor", shift, self._pointwise("mul.Tensor", centred, slope)
            )
            scale = spread
            if weight is not None:
                scale = self._pointwise("mul.Tensor", spread, self._wide(weight))
            self._named(name, "mul.Tensor", lean, scale, pointwise=True)
        if mask[1]:
            made = self._pointwise("mul.Tensor", dot, spread)
            self._named(next(outputs), "view.default", made, (self.channels,))
        if mask[2]:
            self._named(next(outputs), "view.default", total, (self.channels,))

    def _normalised(
        self, name: str, weight: Argument, bias: Argument, mean: Ref, var: Ref, *numbers: float
    ) -> None:
        """Write the fused operator for given statistics; its other outputs are empty."""
        outputs = (name, *(f"{name}.none{index}" for index in range(2)))
        for empty in outputs[1:]:
            self.writer.types[empty] = TensorType((0,), self.full.dtype)
        self.writer.nodes.append(
            replace(
                self.node,
                name=f"{self.node.name}.fixed",
                op=_FIXED,
                args=(self.data, weight, bias, mean, var, *numbers),
                outputs=outputs,
            )
        )

    def _sum(self, value: Ref) -> Ref:
        args = (value, self.dims, True)
        return self.writer.call(self.node, "aten.sum.dim_IntList", args, self.wide)

    def _scaled(self, value: Ref, factor: float) -> Ref:
        made = self.writer.tensor(value.name)
        return self.writer.call(self.node, "aten.mul.Scalar", (value, factor), made, pointwise=True)

    def _pointwise(self, op: str, first: Ref, *others: Argument, like: Ref | None = None) -> Ref:
        """Write a pointwise operator; its result is as large as the larger of its arguments."""
        refs = [first, *(other for other in others if isinstance(other, Ref))]
        types = [self.writer.tensor((like or ref).name) for ref in refs]
        made = max(types, key=lambda entry: prod(entry.shape))
        return self.writer.call(self.node, f"aten.{op}", (first, *others), made, pointwise=True)

    def _flat(self, value: Ref) -> Ref:
        return self.writer.call(
            self.node, "aten.view.default", (value, (self.channels,)), self.flat
        )

    def _wide(self, value: Ref) -> Ref:
        return self.writer.call(self.node, "aten.view.default", (value, self.wide.shape), self.wide)

    def _named(self, name: str, op: str, *args: Argument, pointwise: bool = False) -> None:
        """Write an operator that makes one of the outputs of the node."""
        made = self.writer.tensor(name)
        ref = self.writer.call(self.node, f"aten.{op}", args, made, pointwise=pointwise)
        del self.writer.types[ref.name]
        self.writer.nodes[-1] = replace(self.writer.nodes[-1], outputs=(name,))

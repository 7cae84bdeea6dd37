"""Hand-made graphs and clusters, for tests that need no tensor library."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise

from sbp_core.cluster import Cluster, Device, Link
from sbp_core.graph.ir import (
    GraphInput,
    GraphOutput,
    InputKind,
    LogicalGraph,
    Node,
    OutputKind,
    Phase,
    Rate,
    Ref,
    TensorType,
)
from sbp_core.passes.accumulation import accumulate

__all__ = ["Builder", "chain", "cluster", "mlp"]


def cluster(
    *,
    num_devices: int = 8,
    bytes_per_s: float = 1e9,
    latency_s: float = 1e-5,
    launch_s: float = 0.0,
) -> Cluster:
    """Return a cluster of one node."""
    device = Device(
        memory_bytes=1 << 30,
        flop_per_s={"float32": 1e10},
        memory_bytes_per_s=1e10,
        launch_s=launch_s,
    )
    link = Link(latency_s=latency_s, bytes_per_s=bytes_per_s)
    return Cluster(
        name="test",
        num_devices=num_devices,
        devices_per_node=num_devices,
        device=device,
        intra_node=link,
    )


class Builder:
    """A builder that collects the nodes of one graph."""

    def __init__(self) -> None:
        self.inputs: list[GraphInput] = []
        self.outputs: list[GraphOutput] = []
        self.nodes: list[Node] = []
        self.types: dict[str, TensorType] = {}

    def add_input(
        self,
        name: str,
        kind: InputKind,
        shape: Sequence[int],
        *,
        of: str = "",
        dtype: str = "float32",
    ) -> str:
        """Add an input of the graph, and return its name.

        Args:
            name: Its name.
            kind: Its kind.
            shape: The shape of the logical tensor.
            of: For an optimizer state, the parameter that it belongs to.
            dtype: The dtype of its elements.
        """
        self.inputs.append(GraphInput(name=name, kind=kind, of=of))
        self.types[name] = TensorType(tuple(shape), dtype)
        return name

    def op(
        self,
        name: str,
        op: str,
        args: tuple[object, ...],
        shape: Sequence[int],
        *,
        module: str = "",
        phase: Phase = Phase.FORWARD,
        forward: str = "",
        pointwise: bool = False,
    ) -> str:
        """Add a float32 node of ATen's `op`, and return its name; tensors are passed as `Ref`s."""
        self.nodes.append(
            Node(
                name=name,
                op=f"aten.{op}",
                args=args,
                outputs=(name,),
                phase=phase,
                rate=Rate.STEP if phase is Phase.OPTIMIZER else Rate.MICRO,
                module=module,
                forward=forward,
                tags=("pointwise",) if pointwise else (),
            )
        )
        self.types[name] = TensorType(tuple(shape), "float32")
        return name

    def graph(self, name: str = "toy") -> LogicalGraph:
        """Return the graph of all nodes that were added so far."""
        return LogicalGraph(
            name=name,
            inputs=tuple(self.inputs),
            outputs=tuple(self.outputs),
            nodes=tuple(self.nodes),
            types=self.types,
        )


def chain(batch: int = 8, width: int = 4) -> LogicalGraph:
    """Return `sum(relu(x w))` without a backward pass."""
    b = Builder()
    b.add_input("w", InputKind.PARAMETER, (width, width))
    b.add_input("x", InputKind.BATCH, (batch, width))
    b.op("lin.mm", "mm.default", (Ref("x"), Ref("w")), (batch, width), module="lin")
    b.op("act.relu", "relu.default", (Ref("lin.mm"),), (batch, width), module="act", pointwise=True)
    b.op("sum", "sum.default", (Ref("act.relu"),), ())
    b.outputs.append(GraphOutput(name="loss", kind=OutputKind.LOSS, value="sum"))
    return b.graph("chain")


def mlp(
    widths: Sequence[int] = (4, 8, 4),
    batch: int = 8,
    num_micro_batches: int = 1,
    num_updates: int = 1,
) -> LogicalGraph:
    """Return a whole training step of an MLP: forward, backward, an Adam-like update.

    Layer i is the module `layers.i` with the parameter `layers.i.weight` and the states
    `layers.i.weight.exp_avg` and `.exp_avg_sq`; the batch input is `x`.
    """
    b = Builder()
    layers = list(enumerate(pairwise(widths)))
    for i, shape in layers:
        name = b.add_input(f"layers.{i}.weight", InputKind.PARAMETER, shape)
        for key in ("exp_avg", "exp_avg_sq"):
            b.add_input(f"{name}.{key}", InputKind.OPTIMIZER_STATE, shape, of=name)
    value = b.add_input("x", InputKind.BATCH, (batch, widths[0]))
    befores: list[str] = []
    for i, (_, after) in layers:
        module, weight = f"layers.{i}", f"layers.{i}.weight"
        befores.append(value)
        made = b.op(
            f"{module}.mm", "mm.default", (Ref(value), Ref(weight)), (batch, after), module=module
        )
        value = b.op(
            f"{module}.relu", "relu.default", (Ref(made),), (batch, after), module=module,
            pointwise=True,
        )  # fmt: skip
    loss = b.op("sum", "sum.default", (Ref(value),), ())
    b.outputs.append(GraphOutput(name="loss", kind=OutputKind.LOSS, value=loss))
    backward = partial(b.op, phase=Phase.BACKWARD)
    grad = backward("grad.ones_like", "ones_like.default", (Ref(loss),), (), forward="sum")
    logits = (batch, widths[-1])
    grad = backward("grad.expand", "expand.default", (Ref(grad), logits), logits, forward="sum")
    gradients: dict[int, str] = {}
    for i, (before, after) in reversed(layers):
        m = f"layers.{i}"
        of_layer = partial(backward, module=m, forward=f"{m}.mm")
        grad = of_layer(
            f"{m}.grad.threshold",
            "threshold_backward.default",
            (Ref(grad), Ref(f"{m}.relu"), 0),
            (batch, after),
            pointwise=True,
        )
        x_t = of_layer(f"{m}.grad.t", "t.default", (Ref(befores[i]),), (before, batch))
        gradients[i] = of_layer(
            f"{m}.grad.mm", "mm.default", (Ref(x_t), Ref(grad)), (before, after)
        )
        if i:
            w_t = of_layer(f"{m}.grad.t_1", "t.default", (Ref(f"{m}.weight"),), (after, before))
            grad = of_layer(f"{m}.grad.mm_1", "mm.default", (Ref(grad), Ref(w_t)), (batch, before))
    for i, shape in layers:
        _add_update(b, f"layers.{i}", gradients[i], shape)
    return accumulate(b.graph("mlp"), num_micro_batches, num_updates=num_updates)


def _add_update(b: Builder, module: str, grad: str, shape: tuple[int, int]) -> None:
    weight = f"{module}.weight"
    update = partial(b.op, module=module, phase=Phase.OPTIMIZER, pointwise=True)
    avg, square = f"{weight}.exp_avg", f"{weight}.exp_avg_sq"
    new_avg = update(f"{weight}.update.lerp", "lerp.Scalar", (Ref(avg), Ref(grad), 0.1), shape)
    new_square = update(
        f"{weight}.update.addcmul", "addcmul.default", (Ref(square), Ref(grad), Ref(grad)), shape
    )
    root = update(f"{weight}.update.sqrt", "sqrt.default", (Ref(new_square),), shape)
    new = update(
        f"{weight}.update.addcdiv", "addcdiv.default", (Ref(weight), Ref(new_avg), Ref(root)), shape
    )
    for state, value in ((weight, new), (avg, new_avg), (square, new_square)):
        b.outputs.append(GraphOutput(name=state, kind=OutputKind.STATE, value=value))

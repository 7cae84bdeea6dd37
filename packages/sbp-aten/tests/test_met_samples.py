"""Where recurrent networks and attention go through the samples of a batch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from sbp_aten.passes import samples_met
from sbp_core.graph import LogicalGraph
from sbp_core.graph.ir import (
    GraphInput,
    GraphOutput,
    InputKind,
    Node,
    OutputKind,
    Ref,
    TensorType,
)
from sbp_torch.graph_capture import capture


class Sequences(nn.Module):
    def __init__(self, inner: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.inner, self.change = nn.Linear(4, 4), inner, change

    def forward(self, x: Tensor) -> Tensor:
        x = self.change(self.first(x))
        found = self.inner(x, x, x) if isinstance(self.inner, nn.MultiheadAttention) else None
        made: Tensor = (found or self.inner(x))[0]
        return made


CHANGES: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {
    "as it is": (lambda x: x, True),
    "positions added": (lambda x: x + torch.arange(6.0).view(6, 1, 1), True),
    "transposed": (lambda x: x.transpose(0, 1), False),
    "permuted, contiguous": (lambda x: x.permute(1, 0, 2).contiguous(), False),
    "there and back": (lambda x: x.transpose(0, 1).tanh().transpose(0, 1), True),
}

KINDS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "lstm": (lambda: nn.LSTM(4, 4), "aten.unbind.int"),
    "gru": (lambda: nn.GRU(4, 4, 2, bidirectional=True), "aten.unbind.int"),
    "attention": (lambda: nn.MultiheadAttention(4, 2), "aten.bmm.default"),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_module_goes_through_samples_if_they_are_where_it_has_time(
    kind: str, change: str
) -> None:
    (make, op), (changing, is_met) = KINDS[kind], CHANGES[change]
    model = Sequences(make(), changing)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    graph = capture(model, lambda model, x: model(x).square().mean(), torch.randn(6, 10, 4), sgd)

    found = samples_met(graph, {"inner"})

    assert (found is not None) == is_met
    assert found is None or (found.op, found.module) == (op, "inner")
    assert samples_met(graph, {"first"}) is None
    assert samples_met(graph, ()) is None


def fused(kind: str, shape: tuple[int, ...], swapped: tuple[int, int] | None) -> LogicalGraph:
    """Return a graph of one operator, whose input may be transposed."""
    made, nodes, types = "x", [], {"x": TensorType(shape, "float32")}
    if swapped is not None:
        order = list(shape)
        one, other = swapped
        order[one], order[other] = order[other], order[one]
        node = Node(name="t", op="aten.transpose.int", args=(Ref("x"), *swapped), outputs=("t",))
        nodes.append(node)
        types["t"] = TensorType(tuple(order), "float32")
        made = "t"
    args = (Ref(made),) * (3 if "attention" in kind else 1)
    nodes.append(Node(name="y", op=f"aten.{kind}", args=args, outputs=("y",), module="inner"))
    types["y"] = types[made]
    return LogicalGraph(
        name="step",
        inputs=(GraphInput(name="x", kind=InputKind.BATCH),),
        outputs=(GraphOutput(name="loss", kind=OutputKind.LOSS, value="y"),),
        nodes=tuple(nodes),
        types=types,
    )


@pytest.mark.parametrize(
    ("kind", "shape", "swapped", "is_met"),
    [
        ("lstm.input", (6, 10, 4), None, True),
        ("lstm.input", (6, 10, 4), (0, 1), False),
        ("_cudnn_rnn.default", (6, 10, 4), None, True),
        ("_scaled_dot_product_flash_attention.default", (6, 2, 10, 4), None, False),
        ("_scaled_dot_product_flash_attention.default", (6, 2, 10, 4), (0, 2), True),
        ("relu.default", (6, 10, 4), None, False),
    ],
)
def test_fused_operators_are_known_too(
    kind: str, shape: tuple[int, ...], swapped: tuple[int, int] | None, is_met: bool
) -> None:
    assert (samples_met(fused(kind, shape, swapped), {"inner"}) is not None) == is_met

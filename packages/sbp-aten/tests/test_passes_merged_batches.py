"""Products that keep heads apart from the batch: the same step, and heads can be split."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.types import Number

from sbp_aten.pass_options import PassOptions
from sbp_aten.passes import expose_batch_dim, prepare_step
from sbp_aten.passes.batch_dim import separate_merged_batches
from sbp_core.graph import LogicalGraph, verify_graph
from sbp_core.sbp import S
from sbp_core.signatures import OpCall, derive
from sbp_torch.graph_capture import capture, initial_states
from sbp_torch.runtime.single import run_graph

SAMPLES, TIMES, HEADS, WIDTH = 3, 5, 4, 2


class Attention(nn.Module):
    """Attention as two products, so that it may have any bias."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(heads * WIDTH, 3 * heads * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        made = self.qkv(x).view(x.shape[0], TIMES, self.heads, 3 * WIDTH).transpose(1, 2)
        q, k, v = made.chunk(3, dim=-1)
        y: Tensor = (q @ k.transpose(2, 3)).softmax(dim=-1) @ v
        return y.transpose(1, 2).flatten(2)


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    made: Tensor = model(batch["x"])
    return made.square().mean()


def step(
    samples: int = SAMPLES, heads: int = HEADS
) -> tuple[LogicalGraph, dict[str, Tensor | Number], dict[str, Tensor]]:
    """Return a step that is prepared without the pass, its states and a batch."""
    torch.manual_seed(0)
    model = Attention(heads)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = {"x": torch.randn(samples, TIMES, heads * WIDTH)}
    graph = prepare_step(
        capture(model, loss, batch, optimizer), options=PassOptions(expose_batch_dim=False)
    )
    return graph, dict(initial_states(model, optimizer)), batch


def kinds(graph: LogicalGraph) -> list[str]:
    return [node.kind for node in graph.nodes if node.kind in ("bmm", "matmul")]


def test_products_forward_and_backward_get_their_dims_back() -> None:
    graph, *_ = step()

    separate = verify_graph(separate_merged_batches(graph))

    assert kinds(graph) == ["bmm"] * 6
    assert kinds(separate) == ["matmul"] * 6
    assert len(separate.nodes) < len(graph.nodes)


def test_every_bit_of_the_step_stays() -> None:
    graph, states, batch = step()
    separate = separate_merged_batches(graph)

    before, after = (run_graph(one, states, [batch], {"lr": 0.1}) for one in (graph, separate))

    assert torch.equal(before[0]["loss"], after[0]["loss"])
    assert before[1].keys() == after[1].keys()
    for name, value in before[1].items():
        assert torch.equal(torch.as_tensor(after[1][name]), torch.as_tensor(value)), name


def test_heads_of_each_product_can_be_split() -> None:
    graph, *_ = step()

    separate = separate_merged_batches(graph)

    for node in separate.nodes:
        if node.kind == "matmul":
            splits = [one.inputs for one in derive(OpCall.of(separate, node), 2)]
            assert (S(0), S(0)) in splits
            assert (S(1), S(1)) in splits


def test_a_batch_of_one_dim_stays_one() -> None:
    for samples, heads in ((1, HEADS), (SAMPLES, 1)):
        graph, *_ = step(samples, heads)

        assert separate_merged_batches(graph) is graph


def test_it_is_part_of_exposing_the_batch() -> None:
    graph, *_ = step()

    assert kinds(expose_batch_dim(graph)) == ["matmul"] * 6

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - everybody's name for it
from torch import Tensor, nn

from sbp_aten.pass_options import MixedPrecision, PassOptions
from sbp_aten.passes import mixed_precision, prepare_step
from sbp_core.compile import compile_plan
from sbp_core.errors import SbpValueError
from sbp_core.graph import LogicalGraph, Node
from sbp_core.graph.ir import Phase
from sbp_core.infer import infer_strategy
from sbp_core.placement import Placement
from sbp_core.plan_check import check
from sbp_core.planning import PlanRequest
from sbp_core.testing.graphs import cluster
from sbp_torch.boxing.execute import shard
from sbp_torch.graph_capture import capture, initial_states
from sbp_torch.runtime.configs import ReferenceConfig
from sbp_torch.runtime.reference import ReferenceRuntime
from sbp_torch.runtime.single import run_graph
from sbp_torch.testing.models import PROGRAMS, Program, graph_states

LR = {"lr": 1e-2}
LOW = PassOptions(mixed_precision=MixedPrecision())


@pytest.fixture(scope="module")
def gpt32(gpt: Program) -> LogicalGraph:
    """The step of the tiny GPT in float32, as captured."""
    model, optimizer = gpt.build()
    return capture(model, gpt.loss, gpt.batches(1)[0], optimizer)


def _dtypes(graph: LogicalGraph, node: Node) -> set[str]:
    """Return the floating dtypes that a node reads and makes."""
    found = {graph.tensor(value).dtype for value in (*graph.tensor_inputs(node), *node.outputs)}
    return {dtype for dtype in found if "float" in dtype}


def _products(graph: LogicalGraph) -> list[Node]:
    return [node for node in graph.nodes if node.kind in ("mm", "addmm", "bmm")]


@pytest.mark.slow
def test_products_are_low_and_the_rest_is_full(gpt32: LogicalGraph) -> None:
    graph = prepare_step(gpt32, options=LOW)

    delicate = [
        node
        for node in graph.nodes
        if any(word in node.kind for word in ("norm", "softmax", "nll", "sum", "add_", "lerp"))
    ]
    assert len(_products(graph)) > 10
    assert {frozenset(_dtypes(graph, node)) for node in _products(graph)} == {
        frozenset({"bfloat16"})
    }
    assert len(delicate) > 10
    # A sum may read low precision, if it is told to sum in float32.
    assert all(graph.tensor(node.outputs[0]).dtype == "float32" for node in delicate)
    assert all("bfloat16" not in _dtypes(graph, n) for n in delicate if n.kind != "sum")


def test_states_loss_and_metrics_keep_their_dtypes(gpt32: LogicalGraph) -> None:
    graph = prepare_step(gpt32, options=LOW)

    plain = prepare_step(gpt32)
    assert {e.name: graph.types[e.name] for e in graph.inputs} == {
        e.name: plain.types[e.name] for e in plain.inputs
    }
    assert [graph.types[out.value] for out in graph.outputs] == [
        plain.types[out.value] for out in plain.outputs
    ]
    assert all(
        "bfloat16" not in _dtypes(graph, node)
        for node in graph.nodes
        if node.phase is Phase.OPTIMIZER and not node.is_host
    )


def test_each_value_is_converted_once_for_all_who_use_it(gpt32: LogicalGraph) -> None:
    graph = mixed_precision(prepare_step(gpt32))

    casts = [node for node in graph.nodes if node.kind == "_to_copy"]
    keys = [(node.args, node.kwargs["dtype"]) for node in casts]
    assert len(keys) > 20
    assert len(set(keys)) == len(keys)


def test_a_graph_of_another_dtype_stays_as_it_is(gpt_graph: LogicalGraph) -> None:
    assert mixed_precision(gpt_graph).nodes == gpt_graph.nodes


class _Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(6, 16), nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.first(x)))


def _class_loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"])


def test_loss_and_gradients_are_those_of_autocast() -> None:
    torch.manual_seed(0)
    model = _Classifier()
    batch = {"x": torch.randn(9, 6), "y": torch.randint(0, 5, (9,))}
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    graph = prepare_step(capture(model, _class_loss, batch, optimizer), options=LOW)
    states = initial_states(model, optimizer)
    # On numbers of bfloat16 an update with learning rate 1 shows the gradient.
    found, new = run_graph(graph, states, [batch], {"lr": 1.0})

    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = _class_loss(model, batch)
    loss.backward()

    assert torch.equal(found["loss"], loss.detach())
    for name, parameter in model.named_parameters():
        gradient = states[name] - new[name]
        assert parameter.grad is not None
        # Of biases autocast rounds the sum of the rows; here it stays in float32.
        near = 1e-3 if "bias" in name else 1e-6
        torch.testing.assert_close(gradient, parameter.grad, rtol=2 * near, atol=near)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_training_in_low_precision_stays_near_float32(dtype: str, gpt32: LogicalGraph) -> None:
    program = PROGRAMS["gpt"]
    how = PassOptions(mixed_precision=MixedPrecision(dtype=dtype, lower=("embedding",)))
    low, full = prepare_step(gpt32, options=how), prepare_step(gpt32)
    states = graph_states(full, initial_states(*program.build()))
    found_states = dict(states)

    for batch in program.batches(4):
        outputs, states = run_graph(full, states, [batch], LR)
        found, found_states = run_graph(low, found_states, [batch], LR)

        torch.testing.assert_close(found["loss"], outputs["loss"], rtol=3e-3, atol=0)
        assert not torch.equal(found["loss"], outputs["loss"])


def test_what_is_kept_is_as_it_was(gpt32: LogicalGraph) -> None:
    how = MixedPrecision(keep=("head", "blocks.0.*", "bmm"))
    graph = prepare_step(gpt32, options=PassOptions(mixed_precision=how))

    for node in _products(graph):
        kept = node.module == "head" or node.module.startswith("blocks.0.")
        assert _dtypes(graph, node) == {"float32" if kept else "bfloat16"}, node.name


def test_what_grows_fast_is_full_and_what_does_not_follows_its_arguments() -> None:
    torch.manual_seed(0)
    model = nn.Linear(6, 4)

    def loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        made = model(batch["x"])
        return (made.relu().exp() + made.pow(3) + made.mean(1, keepdim=True)).sum()

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    graph = prepare_step(capture(model, loss, {"x": torch.randn(3, 6)}, optimizer), options=LOW)

    forward = {n.kind: n for n in graph.nodes if n.phase is Phase.FORWARD}
    assert _dtypes(graph, forward["relu"]) == {"bfloat16"}
    assert _dtypes(graph, forward["exp"]) == _dtypes(graph, forward["pow"]) == {"float32"}
    assert graph.tensor(forward["mean"].outputs[0]).dtype == "float32"


def test_embeddings_are_low_only_if_asked(gpt32: LogicalGraph) -> None:
    how = MixedPrecision(lower=("embedding",))
    graphs = [
        prepare_step(gpt32, options=PassOptions(mixed_precision=m)) for m in (MixedPrecision(), how)
    ]

    made = [
        {g.tensor(node.outputs[0]).dtype for node in g.nodes if node.kind == "embedding"}
        for g in graphs
    ]
    gradients = [
        {g.tensor(n.outputs[0]).dtype for n in g.nodes if n.kind == "embedding_dense_backward"}
        for g in graphs
    ]
    assert made == [{"float32"}, {"bfloat16"}]
    assert gradients == [{"float32"}, {"float32"}]


def test_conversions_of_gradients_come_before_the_accumulation(gpt32: LogicalGraph) -> None:
    graph = prepare_step(gpt32, 3, options=LOW)

    sums = [node for node in graph.nodes if node.op == "sbp.accumulate"]
    assert len(sums) > 10
    assert {graph.tensor(node.args[0].name).dtype for node in sums} == {"float32"}


@pytest.mark.slow
@pytest.mark.parametrize("pins", [{"parameters": "B"}, {"parameters": "S(0)"}], ids=["B", "S(0)"])
def test_ranks_compute_what_one_device_computes(
    pins: dict[str, str], gpt: Program, gpt32: LogicalGraph
) -> None:
    graph = prepare_step(gpt32, 2, options=LOW)
    mesh = Placement.grid((2,), ("data",))
    request = PlanRequest(graph=graph, mesh=mesh, cluster=cluster())
    given = {"batch": "S(0)", "activations": "S(0)", "optimizer_states": "S(0)", **pins}
    plan = compile_plan(graph, infer_strategy(request, planner="test", pins=given))
    check(plan)
    states = initial_states(*gpt.build())
    session = ReferenceRuntime(ReferenceConfig()).start(plan, states, None)
    expected = graph_states(graph, states)

    for batch in gpt.batches(3, 8):
        halves = [{k: v[at : at + 4] for k, v in batch.items()} for at in (0, 4)]
        outputs, expected = run_graph(graph, expected, halves, LR)
        loss = session.step(batch, LR).loss
        torch.testing.assert_close(loss, outputs["loss"], rtol=1e-3, atol=0)

    for part in plan.ranks:
        for slot in part.slots:
            if slot.name in gpt32.new_states and slot.sbp is not None:
                own = shard(expected[slot.name], plan.stages[slot.stage], slot.sbp)[part.rank]
                held = session.shard(slot.name, part.rank)
                assert held.dtype == torch.float32
                # Three AdamW steps of 1e-2, whose directions hang on rounded gradients.
                torch.testing.assert_close(held, own, rtol=0, atol=2e-2)


def test_another_dtype_is_refused() -> None:
    with pytest.raises(SbpValueError, match="dtype='float64'"):
        MixedPrecision(dtype="float64")  # type: ignore[arg-type]  # what is tested

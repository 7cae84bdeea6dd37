from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from functools import cache

import pytest
import torch
from torch import Tensor, nn

from sbp_core.errors import CaptureError
from sbp_core.graph import GRAPH, LogicalGraph, verify_graph
from sbp_core.graph.ir import InputKind, OutputKind, Phase, Rate
from sbp_torch.graph_capture import capture, initial_states
from sbp_torch.runtime.single import run_graph
from sbp_torch.testing.models import (
    PROGRAMS,
    Mlp,
    Program,
    adamw,
    eager_states,
    eager_step,
    same_states,
    square_batch,
    square_loss,
)


@cache
def _captured(name: str) -> tuple[LogicalGraph, Mapping[str, torch.Tensor]]:
    program = PROGRAMS[name]
    model, optimizer = program.build()
    graph = capture(model, program.loss, program.batches(1)[0], optimizer)
    return verify_graph(graph), initial_states(model, optimizer)


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_captured_graph_computes_what_eager_computes_bit_for_bit(name: str) -> None:
    program = PROGRAMS[name]
    graph, states = _captured(name)
    model, optimizer = program.build()

    for batch in program.batches(3):
        expected = eager_step(program, model, optimizer, batch)
        outputs, states = run_graph(graph, states, [batch], {"lr": 1e-2})

        assert torch.equal(outputs["loss"], expected)
        assert same_states(states, eager_states(model, optimizer))


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("name", PROGRAMS)
def test_capture_from_the_middle_of_training_goes_on_bit_for_bit(name: str) -> None:
    program = PROGRAMS[name]
    model, optimizer = program.build()
    before, after = program.batches(2)
    eager_step(program, model, optimizer, before)
    graph = capture(model, program.loss, before, optimizer)

    outputs, states = run_graph(graph, initial_states(model, optimizer), [after], {"lr": 1e-2})

    assert torch.equal(outputs["loss"], eager_step(program, model, optimizer, after))
    assert same_states(states, eager_states(model, optimizer))


def test_capture_changes_nothing_on_model_and_optimizer() -> None:
    program = PROGRAMS["buffers"]
    model, optimizer = program.build()
    before = copy.deepcopy(model.state_dict())
    groups = copy.deepcopy(optimizer.state_dict())

    capture(model, program.loss, program.batches(1)[0], optimizer)
    initial_states(model, optimizer)

    assert same_states(model.state_dict(), before)
    assert optimizer.state_dict() == groups
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


@pytest.mark.slow
def test_capture_twice_gives_the_same_graph(gpt: Program, gpt_graph: LogicalGraph) -> None:
    model, optimizer = gpt.build(torch.float64)

    again = capture(model, gpt.loss, gpt.batches(1)[0], optimizer)

    assert again == gpt_graph


def test_initial_states_are_copies() -> None:
    program = PROGRAMS["mlp"]
    model, optimizer = program.build()

    states = initial_states(model, optimizer)
    states["layers.0.weight"].zero_()

    assert model.layers[0].weight.abs().sum() > 0
    assert states["layers.0.weight.momentum_buffer"].count_nonzero() == 0


def test_every_node_is_functional(gpt_graph: LogicalGraph) -> None:
    for node in gpt_graph.nodes:
        if not node.is_host:
            packet, overload = node.op.split(".")[1:]
            schema = getattr(getattr(torch.ops.aten, packet), overload)._schema
            assert not schema.is_mutable, node.op


def test_inputs_and_outputs_are_typed(gpt_graph: LogicalGraph) -> None:
    kinds = {entry.name: entry.kind for entry in gpt_graph.inputs}
    outputs = {out.name: out.kind for out in gpt_graph.outputs}

    assert kinds["tokens.weight"] is InputKind.PARAMETER
    assert kinds["head.weight.exp_avg"] is InputKind.OPTIMIZER_STATE
    assert gpt_graph.input_kinds["head.weight.exp_avg"].of == "head.weight"
    assert kinds["targets"] is InputKind.BATCH
    assert kinds["lr"] is InputKind.SCALAR
    assert outputs["loss"] is OutputKind.LOSS
    states = {name for name, kind in kinds.items() if kind.is_state}
    assert {name for name, kind in outputs.items() if kind is OutputKind.STATE} == states


def test_nodes_know_module_line_phase_and_rate(gpt_graph: LogicalGraph) -> None:
    node = gpt_graph.by_name["blocks.1.attention.qkv.addmm"]

    assert node.module == "blocks.1.attention.qkv"
    assert "sbp_torch/testing/models.py:" in node.source
    assert (node.phase, node.rate) == (Phase.FORWARD, Rate.MICRO)
    update = gpt_graph.producers[gpt_graph.new_states["head.weight"]]
    assert (update.phase, update.rate) == (Phase.OPTIMIZER, Rate.STEP)
    assert update.name.startswith("head.weight.update.")
    assert update.module == "head"
    assert update.source.startswith("torch/optim/adamw.py:")


def test_backward_nodes_belong_to_a_forward_node_of_their_module(gpt_graph: LogicalGraph) -> None:
    backward = [node for node in gpt_graph.nodes if node.phase is Phase.BACKWARD]
    linked = [node for node in backward if node.forward]

    assert len(linked) > 0.9 * len(backward)
    for node in linked:
        forward = gpt_graph.by_name[node.forward]
        assert forward.phase is Phase.FORWARD
        assert (forward.module, forward.source) == (node.module, node.source)
    mms = [node for node in linked if node.module == "blocks.0.up" and node.kind == "mm"]
    assert {node.forward for node in mms} == {"blocks.0.up.addmm"}
    assert len(mms) == 2  # gradients of weight and of input are nodes of their own


def test_a_tied_weight_is_one_parameter() -> None:
    graph, _ = _captured("tied gpt")

    assert "tokens.weight" in graph.types
    assert "head.weight" not in graph.types


def test_the_learning_rate_is_an_input() -> None:
    program = PROGRAMS["mlp"]
    graph, states = _captured("mlp")
    (batch,) = program.batches(1)

    _, stay = run_graph(graph, states, [batch], {"lr": 0.0})
    _, move = run_graph(graph, states, [batch], {"lr": 0.5})

    weight = "layers.0.weight"
    assert torch.equal(stay[weight], states[weight])
    assert not torch.equal(move[weight], states[weight])


def test_groups_have_learning_rates_of_their_own() -> None:
    torch.manual_seed(0)
    model = Mlp()
    first, *rest = model.parameters()
    optimizer = torch.optim.SGD([{"params": [first], "lr": 0.1}, {"params": rest, "lr": 0.2}])
    batch = square_batch(4)
    graph = capture(model, square_loss, batch, optimizer)

    _, new = run_graph(graph, initial_states(model, optimizer), [batch], {"lr.0": 0.0, "lr.1": 0.2})

    assert torch.equal(new["layers.0.weight"], first)
    assert not torch.equal(new["layers.2.weight"], model.layers[2].weight)


def test_without_an_optimizer_only_the_loss_is_captured() -> None:
    program = PROGRAMS["mlp"]
    model, _ = program.build()

    graph = capture(model, program.loss, program.batches(1)[0], name="eval")

    assert graph.name == "eval"
    assert [out.name for out in graph.outputs] == ["loss"]
    assert {node.phase for node in graph.nodes} == {Phase.FORWARD}


def test_a_frozen_parameter_stays_as_it_is() -> None:
    program = PROGRAMS["mlp"]
    model, optimizer = program.build()
    model.layers[0].weight.requires_grad_(False)
    (batch,) = program.batches(1)

    graph = capture(model, program.loss, batch, optimizer)
    _, new = run_graph(graph, initial_states(model, optimizer), [batch], {"lr": 0.1})

    assert "layers.0.weight" not in graph.new_states
    assert torch.equal(new["layers.0.weight"], model.layers[0].weight)


def test_a_loss_that_is_no_number_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"the loss is torch.float32 of shape \(4, 4\)"):
        capture(Mlp(), lambda model, batch: model(batch["x"]), square_batch(4))


@pytest.mark.parametrize(
    ("wrong", "what", "todo"),
    [
        (lambda loss: loss.item(), "a number of Python", "drop .item()"),
        (lambda loss: 3.0, "a number of Python", "drop .item()"),
        (lambda loss: (loss,), "a tuple of Tensor", "return loss, {'accuracy': accuracy}"),
        (
            lambda loss: (loss, 3.0),
            "a tuple of Tensor, float",
            "return loss, {'accuracy': accuracy}",
        ),
        (lambda loss: {"total": loss}, "a mapping of 'total', without", "{'loss': loss"),
        (lambda loss: None, "None", "return loss"),
        (lambda loss: loss.long(), "torch.int64", "floating"),
        (lambda loss: loss.expand(3), r"torch.float32 of shape \(3,\)", "loss.mean()"),
    ],
)
def test_what_is_returned_for_a_loss_is_refused_with_what_to_return(
    wrong: Callable[[Tensor], object], what: str, todo: str
) -> None:
    with pytest.raises(CaptureError, match=f"the loss is {what}") as caught:
        capture(Mlp(), lambda model, batch: wrong(square_loss(model, batch)), square_batch(4))

    assert todo in caught.value.todo


def test_states_of_training_are_kept_although_a_parameter_is_frozen() -> None:
    program = PROGRAMS["mlp"]
    model, optimizer = program.build()
    model.layers[0].weight.requires_grad_(False)
    eager_step(program, model, optimizer, program.batches(1)[0])

    states = initial_states(model, optimizer)

    assert states["layers.4.bias.momentum_buffer"].count_nonzero() > 0
    assert "layers.0.weight.momentum_buffer" not in states


def test_a_parameter_that_the_model_does_not_have_is_refused() -> None:
    with pytest.raises(CaptureError, match="a parameter that the model does not have"):
        capture(Mlp(), square_loss, square_batch(4), adamw(Mlp()))


class _Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.head(x)
        if made.sum() > 0:  # the line that the error must name
            return made
        return -made


def test_control_flow_on_values_names_the_users_line() -> None:
    with pytest.raises(CaptureError, match="_Branching cannot be captured") as caught:
        capture(_Branching(), square_loss, square_batch(4))

    line = _Branching.forward.__code__.co_firstlineno + 2
    (place,) = caught.value.where
    assert place.endswith(f"tests/test_capture.py:{line}")
    assert "torch.where instead of if" in caught.value.todo


class _Constant(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 4)
        self.hidden = torch.ones(6)  # not registered

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x * self.hidden)


def test_an_unregistered_tensor_of_a_module_is_a_buffer() -> None:
    torch.manual_seed(0)
    model, batch = _Constant(), square_batch(4)

    graph = capture(model, square_loss, batch)
    outputs, _ = run_graph(graph, initial_states(model), [batch], {})

    assert graph.input_kinds["hidden"].kind is InputKind.BUFFER
    assert torch.equal(outputs["loss"], square_loss(model, batch))


def test_a_captured_graph_is_legal_and_survives_json(gpt_graph: LogicalGraph) -> None:
    text = json.dumps(GRAPH.dump(gpt_graph), allow_nan=False)

    assert verify_graph(gpt_graph) is gpt_graph
    assert GRAPH.load(json.loads(text)) == gpt_graph

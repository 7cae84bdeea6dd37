from importlib.resources import files

import pytest
import torch
import yaml
from plan_requests import collectives, gpt_step, request
from small_steps import (
    Classes,
    Experts,
    LongSequence,
    Mlp,
    Table,
    captured,
    draws,
    entries,
    machine,
    run_beside_one_device,
    signatures,
)
from torch import nn
from torch.nn import functional

from sbp_core.compile import CompileOptions, compile_plan
from sbp_core.errors import ConfigError
from sbp_core.graph import Phase
from sbp_core.placement import Placement
from sbp_core.planning import PlanRequest
from sbp_core.plugins import merge_settings
from sbp_core.sbp import B, P, S
from sbp_planner.configs import ManualConfig
from sbp_planner.manual import ManualPlanner
from sbp_planner.pattern_pins import pattern_pins

#: Megatron's tensor parallelism by the names of gpt: what the patterns have to come to.
BY_NAME = {
    "*.attention.qkv.*": {"tensor": "S(0)"},
    "*.attention.proj.weight*": {"tensor": "S(1)"},
    "*.mlp.up.*": {"tensor": "S(0)"},
    "*.mlp.down.weight*": {"tensor": "S(1)"},
    "use:*.attention.qkv.weight": {"tensor": "S(0)"},
    "use:*.attention.proj.weight": {"tensor": "S(1)"},
    "use:*.mlp.up.weight": {"tensor": "S(0)"},
    "use:*.mlp.down.weight": {"tensor": "S(1)"},
    "*.attention.proj": {"tensor": "B"},
    "*.mlp.down": {"tensor": "B"},
    "blocks.*.norm*.native_layer_norm*": {"tensor": "B"},
}


def option(preset):
    text = files("sbp_planner.conf").joinpath("planner", "manual", f"{preset}.yaml").read_text()
    found = yaml.safe_load(text)
    del found["name"]
    return found


def planned(preset, step, mesh_shape=(2,), axes=("data",), bytes_per_s=1e9):
    """Plan a step by a preset, and compare a run of it with one device."""
    mesh = Placement.grid(mesh_shape, axes)
    cluster = machine(bytes_per_s, num_ranks=mesh.size)
    planner = ManualPlanner(merge_settings(ManualConfig, option(preset)))
    strategy = planner.plan(PlanRequest(graph=step.graph, mesh=mesh, cluster=cluster))
    run_beside_one_device(step, strategy)
    return strategy


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(
    ("preset", "mesh_shape", "axes"),
    [
        ("tensor_parallel", (2,), ("tensor",)),
        ("tensor_parallel", (2, 2), ("data", "tensor")),
        ("data_tensor", (2, 1, 2), ("pipe", "data", "tensor")),
    ],
)
def test_of_a_gpt_what_is_found_is_what_was_pinned_by_name(preset, mesh_shape, axes):
    asked = request(mesh_shape, axes)
    settings = option(preset)
    by_name = settings | {"patterns": {}, "pins": settings["pins"] | BY_NAME}

    found, named = (
        ManualPlanner(merge_settings(ManualConfig, one)).plan(asked) for one in (settings, by_name)
    )

    assert found.storage == named.storage
    assert found.nodes == named.nodes
    sent = [
        compile_plan(asked.graph, one, CompileOptions(cluster=asked.cluster)).boxing_bytes
        for one in (found, named)
    ]
    assert sent[0] == sent[1] > 0


class Gated(nn.Module):
    """SwiGLU behind a norm, with a residual connection: two parameters make its hidden units."""

    def __init__(self, width: int, hidden: int):
        super().__init__()
        self.first, self.norm = nn.Linear(width, width), nn.LayerNorm(width)
        self.gate, self.up = nn.Linear(width, hidden), nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def loss(self, batch):
        x = self.first(batch["x"])
        y = self.norm(x)
        y = self.down(functional.silu(self.gate(y)) * self.up(y))
        return (x + y).square().mean()


def test_gradients_of_one_input_are_added_up_before_ranks_exchange_them():
    step = captured(Gated(8, 16), lambda n, seed: {"x": draws(seed, 4 * n, 3, 8)})

    strategy = planned("tensor_parallel", step, axes=("tensor",))

    assert collectives(step.graph, strategy, Phase.FORWARD) == {"all-reduce": 1}
    assert collectives(step.graph, strategy, Phase.BACKWARD) == {"all-reduce": 1}


class Convolutions(nn.Module):
    """Channels that one convolution makes and another contracts."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.up, self.down = nn.Conv2d(8, 16, 3, padding=1), nn.Conv2d(16, 8, 3, padding=1)

    def loss(self, batch):
        x = self.stem(batch["x"])
        return (x + self.down(self.up(x).relu())).square().mean()


def test_gradients_of_split_convolutions_stay_split_until_they_are_accumulated():
    step = captured(
        Convolutions(), lambda n, seed: {"x": draws(seed, 4 * n, 3, 6, 6)}, num_micro_batches=2
    )

    strategy = planned("tensor_parallel", step, axes=("tensor",))

    assert strategy.storage["up.weight"].sbp[0] == S(0)
    assert "all-gather" not in collectives(step.graph, strategy, Phase.BACKWARD)


def test_states_gradients_and_updates_are_split_as_parameters_are():
    graph = gpt_step()

    found = pattern_pins(graph, Placement.grid((2,), ("tensor",)), {"*": ["tensor"]})

    split = {"tensor": "S(1)"}
    name = "blocks.0.mlp.down.weight"
    assert found.pins[name] == found.pins[f"use:{name}"] == found.pins[f"{name}.exp_avg"] == split
    new = graph.new_states[name]
    assert found.pins[new] == split


def test_an_axis_of_one_rank_splits_nothing():
    mesh = Placement.grid((1,), ("tensor",))

    found = pattern_pins(gpt_step(), mesh, {"tensor": ["tensor", "experts"]})

    assert not found.pins
    assert not found.explanation


def test_a_pattern_of_every_axis_splits_over_all_of_them():
    step = captured(
        Classes(16, 2048),
        lambda n, seed: {"x": draws(seed, 4 * n, 16), "y": torch.arange(4 * n)},
    )
    mesh = Placement.grid((2, 2), ("data", "tensor"))

    found = pattern_pins(step.graph, mesh, {"*": ["classes"]})

    assert found.pins["head.weight"] == {"data": "S(0)", "tensor": "S(0)"}
    assert found.explanation == ("classes on data: head.weight", "classes on tensor: head.weight")


def test_columns_and_rows_run_as_one_device():
    step = captured(Mlp(8, 32), lambda n, seed: {"x": draws(seed, 4 * n, 8)}, num_micro_batches=2)

    strategy = planned("data_tensor", step, (2, 2), ("data", "tensor"))

    assert strategy.storage["up.weight"].sbp[1] == S(0)
    assert strategy.storage["down.weight"].sbp[1] == S(1)


def test_split_classes_run_as_one_device():
    step = captured(
        Classes(16, 2048),
        lambda n, seed: {"x": draws(seed, 4 * n, 16), "y": torch.arange(4 * n) * 100},
    )

    strategy = planned("class_parallel", step)

    assert entries(strategy, "head.weight") == {S(0)}
    assert entries(strategy, "trunk.weight") == {B}
    made = [sbp for one in strategy.nodes.values() for sbp in one.signature.outputs]
    assert any(P("max") in sbp for sbp in made), "no rank has maxima of its classes"
    # Each rank has the gradients of its classes: no sum over ranks is as large as the parameter.
    nodes = [node for node in step.graph.nodes if node.name in strategy.nodes]
    outputs = [(node.outputs, strategy.nodes[node.name].signature.outputs) for node in nodes]
    shapes = {
        step.graph.tensor(name).shape
        for names, entries_of in outputs
        for name, sbp in zip(names, entries_of, strict=True)
        if P("sum") in sbp
    }
    assert not {(2048, 16), (16, 2048)} & shapes


@pytest.mark.parametrize("bytes_per_s", [1e6, 1e9, 1e12])
def test_split_classes_send_nothing_that_grows_with_classes_times_width(bytes_per_s):
    sent = []
    for num_classes in (2048, 8192):
        step = captured(
            Classes(16, num_classes),
            lambda n, seed: {"x": draws(seed, 4 * n, 16), "y": torch.arange(4 * n) * 100},
        )
        strategy = planned("class_parallel", step, (4,), bytes_per_s=bytes_per_s)
        sent.append(compile_plan(step.graph, strategy, CompileOptions()).boxing_bytes)

    assert sent[0] == sent[1]


@pytest.mark.parametrize("patterns", [["experts", "tensor"], ["tensor", "experts"]])
def test_experts_are_split_before_tensor_whatever_the_order(patterns):
    step = captured(Experts(8, 16, 4), lambda n, seed: {"x": draws(seed, 4 * n, 8)})
    mesh = Placement.grid((2,), ("tensor",))

    with pytest.raises(ConfigError, match="'experts' splits the tensors that the pattern 'tensor'"):
        pattern_pins(step.graph, mesh, {"tensor": patterns})


def test_a_pattern_that_may_be_missing_is_left_out():
    graph = captured(Table(64, 8), lambda n, seed: {"i": torch.arange(8 * n) * 3}).graph
    mesh = Placement.grid((2,), ("tensor",))

    found = pattern_pins(graph, mesh, {"tensor": ["classes?", "tables?"]})

    assert found.pins["table.weight"] == {"tensor": "S(0)"}
    assert found.explanation == (
        "classes on tensor: not in this model",
        "tables on tensor: table.weight",
    )


class Classifier(nn.Module):
    """Hidden units, and very many classes."""

    def __init__(self, width: int, hidden: int, classes: int):
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.head = nn.Linear(width, classes, bias=False)

    def loss(self, batch):
        x = self.down(functional.gelu(self.up(batch["x"]))).tanh()
        return functional.cross_entropy(self.head(x), batch["y"])


def test_megatron_splits_columns_rows_and_classes_and_runs_as_one_device():
    step = captured(
        Classifier(16, 32, 2048),
        lambda n, seed: {"x": draws(seed, 4 * n, 16), "y": torch.arange(4 * n) * 100},
    )

    strategy = planned("megatron", step, (2, 2), ("data", "tensor"))

    on_tensor = {name: strategy.storage[f"{name}.weight"].sbp[1] for name in ("up", "down", "head")}
    assert on_tensor == {"up": S(0), "down": S(1), "head": S(0)}


def test_split_tables_run_as_one_device():
    step = captured(Table(64, 8), lambda n, seed: {"i": torch.arange(8 * n) * 3})

    strategy = planned("table_parallel", step)

    assert entries(strategy, "table.weight") == {S(0)}
    (looked_up,) = signatures(step, strategy, "embedding")
    assert looked_up[1] == (P("sum"),)


def test_split_experts_run_as_one_device():
    step = captured(Experts(8, 16, 4), lambda n, seed: {"x": draws(seed, 4 * n, 8)})

    strategy = planned("expert_parallel", step)

    assert entries(strategy, "up") == entries(strategy, "down") == {S(0)}
    up, down, _ = signatures(step, strategy, "bmm")
    assert up == down == ((S(0), S(0)), (S(0),))


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(
    ("mesh_shape", "axes", "samples"),
    [((2,), ("sequence",), 1), ((2, 2), ("data", "sequence"), 2)],
)
def test_split_sequences_run_as_one_device(mesh_shape, axes, samples):
    step = captured(LongSequence(8), lambda n, seed: {"x": draws(seed, samples * n, 16, 8)})

    strategy = planned("sequence_parallel", step, mesh_shape, axes)

    assert strategy.storage["x"].sbp[-1] == S(1)
    attention = "_scaled_dot_product_flash_attention_for_cpu"
    name = next(node.name for node in step.graph.nodes if node.kind == attention)
    queries, keys, values = (sbp[-1] for sbp in strategy.nodes[name].signature.inputs)
    assert (queries, keys, values) == (S(2), B, B)

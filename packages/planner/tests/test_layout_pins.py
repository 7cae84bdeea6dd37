"""Layouts of named dims, as in Mesh-TensorFlow: their splits, their numbers, and their errors."""

from importlib.resources import files

import pytest
import torch
import yaml
from plan_requests import request
from small_steps import (
    Chain,
    Classes,
    Experts,
    Mlp,
    Table,
    captured,
    draws,
    entries,
    machine,
    run_beside_one_device,
)

from sbp_core.errors import ConfigError
from sbp_core.placement import Placement
from sbp_core.planning import PlanRequest
from sbp_core.plugins import merge_settings
from sbp_core.sbp import B, NdSbp, S
from sbp_planner.configs import ManualConfig, layout_of
from sbp_planner.dim_groups import dim_groups
from sbp_planner.manual import ManualPlanner

#: The dims of gpt that the paper names; `d_model` is a dim of nearly every tensor.
NAMES = {
    "hidden": "blocks.*.mlp.up.weight[0]",
    "heads": "blocks.*.attention.qkv.weight[-2]",
    "vocabulary": "head.weight[0]",
    "d_model": "blocks.*.mlp.up.weight[1]",
}


def layout(text, names=NAMES, **settings):
    path = files("sbp_planner.conf").joinpath("planner", "manual", "layout.yaml")
    option = yaml.safe_load(path.read_text("utf-8"))
    assert option.pop("name") == "manual"
    changes = {"layout": text, "names": names, **settings}
    return ManualPlanner(merge_settings(ManualConfig, {**option, **changes}))


def splits(strategy, *names):
    return [strategy.storage[name].sbp for name in names]


WEIGHTS = [
    "blocks.0.attention.qkv.weight",
    "blocks.0.attention.proj.weight",
    "blocks.0.mlp.up.weight",
    "blocks.0.mlp.up.bias",
    "blocks.0.mlp.down.weight",
    "head.weight",
    "blocks.0.norm1.weight",
]


@pytest.mark.parametrize(
    ("text", "axes", "expected"),
    [
        ("batch:data", ("data",), [B, B, B, B, B, B, B]),
        ("hidden:t; heads:t; vocabulary:t", ("t",), [S(0), S(1), S(0), S(0), S(1), S(0), B]),
        ("hidden:t", ("t",), [B, B, S(0), S(0), S(1), B, B]),
        ({"vocabulary": "t"}, ("t",), [B, B, B, B, B, S(0), B]),
    ],
)
def test_all_layers_are_split_along_the_dims_of_the_names(text, axes, expected):
    strategy = layout(text).plan(request((2,), axes))

    assert splits(strategy, *WEIGHTS) == [NdSbp(entry) for entry in expected]
    assert splits(strategy, *(f"{name}.exp_avg" for name in WEIGHTS)) == [
        NdSbp(entry) for entry in expected
    ]


def test_data_and_model_parallelism_are_one_layout_of_two_axes():
    asked = request((2, 2), ("rows", "cols"))

    strategy = layout("batch:rows; hidden:cols; heads:cols").plan(asked)

    assert splits(strategy, "blocks.0.mlp.down.weight") == [NdSbp(B, S(1))]
    batch = next(entry.name for entry in asked.graph.inputs if entry.kind == "batch")
    assert splits(strategy, batch) == [NdSbp(S(0), B)]
    forward = {
        node.name: strategy.nodes[node.name].signature
        for node in asked.graph.nodes
        if node.module == "blocks.0.mlp.up" and node.kind in ("addmm", "mm")
    }
    products = [one.outputs[0] for name, one in forward.items() if ".grad" not in name]
    assert products and all(sbp == NdSbp(S(0), S(1)) for sbp in products)
    assert any("hidden over cols" in line for line in strategy.report["explanation"])


def test_along_an_axis_without_names_the_forward_pass_is_whole():
    asked = request((2, 2), ("rows", "cols"))

    strategy = layout("batch:rows").plan(asked)

    of_batch = dim_groups(asked.graph, 2).of_batch
    outputs = [
        sbp
        for node in asked.graph.nodes
        if node.phase == "forward" and of_batch.intersection(node.outputs)
        for sbp in strategy.nodes[node.name].signature.outputs
    ]
    assert {sbp[1] for sbp in outputs} == {B}


def mlp(width=8, hidden=12):
    return captured(Mlp(width, hidden), lambda n, seed: {"x": draws(seed, 6 * n, width)})


def run(step, text, names, mesh=(2, 2), axes=("rows", "cols")):
    """Plan a step by a layout, and compare a run of it with one device, in float64."""
    placement = Placement.grid(mesh, axes)
    cluster = machine(1e9, num_ranks=placement.size)
    asked = PlanRequest(graph=step.graph, mesh=placement, cluster=cluster)
    strategy = layout(text, names).plan(asked)
    run_beside_one_device(step, strategy)
    return strategy


@pytest.mark.parametrize(
    ("text", "down"),
    [
        ("batch:rows", NdSbp(B, B)),  # data parallelism
        ("batch:cols", NdSbp(B, B)),
        ("hidden:cols", NdSbp(B, S(1))),  # model parallelism
        ("width:rows", NdSbp(S(0), B)),
        ("batch:rows; hidden:cols", NdSbp(B, S(1))),  # both, as in section 5 of the paper
        ("hidden:rows; batch:cols", NdSbp(S(1), B)),
        ("batch:rows; width:cols", NdSbp(B, S(0))),
        ("hidden:rows; width:cols", NdSbp(S(1), S(0))),  # both dims of each matrix
    ],
)
def test_an_mlp_trains_as_on_one_device_in_the_layouts_of_the_paper(text, down):
    # 7 hidden units over 2 ranks: extents need not be divisible.
    names = {"hidden": "up.weight[0]", "width": "down.weight[0]"}

    strategy = run(mlp(hidden=7), text, names)

    assert splits(strategy, "down.weight") == [down]
    assert splits(strategy, "down.weight.exp_avg") == [down]


@pytest.mark.slow
@pytest.mark.parametrize("text", ["batch:rows; classes:cols", "batch:rows; tables:cols"])
def test_names_of_patterns_need_no_definition(text):
    if "classes" in text:
        step = captured(
            Classes(16, 2048),
            lambda n, seed: {"x": draws(seed, 4 * n, 16), "y": torch.arange(4 * n) * 100},
        )
        name = "head.weight"
    else:
        step = captured(Table(500, 4), lambda n, seed: {"i": torch.arange(4 * n) + seed})
        name = "table.weight"

    strategy = run(step, text, {})

    assert entries(strategy, name) == {B, S(0)}


@pytest.mark.slow
def test_experts_over_one_axis_and_their_hidden_units_over_the_other():
    step = captured(Experts(4, 6, 4), lambda n, seed: {"x": draws(seed, 6 * n, 4)})

    strategy = run(step, "experts:rows; hidden:cols", {"hidden": "up[2]"})

    assert splits(strategy, "up", "down") == [NdSbp(S(0), S(2)), NdSbp(S(0), S(1))]


def test_a_name_of_the_user_comes_before_a_known_one():
    step = captured(Chain(4, 2), lambda n, seed: {"x": draws(seed, 4 * n, 4)})

    strategy = run(step, "batch:cols", {"batch": "layers.0.weight[0]"})

    assert splits(strategy, "layers.0.weight") == [NdSbp(B, S(0))]


def test_pins_override_a_layout_axis_by_axis():
    asked = request((2, 2), ("rows", "cols"))
    pins = {"parameters": {"rows": "S(0)"}, "optimizer_states": {"rows": "S(0)"}}

    strategy = layout("batch:rows; hidden:cols", pins=pins).plan(asked)

    assert splits(strategy, "blocks.0.norm1.weight") == [NdSbp(S(0), B)]
    assert splits(strategy, "blocks.0.mlp.down.weight") == [NdSbp(S(0), S(1))]


@pytest.mark.parametrize(
    ("text", "names", "what"),
    [
        ("batch:data; hiden:t", NAMES, r"the dim 'hiden', which no tensor is known to have"),
        ("hidden:t", {"hidden": "blox.up[0]"}, r"names.hidden='blox.up\[0\]' matches no tensor"),
        ("hidden:t", {"hidden": "head.weight[2]"}, r"'head.weight' of shape \(\d+, \d+\) has no"),
        ("batch:rows", NAMES, r"'batch:rows' names a mesh axis that this mesh does not have"),
        ("hidden:t; d_model:t", NAMES, r"two dims of 'blocks.0.mlp.*'.*: hidden .dim 0. and d_m"),
        ("batch:t; hidden:t", NAMES, r"two dims of 'blocks.*'.*: batch .dim 0. and hidden .dim 1"),
    ],
)
def test_a_layout_that_cannot_be_is_refused_by_name(text, names, what):
    with pytest.raises(ConfigError, match=what):
        layout(text, names).plan(request((2, 2), ("data", "t")))


def test_an_unknown_name_is_answered_with_the_known_ones_and_a_tensor_of_each():
    with pytest.raises(ConfigError) as caught:
        layout("hiden:t", {"hidden": "blocks.*.mlp.up.weight[0]"}).plan(request((2,), ("t",)))

    batch = next(e.name for e in request((2,), ("t",)).graph.inputs if e.kind == "batch")
    assert f"batch ({batch}[0])" in caught.value.accepted
    assert "hidden (blocks.*.mlp.up.weight[0])" in caught.value.accepted


def test_heads_that_cannot_be_shared_by_the_ranks_are_whole_and_that_is_said():
    heads = layout("heads:t").plan(request((8,), ("t",)))

    assert any("gathered" in line for line in heads.report["explanation"])


@pytest.mark.parametrize("text", ["batch", "batch:", ":data", "a:b:c", "a:x; a:y"])
def test_a_layout_that_cannot_be_read_is_refused_before_anything_is_captured(text):
    with pytest.raises(ConfigError, match="layout="):
        ManualConfig(layout=text)
    with pytest.raises(ConfigError, match="names no dim"):
        ManualConfig(names={"a": "weight"})


def test_a_layout_is_a_text_or_a_mapping():
    assert layout_of(" batch : data;hidden:tensor; ") == {"batch": "data", "hidden": "tensor"}
    assert layout_of({"batch": "data"}) == layout_of("batch:data")

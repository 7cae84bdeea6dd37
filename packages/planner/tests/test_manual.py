from dataclasses import replace
from importlib.resources import files

import pytest
import yaml
from plan_requests import assert_legal, collectives, request

from sbp_core.compile import CompileOptions, compile_plan
from sbp_core.errors import ConfigError, PlanError
from sbp_core.graph.ir import Phase
from sbp_core.infer import conversions
from sbp_core.plugins import merge_settings
from sbp_core.sbp import B, NdSbp, S
from sbp_core.simulation import simulate
from sbp_core.testing.graphs import mlp
from sbp_planner.configs import ManualConfig
from sbp_planner.manual import ManualPlanner

MESHES = [
    ("data_parallel", (4,), ("data",)),
    ("data_parallel", (2, 2), ("data", "tensor")),
    ("tensor_parallel", (1, 2), ("data", "tensor")),
    ("tensor_parallel", (2,), ("tensor",)),
    ("tensor_parallel", (2, 2), ("data", "tensor")),
    ("megatron", (2, 2), ("data", "tensor")),
    ("data_tensor", (2, 2), ("data", "tensor")),
    ("data_tensor", (2, 1, 2), ("pipe", "data", "tensor")),
    ("zero", (4,), ("data",)),
    ("zero", (2, 2), ("data", "tensor")),
    ("zero1", (4,), ("data",)),
    ("zero2", (4,), ("data",)),
    ("pipeline", (2,), ("pipe",)),
    ("pipeline", (2, 2), ("pipe", "data")),
    ("custom", (2, 2), ("data", "tensor")),
]


def preset(name, **changes):
    folder = files("sbp_planner.conf").joinpath("planner", "manual")
    option = yaml.safe_load(folder.joinpath(f"{name}.yaml").read_text("utf-8"))
    assert option.pop("name") == "manual"
    return ManualPlanner(merge_settings(ManualConfig, {**option, **changes}))


@pytest.mark.slow(but=2)
@pytest.mark.parametrize(("name", "mesh_shape", "axes"), MESHES)
def test_every_preset_plans_legally(name, mesh_shape, axes):
    asked = request(mesh_shape, axes)

    strategy = preset(name).plan(asked)

    assert_legal(asked.graph, strategy)
    assert strategy.planner == "manual"
    assert all(strategy.report["optimal_by_axis"].values())


def test_data_parallelism_all_reduces_each_gradient_once_and_nothing_else():
    asked = request((4,), ("data",))

    strategy = preset("data_parallel").plan(asked)

    num_parameters = sum(entry.kind.value == "parameter" for entry in asked.graph.inputs)
    found = collectives(asked.graph, strategy, Phase.BACKWARD)
    assert found == {"all-reduce": num_parameters}
    assert not collectives(asked.graph, strategy, Phase.OPTIMIZER)


def test_tensor_parallelism_has_two_all_reduces_forward_and_two_backward_a_layer():
    asked = request((1, 2), ("data", "tensor"))

    strategy = preset("tensor_parallel").plan(asked)

    wide = {
        (conversion.value, str(conversion.target[1]))
        for conversion in _partial_activations(asked.graph, strategy)
    }
    assert wide == {
        ("blocks.0.attention.proj.addmm", "B, B"),
        ("blocks.0.mlp.down.addmm", "B, B"),
        ("blocks.0.mlp.up.grad.mm", "B, B"),
        ("blocks.0.attention.qkv.grad.mm", "B, B"),
    }


def _partial_activations(graph, strategy):
    return [
        conversion
        for conversion in conversions(graph, strategy)
        if conversion.source[1].has_partial
        and conversion.value.startswith("blocks.")
        and not conversion.value.endswith(".mean")
    ]


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("name", ["tensor_parallel", "data_tensor"])
def test_tensor_parallel_weights_are_stored_and_updated_in_shards(name):
    strategy = preset(name).plan(request((2, 2), ("data", "tensor")))

    expected = {
        "attention.qkv.weight": S(0),
        "attention.qkv.bias": S(0),
        "attention.proj.weight": S(1),
        "attention.proj.bias": B,
        "mlp.up.weight": S(0),
        "mlp.down.weight": S(1),
        "mlp.down.weight.exp_avg": S(1),
        "norm1.weight": B,
    }
    found = {key: strategy.storage[f"blocks.0.{key}"].sbp for key in expected}
    assert found == {key: NdSbp(B, entry) for key, entry in expected.items()}


def test_zero_shards_all_states_gathers_parameters_and_scatters_gradients():
    asked = request((4,), ("data",))

    strategy = preset("zero").plan(asked)

    states = [name for name in strategy.storage if asked.graph.input_kinds[name].kind.is_state]
    assert all(strategy.storage[name].sbp == NdSbp(S(0)) for name in states)
    assert collectives(asked.graph, strategy, Phase.BACKWARD)["reduce-scatter"] == len(states) // 3
    assert not collectives(asked.graph, strategy, Phase.OPTIMIZER)


def test_zero_stage_1_keeps_parameters_whole():
    asked = request((4,), ("data",))

    strategy = preset("zero1").plan(asked)

    assert strategy.storage["head.weight"].sbp == NdSbp(B)
    assert strategy.storage["head.weight.exp_avg"].sbp == NdSbp(S(0))
    gathers = collectives(asked.graph, strategy, Phase.OPTIMIZER)
    assert set(gathers) == {"all-gather"}


@pytest.mark.slow
def test_zero_holds_less_memory_than_data_parallelism():
    sizes = [
        preset(name).plan(request((4,), ("data",))).report["predicted_by_stage"][0]["states_bytes"]
        for name in ("data_parallel", "zero1", "zero")
    ]

    assert sizes[0] > sizes[1] > sizes[2] > 0


def test_a_pipeline_sends_one_activation_forward_and_its_gradient_back():
    asked = request((2,), ("pipe",))

    strategy = preset("pipeline").plan(asked)

    assert collectives(asked.graph, strategy) == {"transfer": 2}
    assert strategy.in_flight == (2, 1)


def test_gpipe_lets_all_micro_batches_be_in_flight():
    strategy = preset("pipeline", pipeline="gpipe").plan(request((2,), ("pipe",)))

    assert strategy.in_flight == (2, 2)
    assert strategy.report["pipeline"] == "gpipe"


@pytest.mark.parametrize("name", ["data_parallel", "zero"])
def test_without_a_pipeline_one_micro_batch_is_in_flight(name: str) -> None:
    graph = mlp((4, 4, 4), num_micro_batches=4)

    strategy = preset(name).plan(replace(request((2,), ("data",)), graph=graph))

    assert strategy.in_flight == (1,)


def test_a_schedule_of_chunks_gives_each_position_several_stages():
    graph = mlp((4, 4, 4, 4, 4), num_micro_batches=4)
    asked = replace(request((2,), ("pipe",)), graph=graph)

    strategy = preset("pipeline", pipeline="interleaved").plan(asked)

    assert [stage.rank_list for stage in strategy.stages] == [(0,), (1,), (0,), (1,)]
    assert strategy.orders[1].startswith("1F0 1F1 3F0 3B0")
    assert strategy.report["pipeline"] == "interleaved"


@pytest.mark.slow
def test_auto_takes_the_fastest_schedule_that_fits_and_says_what_it_tried():
    graph = mlp((64,) * 9, batch=64, num_micro_batches=4)
    asked = replace(request((2,), ("pipe",)), graph=graph)

    found = preset("pipeline", pipeline="auto").plan(asked)

    options = CompileOptions(cluster=asked.cluster)
    steps = {}
    for name in ("gpipe", "1f1b", "interleaved", "zero_bubble"):
        named = preset("pipeline", pipeline=name).plan(asked)
        steps[name] = simulate(compile_plan(graph, named, options)).step_s
    assert simulate(compile_plan(graph, found, options)).step_s <= 1.001 * min(steps.values())
    *_, told = found.report["explanation"]
    assert f"the fastest of what fits is {found.report['pipeline']}" in told


@pytest.mark.slow
def test_auto_says_what_each_schedule_would_need_if_none_fits():
    asked = request((2,), ("pipe",))
    device = replace(asked.cluster.device, memory_bytes=1000)
    asked = replace(asked, cluster=replace(asked.cluster, device=device))

    with pytest.raises(PlanError, match="no schedule of the pipeline fits"):
        preset("pipeline", pipeline="auto").plan(asked)


def test_a_schedule_that_does_not_end_its_steps_is_refused():
    with pytest.raises(ConfigError, match="updates parameters between the micro-batches"):
        preset("pipeline", pipeline="pipedream").plan(request((2,), ("pipe",)))


def test_stage_patterns_place_modules():
    patterns = [["embed", "blocks"], ["norm", "head"]]

    strategy = preset("pipeline", stage_patterns=patterns).plan(request((2,), ("pipe",)))

    assert strategy.storage["blocks.0.norm1.weight"].stage == 0
    assert strategy.storage["norm.weight"].stage == 1
    assert strategy.storage["targets"].stage == 1


def test_the_users_pins_override_a_preset():
    strategy = preset("data_parallel").plan(request((4,), ("data",), {"head.weight": "S(1)"}))

    assert strategy.storage["head.weight"].sbp == NdSbp(S(1))


def test_a_preset_for_an_axis_that_the_mesh_lacks_says_so():
    with pytest.raises(ConfigError, match="'tensor'"):
        preset("data_tensor").plan(request((2,), ("data",)))


@pytest.mark.parametrize(
    ("preset", "axes", "lacks"),
    [
        ("pipeline", ("data",), "pipe"),
        ("tensor_parallel", ("data",), "tensor"),
        ("data_tensor", ("tensor",), "data"),
    ],
)
def test_a_preset_refuses_a_mesh_without_the_axis_it_is_about(preset, axes, lacks):
    text = files("sbp_planner").joinpath(f"conf/planner/manual/{preset}.yaml").read_text()
    settings = yaml.safe_load(text)
    planner = ManualPlanner(
        merge_settings(ManualConfig, {k: v for k, v in settings.items() if k != "name"})
    )

    with pytest.raises(ConfigError, match=f"no axis '{lacks}'"):
        planner.plan(request((2,), axes))


@pytest.mark.parametrize(
    "pins",
    [
        {"batch": {"data": "S(9)"}},
        {"nothing.*": "B"},
        {"batch": {"dta": "S(0)"}},
        {"blocks.0.mlp.up.weight": "S(2)"},
        {"blocks.0.mlp.up.addmm": "P(max)"},
    ],
)
def test_a_pin_that_cannot_hold_is_a_wrong_setting(pins):
    with pytest.raises(ConfigError, match=r"^planner\.pins: the pin '") as refused:
        preset("custom", pins=pins).plan(request((2,), ("data",)))

    assert refused.value.accepted
    assert refused.value.todo


def test_a_pattern_that_there_is_not_is_a_wrong_setting():
    with pytest.raises(ConfigError, match="'tensr' is no pattern") as refused:
        ManualConfig(patterns={"tensor": ("tensr",)})

    assert "did you mean 'tensor'?" in refused.value.todo


def test_what_patterns_found_is_explained():
    strategy = preset("tensor_parallel").plan(request((2,), ("tensor",)))

    (line,) = strategy.report["explanation"]
    assert line == (
        "tensor on tensor: columns blocks.*.mlp.up.weight, blocks.*.attention.qkv.weight; "
        "rows blocks.*.mlp.down.weight, blocks.*.attention.proj.weight"
    )


@pytest.mark.slow
def test_pins_of_names_override_what_patterns_found_on_the_axes_that_they_name():
    asked = request((2, 2), ("data", "tensor"))
    pins = {"activations": {"data": "S(0)"}, "blocks.0.mlp.up.weight": {"data": "S(1)"}}
    pins |= {"blocks.0.mlp.down.weight*": {"tensor": "B"}, "batch": {"data": "S(0)", "tensor": "B"}}

    strategy = preset("custom", pins=pins, patterns={"tensor": ["tensor"]}).plan(asked)

    assert strategy.storage["blocks.0.mlp.up.weight"].sbp == NdSbp(S(1), S(0))
    assert strategy.storage["blocks.0.mlp.down.weight"].sbp[1] == B


def test_the_users_pins_override_what_patterns_found():
    pins = {"blocks.0.mlp.up.weight": {"tensor": "B"}}

    strategy = preset("tensor_parallel").plan(request((2,), ("tensor",), pins))

    assert strategy.storage["blocks.0.mlp.up.weight"].sbp == NdSbp(B)
    assert strategy.storage["blocks.0.attention.qkv.weight"].sbp == NdSbp(S(0))


def test_a_preset_for_some_models_says_so_to_another_and_names_presets_for_any():
    fits = "gpt alone"
    planner = ManualPlanner(ManualConfig(pins={"*.no_such_module.*": "B"}, fits=fits))

    with pytest.raises(ConfigError) as caught:
        planner.plan(request((2,), ("data",)))

    assert f"this preset is for {fits}" in caught.value.what
    assert "planner=propagate" in caught.value.todo

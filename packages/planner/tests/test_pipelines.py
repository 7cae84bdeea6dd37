"""The planners that cut the model into stages, and the blocks that they cut."""

from types import SimpleNamespace

import pytest
from plan_requests import assert_legal, gpt_step, request

from sbp_core.cluster import Cluster, Device, Link
from sbp_core.compile import compile_plan
from sbp_core.errors import ConfigError, PlanError
from sbp_core.graph import InputKind
from sbp_core.placement import Placement
from sbp_core.plan_check import check
from sbp_core.planning import PlanRequest
from sbp_core.testing.graphs import cluster, mlp
from sbp_core.testing.planner import PlannerConformance
from sbp_planner.model_blocks import machine_levels, model_blocks
from sbp_planner.pipelines import GpipePlanner, PipedreamPlanner
from sbp_planner.search_configs import GpipeConfig, PipedreamConfig
from sbp_planner.stages import MachineLevel


class TestGpipe(PlannerConformance):
    meshes = (((1,), ("data",)), ((2,), ("pipe",)), ((2, 2), ("pipe", "data")))
    micro_batches = (4,)

    def make_planner(self):
        return GpipePlanner(GpipeConfig())


class TestPipedream(PlannerConformance):
    meshes = (((3,), ("data",)), ((2,), ("pipe",)))
    micro_batches = (4,)

    def make_planner(self):
        return PipedreamPlanner(PipedreamConfig())


def on_links(bytes_per_s, num_ranks=4):
    """Ask for a plan of an MLP whose last layer has nearly all parameters."""
    machine = Cluster(
        name="test",
        num_devices=num_ranks,
        devices_per_node=num_ranks,
        device=Device(memory_bytes=1 << 30, flop_per_s={"float32": 1e9}, memory_bytes_per_s=1e12),
        intra_node=Link(latency_s=0.0, bytes_per_s=bytes_per_s),
    )
    graph = mlp((256, 256, 256, 2048), batch=8, num_micro_batches=8)
    mesh = Placement.grid((num_ranks,), ("data",))
    return PlanRequest(graph=graph, mesh=mesh, cluster=machine)


def test_blocks_have_the_work_and_the_parameters_of_their_modules():
    graph = gpt_step()

    found = model_blocks(graph, request((2,), ("data",)).cluster)

    assert found.modules == ("embed", "blocks.0", "norm", "head")
    blocks = {block.name: block for block in found.graph.blocks}
    parameters = [e.name for e in graph.inputs if e.kind is InputKind.PARAMETER]
    sizes = {name: graph.tensor(name).size_bytes for name in parameters}
    for module, block in blocks.items():
        own = sum(size for name, size in sizes.items() if name.startswith(f"{module}."))
        assert block.parameter_bytes == own, module
        assert 0 < block.forward_s < block.backward_s or module == "embed"
    assert {flow.producer: flow.consumers for flow in found.graph.flows} == {
        "embed": ("blocks.0",),
        "blocks.0": ("norm",),
        "norm": ("head",),
    }


def test_with_fast_links_data_are_split_over_all_ranks():
    strategy = PipedreamPlanner(PipedreamConfig()).plan(on_links(1e12))

    assert len(strategy.stages) == 1
    assert "1 stage by 1f1b" in strategy.report["explanation"][0]


def test_with_slow_links_what_has_many_parameters_is_not_replicated():
    asked = on_links(2e6)

    strategy = PipedreamPlanner(PipedreamConfig()).plan(asked)

    assert len(strategy.stages) > 1
    last = strategy.storage["layers.2.weight"].stage
    assert last == len(strategy.stages) - 1 and strategy.stages[last].size == 1
    assert sum(stage.size for stage in strategy.stages) == 4
    check(compile_plan(asked.graph, strategy))


def test_gpipe_has_a_rank_for_each_stage_and_all_forward_passes_first():
    strategy = GpipePlanner(GpipeConfig()).plan(on_links(1e9, num_ranks=3))

    assert [stage.size for stage in strategy.stages] == [1, 1, 1]
    assert strategy.in_flight == (8, 8, 8)
    assert strategy.report["pipeline"] == "gpipe"
    assert [entry["blocks"] for entry in strategy.report["stages"]] == [
        ["layers.0"],
        ["layers.1"],
        ["layers.2"],
    ]


@pytest.mark.slow
def test_ranks_that_cannot_share_the_samples_of_a_micro_batch_are_stages_instead():
    # Three ranks cannot split eight samples of a GPT, whose views join samples and times: all of
    # them would compute all samples, and a step would take as long as on one.
    asked = request((3,), ("data",))

    strategy = PipedreamPlanner(PipedreamConfig()).plan(asked)

    assert [8 % stage.size for stage in strategy.stages] == [0] * len(strategy.stages)
    said = strategy.report["explanation"][-1]
    assert said.startswith("  stages of any number of ranks instead: ")
    assert said.endswith("a micro-batch has 8 samples")


def test_settings_refuse_a_mesh_that_says_no_stages_before_anything_is_captured():
    beside = {"cluster": SimpleNamespace(mesh=(2, 2), axes=("data", "tensor"))}

    with pytest.raises(ConfigError, match="does not show which ranks are stages"):
        PipedreamConfig().check_combination(beside)
    GpipeConfig().check_combination({"cluster": SimpleNamespace(mesh=(4,), axes=("data",))})


def test_positions_of_the_axis_pipe_are_the_stages():
    asked = request((2, 2), ("pipe", "data"))

    strategy = PipedreamPlanner(PipedreamConfig()).plan(asked)

    assert [stage.rank_list for stage in strategy.stages] == [(0, 1), (2, 3)]
    assert_legal(asked.graph, strategy)


def test_more_stages_than_blocks_are_refused():
    with pytest.raises(PlanError, match="has 3 blocks for 4 stages"):
        GpipePlanner(GpipeConfig()).plan(on_links(1e9))


def test_a_mesh_that_says_no_stages_is_refused_with_the_mesh_to_set():
    with pytest.raises(ConfigError, match="does not show which ranks are stages") as caught:
        GpipePlanner(GpipeConfig()).plan(request((2, 2), ("data", "tensor")))

    assert "cluster.mesh=[4] cluster.axes=[data]" in caught.value.todo


def test_links_of_a_machine_are_levels_from_the_inside():
    machine = Cluster(
        name="test",
        num_devices=8,
        devices_per_node=4,
        device=cluster().device,
        intra_node=Link(latency_s=0.0, bytes_per_s=8.0),
        inter_node=Link(latency_s=0.0, bytes_per_s=2.0),
    )

    assert machine_levels(machine, 8) == (
        MachineLevel(components=4, bytes_per_s=8.0),
        MachineLevel(components=2, bytes_per_s=2.0),
    )
    assert machine_levels(machine, 2) == (MachineLevel(components=2, bytes_per_s=8.0),)
    assert machine_levels(machine, 6) == (MachineLevel(components=6, bytes_per_s=2.0),)

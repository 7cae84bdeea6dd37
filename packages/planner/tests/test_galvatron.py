"""Stages over groups of ranks, and a way to parallelise each layer in them."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, pairwise, product
from time import monotonic

import numpy as np
import pytest
from plan_requests import assert_legal, gpt_step, request
from small_steps import run_beside_one_device
from staged_steps import asked, machine, nodes_of_two, step_of
from step_family import MlpFamily, family_request

from sbp_core.compile import compile_plan
from sbp_core.errors import ConfigError, PlanError
from sbp_core.infer import resolve_pins
from sbp_core.placement import Placement
from sbp_core.plan_check import check
from sbp_core.planning.compiled import Compilation
from sbp_core.sbp import NdSbp, S
from sbp_core.testing.graphs import mlp
from sbp_core.testing.planner import PlannerConformance
from sbp_planner.galvatron import GalvatronPlanner
from sbp_planner.layer_search import (
    AXES,
    Kind,
    LayerParallelism,
    LayerSearch,
    layer_program,
    pins_of,
    ways_of,
)
from sbp_planner.model_blocks import model_blocks
from sbp_planner.search_configs import GalvatronConfig
from sbp_planner.segments import StepSegments, grouped
from sbp_planner.stage_search import StageAsked
from sbp_planner.stages import transfer_s


class TestGalvatron(PlannerConformance):
    meshes = (((1,), ("data",)), ((2,), ("data",)), ((2, 2), ("pipe", "data")))
    micro_batches = (4,)

    def make_planner(self):
        return GalvatronPlanner(GalvatronConfig())


def test_ways_are_those_of_the_paper():
    assert [str(way) for way in ways_of(1)] == ["whole"]
    assert [str(way) for way in ways_of(2)] == ["DP 2", "ZDP 2", "TP 2"]
    # Samples or states, and matrices, in powers of two and both orders; not both of the first.
    assert [str(way) for way in ways_of(8)] == [
        "DP 8", "ZDP 8", "TP 8",
        "DP 4 x TP 2", "TP 2 x DP 4", "DP 2 x TP 4", "TP 4 x DP 2",
        "ZDP 4 x TP 2", "TP 2 x ZDP 4", "ZDP 2 x TP 4", "TP 4 x ZDP 2",
    ]  # fmt: skip


def layer_of(graph, cluster, block, way):
    """Return what is stored of a block under a way, by the names of inputs."""
    groups = grouped(model_blocks(graph, cluster), 16)
    pins = resolve_pins(graph, AXES, {})
    segments = StepSegments(graph=graph, groups=groups, pins=pins, cluster=cluster)
    segment = segments.segment(frozenset((block,)))
    placement = Placement.grid(way.sizes, AXES)
    pins = resolve_pins(graph, AXES, pins_of(way))
    program = layer_program(segments, segment, placement, way, pins)
    return program, program.kept(segment)


@pytest.mark.slow
def test_columns_and_rows_come_out_of_the_operators_of_a_layer():
    graph, cluster = gpt_step(), request((2,), ("data",)).cluster
    way = LayerParallelism(kinds=(Kind.TP, Kind.TP), sizes=(4, 1))

    _, kept = layer_of(graph, cluster, 1, way)

    # Megatron's: the first of each pair by its output, the second by its input.
    names = ("attention.qkv", "attention.proj", "mlp.up", "mlp.down")
    stored = [kept.storage[f"blocks.0.{name}.weight"][0] for name in names]
    assert stored == [S(0), S(1), S(0), S(1)]


def test_states_are_whole_under_dp_and_in_shards_under_zdp():
    graph, cluster = mlp((16, 16, 16), num_micro_batches=2), nodes_of_two(inside=1e9, between=1e9)
    whole, sharded = (
        layer_of(graph, cluster, 1, LayerParallelism(kinds=(kind, kind), sizes=(4, 1)))
        for kind in (Kind.DP, Kind.ZDP)
    )

    for suffix in ("", ".exp_avg", ".exp_avg_sq"):
        name = f"layers.1.weight{suffix}"
        assert (str(whole[1].storage[name][0]), str(sharded[1].storage[name][0])) == ("B", "S(0)")
    assert sharded[0].memory_bytes(1) < whole[0].memory_bytes(1)
    assert sharded[0].cost_s > whole[0].cost_s


def test_samples_stay_split_between_layers_under_dp():
    graph, cluster = mlp((16, 16, 16), num_micro_batches=2), nodes_of_two(inside=1e9, between=1e9)
    groups = grouped(model_blocks(graph, cluster), 16)
    pins = resolve_pins(graph, AXES, {})
    segments = StepSegments(graph=graph, groups=groups, pins=pins, cluster=cluster)
    way = next(ways_of(4))

    segment = segments.segment(frozenset((0,)))
    layer = LayerSearch(segments, segment, Placement.grid(way.sizes, AXES), way,
                        resolve_pins(graph, AXES, pins_of(way)))  # fmt: skip

    _, values = layer.free()
    storage = layer.problem.decided(values).storage
    assert segment.elsewhere
    assert {storage[name][0] for name in segment.elsewhere} == {S(0)}


def every_cut(num_layers, num_stages):
    for cuts in combinations(range(1, num_layers), num_stages - 1):
        yield list(pairwise((0, *cuts, num_layers)))


def brute_force_s(search, limit_bytes):
    """Return the least objective of every cut and every way of every layer within a limit."""
    solver, settings = search.solver, search.settings
    number, count = len(search.segments.groups), search.count
    best = float("inf")
    for cut in every_cut(number, settings.num_stages):
        times = []
        for at, (first, end) in enumerate(cut):
            stage = StageAsked(
                blocks=frozenset(range(first, end)), start=at * solver.devices,
                devices=solver.devices, limit_bytes=limit_bytes,
                in_flight=min(len(cut) - at, count),
            )  # fmt: skip
            times.append(cheapest_s(solver, stage, range(first, end)) / count)
            if end < number:
                behind = search.request.mesh.size - (at + 1) * solver.devices
                ranks = solver.devices
                crossing = transfer_s(search.levels, search.ideals, ranks, ranks, behind)
                times.append(float(crossing[end]))
        best = min(best, (count - 1) * max(times) + sum(times))
    return best


def cheapest_s(solver, stage, layers):
    """Return what the cheapest ways of a stage's layers take, by every one of them."""
    programs = [[solver._program(stage, layer, way) for way in solver.ways] for layer in layers]
    switches = [solver._switches(stage, a, b) for a, b in pairwise(layers)]
    before = solver._arrivals(stage, layers[0], before=True)
    behind = solver._arrivals(stage, layers[-1], before=False)
    best = float("inf")
    for chosen in product(range(len(solver.ways)), repeat=len(layers)):
        found = [of[at] for of, at in zip(programs, chosen, strict=True)]
        steady = [
            int(one.fixed_bytes.min()) + stage.in_flight * int(one.waiting_bytes.max())
            for one in found
        ]
        beside = [one.memory_bytes(stage.in_flight) - held
                  for one, held in zip(found, steady, strict=True)]  # fmt: skip
        if sum(steady) + max(beside) > stage.limit_bytes:
            continue
        seconds = sum(one.cost_s for one in found) + before[chosen[0]] + behind[chosen[-1]]
        seconds += sum(
            table[a, b] for table, (a, b) in zip(switches, pairwise(chosen), strict=True)
        )
        best = min(best, seconds)
    return best


def searches_of(ask, **settings):
    return list(GalvatronPlanner(GalvatronConfig(**settings))._searches(ask, monotonic() + 1000))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("between", "share"),
    [
        (1e7, 0.6),
        pytest.param(1e7, 1.0, marks=pytest.mark.exhaustive),
        pytest.param(1e9, 0.6, marks=pytest.mark.exhaustive),
        pytest.param(1e9, 1.0, marks=pytest.mark.exhaustive),
    ],
)
def test_the_objective_is_that_of_brute_force(between, share):
    graph = mlp((32, 32, 64, 16), batch=16, num_micro_batches=4)
    ask = asked(graph, nodes_of_two(inside=1e9, between=between))

    for search in searches_of(ask):
        # What the fastest ways hold, and less of that, on the fullest rank.
        roomy = search.cut(float("inf"))
        held = max(one.memory_bytes for one in search.programs(roomy, float("inf")))
        found, wanted = search.cut(share * held), brute_force_s(search, share * held)
        if np.isinf(wanted):
            assert found is None
        else:
            # Memory is in granules, so that a plan that just fits may be passed over.
            assert wanted * (1 - 1e-9) <= found.plan.objective_s
            if share == 1.0:
                assert found.plan.objective_s == pytest.approx(wanted)
            else:
                tighter = brute_force_s(search, 0.99 * share * held)
                assert found.plan.objective_s <= tighter * (1 + 1e-9)


def test_one_stage_takes_what_is_said():
    ask = asked(
        mlp((64,) * 5, num_micro_batches=4), nodes_of_two(inside=1e9, between=1e9, num_devices=2)
    )

    strategy = GalvatronPlanner(GalvatronConfig()).plan(ask)

    assert len(strategy.stages) == 1
    simulated = Compilation(request=ask, limit_bytes=1e12).compiled(strategy).step_s
    assert simulated == pytest.approx(strategy.report["objective_s"], rel=0.05)
    assert {entry["stages"] for entry in strategy.report["tried"]} == {1, 2}


@pytest.mark.slow
def test_a_pipeline_goes_across_slow_links_with_stages_of_equal_time():
    graph = mlp((64, 64, 64, 64, 256), batch=4, num_micro_batches=8)
    ask = asked(graph, nodes_of_two(inside=1e9, between=1e7))

    strategy = GalvatronPlanner(GalvatronConfig()).plan(ask)

    assert [stage.size for stage in strategy.stages] == [2, 2]
    # The last layer has more than half of the work: three are beside it, not two.
    assert [len(entry["blocks"]) for entry in strategy.report["stages"]] == [3, 1]
    assert_legal(ask.graph, strategy)


@pytest.mark.slow
def test_micro_batches_are_chosen_if_the_step_has_variants():
    family = MlpFamily(sizes=(16, 64, 2, 16), batch_size=64, micro_batches=(1, 4))
    ask = family_request(family, bytes_per_s=1e6)

    strategy = GalvatronPlanner(GalvatronConfig()).plan(ask)

    tried = strategy.report["tried"]
    assert {entry["micro_batches"] for entry in tried} == {1, 4}
    assert strategy.report["objective_s"] == min(entry["objective_s"] for entry in tried)
    assert strategy.variant.num_micro_batches == strategy.num_micro_batches
    check(compile_plan(family.graph(strategy.variant), strategy))


def memory_of(ask, strategy):
    return Compilation(request=ask, limit_bytes=0).compiled(strategy, exact=True).memory_bytes


@pytest.mark.slow
def test_layers_are_split_otherwise_where_memory_is_short():
    graph = mlp((64,) * 4, batch=128, num_micro_batches=2)
    ask = asked(graph, nodes_of_two(inside=1e10, between=1e9, num_devices=2))
    free = GalvatronPlanner(GalvatronConfig()).plan(ask)
    limit = 0.9 * memory_of(ask, free)

    strategy = GalvatronPlanner(GalvatronConfig(memory_bytes=limit)).plan(ask)

    assert memory_of(ask, strategy) <= limit
    assert strategy.report["objective_s"] > free.report["objective_s"]
    assert strategy.report["explanation"][1] != free.report["explanation"][1]


@pytest.mark.slow
def test_layers_of_several_ways_train_as_one_device():
    step = step_of(16, (16, 256), 16, samples=32, num_micro_batches=2)
    cluster = machine(num_devices=2, devices_per_node=2, inside=1e9, between=1e9, flop_per_s=1e9)

    strategy = GalvatronPlanner(GalvatronConfig()).plan(asked(step.graph, cluster))

    words = " ".join(strategy.report["explanation"])
    assert "DP 2" in words and "TP 2" in words, "all layers are split alike"
    run_beside_one_device(step, strategy)


@pytest.mark.exhaustive
def test_products_of_ways_train_as_one_device():
    step = step_of(64, (64, 64, 64), 64, samples=128, num_micro_batches=2)
    cluster = machine(num_devices=4, devices_per_node=4, inside=2e9, between=1e9, flop_per_s=1e9)
    ask = asked(step.graph, cluster)
    limit = 0.9 * memory_of(ask, GalvatronPlanner(GalvatronConfig()).plan(ask))

    strategy = GalvatronPlanner(GalvatronConfig(memory_bytes=limit)).plan(ask)

    assert memory_of(ask, strategy) <= limit
    words = " ".join(strategy.report["explanation"])
    assert "TP 2 x ZDP 2, " in words and "TP 2 x DP 2" in words, "all layers are split alike"
    run_beside_one_device(step, strategy)


@pytest.mark.exhaustive
def test_a_pipeline_of_split_layers_trains_as_one_device():
    step = step_of(16, (16, 256, 16, 256), 16, samples=8, num_micro_batches=4)
    cluster = machine(num_devices=4, devices_per_node=2, inside=1e9, between=1e7, flop_per_s=1e9)

    strategy = GalvatronPlanner(GalvatronConfig()).plan(asked(step.graph, cluster))

    assert len(strategy.stages) == 2
    words = " ".join(strategy.report["explanation"])
    assert "DP 2, " in words and "TP 2" in words, "all layers are split alike"
    run_beside_one_device(step, strategy)


@pytest.mark.slow
def test_what_nothing_keeps_is_refused_with_what_would_do():
    ask = asked(
        mlp((64,) * 3, num_micro_batches=4), nodes_of_two(inside=1e9, between=1e9, num_devices=2)
    )
    needs = memory_of(ask, GalvatronPlanner(GalvatronConfig()).plan(ask))

    with pytest.raises(PlanError, match="no stages that were found fit") as caught:
        GalvatronPlanner(GalvatronConfig(memory_bytes=0.2 * needs)).plan(ask)

    assert caught.value.accepted.startswith("planner.memory_bytes >= ")
    limit = float(caught.value.accepted.rpartition(" ")[2])
    assert memory_of(ask, GalvatronPlanner(GalvatronConfig(memory_bytes=limit)).plan(ask)) <= limit


def test_a_mesh_of_several_axes_is_refused_with_the_one_to_set():
    with pytest.raises(ConfigError, match="divides the ranks of a stage itself") as caught:
        GalvatronPlanner(GalvatronConfig()).plan(request((2, 2, 2), ("pipe", "data", "tensor")))

    assert caught.value.todo == "set cluster.mesh=[2,4] cluster.axes=[pipe,data]"


def test_a_pin_of_the_user_holds_under_every_way():
    ask = asked(
        mlp((16, 16, 16), num_micro_batches=4), nodes_of_two(inside=1e9, between=1e9, num_devices=2)
    )
    pinned = replace(ask, pins={"layers.0.weight": {"data": "S(1)"}})

    strategy = GalvatronPlanner(GalvatronConfig()).plan(pinned)

    assert set(strategy.storage["layers.0.weight"].sbp) == {S(1)}
    assert strategy.storage["layers.0.weight"].sbp != NdSbp(S(0))

"""Stages of a pipeline on submeshes, each split inside by the joint search."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, pairwise

import pytest
from plan_requests import assert_legal, request
from small_steps import run_beside_one_device
from staged_steps import asked, machine, nodes_of_two, step_of

from sbp_core.cluster import Cluster
from sbp_core.compile import CompileOptions, compile_plan
from sbp_core.errors import ConfigError, PlanError
from sbp_core.graph import GraphOutput, InputKind, OutputKind, Ref
from sbp_core.infer import CostTables, minimise
from sbp_core.placement import Placement
from sbp_core.plan_check import check
from sbp_core.planning import PlanRequest
from sbp_core.planning.compiled import Compilation
from sbp_core.sbp import B
from sbp_core.simulation import simulate
from sbp_core.testing.graphs import Builder, mlp
from sbp_core.testing.planner import PlannerConformance
from sbp_planner import alpa, exhaustive
from sbp_planner.alpa import AlpaPlanner
from sbp_planner.joint.layers import tie
from sbp_planner.model_blocks import machine_levels
from sbp_planner.pipelines import PipedreamPlanner
from sbp_planner.search_configs import AlpaConfig, PipedreamConfig
from sbp_planner.segment_search import SegmentSearch
from sbp_planner.segments import StepSegments, grouped, merged
from sbp_planner.stages import order_ideals, transfer_s
from sbp_planner.submeshes import is_submesh, logical_shapes, stage_ranks, submesh_sizes


class TestAlpa(PlannerConformance):
    meshes = (((1,), ("data",)), ((3,), ("data",)), ((2, 2), ("pipe", "data")))
    micro_batches = (4,)

    def make_planner(self):
        return AlpaPlanner(AlpaConfig())


def by_every_assignment(problem):
    """Return the seconds of a step of the cheapest of all assignments of a segment."""
    best, search = float("inf"), exhaustive._Search(problem, 2_000_000)
    for seconds, _ in search.assignments():
        search.bound_s = best = seconds
    return best


def by_elimination(problem):
    """Return the same, of equal layers decided alike, where assignments are too many."""
    step = tie(problem)
    tables = CostTables(step, max_entries=1 << 22)
    found = minimise(tables.sizes, tables.factors, tables.start, max_entries=1 << 22)
    assert found.exact
    return problem.cost(step.expanded(found.values))


def every_pipeline(num_blocks, num_ranks, sizes):
    """Yield (first block, end, first rank, ranks) of the stages of every pipeline."""
    for number in range(1, num_blocks + 1):
        for cuts in combinations(range(1, num_blocks), number - 1):
            blocks = list(zip((0, *cuts), (*cuts, num_blocks), strict=True))
            for splits in combinations(range(1, num_ranks), number - 1):
                ranks = list(zip((0, *splits), (*splits, num_ranks), strict=True))
                if all(end - start in sizes for start, end in ranks):
                    pairs = zip(blocks, ranks, strict=True)
                    yield [(*of, start, end - start) for of, (start, end) in pairs]


def brute_force_s(ask, cheapest_s):
    """Return the least objective of all cuts, submeshes, logical meshes and assignments."""
    axes = ("data", "tensor")
    blocks = alpa.model_blocks(ask.graph, ask.cluster)
    groups = grouped(blocks, 16)
    segments = StepSegments(
        graph=ask.graph, groups=groups, pins=alpa.resolve_pins(ask.graph, axes, {}),
        cluster=ask.cluster,
    )  # fmt: skip
    ideals = order_ideals(merged(blocks.graph, groups), 100)
    levels = machine_levels(ask.cluster, ask.mesh.size)
    size, count = ask.mesh.size, ask.graph.num_micro_batches
    found, best = {}, float("inf")
    for stages in every_pipeline(len(groups), size, submesh_sizes(ask.cluster, size)):
        ranges = [ask.mesh.rank_list[start : start + n] for *_, start, n in stages]
        if not all(len(r) == size or is_submesh(ask.cluster, r) for r in ranges):
            continue
        times = []
        for at, stage in enumerate(stages):
            first, end, start, devices = stage
            if stage not in found:
                segment = segments.segment(frozenset(range(first, end)))
                found[stage] = min(
                    cheapest_s(SegmentSearch(segments, segment, ranks).problem) / count
                    for shape in logical_shapes(devices)
                    for ranks in [stage_ranks(ask.mesh, start, shape, axes)]
                )
            times.append(found[stage])
            if end < len(groups):
                after = stages[at + 1][3]
                crossing = transfer_s(levels, ideals, devices, after, size - start - devices)
                times.append(float(crossing[end]))
        best = min(best, (count - 1) * max(times) + sum(times))
    return best


def forward_chain(widths):
    """Return `sum(x w0 w1 ...)`, each product a module of its own."""
    b = Builder()
    value = b.add_input("x", InputKind.BATCH, (8, widths[0]))
    for at, shape in enumerate(pairwise(widths)):
        weight = b.add_input(f"layers.{at}.weight", InputKind.PARAMETER, shape)
        value = b.op(f"layers.{at}.mm", "mm.default", (Ref(value), Ref(weight)), (8, shape[1]),
                     module=f"layers.{at}")  # fmt: skip
    b.op("sum", "sum.default", (Ref(value),), ())
    b.outputs.append(GraphOutput(name="loss", kind=OutputKind.LOSS, value="sum"))
    return replace(b.graph(), num_micro_batches=4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("inside", "between"),
    [
        pytest.param(1e8, 1e6, marks=pytest.mark.exhaustive),
        (1e9, 1e7),
        pytest.param(1e9, 1e9, marks=pytest.mark.exhaustive),
    ],
)
def test_the_objective_is_that_of_brute_force_over_everything(inside, between):
    machine = nodes_of_two(inside=inside, between=between)
    ask = asked(forward_chain((32, 64, 32)), machine)

    strategy = AlpaPlanner(AlpaConfig()).plan(ask)

    wanted = brute_force_s(ask, by_every_assignment)
    assert strategy.report["objective_s"] == pytest.approx(wanted)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("inside", "between"),
    [(1e9, 3e6), pytest.param(1e8, 1e7, marks=pytest.mark.exhaustive),
     pytest.param(1e9, 1e9, marks=pytest.mark.exhaustive)],
)  # fmt: skip
def test_the_objective_of_a_training_step_is_that_of_all_stages(inside, between):
    machine = nodes_of_two(inside=inside, between=between, num_devices=3)
    ask = asked(mlp((32, 32, 32, 64), batch=4, num_micro_batches=4), machine)

    strategy = AlpaPlanner(AlpaConfig()).plan(ask)

    wanted = brute_force_s(ask, by_elimination)
    assert strategy.report["objective_s"] == pytest.approx(wanted)


def priced_s(ask, stages):
    """Return the objective of given stages: the modules and the ranks of each."""
    blocks = alpa.model_blocks(ask.graph, ask.cluster)
    number = {name: at for at, name in enumerate(blocks.modules)}
    groups = grouped(blocks, 16)
    pins = alpa.resolve_pins(ask.graph, ("data", "tensor"), {})
    segments = StepSegments(graph=ask.graph, groups=groups, pins=pins, cluster=ask.cluster)
    solver = alpa.IntraOperator(segments=segments, mesh=ask.mesh, axes=("data", "tensor"))
    ideals = order_ideals(merged(blocks.graph, groups), 100)
    levels = machine_levels(ask.cluster, ask.mesh.size)
    start, times, count = 0, [], ask.graph.num_micro_batches
    for at, (modules, devices) in enumerate(stages):
        inside = frozenset(number[name] for name in modules)
        stage = alpa.StageAsked(
            blocks=inside, start=start, devices=devices, in_flight=1, limit_bytes=float("inf")
        )
        times.append(solver.free_s(stage) / count)
        start += devices
        if at + 1 < len(stages):
            behind = ask.mesh.size - start
            crossing = transfer_s(levels, ideals, devices, stages[at + 1][1], behind)
            times.append(float(crossing[max(inside) + 1]))
    return (count - 1) * max(times) + sum(times)


@pytest.mark.slow
@pytest.mark.parametrize("bytes_per_s", [pytest.param(1e5, marks=pytest.mark.exhaustive), 3e6, 1e8])
def test_no_plan_is_slower_by_its_objective_than_that_of_pipedream(bytes_per_s):
    graph = mlp((64, 64, 256), batch=4, num_micro_batches=8)
    ask = asked(graph, nodes_of_two(inside=1e9, between=bytes_per_s))
    other = PipedreamPlanner(PipedreamConfig()).plan(ask).report["stages"]

    found = AlpaPlanner(AlpaConfig()).plan(ask).report

    theirs = priced_s(ask, [(entry["blocks"], entry["ranks"]) for entry in other])
    assert found["objective_s"] <= theirs * (1 + 1e-9)
    own = priced_s(ask, [(entry["blocks"], entry["ranks"]) for entry in found["stages"]])
    assert found["objective_s"] == pytest.approx(own), "it is not what its stages cost"


def simulated_s(ask, strategy):
    plan = compile_plan(ask.graph, strategy, CompileOptions(cluster=ask.cluster))
    return simulate(plan).step_s


def test_across_slow_links_it_is_a_pipeline_whose_stages_take_what_is_said():
    ask = asked(mlp((64,) * 7, batch=4, num_micro_batches=8), nodes_of_two(inside=1e9, between=2e7))

    strategy = AlpaPlanner(AlpaConfig()).plan(ask)

    assert [stage.size for stage in strategy.stages] == [2, 2]
    for predicted, said in zip(strategy.report["predicted_by_stage"], strategy.report["stages"],
                               strict=True):  # fmt: skip
        each = predicted["micro_compute_s"] + predicted["step_compute_s"] / 8
        assert 0.5 * said["compute_s"] < each <= said["compute_s"]


def test_it_is_faster_than_pipedream_where_tensors_are_better_split_than_samples():
    ask = asked(mlp((64,) * 7, batch=4, num_micro_batches=8), nodes_of_two(inside=1e9, between=5e6))

    strategy = AlpaPlanner(AlpaConfig()).plan(ask)

    other = PipedreamPlanner(PipedreamConfig()).plan(ask)
    assert simulated_s(ask, strategy) < 0.8 * simulated_s(ask, other)


def test_with_fast_links_it_is_one_stage():
    ask = asked(mlp((64,) * 4, num_micro_batches=4), nodes_of_two(inside=1e12, between=1e12))

    strategy = AlpaPlanner(AlpaConfig()).plan(ask)

    assert len(strategy.stages) == 1
    assert "1 stage by 1f1b" in strategy.report["explanation"][0]


@pytest.mark.slow
def test_a_short_memory_is_kept_by_the_compiled_plan():
    ask = asked(mlp((64,) * 6, batch=4, num_micro_batches=8), nodes_of_two(inside=1e9, between=1e7))
    free = AlpaPlanner(AlpaConfig()).plan(ask)
    compilation = Compilation(request=ask, limit_bytes=float("inf"))
    needs = compilation.compiled(free).memory_bytes

    strategy = AlpaPlanner(AlpaConfig(memory_bytes=0.75 * needs)).plan(ask)

    compilation.limit_bytes = 0.75 * needs
    assert compilation.compiled(strategy).fits
    assert_legal(ask.graph, strategy)


def test_what_nothing_keeps_is_refused_with_what_to_change():
    ask = asked(mlp((64,) * 4, num_micro_batches=4), nodes_of_two(inside=1e9, between=1e7))

    with pytest.raises(PlanError, match=r"no stages that were found fit the 1000 B") as caught:
        AlpaPlanner(AlpaConfig(memory_bytes=1000)).plan(ask)

    assert "planner.memory_bytes" in caught.value.accepted
    assert "trainer.micro_batches" in caught.value.todo


@pytest.mark.slow
def test_equal_stages_are_solved_once(monkeypatch):
    made = []

    class Counted(SegmentSearch):
        def __init__(self, segments, segment, ranks):
            made.append((segment.key, ranks.link_class(segments.cluster)))
            super().__init__(segments, segment, ranks)

    monkeypatch.setattr(alpa, "SegmentSearch", Counted)

    AlpaPlanner(AlpaConfig()).plan(asked(mlp((16,) * 7, num_micro_batches=8),
                                   nodes_of_two(inside=1e8, between=1e6)))  # fmt: skip

    assert len(made) == len(set(made))


@pytest.mark.slow
def test_without_time_it_is_the_first_pipeline_that_was_priced_with_its_distance_to_the_bound():
    ask = asked(mlp((64,) * 4, batch=4, num_micro_batches=8), nodes_of_two(inside=1e8, between=1e6))
    best = AlpaPlanner(AlpaConfig()).plan(ask).report

    late = AlpaPlanner(AlpaConfig(time_limit_s=1e-6)).plan(ask).report

    assert late["bound_s"] <= best["objective_s"] <= late["objective_s"]


@pytest.mark.slow
def test_positions_of_the_axis_pipe_are_the_stages():
    ask = request((2, 2), ("pipe", "data"))

    strategy = AlpaPlanner(AlpaConfig()).plan(ask)

    assert [stage.rank_list for stage in strategy.stages] == [(0, 1), (2, 3)]
    assert strategy.stages[0].axes == ("data",)
    assert_legal(ask.graph, strategy)


def test_more_stages_than_blocks_are_refused():
    with pytest.raises(PlanError, match="has 2 blocks for 3 stages"):
        AlpaPlanner(AlpaConfig()).plan(
            PlanRequest(graph=mlp((4, 4, 4), num_micro_batches=4),
                        mesh=Placement.grid((3,), ("pipe",)), cluster=Cluster.nominal(3))
        )  # fmt: skip


def test_a_mesh_that_says_no_stages_is_refused():
    with pytest.raises(ConfigError, match="does not show which ranks are stages"):
        AlpaPlanner(AlpaConfig()).plan(request((2, 2), ("data", "tensor")))


@pytest.mark.slow
def test_a_pin_of_the_user_is_kept_inside_every_stage():
    pins = {"parameters": "B", "use:layers.1.weight": {"data": "B"}}
    ask = asked(mlp((64,) * 4, num_micro_batches=4), nodes_of_two(inside=1e9, between=1e7))

    strategy = AlpaPlanner(AlpaConfig()).plan(replace(ask, pins=pins))

    stored = [strategy.storage[f"layers.{at}.weight"].sbp for at in range(3)]
    assert all(entry == B for sbp in stored for entry in sbp)


@pytest.mark.slow
def test_stages_of_unequal_ranks_train_as_one_device():
    # One rank for a narrow block, two for a wide one.
    step = step_of(64, (64, 128), 16, samples=4, num_micro_batches=4)
    cluster = machine(num_devices=3, devices_per_node=3, inside=5e7, between=1e7, flop_per_s=1e9)

    strategy = AlpaPlanner(AlpaConfig()).plan(asked(step.graph, cluster))

    assert [stage.mesh_shape for stage in strategy.stages] == [(1,), (2,)]
    check(compile_plan(step.graph, strategy))
    run_beside_one_device(step, strategy)


@pytest.mark.exhaustive
def test_stages_of_meshes_of_two_axes_train_as_one_device():
    step = step_of(64, (64, 64, 512), 64, samples=4, num_micro_batches=8)
    cluster = machine(num_devices=8, devices_per_node=4, inside=3e8, between=1e7, flop_per_s=1e9)

    strategy = AlpaPlanner(AlpaConfig()).plan(asked(step.graph, cluster))

    assert len(strategy.stages) > 1
    run_beside_one_device(step, strategy)

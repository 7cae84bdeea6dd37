"""`dlplacer` and `stanza`: what they place where, and that it trains as one device does."""

from functools import cache

import pytest
import torch
from placed_models import Branches, Convolutions, captured, features, images

from sbp_core.cluster import Cluster, Device, Link
from sbp_core.compile import CompileOptions, compile_plan
from sbp_core.errors import ConfigError, PlanError
from sbp_core.infer import infer_strategy
from sbp_core.memory import predict_memory
from sbp_core.placement import Placement
from sbp_core.planning import PlanRequest
from sbp_core.simulation import simulate
from sbp_core.testing.planner import PlannerConformance
from sbp_planner.placers import DlplacerPlanner, StanzaPlanner, nested_ranges
from sbp_planner.search_configs import DlplacerConfig, StanzaConfig
from sbp_torch.boxing.local import LocalBackend
from sbp_torch.runtime.configs import ReferenceConfig
from sbp_torch.runtime.reference import ReferenceRuntime
from sbp_torch.testing.cases import check_shards, run_steps, shards_of
from sbp_torch.testing.planner import PlannerRunConformance
from sbp_torch.testing.programs import assert_near, one_device_run


@pytest.mark.exhaustive
class TestDlplacer(PlannerRunConformance):
    meshes = (((2,), ("data",)), ((2, 2), ("data", "tensor")))

    def make_planner(self):
        return DlplacerPlanner(DlplacerConfig())


class TestStanza(PlannerConformance):
    meshes = (((3,), ("data",)),)

    def make_planner(self):
        return StanzaPlanner(StanzaConfig())


@cache
def branches(num_micro_batches=1):
    torch.manual_seed(0)
    return captured(Branches(), features, num_micro_batches, 16)


@cache
def convolutions(num_micro_batches=1):
    torch.manual_seed(0)
    return captured(Convolutions(), images, num_micro_batches)


def machine(num_ranks, bytes_per_s=1e8):
    return Cluster(
        name="test",
        num_devices=num_ranks,
        devices_per_node=num_ranks,
        device=Device(memory_bytes=1 << 40, flop_per_s={"float64": 1e9}, memory_bytes_per_s=1e11),
        intra_node=Link(latency_s=1e-7, bytes_per_s=bytes_per_s),
    )


def asked(step, num_ranks, bytes_per_s=1e8):
    return PlanRequest(
        graph=step.graph,
        mesh=Placement.grid((num_ranks,), ("data",)),
        cluster=machine(num_ranks, bytes_per_s),
    )


def step_s(request, strategy):
    options = CompileOptions(cluster=request.cluster)
    return simulate(compile_plan(request.graph, strategy, options)).step_s


def check_run(step, request, strategy):
    """Compare a run with one device."""
    plan = compile_plan(request.graph, strategy, CompileOptions(cluster=request.cluster))
    wanted, states = one_device_run(step)
    with ReferenceRuntime(ReferenceConfig()).start(plan, step.states, LocalBackend()) as session:
        losses, shards = run_steps(session, step), shards_of(session, plan)
    for index, loss in enumerate(losses):
        assert_near(f"loss {index}", loss, wanted[index], 1e-9)
    check_shards(plan, shards, states, 1e-9)


def places(strategy):
    """Return the ranks of each group."""
    found = {}
    for place in strategy.report["places"]:
        found |= dict.fromkeys(place["groups"], place["ranks"])
    return found


@pytest.mark.slow
@pytest.mark.parametrize("num_micro_batches", [1, pytest.param(3, marks=pytest.mark.exhaustive)])
def test_two_branches_run_side_by_side_and_faster_than_on_one_rank(num_micro_batches):
    step = branches(num_micro_batches)
    request = asked(step, 2)

    strategy = DlplacerPlanner(DlplacerConfig()).plan(request)

    where = places(strategy)
    (left,) = {where[f"left.{at}"] for at in range(3)}
    (right,) = {where[f"right.{at}"] for at in range(3)}
    assert {left, right} == {"0", "1"}
    # The stem, a branch on its rank, the other one, and the head with the branch that it follows.
    assert len(strategy.stages) == 4
    serial = infer_strategy(asked(step, 1), planner="serial")
    assert step_s(request, strategy) < 0.7 * step_s(asked(step, 1), serial)
    check_run(step, request, strategy)


@pytest.mark.exhaustive
def test_branches_may_have_several_ranks_each():
    step = branches()
    request = asked(step, 4, bytes_per_s=1e9)

    strategy = DlplacerPlanner(DlplacerConfig()).plan(request)

    where = places(strategy)
    sides = [{where[f"{side}.{at}"] for at in range(3)} for side in ("left", "right")]
    assert sides in ([{"0, 1"}, {"2, 3"}], [{"2, 3"}, {"0, 1"}])
    check_run(step, request, strategy)


@pytest.mark.parametrize(
    ("num", "sizes"),
    [(1, [1]), (2, [1, 2]), (6, [1, 2, 6]), (8, [1, 2, 4, 8]), (7, [1, 7]), (16, [1, 16])],
)
def test_places_are_nested(num, sizes):
    found = nested_ranges(num)

    assert sorted({end - begin for begin, end in found}) == sizes
    for begin, end in found:
        assert all(
            (a <= begin and end <= b) or (begin <= a and b <= end) or b <= begin or end <= a
            for a, b in found
        )


@pytest.mark.exhaustive
def test_more_ranks_than_samples_do_not_share_them():
    step = convolutions()  # of 8 samples
    request = asked(step, 16, bytes_per_s=1e12)

    strategy = DlplacerPlanner(DlplacerConfig()).plan(request)

    assert max(stage.size for stage in strategy.stages) <= 8


@pytest.mark.exhaustive
def test_the_program_predicts_what_the_compiled_plan_takes():
    strategy = DlplacerPlanner(DlplacerConfig()).plan(asked(branches(), 2))

    predicted = strategy.report["placement_s"]

    assert strategy.report["bound_s"] <= predicted
    assert predicted == pytest.approx(step_s(asked(branches(), 2), strategy), rel=0.15)


@pytest.mark.slow
def test_convolutions_are_data_parallel_and_large_matrices_are_on_a_rank_of_their_own():
    step = convolutions()
    request = asked(step, 4)

    strategy = StanzaPlanner(StanzaConfig(num_fc_workers=1)).plan(request)

    assert places(strategy) == {
        "convs.0": "0, 1, 2",
        "convs.1": "0, 1, 2",
        "wide": "3",
        "head": "3",
    }
    assert [stage.rank_list for stage in strategy.stages] == [(0, 1, 2), (3,)]
    data_parallel = infer_strategy(
        request,
        planner="data",
        pins={"batch": "S(0)", "activations": "S(0)", "parameters": "B", "updates": "B"},
    )
    assert step_s(request, strategy) < step_s(request, data_parallel)
    check_run(step, request, strategy)


@pytest.mark.exhaustive
def test_the_fastest_size_of_the_smaller_part_is_found():
    request = asked(convolutions(), 4)

    best = StanzaPlanner(StanzaConfig()).plan(request)

    times = [
        step_s(request, StanzaPlanner(StanzaConfig(num_fc_workers=few)).plan(request))
        for few in (1, 2)
    ]
    assert step_s(request, best) == pytest.approx(min(times), rel=1e-9)


@pytest.mark.exhaustive
def test_parts_on_all_ranks_and_parts_on_one_of_them_go_together():
    # The loss is made on one rank, and reported on all of them, each of which has it once.
    step = convolutions()
    request = asked(step, 4)

    strategy = DlplacerPlanner(DlplacerConfig()).plan(request)

    where = places(strategy)
    assert where["convs.0"] == "0, 1, 2, 3"
    assert where["wide"] in ("0", "1", "2", "3")
    check_run(step, request, strategy)


@pytest.mark.slow
def test_where_everything_is_best_on_all_ranks_it_is_one_stage():
    strategy = DlplacerPlanner(DlplacerConfig()).plan(asked(convolutions(), 2, bytes_per_s=1e12))

    assert [stage.rank_list for stage in strategy.stages] == [(0, 1)]


@pytest.mark.slow
def test_the_limit_of_memory_is_kept_by_the_compiled_plan():
    request = asked(branches(), 2, bytes_per_s=1e6)
    together = DlplacerPlanner(DlplacerConfig()).plan(request)
    options = CompileOptions(cluster=request.cluster)
    needed = predict_memory(compile_plan(request.graph, together, options)).peak
    assert len({stage.rank_list for stage in together.stages}) == 1

    apart = DlplacerPlanner(DlplacerConfig(memory_bytes=0.8 * needed)).plan(request)

    assert len({stage.rank_list for stage in apart.stages}) == 2
    held = predict_memory(compile_plan(request.graph, apart, options))
    assert held.peak <= 0.8 * needed


@pytest.mark.slow
def test_what_cannot_fit_is_refused_with_the_setting():
    with pytest.raises(PlanError, match=r"fits the 1000 B of a rank") as refused:
        DlplacerPlanner(DlplacerConfig(memory_bytes=1000)).plan(asked(branches(), 2))

    assert "planner.memory_bytes" in refused.value.accepted


def test_a_mesh_with_stages_of_its_own_is_refused():
    request = PlanRequest(
        graph=branches().graph, mesh=Placement.grid((2,), ("pipe",)), cluster=machine(2)
    )

    with pytest.raises(ConfigError, match="makes stages of its own"):
        DlplacerPlanner(DlplacerConfig()).plan(request)


@pytest.mark.parametrize(("num_ranks", "few"), [(1, None), (2, 2)])
def test_parts_that_there_are_not_are_refused(num_ranks, few):
    with pytest.raises(ConfigError, match=f"planner.num_fc_workers={few} of {num_ranks} positions"):
        StanzaPlanner(StanzaConfig(num_fc_workers=few)).plan(asked(branches(), num_ranks))

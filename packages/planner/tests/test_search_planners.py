"""The planners that search all mesh axes at once, and `auto`."""

from dataclasses import replace
from random import Random

import pytest
from plan_requests import assert_legal, request
from random_steps import CUBE, random_request

from sbp_core.errors import ConfigError, MemoryLimitError, PlanError
from sbp_core.graph_variant import GraphVariant
from sbp_core.infer import joint_problem
from sbp_core.placement import Placement
from sbp_core.planning import PlanRequest
from sbp_core.planning.compiled import Compilation
from sbp_core.testing.graphs import cluster, mlp
from sbp_core.testing.planner import PlannerConformance
from sbp_core.units import format_bytes
from sbp_planner import auto, exhaustive, greedy, ilp, mcmc, optcnn, osdp, placers, tofu
from sbp_planner.configs import OsdpConfig
from sbp_planner.search_configs import (
    AutoConfig,
    DlplacerConfig,
    ExhaustiveConfig,
    GreedyConfig,
    IlpConfig,
    McmcConfig,
    OptcnnConfig,
    TofuConfig,
)

SMALL = (((2,), ("data",)), ((2, 2), ("data", "tensor")))

#: Each with settings under which it takes a moment.
PLANNERS = {
    "greedy": lambda: greedy.GreedyPlanner(GreedyConfig()),
    "ilp": lambda: ilp.IlpPlanner(IlpConfig(time_limit_s=10)),
    "mcmc": lambda: mcmc.McmcPlanner(McmcConfig(proposals=5)),
    "optcnn": lambda: optcnn.OptcnnPlanner(OptcnnConfig()),
    "tofu": lambda: tofu.TofuPlanner(TofuConfig()),
}


class SearchConformance(PlannerConformance):
    meshes = SMALL
    micro_batches = (2,)


class TestGreedy(SearchConformance):
    def make_planner(self):
        return PLANNERS["greedy"]()


class TestIlp(SearchConformance):
    def make_planner(self):
        return PLANNERS["ilp"]()


class TestMcmc(SearchConformance):
    meshes = SMALL[:1]

    def make_planner(self):
        return PLANNERS["mcmc"]()


class TestOptcnn(SearchConformance):
    def make_planner(self):
        return PLANNERS["optcnn"]()


class TestTofu(SearchConformance):
    meshes = (*SMALL, ((6,), ("data",)))

    def make_planner(self):
        return PLANNERS["tofu"]()


@pytest.mark.slow
class TestAuto(SearchConformance):
    meshes = SMALL[:1]

    def make_planner(self):
        return auto.AutoPlanner(AutoConfig(time_limit_s=600))


def small(shape=(2,), axes=("data",), **sizes):
    graph = mlp((32, 64), batch=16, **sizes)
    mesh = Placement.grid(shape, axes)
    return PlanRequest(graph=graph, mesh=mesh, cluster=cluster(num_devices=mesh.size))


def check_against_exhaustive(asked: PlanRequest, max_assignments: int = 400_000) -> None:
    truth = exhaustive.ExhaustivePlanner(ExhaustiveConfig(max_assignments=max_assignments))

    found = ilp.IlpPlanner(IlpConfig(tied=False)).plan(asked)
    wanted = truth.plan(asked)

    cost = found.report["cost_s"]
    assert cost == pytest.approx(wanted.report["cost_s"], rel=1e-9)
    # It proves so itself, and never promises more than there is.
    assert found.report["bound_s"] == pytest.approx(cost, rel=1e-6)
    assert found.report["bound_s"] <= cost
    assert wanted.report["cost_s"] <= found.report["cost_by_axis_s"] * (1 + 1e-9)


@pytest.mark.slow(but=2)
@pytest.mark.parametrize("seed", range(12))
def test_the_integer_program_equals_looking_at_everything(seed):
    check_against_exhaustive(random_request(Random(seed)))


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(200))
def test_it_does_so_on_200_random_programs(seed):
    asked = random_request(Random(1000 + seed))
    check_against_exhaustive(asked, max_assignments=20_000_000)


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(20))
def test_it_does_so_on_20_random_programs_on_three_axes(seed):
    asked = random_request(Random(2000 + seed), meshes=CUBE, max_ops=1)
    check_against_exhaustive(asked, max_assignments=20_000_000)


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("name", PLANNERS)
def test_what_a_planner_finds_of_a_transformer_is_legal(name):
    asked = request((2,), ("data",))

    strategy = PLANNERS[name]().plan(asked)

    assert strategy.planner == name
    assert_legal(asked.graph, strategy)
    assert strategy.report["explanation"]


@pytest.mark.slow
def test_on_all_axes_at_once_is_no_worse_than_axis_by_axis():
    asked = request((2, 2), ("data", "tensor"))

    found = ilp.IlpPlanner(IlpConfig(time_limit_s=4)).plan(asked)

    report = found.report
    assert report["cost_s"] < 0.99 * report["cost_by_axis_s"]  # 2.4 % less
    assert 0.8 * report["cost_s"] < report["bound_s"] <= report["cost_s"]
    assert 0 <= report["gap"] < 0.2


def test_what_fits_is_chosen_by_the_exact_memory_of_the_compiled_plan():
    slow = cluster(num_devices=2, bytes_per_s=1e7)
    mesh = Placement.grid((2,), ("data",))
    asked = PlanRequest(graph=mlp((32, 64), batch=512), mesh=mesh, cluster=slow)
    free = ilp.IlpPlanner(IlpConfig()).plan(asked)
    needed = Compilation(request=asked, limit_bytes=1).compiled(free).memory_bytes
    limit = 0.9 * needed

    found = ilp.IlpPlanner(IlpConfig(memory_bytes=limit)).plan(asked)

    held = Compilation(request=asked, limit_bytes=limit).compiled(found)
    assert held.fits
    assert found.report["cost_s"] > free.report["cost_s"] == found.report["bound_s"]


def test_what_cannot_fit_is_refused_with_the_least_that_states_need():
    with pytest.raises(PlanError, match="no plan fits the 100 B of a rank: the states alone need"):
        ilp.IlpPlanner(IlpConfig(memory_bytes=100)).plan(small())


LIMITED = {
    "auto": lambda limit: auto.AutoPlanner(AutoConfig(memory_bytes=limit)),
    "dlplacer": lambda limit: placers.DlplacerPlanner(DlplacerConfig(memory_bytes=limit)),
    "ilp": lambda limit: ilp.IlpPlanner(IlpConfig(memory_bytes=limit)),
    "mcmc": lambda limit: mcmc.McmcPlanner(McmcConfig(memory_bytes=limit, proposals=2)),
    "osdp": lambda limit: osdp.OsdpPlanner(OsdpConfig(memory_bytes=limit)),
}


@pytest.mark.parametrize("name", LIMITED)
def test_what_cannot_fit_is_refused_in_one_kind_of_error_that_names_the_limit(name):
    with pytest.raises(MemoryLimitError) as caught:
        LIMITED[name](100).plan(small())

    assert "planner.memory_bytes" in caught.value.accepted


def test_looking_at_everything_ends_where_there_is_too_much():
    with pytest.raises(ConfigError, match="more than 1,000 branches"):
        exhaustive.ExhaustivePlanner(ExhaustiveConfig(max_assignments=1000)).plan(
            request((2,), ("data",))
        )


@pytest.mark.slow
def test_exhaustive_tells_how_far_it_is_and_how_many_assignments_there_are():
    told: list[float] = []
    asked = replace(request((2,), ("data",)), progress=lambda what, part: told.append(part))
    planner = exhaustive.ExhaustivePlanner(ExhaustiveConfig(max_assignments=50_000))

    with pytest.raises(ConfigError, match=r"50,000 branches .* some 10\^\d+ assignments"):
        planner.plan(asked)

    assert told == sorted(told)
    assert len(told) >= 2 and 0 < told[0] < 0.5


@pytest.mark.slow
def test_a_walk_is_the_same_for_the_same_seed():
    asked = small()

    first, again = (
        mcmc.McmcPlanner(McmcConfig(proposals=20, seed=3)).plan(asked) for _ in range(2)
    )

    assert first == again
    assert first.report["num_accepted"] > 0


def test_factors_of_the_ranks_have_the_order_of_the_ranks():
    mesh = tofu.by_factors(Placement.grid((12, 2), ("data", "tensor")))

    assert mesh.mesh_shape == (3, 2, 2, 2)
    assert mesh.rank_list == tuple(range(24))
    assert mesh.axes == ("data.0", "data.1", "data.2", "tensor.0")


@pytest.mark.slow
def test_a_pin_of_an_axis_holds_for_its_factors():
    asked = replace(request((4, 2), ("data", "tensor")), pins={"batch": {"data": "S(0)"}})

    strategy = tofu.TofuPlanner(TofuConfig()).plan(asked)

    (tokens,) = {e.name for e in asked.graph.inputs if e.name.endswith("tokens")} or {"tokens"}
    assert str(strategy.storage[tokens].sbp).startswith("S(0), S(0)")


@pytest.mark.slow
def test_auto_is_no_slower_than_any_other():
    asked = small(shape=(2, 2), axes=("data", "tensor"))
    judge = Compilation(request=asked, limit_bytes=1 << 30)

    chosen = judge.compiled(auto.AutoPlanner(AutoConfig(time_limit_s=600)).plan(asked))

    others = {
        "osdp": lambda: osdp.OsdpPlanner(OsdpConfig()),
        "dlplacer": lambda: placers.DlplacerPlanner(DlplacerConfig()),
    }
    for name, make in {**PLANNERS, **others}.items():
        other = judge.compiled(make().plan(asked))
        assert chosen.step_s <= other.step_s * (1 + 1e-9), name


@pytest.mark.slow
def test_auto_says_what_its_plans_hold_exactly():
    asked = small()

    strategy = auto.AutoPlanner(AutoConfig()).plan(asked)

    held = Compilation(request=asked, limit_bytes=1 << 30).compiled(strategy, exact=True)
    said = strategy.report["explanation"]
    assert held.is_exact and said[1].endswith(format_bytes(held.memory_bytes))
    assert not any("at most" in line for line in said)


@pytest.mark.slow
def test_auto_cuts_stages_with_programs_of_their_own_if_there_are_micro_batches():
    graph = mlp((8, 8, 8), num_micro_batches=2)
    asked = PlanRequest(graph=graph, mesh=Placement.grid((2,), ("data",)), cluster=cluster())

    report = auto.AutoPlanner(AutoConfig(time_limit_s=600)).plan(asked).report

    assert {"galvatron on data 2", "alpa on data 2"} <= set(report["tried"])


def test_auto_says_what_it_had_no_time_for():
    strategy = auto.AutoPlanner(AutoConfig(time_limit_s=1e-9)).plan(small())

    assert strategy.report["untried"]
    assert any("not tried within 1e-09 s" in line for line in strategy.report["explanation"])


class Variants:
    """A family of a step that may have one or two micro-batches."""

    variant = GraphVariant()
    micro_batches = (1, 4)
    may_recompute = may_slice = False

    def graph(self, variant):
        count = variant.num_micro_batches
        return mlp((32, 64), batch=512 // count, num_micro_batches=count)


@pytest.mark.slow
def test_auto_takes_smaller_micro_batches_where_memory_is_short():
    family = Variants()
    mesh = Placement.grid((2,), ("data",))
    graph = family.graph(family.variant)
    asked = PlanRequest(graph=graph, mesh=mesh, cluster=cluster(), family=family)
    four = asked.of(GraphVariant(num_micro_batches=4))
    needed = Compilation(request=four, limit_bytes=1).compiled(
        auto.AutoPlanner(AutoConfig()).plan(four), exact=True
    )
    planner = auto.AutoPlanner(AutoConfig(memory_bytes=needed.memory_bytes))
    with pytest.raises(PlanError, match="nothing that was tried fits"):
        planner.plan(replace(asked, family=None))

    found = planner.plan(asked)

    assert found.variant == GraphVariant(num_micro_batches=4)
    assert found.num_micro_batches == 4
    held = Compilation(request=four, limit_bytes=needed.memory_bytes).compiled(found)
    assert held.fits


@pytest.mark.slow
def test_the_problem_starts_from_what_was_found_axis_by_axis():
    asked = request((2, 2), ("data", "tensor"))

    problem = joint_problem(asked)

    assert problem.decided(problem.start) == problem.decision

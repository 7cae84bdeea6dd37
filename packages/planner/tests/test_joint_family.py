"""The joint search among variants of a step: struck by bounds, solved, equal to looking at all."""

from dataclasses import dataclass, replace
from random import Random
from typing import Any

import pytest
from random_steps import random_request
from step_family import MlpFamily, family_request

from sbp_core.errors import ConfigError, PlanError
from sbp_core.graph import GraphOutput, InputKind, LogicalGraph, OutputKind, Ref
from sbp_core.graph_variant import GraphVariant
from sbp_core.passes import accumulate
from sbp_core.planning import PlanRequest
from sbp_core.planning.compiled import Compilation
from sbp_core.testing.graphs import Builder
from sbp_planner import exhaustive, ilp
from sbp_planner.joint import family
from sbp_planner.joint.family import BoundedVariant, FamilySearch
from sbp_planner.joint.search import JointSearch
from sbp_planner.search_configs import ExhaustiveConfig, IlpConfig


@dataclass(frozen=True)
class Product:
    """A family of the sum of a product of a batch of 64 with a matrix."""

    width: int
    after: int
    micro_batches: tuple[int, ...] = (1, 2, 4)
    variant = GraphVariant()
    may_recompute = may_slice = False

    def graph(self, variant: GraphVariant) -> LogicalGraph:
        rows, b = 64 // variant.num_micro_batches, Builder()
        b.add_input("x", InputKind.BATCH, (rows, self.width))
        b.add_input("w", InputKind.PARAMETER, (self.width, self.after))
        b.op("mm", "mm.default", (Ref("x"), Ref("w")), (rows, self.after))
        b.op("sum", "sum.default", (Ref("mm"),), ())
        b.outputs.append(GraphOutput(name="loss", kind=OutputKind.LOSS, value="sum"))
        return accumulate(b.graph("product"), variant.num_micro_batches)


def asked(seed: int) -> PlanRequest:
    """Return the request to plan a product on two ranks of a random machine."""
    random = Random(seed)
    family = Product(random.choice((2, 4, 8)), random.choice((4, 16, 64)))
    request = replace(random_request(random, meshes=(((2,), ("data",)),)), family=family)
    return replace(request, graph=family.graph(family.variant))


def needed(request: PlanRequest, count: int) -> float:
    """Return what the fastest plan of a number of micro-batches holds, in bytes."""
    one = request.of(GraphVariant(num_micro_batches=count))
    found = ilp.IlpPlanner(IlpConfig()).plan(one)
    return Compilation(request=one, limit_bytes=1).compiled(found, exact=True).memory_bytes


def check_against_exhaustive(seed: int, count: int) -> None:
    """Compare where the fastest plan with so many micro-batches just fits, and wins."""
    request = asked(seed)
    limit = needed(request, count)
    assert needed(request, 1) > limit

    found = ilp.IlpPlanner(IlpConfig(memory_bytes=limit, tied=False)).plan(request)
    wanted = exhaustive.ExhaustivePlanner(ExhaustiveConfig(memory_bytes=limit)).plan(request)

    assert found.report["cost_s"] == pytest.approx(wanted.report["cost_s"], rel=1e-9)
    # Of two variants that take the same time either may be taken.
    assert found.variant is not None and wanted.variant is not None
    assert found.variant.num_micro_batches <= count
    assert found.report["bound_s"] <= wanted.report["cost_s"]
    judge = Compilation(request=request.of(found.variant), limit_bytes=limit)
    assert judge.compiled(found, exact=True).fits


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 2])
def test_the_best_variant_is_that_of_looking_at_every_plan_of_every_variant(seed: int) -> None:
    check_against_exhaustive(seed, 2)


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("count", [2, 4])
def test_it_is_so_on_random_products_and_machines(seed: int, count: int) -> None:
    check_against_exhaustive(1000 + seed, count)


def test_without_a_limit_the_variants_that_are_slower_are_struck_by_their_bounds() -> None:
    request = asked(0)

    report = ilp.IlpPlanner(IlpConfig()).plan(request).report

    assert [one["outcome"] for one in report["variants"]] == ["best", *["struck by its bound"] * 2]
    assert report["gap"] == pytest.approx(0, abs=1e-9)
    assert "of 3 variants of the step the best is 1 micro-batch" in report["explanation"][1]
    assert "2 take no less, by their bounds: 2 micro-batches; 4" in report["explanation"][2]


def test_a_variant_that_a_proof_strikes_is_not_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    request, searched = asked(0), []
    begun = JointSearch.__init__

    def noted(search: JointSearch, one: PlanRequest, *arguments: Any, **more: Any) -> None:
        searched.append(one.graph.num_micro_batches)
        begun(search, one, *arguments, **more)
        # What was found out for the floor is not found out again.
        assert search.problem.work is more["known"]

    monkeypatch.setattr(JointSearch, "__init__", noted)
    # Nothing is known of operators: only what is proved of all costs strikes anything.
    posed = family.FamilySearch._posed

    def without_floor(search: FamilySearch, variant: GraphVariant) -> BoundedVariant | None:
        found = posed(search, variant)
        return found and replace(found, bound_s=0.0)

    monkeypatch.setattr(FamilySearch, "_posed", without_floor)
    report = ilp.IlpPlanner(IlpConfig()).plan(request).report

    assert [one["outcome"] for one in report["variants"]] == ["best", *["struck by its bound"] * 2]
    assert searched == [1]
    assert report["gap"] == pytest.approx(0, abs=1e-9)


def test_of_very_large_steps_what_gains_little_is_not_planned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Four(Product):
        variant = GraphVariant(num_micro_batches=4)

    request = replace(asked(0), family=Four(4, 16, micro_batches=(4, 1)))
    request = replace(request, graph=request.family.graph(Four.variant))
    whole = ilp.IlpPlanner(IlpConfig()).plan(request).report
    monkeypatch.setattr(family, "_MAX_NODES", 1)
    monkeypatch.setattr(family, "_NEAR_SHARE", 0.999)
    found = ilp.IlpPlanner(IlpConfig()).plan(request).report

    assert [one["outcome"] for one in whole["variants"]] == [
        "slower",
        "best",
    ]
    assert [one["outcome"] for one in found["variants"]] == [
        "best",
        "gains too little by its bound",
    ]
    # What it might have gained is said.
    assert found["bound_s"] <= whole["cost_s"] < found["cost_s"]
    assert found["gap"] == pytest.approx(1 - found["bound_s"] / found["cost_s"])
    assert any("1 gain no more than" in line for line in found["explanation"])


@pytest.mark.parametrize("count", [2, 4])
def test_a_variant_that_is_struck_would_have_been_no_faster(count: int) -> None:
    request = asked(1)
    one = request.of(GraphVariant(num_micro_batches=count))

    best = ilp.IlpPlanner(IlpConfig()).plan(request).report["cost_s"]

    assert ilp.IlpPlanner(IlpConfig()).plan(one).report["bound_s"] >= best


def test_where_the_search_of_a_variant_fails_its_bound_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fitting = JointSearch.fitting

    def failing(search: JointSearch, *arguments: Any) -> Any:
        if search.request.graph.num_micro_batches == 1:
            raise PlanError("nothing was found")
        return fitting(search, *arguments)

    whole = ilp.IlpPlanner(IlpConfig()).plan(asked(0)).report
    monkeypatch.setattr(JointSearch, "fitting", failing)
    found = ilp.IlpPlanner(IlpConfig()).plan(asked(0)).report

    assert found["cost_s"] > whole["cost_s"]
    assert found["bound_s"] == pytest.approx(whole["bound_s"])
    assert found["gap"] > 0


def test_the_gap_is_that_to_variants_that_do_not_fit_too() -> None:
    request = asked(0)
    limit = needed(request, 4)

    report = ilp.IlpPlanner(IlpConfig(memory_bytes=limit)).plan(request).report

    free = ilp.IlpPlanner(IlpConfig()).plan(request).report["cost_s"]
    assert report["bound_s"] == pytest.approx(free)
    assert report["gap"] == pytest.approx(1 - free / report["cost_s"])
    assert any("have no plan that was found and fits: 1 micro" in s for s in report["explanation"])


@pytest.mark.slow
def test_activations_are_made_again_where_memory_is_short() -> None:
    family = MlpFamily(sizes=(16, 64, 2, 16), batch_size=256, micro_batches=(1,), may_slice=False)
    request = family_request(family, bytes_per_s=1e9)
    free = ilp.IlpPlanner(IlpConfig()).plan(request)
    assert free.variant == GraphVariant()
    judge = Compilation(request=request, limit_bytes=1)
    limit = 0.75 * judge.compiled(free, exact=True).memory_bytes

    found = ilp.IlpPlanner(IlpConfig(memory_bytes=limit, time_limit_s=20)).plan(request)

    assert found.variant is not None and found.variant.recompute_bytes is not None
    held = Compilation(request=request.of(found.variant), limit_bytes=limit).compiled(found)
    assert held.fits
    assert found.report["cost_s"] > free.report["cost_s"] >= found.report["bound_s"]


def test_once_it_is_late_nothing_further_is_begun_and_the_report_says_so() -> None:
    request = asked(2)

    report = ilp.IlpPlanner(IlpConfig(time_limit_s=1e-9)).plan(request).report

    assert report["unseen_micro_batches"] == [2, 4]
    assert report["explanation"][-1] == "  micro-batches that were not looked at in time: 2, 4"


def test_where_it_is_late_and_nothing_fits_the_leanest_variant_is_still_tried() -> None:
    request = asked(2)
    limit = needed(request, 4)

    found = ilp.IlpPlanner(IlpConfig(memory_bytes=limit, time_limit_s=1e-9)).plan(request)

    assert found.variant == GraphVariant(num_micro_batches=4)


def test_the_least_of_all_variants_is_named_where_none_fits() -> None:
    request = asked(0)
    limit = needed(request, 4) / 2

    with pytest.raises(PlanError, match=r"fits .* of 3 variants of the step") as refused:
        ilp.IlpPlanner(IlpConfig(memory_bytes=limit)).plan(request)

    assert refused.value.accepted.startswith("planner.memory_bytes >= ")


def test_a_pin_that_cannot_be_meant_is_told_whatever_the_variants_are() -> None:
    request = replace(asked(0), pins={"no.such": "B"})

    for planner in (ilp.IlpPlanner(IlpConfig()), exhaustive.ExhaustivePlanner(ExhaustiveConfig())):
        with pytest.raises(ConfigError, match=r"no\.such"):
            planner.plan(request)


def test_a_number_of_micro_batches_of_which_there_is_no_step_is_passed_over() -> None:
    class Odd(Product):
        def graph(self, variant: GraphVariant) -> LogicalGraph:
            if variant.num_micro_batches == 2:
                raise ConfigError("two halves make no step")
            return super().graph(variant)

    request = replace(asked(0), family=Odd(4, 16))
    request = replace(request, graph=request.family.graph(GraphVariant()))

    strategy = ilp.IlpPlanner(IlpConfig()).plan(request)

    assert [one["variant"] for one in strategy.report["variants"]] == [
        "1 micro-batch",
        "4 micro-batches",
    ]


def test_progress_says_which_variant_is_looked_at() -> None:
    told: list[tuple[str, float]] = []
    request = replace(asked(0), progress=lambda what, part: told.append((what, part)))

    ilp.IlpPlanner(IlpConfig(memory_bytes=needed(request, 4))).plan(request)

    assert any(what.startswith("4 micro-batches: ") for what, _ in told)
    assert all(0 <= part <= 1 for _, part in told)

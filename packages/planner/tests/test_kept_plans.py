"""What a planner has compiled is not compiled again by whoever executes what it chose."""

from dataclasses import replace

import pytest
from plan_requests import request

from sbp_core.compile import CompileOptions, compile_plan
from sbp_core.graph_variant import GraphVariant
from sbp_core.memory import KeptPlans, predict_memory
from sbp_core.simulation import simulate
from sbp_planner.configs import ManualConfig
from sbp_planner.ilp import IlpPlanner
from sbp_planner.manual import ManualPlanner
from sbp_planner.search_configs import IlpConfig


@pytest.mark.slow
def test_the_plan_of_what_was_chosen_is_kept_with_its_memory():
    asked = request((2,), ("data",))
    options, kept = CompileOptions(cluster=asked.cluster), KeptPlans()
    asked = replace(asked, options=options, kept=kept)
    least = predict_memory(compile_plan(asked.graph, IlpPlanner(IlpConfig()).plan(asked), options))

    strategy = IlpPlanner(IlpConfig(memory_bytes=1.01 * least.peak)).plan(asked)

    plan = kept.plan(asked.graph, strategy, options)
    assert plan.hash == compile_plan(asked.graph, strategy, options).hash
    assert kept.known_memory(plan) == predict_memory(plan)
    assert kept.asked(simulate, plan) is kept.asked(simulate, plan)
    assert kept.asked(simulate, plan).step_s == simulate(plan).step_s
    assert kept.plan(asked.graph, strategy, replace(options)) is plan


@pytest.mark.slow
def test_a_strategy_that_says_its_variant_has_the_plan_of_one_that_does_not():
    asked = request((2,), ("data",))
    options, kept = CompileOptions(cluster=asked.cluster), KeptPlans()
    silent = IlpPlanner(IlpConfig()).plan(asked)

    plan = kept.plan(asked.graph, silent, options)

    variant = GraphVariant(num_micro_batches=silent.num_micro_batches)
    assert silent.variant is None
    assert kept.plan(asked.graph, replace(silent, variant=variant), options) is plan


@pytest.mark.slow
def test_another_strategy_other_options_and_another_graph_are_compiled_by_themselves():
    asked = request((2,), ("data",))
    options, kept = CompileOptions(cluster=asked.cluster), KeptPlans()
    first = IlpPlanner(IlpConfig()).plan(asked)
    plan = kept.plan(asked.graph, first, options)
    kept.memory(plan)

    other = ManualPlanner(ManualConfig(pins={"parameters": "S(0)"})).plan(asked)
    found = [
        kept.plan(asked.graph, other, options),
        kept.plan(asked.graph, first, replace(options, in_place_states=False)),
        kept.plan(replace(asked.graph, name=asked.graph.name), first, options),
    ]

    assert all(one is not plan and kept.known_memory(one) is None for one in found)


@pytest.mark.slow
def test_only_the_last_plans_are_kept():
    asked = request((2,), ("data",))
    options, kept = CompileOptions(cluster=asked.cluster), KeptPlans()
    strategy = IlpPlanner(IlpConfig()).plan(asked)
    first = kept.plan(asked.graph, strategy, options)

    for number in range(8):
        kept.plan(asked.graph, strategy, replace(options, bucket_bytes=number))

    assert kept.plan(asked.graph, strategy, options) is not first

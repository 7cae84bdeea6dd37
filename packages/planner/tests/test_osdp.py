from dataclasses import replace

import pytest
from plan_requests import assert_legal, cluster, collectives, gpt_step, request

from sbp_core.errors import ConfigError, PlanError
from sbp_core.graph.ir import Phase
from sbp_core.placement import Placement
from sbp_core.sbp import B, NdSbp, S
from sbp_planner.configs import OsdpConfig
from sbp_planner.knapsack import evaluate
from sbp_planner.osdp import build, parameter_items, shardable, update_values


def plan(memory_bytes=None, mesh_shape=(4,), axes=("data",)):
    return build(OsdpConfig(memory_bytes=memory_bytes)).plan(request(mesh_shape, axes))


@pytest.fixture(scope="module")
def bounds():
    """The memory of the compiled plans with everything sharded, and with everything replicated."""
    with pytest.raises(PlanError) as caught:
        plan(1000)
    least = int(caught.value.accepted.rpartition(" ")[2])
    return least, plan().report["osdp"]["plan_memory_bytes_per_rank"]


@pytest.mark.parametrize(("num_micro_batches", "zdp"), [(1, 3), (2, 5)])
def test_an_item_costs_what_the_paper_says(num_micro_batches, zdp):
    graph, machine = replace(gpt_step(), num_micro_batches=num_micro_batches), cluster()
    mesh = Placement.grid((4,), ("data",))

    (found,) = parameter_items(graph, ["head.weight"], mesh, 0, machine)

    size = 32 * 16 * 4
    once = 3 * (1e-6 + size / 4 / 1e7)
    assert (found.dp_s, found.zdp_s) == pytest.approx((2 * once, zdp * once))
    assert (found.dp_bytes, found.zdp_bytes) == (4 * size, size)
    assert found.transient_bytes == 2 * size


def test_an_uneven_shard_counts_its_largest_part():
    mesh = Placement.grid((3,), ("data",))

    (found,) = parameter_items(gpt_step(), ["head.weight"], mesh, 0, cluster())

    assert found.zdp_bytes == 4 * 11 * 16 * 4  # 11 of 32 rows


def test_with_enough_memory_everything_is_replicated():
    strategy = plan()

    assert set(strategy.report["osdp"]["modes"].values()) == {"DP"}
    assert strategy.report["osdp"]["binds"].startswith("communication time")
    assert all(entry.sbp == NdSbp(B) for n, entry in strategy.storage.items() if "weight" in n)


def test_with_little_memory_some_parameters_are_sharded_with_their_states(bounds):
    limit = sum(bounds) / 2

    strategy = plan(limit)

    report = strategy.report["osdp"]
    assert set(report["modes"].values()) == {"DP", "ZDP"}
    assert report["plan_memory_bytes_per_rank"] <= limit
    assert report["binds"].startswith("memory")
    for name, mode in report["modes"].items():
        expected = NdSbp(S(0) if mode == "ZDP" else B)
        for key in (name, f"{name}.exp_avg", f"{name}.exp_avg_sq"):
            assert strategy.storage[key].sbp == expected, key


def test_gradients_of_sharded_parameters_are_reduce_scattered(bounds):
    asked = request((4,), ("data",))

    strategy = build(OsdpConfig(memory_bytes=sum(bounds) / 2)).plan(asked)

    modes = list(strategy.report["osdp"]["modes"].values())
    found = collectives(asked.graph, strategy, Phase.BACKWARD)
    assert found["reduce-scatter"] == modes.count("ZDP")
    assert found["all-reduce"] == modes.count("DP")
    assert_legal(asked.graph, strategy)


def test_the_report_compares_with_all_replicated_and_all_sharded(bounds):
    report = plan(sum(bounds) / 2).report["osdp"]

    times = [report[key]["predicted_step_s"] for key in ("all_dp", "chosen", "all_zdp")]
    assert times[0] < times[1] < times[2]


def test_more_memory_is_never_slower():
    model = build(OsdpConfig()).model(request((4,), ("data",)))
    all_zdp, all_dp = (
        evaluate(model.items, [kind] * len(model.items), model.fixed_bytes).memory_bytes
        for kind in (True, False)
    )
    limits = [all_zdp + (all_dp - all_zdp) * part / 8 for part in range(9)]

    times = [replace(model, limit_bytes=limit).solve().seconds for limit in limits]

    assert times == sorted(times, reverse=True)
    assert times[0] > times[-1]


def test_too_little_memory_names_the_limit_and_what_sharding_everything_needs(bounds):
    least = bounds[0]

    assert plan(least).report["osdp"]["plan_memory_bytes_per_rank"] <= least
    with pytest.raises(PlanError, match=f"no choice fits {least // 2} B"):
        plan(least // 2)


def test_a_choice_that_fits_the_model_but_not_the_plan_is_made_again(bounds):
    limit = bounds[1] - 1
    planner = build(OsdpConfig(memory_bytes=limit))
    asked = request((4,), ("data",))
    by_model = planner.model(asked).solve()

    report = planner.plan(asked).report["osdp"]

    assert not any(by_model.sharded)
    assert "ZDP" in report["modes"].values()
    assert report["plan_memory_bytes_per_rank"] <= limit


def test_updates_belong_to_the_parameter_whose_states_they_read():
    graph = gpt_step()

    found = update_values(graph)

    assert set(found) == set(shardable(graph))
    assert any(value.endswith(".mean") for value in found["head.weight"])
    assert all(graph.tensor(value).shape == (32, 16) for value in found["head.weight"])


def test_an_unknown_axis_is_refused():
    with pytest.raises(ConfigError, match="'data' alone"):
        plan(axes=("tensor",))


def test_a_second_axis_of_several_ranks_is_refused():
    with pytest.raises(ConfigError, match="'tensor': 2"):
        plan(mesh_shape=(2, 2), axes=("data", "tensor"))

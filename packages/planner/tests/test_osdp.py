import re
from dataclasses import replace
from functools import cache

import pytest
from plan_requests import assert_legal, cluster, collectives, gpt_step, request

from sbp_core.boxing import route
from sbp_core.cluster import Link
from sbp_core.compile import CompileOptions, compile_plan
from sbp_core.cost import boxing_time_s
from sbp_core.errors import ConfigError, SbpLookupError
from sbp_core.graph.ir import Phase
from sbp_core.infer import pipelined
from sbp_core.memory import call_layouts, kept_plans, predict_memory
from sbp_core.passes import RecomputeOptions, least_recompute_budget, recompute
from sbp_core.placement import Placement
from sbp_core.planning import PlanRequest
from sbp_core.sbp import B, NdSbp, S
from sbp_core.simulation import simulate
from sbp_planner import no_fit, sharding
from sbp_planner.configs import OsdpConfig
from sbp_planner.guide import parameter_options, shardable, update_values
from sbp_planner.osdp import OsdpPlanner
from sbp_planner.sharding import ends_of


def slow_request(mesh_shape=(4,), axes=("data",)):
    """The request to plan on a machine whose links make every gather dear."""
    asked = request(mesh_shape, axes)
    return replace(
        asked, cluster=replace(asked.cluster, intra_node=Link(latency_s=1e-3, bytes_per_s=1e7))
    )


@cache
def plan(memory_bytes=None, mesh_shape=(4,), axes=("data",)):
    return OsdpPlanner(OsdpConfig(memory_bytes=memory_bytes)).plan(slow_request(mesh_shape, axes))


def needed(strategy):
    return strategy.report["osdp"]["chosen"]["plan_memory_bytes_per_rank"]


@pytest.fixture(scope="module")
def bounds():
    """The memory of the compiled plans with everything sharded, and with everything replicated."""
    with pytest.raises(ConfigError) as caught:
        plan(1000)
    least = int(caught.value.accepted.rpartition(" ")[2])
    return least, needed(plan())


def options_of(name, num_ranks=4, num_micro_batches=1):
    """What one parameter costs in the guide, and the strategies that say so."""
    graph, machine = replace(gpt_step(), num_micro_batches=num_micro_batches), cluster()
    mesh = Placement.grid((num_ranks,), ("data",))
    asked = PlanRequest(graph=graph, mesh=mesh, cluster=machine)
    ends = ends_on(asked)
    (found,) = parameter_options(
        graph, [name], machine, replicated=ends.replicated, sharded=ends.sharded
    )
    return found


def ends_on(asked, axis="data", **settings):
    """The strategies that shard no parameter, and all."""
    stages = pipelined(asked.mesh, "1f1b", asked.graph.num_micro_batches)
    if len(stages.stages) == 1:
        stages = replace(stages, in_flight=(1,))
    return ends_of(asked, axis, stages=stages, **settings)


@pytest.mark.parametrize(("num_micro_batches", "gathers"), [(1, 2), (2, 4)])
def test_a_parameter_costs_its_boxing_and_its_update_by_the_cost_model(num_micro_batches, gathers):
    mesh, machine = Placement.grid((4,), ("data",)), cluster()

    replicated, sharded = options_of("head.weight", num_micro_batches=num_micro_batches)

    def boxing_s(source, target):
        ends = (mesh, NdSbp.parse(source)), (mesh, NdSbp.parse(target))
        return boxing_time_s(route((32, 16), "float32", *ends), machine)

    size = 32 * 16 * 4
    update_s = replicated.seconds - boxing_s("P", "B")
    own_update_s = sharded.seconds - gathers * boxing_s("S(0)", "B") - boxing_s("P", "S(0)")
    launches_s = 8 * 1e-6  # of an update by eight operators
    # Beside a quarter of each tensor, an operator reads whole scalars.
    assert own_update_s - launches_s == pytest.approx((update_s - launches_s) / 4, rel=0.02)
    assert (replicated.resident_bytes, sharded.resident_bytes) == (4 * size, size)
    assert (replicated.transient_bytes, sharded.transient_bytes) == (0, 2 * size)


@pytest.mark.slow
def test_an_uneven_shard_counts_its_largest_part():
    _, sharded = options_of("head.weight", num_ranks=3)

    assert sharded.resident_bytes == 4 * 11 * 16 * 4  # 11 of 32 rows


@pytest.mark.slow
def test_with_enough_memory_everything_is_replicated():
    strategy = plan()

    assert set(strategy.report["osdp"]["modes"].values()) == {"DP"}
    assert strategy.report["osdp"]["binds"].startswith("time: replicating everything is fastest")
    assert all(entry.sbp == NdSbp(B) for n, entry in strategy.storage.items() if "weight" in n)


@pytest.mark.slow
def test_what_is_faster_sharded_is_sharded_with_enough_memory():
    # With links that are fast, what counts is that each rank updates a quarter of a parameter.
    asked = request((4,), ("data",))
    fast = replace(asked.cluster, intra_node=Link(latency_s=0.0, bytes_per_s=1e12))

    found = OsdpPlanner(OsdpConfig()).plan(replace(asked, cluster=fast)).report["osdp"]

    assert found["modes"]["head.weight"] == "ZDP"
    assert found["chosen"]["plan_step_s"] < found["all_dp"]["plan_step_s"]
    assert found["binds"] == "time: replicating everything fits, and sharding these is faster"


@pytest.mark.slow
def test_with_little_memory_some_parameters_are_sharded_with_their_states(bounds):
    limit = sum(bounds) / 2

    strategy = plan(limit)

    report = strategy.report["osdp"]
    assert set(report["modes"].values()) == {"DP", "ZDP"}
    assert report["chosen"]["plan_memory_bytes_per_rank"] <= limit
    assert report["binds"].startswith("memory")
    for name, mode in report["modes"].items():
        expected = NdSbp(S(0) if mode == "ZDP" else B)
        for key in (name, f"{name}.exp_avg", f"{name}.exp_avg_sq"):
            assert strategy.storage[key].sbp == expected, key


def test_gradients_of_sharded_parameters_are_reduce_scattered(bounds):
    asked, strategy = slow_request(), plan(sum(bounds) / 2)

    modes = list(strategy.report["osdp"]["modes"].values())
    found = collectives(asked.graph, strategy, Phase.BACKWARD)
    assert found["reduce-scatter"] == modes.count("ZDP")
    assert found["all-reduce"] == modes.count("DP")
    assert_legal(asked.graph, strategy)


def test_the_report_compares_with_all_replicated_and_all_sharded(bounds):
    report = plan(sum(bounds) / 2).report["osdp"]

    times = [report[key]["plan_step_s"] for key in ("all_dp", "chosen", "all_zdp")]
    assert times[0] < times[1] < times[2]


@pytest.mark.exhaustive
def test_more_memory_is_never_slower(bounds):
    least, most = bounds

    times = [
        plan(limit).report["osdp"]["chosen"]["plan_step_s"]
        for limit in (least, (least + most) / 2, most - 1, None)
    ]

    assert times == sorted(times, reverse=True)
    assert times[0] > times[-1]


@pytest.mark.slow
def test_too_little_memory_names_the_limit_and_what_sharding_everything_needs(bounds):
    least = bounds[0]

    assert needed(plan(least)) <= least
    # A little less is enough where some parameters are not gathered.
    with pytest.raises(ConfigError, match="no choice fits") as refused:
        plan(least * 0.6)
    assert refused.value.accepted == f"planner.memory_bytes >= {least}"


@pytest.mark.slow
def test_the_refusal_says_what_memory_goes_to_and_what_would_help(bounds):
    least = bounds[0]

    with pytest.raises(ConfigError, match=r"at its peak .* activations") as refused:
        plan(least * 0.97)
    with pytest.raises(ConfigError) as hopeless:
        plan(1)

    assert "compile.passes.recompute alone is not enough: with it at least" in refused.value.todo
    assert "trainer.micro_batches=4: leaves about" in refused.value.todo
    assert "more ranks than" in refused.value.todo
    assert "neither compile.passes.recompute nor trainer.micro_batches" in hopeless.value.todo


def test_a_budget_for_activations_is_advised_only_where_recomputation_can_keep_to_it():
    graph, num_ranks = gpt_step(), 4
    least = least_recompute_budget(graph)
    step = 100_000  # to which budgets are rounded down

    for budget in (least // 2, least - 1, least + step, 2 * least + step):
        told = no_fit._recompute_help(graph, num_ranks, 4 * least, budget / num_ranks)

        advised = re.match(r"compile\.passes\.recompute\.memory_bytes=([\d.]+)MB: keeps", told)
        if budget < least:
            assert advised is None
            assert "compile.passes.recompute alone is not enough: with it at least" in told
        else:
            recompute(graph, RecomputeOptions(memory_bytes=1e6 * float(advised[1])))
            assert 1e6 * float(advised[1]) <= budget


@pytest.mark.parametrize(
    ("room", "parts"), [(400, 2), (399, 4), (200, 4), (199, 8), (100, 8), (99, 0)]
)
def test_the_fewest_micro_batches_are_advised_whose_activations_fit(room, parts):
    graph = gpt_step()  # of 8 samples

    assert no_fit._micro_batch_parts(graph, 1, 800, room) == parts


@pytest.mark.slow
def test_the_limit_of_the_machine_is_named_as_the_setting_of_the_cluster(bounds):
    asked = slow_request()
    device = replace(asked.cluster.device, memory_bytes=int(bounds[0] * 0.6))
    small = replace(asked, cluster=replace(asked.cluster, device=device))

    # A little less is enough where some parameters are not gathered.
    with pytest.raises(ConfigError, match="no choice fits") as refused:
        OsdpPlanner(OsdpConfig()).plan(small)

    assert refused.value.accepted == f"cluster.memory_bytes >= {bounds[0]}"


@pytest.mark.slow
def test_what_just_fits_is_replicated_and_a_byte_less_is_not(bounds):
    just, less = (plan(limit).report["osdp"] for limit in (bounds[1], bounds[1] - 1))

    assert set(just["modes"].values()) == {"DP"}
    assert "ZDP" in less["modes"].values()
    assert less["chosen"]["plan_memory_bytes_per_rank"] < bounds[1]


@pytest.mark.slow
def test_the_limit_is_compared_with_the_exact_memory_of_the_plan_that_will_run(bounds):
    limit = sum(bounds) / 2
    asked = replace(slow_request(), options=CompileOptions(bucket_bytes=0))

    strategy = OsdpPlanner(OsdpConfig(memory_bytes=limit)).plan(asked)

    found = strategy.report["osdp"]
    compiled = compile_plan(asked.graph, strategy, asked.options)
    assert found["memory_is_exact"]
    assert found["chosen"]["plan_memory_bytes_per_rank"] == predict_memory(compiled).peak <= limit


@pytest.mark.slow
def test_the_time_of_a_choice_is_that_of_the_plan_that_will_run():
    asked = slow_request()
    overlaps = CompileOptions(cluster=asked.cluster, boxing_thread=True, piece_s=0.0)

    strategy = OsdpPlanner(OsdpConfig()).plan(replace(asked, options=overlaps))

    found = strategy.report["osdp"]["chosen"]["plan_step_s"]
    assert found == simulate(compile_plan(asked.graph, strategy, overlaps)).step_s
    assert found < strategy.report["predicted_step_s"]  # which adds up boxing and compute


@cache
def known_layouts():
    return call_layouts()


@cache
def known_ends(names):
    """The strategies that shard none and all of the parameters `names`, the shardable ones."""
    return ends_on(slow_request())


def measured(sharded_names):
    """The exact memory and the predicted time of a choice, on slow links."""
    asked = slow_request()
    ends = known_ends(sharding.shardable(asked.graph))
    strategy = sharding.mixed(asked.graph, ends, sharded_names)
    compiled = compile_plan(asked.graph, strategy, CompileOptions(cluster=asked.cluster))
    return predict_memory(compiled, layouts=known_layouts()).peak, simulate(compiled).step_s


@pytest.mark.slow
def test_no_change_of_one_parameter_fits_and_is_faster(bounds):
    limit = sum(bounds) / 2
    found = plan(limit).report["osdp"]
    sharded = {name for name, mode in found["modes"].items() if mode == "ZDP"}

    for name in found["modes"]:
        size, seconds = measured(sharded ^ {name})
        assert size > limit or seconds >= found["chosen"]["plan_step_s"] * (1 - 1e-9), name


@pytest.mark.slow
def test_no_choice_at_all_is_faster_where_few_parameters_can_be_chosen(bounds, monkeypatch):
    names = ("embed.tokens.weight", "head.weight", "blocks.0.mlp.up.weight")
    monkeypatch.setattr(sharding, "shardable", lambda graph: names)
    asked = slow_request()
    limit = bounds[1] - 9000
    choices = [{names[at] for at in range(3) if bits >> at & 1} for bits in range(8)]
    found = [measured(chosen) for chosen in choices]
    best = min(seconds for size, seconds in found if size <= limit)

    found = OsdpPlanner(OsdpConfig(memory_bytes=limit)).plan(asked).report["osdp"]

    assert found["chosen"]["plan_step_s"] == pytest.approx(best, rel=1e-12)
    assert found["chosen"]["num_sharded"] > 0


@pytest.mark.slow
def test_without_a_tensor_library_memory_is_a_bound_and_is_called_so(monkeypatch):
    def none():
        raise SbpLookupError("none is installed")

    monkeypatch.setattr(kept_plans, "call_layouts", none)

    strategy = OsdpPlanner(OsdpConfig()).plan(slow_request())

    assert not strategy.report["osdp"]["memory_is_exact"]
    assert "an upper bound" in strategy.report["explanation"][0]


def test_updates_belong_to_the_parameter_whose_states_they_read():
    graph = gpt_step()

    found = update_values(graph)

    assert set(found) == set(shardable(graph))
    assert any(value.endswith(".mean") for value in found["head.weight"])
    assert all(graph.tensor(value).shape == (32, 16) for value in found["head.weight"])


def test_an_axis_that_is_not_there_is_refused():
    with pytest.raises(ConfigError, match=r"'data', which is missing.*\[tensor\]"):
        OsdpPlanner(OsdpConfig(axis="data")).plan(slow_request(axes=("tensor",)))


def test_an_axis_that_is_not_known_is_asked_for():
    with pytest.raises(ConfigError, match="none is named") as refused:
        OsdpPlanner(OsdpConfig()).plan(slow_request((2, 2), ("outer", "tensor")))

    assert refused.value.accepted == "one of outer, tensor"

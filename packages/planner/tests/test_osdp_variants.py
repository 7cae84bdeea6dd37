"""`osdp` among the variants of a step, and among batches."""

from dataclasses import replace
from functools import cache
from itertools import product

import pytest
from plan_requests import assert_legal
from step_family import MlpFamily, family_request

from sbp_core.compile import CompileOptions, compile_plan
from sbp_core.errors import ConfigError
from sbp_core.graph_variant import GraphVariant, SliceAlong
from sbp_core.memory import predict_memory
from sbp_core.planning.variants import recompute_budgets
from sbp_core.simulation import simulate
from sbp_planner.configs import OsdpConfig
from sbp_planner.osdp import OsdpPlanner
from sbp_torch.boxing.local import LocalBackend
from sbp_torch.runtime.configs import ReferenceConfig
from sbp_torch.runtime.reference import ReferenceRuntime
from sbp_torch.testing.cases import check_shards, run_steps, shards_of
from sbp_torch.testing.programs import assert_near, one_device_run

#: Most of its memory is for activations.
DEEP = MlpFamily(sizes=(16, 64, 2, 16), batch_size=256, micro_batches=(1, 2), may_slice=False)

#: The same, smaller still, and nothing of it can be chosen but storage.
SETTLED = MlpFamily(sizes=(16, 64, 1, 16), batch_size=256, may_recompute=False, may_slice=False)

#: Most of its memory is for one parameter.
WIDE = MlpFamily(sizes=(16, 16, 1, 1024), batch_size=16, may_recompute=False)


@cache
def plan(family_name, memory_bytes=None, **settings):
    return OsdpPlanner(OsdpConfig(memory_bytes=memory_bytes, **settings)).plan(asked(family_name))


@cache
def asked(family_name):
    family = {
        "deep": DEEP,
        "deep, whole": replace(DEEP, micro_batches=(1,)),
        "wide": WIDE,
        "settled": SETTLED,
    }
    return family_request(family[family_name], bytes_per_s=1e9)


def needed(strategy, which="chosen"):
    return strategy.report["osdp"][which]["plan_memory_bytes_per_rank"]


def check_fits(family_name, strategy, limit):
    """Compile a plan anew, and compare memory with the limit and time with what it says."""
    request = asked(family_name)
    graph = request.family.graph(strategy.variant)
    compiled = compile_plan(graph, strategy, CompileOptions(cluster=request.cluster))
    assert predict_memory(compiled).peak <= limit
    told = strategy.report["osdp"]["chosen"]["plan_step_s"]
    assert simulate(compiled).step_s == pytest.approx(told, rel=1e-12)
    assert_legal(graph, strategy)


@pytest.mark.slow
def test_with_enough_memory_the_step_stays_as_it_is():
    strategy = plan("deep")

    assert strategy.variant == GraphVariant()
    assert len(strategy.report["osdp"]["variants"]) == 1


@pytest.mark.exhaustive
def test_softmaxes_are_whole_where_no_axis_could_split_their_classes():
    class Family(MlpFamily):
        def graph(self, variant):
            classes = 16 if variant.splits_classes else 8  # another graph, whatever it is
            sizes = (*self.sizes[:3], classes)
            other = replace(self, sizes=sizes, _graphs={})
            return MlpFamily.graph(other, replace(variant, splits_classes=True))

    family = Family(sizes=SETTLED.sizes, batch_size=16, may_recompute=False, may_slice=False)

    strategy = OsdpPlanner(OsdpConfig()).plan(family_request(family, bytes_per_s=1e9))

    assert strategy.variant == GraphVariant(splits_classes=False)


@pytest.mark.slow
def test_activations_are_made_again_where_no_storage_fits():
    limit = 0.9 * needed(plan("deep, whole"), "all_zdp")

    strategy = plan("deep, whole", limit)

    assert strategy.variant.recompute_bytes is not None
    check_fits("deep, whole", strategy, limit)
    with pytest.raises(ConfigError, match="no choice fits"):
        OsdpPlanner(OsdpConfig(memory_bytes=limit)).plan(replace(asked("deep, whole"), family=None))


@pytest.mark.exhaustive
def test_the_variant_is_the_fastest_of_all_that_fit():
    request = asked("deep")
    # Of one size: each variant may have other buckets where the size is free.
    options = CompileOptions(cluster=request.cluster, bucket_bytes=1 << 28)
    request = replace(request, options=options)
    limit = 0.8 * needed(plan("deep"), "all_zdp")
    seconds = []
    for count, budget in product((1, 2), (None, 0, 1, 2)):
        variant = GraphVariant(num_micro_batches=count)
        if budget is not None:
            budgets = recompute_budgets(request.family.graph(variant))
            if budget >= len(budgets):
                continue
            variant = replace(variant, recompute_bytes=budgets[budget])
        try:
            found = OsdpPlanner(OsdpConfig(memory_bytes=limit)).plan(request.of(variant))
        except ConfigError:
            continue
        seconds.append(found.report["osdp"]["chosen"]["plan_step_s"])

    strategy = OsdpPlanner(OsdpConfig(memory_bytes=limit)).plan(request)

    assert strategy.report["osdp"]["chosen"]["plan_step_s"] == pytest.approx(min(seconds), rel=1e-9)
    assert len(seconds) > 1
    check_fits("deep", strategy, limit)


@pytest.mark.slow
def test_only_what_is_gathered_at_the_peak_is_sliced():
    limit = 0.9 * needed(plan("wide"), "all_zdp")

    strategy = plan("wide", limit)

    assert {one.pattern for one in strategy.variant.slices} == {"head.weight"}
    check_fits("wide", strategy, limit)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("name", "share", "what"), [("wide", 0.9, "slices"), ("deep, whole", 0.9, "recompute_bytes")]
)
def test_a_variant_trains_as_the_step_that_was_asked_for(name, share, what):
    request = asked(name)
    strategy = plan(name, share * needed(plan(name), "all_zdp"))
    assert getattr(strategy.variant, what)
    step = request.family.step(strategy.variant)
    compiled = compile_plan(step.graph, strategy, CompileOptions(cluster=request.cluster))

    wanted, states = one_device_run(request.family.step(request.family.variant))
    with ReferenceRuntime(ReferenceConfig()).start(
        compiled, step.states, LocalBackend()
    ) as session:
        losses, shards = run_steps(session, step), shards_of(session, compiled)

    for index, loss in enumerate(losses):
        assert_near(f"loss {index}", loss, wanted[index], 1e-5)
    check_shards(compiled, shards, states, 1e-5)


def test_slices_of_outputs_and_of_contractions_are_both_looked_at():
    limit = 0.9 * needed(plan("wide"), "all_zdp")

    words = [one["variant"] for one in plan("wide", limit).report["osdp"]["variants"]]

    for along in SliceAlong:
        assert any(f"head.weight in 4 by {along}" in told for told in words)


@pytest.mark.slow
def test_nothing_is_sliced_where_activations_are_the_peak():
    family = replace(DEEP, may_slice=True, may_recompute=False, micro_batches=(1,), _graphs={})
    request = family_request(family, bytes_per_s=1e9)
    limit = 0.9 * needed(plan("deep, whole"), "all_zdp")

    with pytest.raises(ConfigError, match="no choice fits") as refused:
        OsdpPlanner(OsdpConfig(memory_bytes=limit)).plan(request)

    assert "slices" not in refused.value.todo


@pytest.mark.slow
def test_what_the_user_has_settled_is_not_chosen():
    limit = 0.9 * needed(plan("settled"), "all_zdp")

    with pytest.raises(ConfigError, match="no choice fits"):
        plan("settled", limit)


@pytest.mark.exhaustive
def test_without_time_only_the_step_as_it_is_is_looked_at():
    limit = 0.9 * needed(plan("deep, whole"), "all_zdp")

    with pytest.raises(ConfigError, match="no choice fits"):
        plan("deep, whole", limit, time_limit_s=1e-9)


@pytest.mark.exhaustive
def test_batches_are_compared_by_samples_per_second_under_the_limit():
    limit = 1.2 * needed(plan("settled"), "all_zdp")

    report = plan("settled", limit, batch_sizes=(64, 128, 512)).report

    rows = {row["batch_size"]: row for row in report["osdp"]["batches"]}
    assert list(rows) == [256, 64, 128, 512]
    assert [row["fits"] for row in rows.values()] == [True, True, True, False]
    for size, row in rows.items():
        assert row["samples_per_s"] == size / row["step_s"]
    # Latencies and launches count less in larger batches.
    assert rows[64]["samples_per_s"] < rows[128]["samples_per_s"] < rows[256]["samples_per_s"]
    assert report["osdp"]["best_batch_size"] == 256
    assert "none of these is faster than trainer.batch_size=256" in report["explanation"][-1]


@pytest.mark.exhaustive
def test_batches_grow_while_they_fit_and_the_setting_to_change_is_named():
    limit = 1.1 * needed(plan("settled"), "all_zdp")
    request = family_request(replace(SETTLED, batch_size=64, _graphs={}), bytes_per_s=1e9)

    report = OsdpPlanner(OsdpConfig(memory_bytes=limit, batch_sizes="auto")).plan(request).report

    fits = {row["batch_size"]: row["fits"] for row in report["osdp"]["batches"]}
    assert fits == {64: True, 128: True, 256: True, 512: False, 384: False}
    assert report["osdp"]["best_batch_size"] == 256
    assert report["explanation"][-1].startswith("  trainer.batch_size=256 is ")


@pytest.mark.slow
def test_a_batch_that_fits_is_named_where_the_one_asked_for_does_not():
    limit = 0.7 * needed(plan("settled"), "all_zdp")

    with pytest.raises(ConfigError, match="no choice fits") as refused:
        plan("settled", limit, batch_sizes="auto")

    assert refused.value.todo.startswith("trainer.batch_size=128: fits")


def test_batches_of_a_step_without_others_are_refused():
    with pytest.raises(ConfigError, match="this step has one batch size"):
        OsdpPlanner(OsdpConfig(batch_sizes=(8,))).plan(replace(asked("wide"), family=None))

"""What the compiler makes of a schedule: chunks, orders of actions, the backward phase in two."""

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sbp_core.compile import CompileOptions, Compute, Send, compile_plan
from sbp_core.errors import ConfigError, SbpValueError
from sbp_core.graph.ir import Phase, Rate
from sbp_core.infer import infer_strategy, pipelined
from sbp_core.pipeline import SCHEDULES, Action, pipeline_schedule
from sbp_core.placement import Placement
from sbp_core.plan_check import check
from sbp_core.planning import PlanRequest
from sbp_core.simulation import simulate
from sbp_core.strategy import Strategy
from sbp_core.testing.graphs import cluster, mlp

#: Schedules that end a step with its update.
FLUSHING = [name for name in SCHEDULES if name not in ("pipedream", "2bw", "auto")]


def strategy_of(name, num_ranks=2, num_micro_batches=4, num_chunks=None, num_layers=8):
    mesh = Placement.grid((num_ranks,), ("pipe",))
    stages = pipelined(mesh, name, num_micro_batches, num_chunks)
    graph = mlp((4,) * (num_layers + 1), num_micro_batches=num_micro_batches)
    request = PlanRequest(graph=graph, mesh=mesh, cluster=cluster(), pins={})
    return graph, infer_strategy(
        request,
        planner="test",
        stages=stages.stages,
        in_flight=stages.in_flight,
        orders=stages.orders,
    )


def actions_of(plan, rank):
    """Return the actions that a rank begins, in the order of its thread."""
    letters = {Phase.FORWARD: "F", Phase.BACKWARD: "B", Phase.WEIGHT_GRADIENT: "W"}
    part = plan.by_rank[rank]
    found = []
    for name, index in part.orders["compute"]:
        actor = part.by_name[name]
        if actor.phase in letters and actor.rate is Rate.MICRO and not name.startswith("receive"):
            found.append((actor.stage, letters[actor.phase], index))
    return list(dict.fromkeys(found))


@pytest.mark.parametrize("name", ["interleaved", "looped_bfs", "zero_bubble", "zbv", "dualpipev"])
def test_ranks_do_their_actions_in_the_order_of_the_strategy(name):
    graph, strategy = strategy_of(name)

    plan = compile_plan(graph, strategy)

    check(plan)
    for rank, order in strategy.actions.items():
        wanted = [(a.stage, "B" if a.kind in "BI" else str(a.kind), a.micro_batch) for a in order]
        made = actions_of(plan, rank)
        if not strategy.splits_backward:
            made = [action for action in made if action[1] != "W"]  # parts of an action B
        assert made == [action for action in wanted if action in made]
        assert {a for a in wanted if a[1] != "W"} == {a for a in made if a[1] != "W"}


def test_weight_gradients_fire_apart_and_nothing_of_the_backward_phase_waits_for_them():
    graph, strategy = strategy_of("zero_bubble")

    plan = compile_plan(graph, strategy)

    part = plan.by_rank[1]
    late = {actor.name for actor in part.actors if actor.phase is Phase.WEIGHT_GRADIENT}
    assert any(name.startswith("weight_gradient") for name in late)
    for register in part.registers:
        if register.producer in late:
            users = [part.by_name[name] for name in register.consumers]
            assert all(user.phase in (Phase.WEIGHT_GRADIENT, Phase.OPTIMIZER) for user in users)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved"])
def test_input_gradients_leave_before_the_weight_gradients_of_their_micro_batch(name):
    graph, strategy = strategy_of(name)

    plan = compile_plan(graph, strategy)

    check(plan)
    part = plan.by_rank[1]
    firings = [(part.by_name[actor], index) for actor, index in part.orders["compute"]]
    at = {
        (type(actor), actor.stage, actor.phase, index): place
        for place, (actor, index) in enumerate(firings)
        if actor.rate is Rate.MICRO
    }
    actions = actions_of(plan, 1)
    gradients = [(actor.stage, index) for actor, index in firings if _sends_gradient(actor)]
    assert gradients
    for stage, index in gradients:
        sent = at[Send, stage, Phase.BACKWARD, index]
        assert sent < at[Compute, stage, Phase.WEIGHT_GRADIENT, index]
        behind = actions.index((stage, "B", index)) + 1
        assert actions[behind] == (stage, "W", index)


def _sends_gradient(actor):
    return isinstance(actor, Send) and actor.phase is Phase.BACKWARD and actor.rate is Rate.MICRO


def test_a_stage_for_whose_gradients_nobody_waits_does_its_backward_in_one():
    graph, strategy = strategy_of("1f1b")

    plan = compile_plan(graph, strategy)

    assert not any(actor.phase is Phase.WEIGHT_GRADIENT for actor in plan.by_rank[0].actors)


def test_gradients_of_activations_are_held_for_one_micro_batch_where_no_schedule_splits():
    graph, strategy = strategy_of("gpipe")

    plan = compile_plan(graph, strategy)

    part = plan.by_rank[1]
    between = [
        register.quota
        for register in part.registers
        if part.by_name[register.producer].phase is Phase.BACKWARD
        and any(name.startswith("weight_gradient") for name in register.consumers)
    ]
    assert set(between) == {1}


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_a_step_is_shorter_by_the_weight_gradients_that_nobody_waits_for(name):
    graph, strategy = strategy_of(name)
    plans = [
        compile_plan(graph, strategy, CompileOptions(input_gradients_first=first))
        for first in (False, True)
    ]

    took_s = [simulate(plan).step_s for plan in plans]

    part = plans[1].by_rank[1]
    (late,) = (
        actor
        for actor in part.actors
        if actor.phase is Phase.WEIGHT_GRADIENT and isinstance(actor, Compute)
    )
    assert took_s[0] - took_s[1] > 0.99 * late.time_s


def test_a_whole_backward_is_one_segment_if_that_is_asked_for():
    graph, strategy = strategy_of("interleaved")

    plan = compile_plan(graph, strategy, CompileOptions(input_gradients_first=False))

    phases = {actor.phase for part in plan.ranks for actor in part.actors}
    assert Phase.WEIGHT_GRADIENT not in phases


@pytest.mark.slow
@settings(deadline=None, max_examples=40)
@given(
    name=st.sampled_from(FLUSHING),
    num_ranks=st.integers(2, 4),
    num_micro_batches=st.integers(1, 9),
    num_chunks=st.sampled_from([None, 1, 2]),
)
def test_every_schedule_that_is_defined_compiles_to_a_live_plan(
    name, num_ranks, num_micro_batches, num_chunks
):
    try:
        graph, strategy = strategy_of(name, num_ranks, num_micro_batches, num_chunks)
    except ConfigError:
        with pytest.raises(ConfigError):
            pipeline_schedule(name, num_ranks, num_micro_batches, num_chunks=num_chunks)
        return

    plan = compile_plan(graph, strategy)

    assert check(plan, types=False).num_firings > 0


def test_quotas_are_the_most_micro_batches_between_forward_and_backward():
    mesh = Placement.grid((4,), ("pipe",))

    stages = pipelined(mesh, "zero_bubble", 8)

    assert stages.in_flight == (4, 4, 4, 4)


def test_micro_batches_go_in_turn_also_where_the_published_order_goes_back():
    mesh = Placement.grid((2,), ("pipe",))

    stages = pipelined(mesh, "looped_bfs", 2)

    assert stages.orders[0] == "0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1"


def test_in_an_order_each_micro_batch_has_its_input_gradient_before_its_weight_gradient():
    for name, num_micro_batches in product(["zero_bubble", "zbv", "dualpipev"], [8, 12]):
        for order in pipelined(Placement.grid((4,), ("pipe",)), name, num_micro_batches).orders:
            place = {text: number for number, text in enumerate(order.split())}
            for text, number in place.items():
                if "W" in text:
                    assert place[text.replace("W", "I")] < number


def test_an_asynchronous_schedule_is_refused():
    with pytest.raises(ConfigError, match="updates parameters between the micro-batches"):
        pipelined(Placement.grid((2,), ("pipe",)), "pipedream", 4)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda orders: orders[:1], "1 ranks|for 1"),
        (lambda orders: (orders[0].replace("0F0", "0F1"), orders[1]), "too many or too few"),
        (lambda orders: (orders[0].replace("0F0", "0X0"), orders[1]), "no action"),
    ],
)
def test_an_edited_order_that_is_none_is_refused(edit, message):
    _, strategy = strategy_of("interleaved")

    with pytest.raises(SbpValueError, match=message):
        replace(strategy, orders=edit(strategy.orders))


def test_an_order_that_cannot_be_kept_is_followed_as_far_as_it_can():
    graph, strategy = strategy_of("interleaved")
    first, second = strategy.orders
    backwards = " ".join(reversed(first.split()))

    plan = compile_plan(graph, replace(strategy, orders=(backwards, second)))

    check(plan)
    assert actions_of(plan, 0)[0] == (0, "F", 0)


def test_a_strategy_with_orders_is_the_same_after_its_file(tmp_path):
    _, strategy = strategy_of("zbv")

    strategy.save(tmp_path / "strategy.json")

    assert Strategy.load(tmp_path / "strategy.json") == strategy
    assert strategy.actions[0][0] == Action.parse("0F0")


@pytest.mark.parametrize("sizes", [(2, 1), (4, 0), (3, 2)])
def test_stages_that_take_other_ranks_than_there_are_are_refused(sizes):
    mesh = Placement.grid((4,), ("data",))

    with pytest.raises(ConfigError, match="stage_ranks"):
        pipelined(mesh, "1f1b", 4, stage_ranks=sizes)


def test_stages_of_unequal_ranks_are_parts_of_the_first_axis():
    mesh = Placement.grid((4, 2), ("data", "tensor"))

    stages = pipelined(mesh, "1f1b", 4, stage_ranks=(3, 1))

    assert [stage.mesh_shape for stage in stages.stages] == [(3, 2), (1, 2)]
    assert stages.stages[1].rank_list == (6, 7)

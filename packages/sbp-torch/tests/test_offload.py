"""States in the memory of the host: the losses and states of those that stay on the device."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from updates import (
    ALL,
    STRATEGIES,
    made,
    net_batch,
    net_loss,
    of,
    rates,
    started,
)

from sbp_aten.passes import prepare_step
from sbp_core.compile import (
    FETCH_THREAD,
    PLAN,
    STORE_THREAD,
    CompileOptions,
    Compute,
    PhysicalPlan,
    compile_plan,
)
from sbp_core.errors import PlanError
from sbp_core.graph.ir import LogicalGraph
from sbp_core.graph.primitives import CLONE
from sbp_core.infer import infer_strategy
from sbp_core.memory import check_memory, lifetime, predict_memory
from sbp_core.placement import Placement
from sbp_core.plan_check import check
from sbp_core.planning import PlanRequest
from sbp_core.strategy import Strategy
from sbp_torch.graph_capture import UpdateOptions, capture, initial_states, scalar_values
from sbp_torch.memory.meter import MemoryMeter
from sbp_torch.runtime.reference import ReferenceSession
from sbp_torch.testing.cases import assert_pieces
from sbp_torch.testing.programs import small_cluster

_QUICK = settings(max_examples=6, deadline=None, derandomize=True)
_LONG = settings(max_examples=100, deadline=None, derandomize=True)


@cache
def _graph(optimizer: str, num_micro_batches: int = 1) -> LogicalGraph:
    model, made_optimizer = made(ALL[optimizer])
    return prepare_step(capture(model, net_loss, net_batch(0), made_optimizer), num_micro_batches)


def _states_of_optimizer(graph: LogicalGraph) -> list[str]:
    return [
        entry.name
        for entry in graph.inputs
        if entry.kind.value == "optimizer_state" and graph.is_tensor(entry.name)
    ]


@cache
def _strategy(optimizer: str, way: str, num_ranks: int, num_micro_batches: int = 1) -> Strategy:
    graph = _graph(optimizer, num_micro_batches)
    pins = dict(STRATEGIES[way])
    if _states_of_optimizer(graph):
        pins["optimizer_states"] = "S(1)" if way == "columns" else "S(0)"
    mesh = Placement.grid((num_ranks,), ("data",))
    request = PlanRequest(graph=graph, mesh=mesh, cluster=small_cluster(num_ranks))
    return infer_strategy(request, planner="test", pins=pins)


def _offloading(strategy: Strategy, names: Collection[str]) -> Strategy:
    storage = {
        name: replace(one, offloaded=name in names) for name, one in strategy.storage.items()
    }
    return replace(strategy, storage=storage)


def _session(optimizer: str, plan: PhysicalPlan) -> ReferenceSession:
    return started(plan, _initial(optimizer))


def _initial(optimizer: str) -> Mapping[str, Tensor]:
    return initial_states(*made(ALL[optimizer]))


def _step(optimizer: str, session: ReferenceSession, index: int) -> Mapping[str, Tensor]:
    model, made_optimizer = made(ALL[optimizer])
    scalars = scalar_values(model, made_optimizer, UpdateOptions()) | rates(made_optimizer, index)
    count = session.plan.num_micro_batches
    parts = [net_batch(count * index + part) for part in range(count)]
    whole = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    return session.step(whole, scalars).outputs


def _runs_alike(optimizer: str, usual: PhysicalPlan, offloads: PhysicalPlan) -> None:
    check(offloads)
    sessions = [_session(optimizer, plan) for plan in (usual, offloads)]
    for index in range(2):
        wanted, found = (_step(optimizer, session, index) for session in sessions)
        assert all(torch.equal(found[key], wanted[key]) for key in wanted)
    wanted, found = (session.state_dict() for session in sessions)
    assert wanted.keys() == found.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def _offloads_without_a_difference(data: st.DataObject) -> None:
    optimizer = data.draw(st.sampled_from(sorted(ALL)), "optimizer")
    count = data.draw(st.sampled_from((1, 1, 2)), "micro-batches")
    way = data.draw(st.sampled_from(sorted(STRATEGIES)), "way")
    strategy = _strategy(optimizer, way, data.draw(st.integers(1, 4), "ranks"), count)
    graph = _graph(optimizer, count)
    states = _states_of_optimizer(graph)
    chosen = data.draw(st.sets(st.sampled_from(states)), "offloaded") if states else set()
    options = CompileOptions(
        boxing_thread=data.draw(st.booleans(), "boxing thread"),
        overlap=data.draw(st.booleans(), "overlap"),
        piece_s=data.draw(st.sampled_from((0.0, 2e-4)), "pieces"),
        in_place_states=data.draw(st.booleans(), "in place"),
        offload_in_flight=data.draw(st.integers(1, 3), "in flight"),
    )

    usual = compile_plan(graph, strategy, options)
    offloads = compile_plan(graph, _offloading(strategy, chosen), options)

    _runs_alike(optimizer, usual, offloads)


@pytest.mark.slow
@_QUICK
@given(st.data())
def test_offloaded_states_change_no_bit_of_losses_and_states(data: st.DataObject) -> None:
    _offloads_without_a_difference(data)


class _Optimistic(torch.optim.Optimizer):
    """Its new states need nothing of the old ones."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state, grad = self.state[parameter], parameter.grad
                assert grad is not None
                if not state:
                    state["prev"] = torch.zeros_like(parameter)
                parameter.sub_((grad - state["prev"]) * group["lr"])
                state["prev"].copy_(grad * 0.5)


@pytest.mark.slow(but=2)
@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("in_flight", [1, 2])
def test_a_state_is_stored_behind_its_fetch_also_if_its_new_value_does_not_need_it(
    num_ranks: int, in_flight: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ALL, "optimistic", of(_Optimistic, lr=0.1))
    graph, strategy = _graph("optimistic"), _strategy("optimistic", "ZeRO-1", num_ranks)
    states = _states_of_optimizer(graph)
    assert states

    usual = compile_plan(graph, strategy)
    offloads = compile_plan(
        graph, _offloading(strategy, states), CompileOptions(offload_in_flight=in_flight)
    )

    _runs_alike("optimistic", usual, offloads)
    stored = {state for actor in offloads.ranks[0].actors for state in actor.in_place}
    assert stored.issuperset(states)


@pytest.mark.exhaustive
@_LONG
@given(st.data())
def test_very_many_plans_that_offload_change_no_bit(data: st.DataObject) -> None:
    _offloads_without_a_difference(data)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "num_ranks"), [("adam", 1), ("fused amsgrad", 2), ("lamb", 2), ("momentum", 1)]
)
def test_the_memory_of_device_and_host_is_as_predicted(
    optimizer: str, num_ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    strategy = _strategy(optimizer, "ZeRO-1", num_ranks)
    graph = _graph(optimizer)
    names = _states_of_optimizer(graph)
    plan = compile_plan(graph, _offloading(strategy, names))
    largest, usual = predict_memory(plan), predict_memory(compile_plan(graph, strategy))
    # As the reference runtime fires; with slower copies it may be more.
    monkeypatch.setattr(lifetime, "_late_stores", lambda _: {})
    found = predict_memory(plan)
    meter = MemoryMeter(plan)

    with _session(optimizer, plan) as session, meter.watching(session):
        _step(optimizer, session, 0)
        meter.restart()
        _step(optimizer, session, 1)

    for part in plan.ranks:
        memory = found.ranks[part.rank]
        on_host = sum(slot.local_bytes for slot in part.slots if slot.offloaded)
        # What lies in the memory of the host is written over, so it is the same all along.
        assert memory.host_peak == on_host > 0
        assert memory.resting == usual.ranks[part.rank].resting - on_host
        assert memory.peak <= largest.ranks[part.rank].peak
        # The reference runtime keeps the loss of one rank only; a fused update makes a number.
        assert abs(memory.peak - meter.peak(part.rank)) <= 8
        assert meter.alive(part.rank) == memory.resting


def test_copies_have_threads_and_at_most_as_many_groups_as_allowed_are_on_the_device() -> None:
    graph = _graph("adam")
    strategy = _offloading(_strategy("adam", "ZeRO-1", 1), _states_of_optimizer(graph))

    one, two = (
        compile_plan(graph, strategy, CompileOptions(offload_in_flight=count)) for count in (1, 2)
    )

    # That of the gain goes with the first layer's; of the three that follow none is large.
    orders = one.ranks[0].orders
    assert [name for name, _ in orders[FETCH_THREAD]] == ["fetch.0.1", "fetch.0.2"]
    assert [name for name, _ in orders[STORE_THREAD]] == ["store.0.1", "store.0.2"]
    waits = {r.name for r in one.ranks[0].registers if not r.keys}
    assert "store.0.1>fetch.0.2" in waits
    assert "store.0.1>fetch.0.2" not in {r.name for r in two.ranks[0].registers}
    # No copy is there before its gradient is.
    assert {"backward.0.0>fetch.0.1", "backward.0.0>fetch.0.2"} <= waits


def test_new_values_of_fetched_states_are_computed_where_the_old_ones_lie() -> None:
    graph = _graph("fused amsgrad")
    strategy = _offloading(_strategy("fused amsgrad", "ZeRO-1", 1), _states_of_optimizer(graph))

    plan = compile_plan(graph, strategy)

    updates = [a for a in plan.ranks[0].actors if isinstance(a, Compute) and a.donated]
    assert len(updates) == 2
    for actor in updates:
        assert set(actor.donated) == {key for key in actor.inputs if key.endswith("@device")}
        assert CLONE not in {entry.op for entry in actor.instructions}


@pytest.mark.parametrize("consumers", [1, 2])
def test_what_others_may_hold_is_not_written_over(consumers: int) -> None:
    graph = _graph("fused amsgrad")
    strategy = _offloading(_strategy("fused amsgrad", "ZeRO-1", 1), _states_of_optimizer(graph))
    plan = compile_plan(graph, strategy)
    part = plan.ranks[0]
    update = next(a for a in part.actors if isinstance(a, Compute) and a.donated)
    names = (update.name, "host") if consumers == 2 else (update.name,)
    given = update.donated if consumers == 2 else (*update.donated, "grad.sum")
    wrong = replace(
        plan,
        ranks=(
            replace(
                part,
                actors=tuple(replace(a, donated=given) if a is update else a for a in part.actors),
                registers=tuple(
                    replace(r, consumers=names) if set(r.keys) & set(update.donated) else r
                    for r in part.registers
                ),
            ),
        ),
    )

    with pytest.raises(PlanError, match=r"is given .* to write over, which other actors may hold"):
        check(wrong)


def test_a_plan_that_offloads_is_read_as_it_was_written() -> None:
    graph = _graph("adam")
    plan = compile_plan(
        graph, _offloading(_strategy("adam", "ZeRO-1", 2), _states_of_optimizer(graph))
    )

    assert PLAN.load(PLAN.dump(plan)) == plan


@pytest.mark.slow
def test_fewer_groups_in_flight_need_less_memory_of_the_device() -> None:
    graph = _graph("adam")
    strategy = _offloading(_strategy("adam", "ZeRO-1", 1), _states_of_optimizer(graph))

    one, two = (
        predict_memory(compile_plan(graph, strategy, CompileOptions(offload_in_flight=count)))
        for count in (1, 2)
    )

    assert one.peak < two.peak
    assert one.host_peak == two.host_peak


@pytest.mark.slow
@pytest.mark.parametrize("begins_offloaded", [False, True])
def test_states_go_on_wherever_they_lie(begins_offloaded: bool) -> None:
    graph, strategy = _graph("fused adamw"), _strategy("fused adamw", "ZeRO-1", 2)
    offloads = _offloading(strategy, _states_of_optimizer(graph))
    plans = [compile_plan(graph, one) for one in (strategy, offloads)]
    first, second = reversed(plans) if begins_offloaded else plans
    begun, other = _session("fused adamw", first), _session("fused adamw", second)
    _step("fused adamw", begun, 0)
    wanted = _step("fused adamw", started(first, begun.state_dict()), 1)

    other.load_state_dict(begun.state_dict())
    found = _step("fused adamw", other, 1)

    assert all(torch.equal(found[key], wanted[key]) for key in wanted)


@pytest.mark.slow
def test_a_snapshot_keeps_offloaded_states_that_later_steps_overwrite() -> None:
    graph, strategy = _graph("adam"), _strategy("adam", "ZeRO-1", 2)
    plan = compile_plan(graph, _offloading(strategy, _states_of_optimizer(graph)))

    with _session("adam", plan) as session:
        _step("adam", session, 0)
        states = session.state_dict()
        with session.snapshot() as snapshot:
            _step("adam", session, 1)
            assert_pieces(snapshot.pieces(), states)


def test_what_the_forward_phase_reads_is_not_offloaded() -> None:
    strategy = _offloading(_strategy("adam", "ZeRO-1", 1), ["first.weight"])

    with pytest.raises(PlanError, match=r"'first.weight' cannot be offloaded: it is needed in the"):
        compile_plan(_graph("adam"), strategy)


def test_no_batch_is_offloaded() -> None:
    with pytest.raises(PlanError, match="'x' cannot be offloaded: it is of kind 'batch'"):
        compile_plan(_graph("adam"), _offloading(_strategy("adam", "ZeRO-1", 1), ["x"]))


def test_the_memory_that_does_not_fit_is_named() -> None:
    graph = _graph("adam")
    strategy = _offloading(_strategy("adam", "ZeRO-1", 1), _states_of_optimizer(graph))
    found = predict_memory(compile_plan(graph, strategy))

    check_memory(found, found.peak, found.host_peak)
    with pytest.raises(PlanError, match=r"rank 0 .* of it for states, and has .* on its device"):
        check_memory(found, found.peak - 1, found.host_peak)
    with pytest.raises(PlanError, match="rank 0 would need 1072 B of its host's memory, and has"):
        check_memory(found, found.peak, found.host_peak - 1)
    with pytest.raises(PlanError, match="its device has no host memory"):
        check_memory(found, found.peak)


def test_the_table_of_memory_shows_what_is_on_the_host() -> None:
    graph, strategy = _graph("adam"), _strategy("adam", "ZeRO-1", 1)

    offloads = compile_plan(graph, _offloading(strategy, _states_of_optimizer(graph)))

    assert "on host  " in predict_memory(offloads).lines()[1]
    assert "on host" not in predict_memory(compile_plan(graph, strategy)).lines()[1]

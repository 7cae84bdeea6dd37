"""Updates that write over the states give, bit for bit, what updates beside them give."""

from __future__ import annotations

import pytest
import torch
from updates import ALL, STRATEGIES, made, net_batch, net_loss, rates, sharded_plan, started

from sbp_aten.passes import prepare_step
from sbp_aten.traits import TRAITS
from sbp_core.compile import OVERWRITE, Compute, Instruction, PhysicalPlan, keys_in
from sbp_torch.graph_capture import UpdateOptions, capture, initial_states, scalar_values
from sbp_torch.ops import fused_updates, row_updates
from sbp_torch.ops.host_copies import HOST_COPIES
from sbp_torch.ops.operators import operator_of

#: Those of which every state has an in-place kernel.
_NO_COPIES = {
    "sgd", "momentum", "adam", "adamw", "adagrad", "rmsprop", "fused adamw", "fused amsgrad",
    "fused momentum", "fused sgd", "fused adagrad",
}  # fmt: skip


def _instructions(plan: PhysicalPlan) -> list[Instruction]:
    actors = (actor for actor in plan.ranks[0].actors if isinstance(actor, Compute))
    return [entry for actor in actors for entry in actor.instructions]


def _num_copies(plan: PhysicalPlan) -> int:
    return sum(entry.op == OVERWRITE for entry in _instructions(plan))


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("name", ALL)
def test_updates_in_place_equal_those_beside(name: str) -> None:
    model, optimizer = made(ALL[name])
    graph = prepare_step(capture(model, net_loss, net_batch(0), optimizer))
    # One of the layouts, or one rank, for each optimizer.
    strategy = [*STRATEGIES, ""][list(ALL).index(name) % 4]
    layout = (strategy, 2) if strategy else ("ZeRO-1", 1)
    plans = [sharded_plan(graph, *layout, in_place_states=flag) for flag in (True, False)]
    states = initial_states(model, optimizer)
    over, beside = (started(plan, states) for plan in plans)
    memory = {name: over.shard(name, 0) for a in plans[0].ranks[0].actors for name in a.in_place}

    for step in range(3):
        scalars = scalar_values(model, optimizer, UpdateOptions()) | rates(optimizer, step)
        found, wanted = (one.step(net_batch(step), scalars) for one in (over, beside))
        assert all(torch.equal(found.outputs[key], wanted.outputs[key]) for key in wanted.outputs)

    expected = beside.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in over.state_dict().items())
    assert memory.keys() >= {"first.weight", "last.bias"}
    assert all(over.shard(name, 0) is value for name, value in memory.items())
    assert _num_copies(plans[1]) == 0
    if name in _NO_COPIES:
        assert _num_copies(plans[0]) == 0


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("name", ["amsgrad", "adamax", "rprop", "asgd"])
def test_a_new_value_is_copied_over_its_state_once_nobody_looks_at_the_old_one(name: str) -> None:
    model, optimizer = made(ALL[name])
    graph = prepare_step(capture(model, net_loss, net_batch(0), optimizer))
    plan = sharded_plan(graph, "ZeRO-1", 1)
    assert _num_copies(plan)

    for entry in _instructions(plan):
        if entry.op != OVERWRITE:
            before = entry
            continue
        state, new = keys_in(entry)
        assert new in before.outputs or state in keys_in(before), f"{state} is copied late"


def test_every_operator_that_is_said_to_have_an_in_place_form_has_it() -> None:
    for kind in TRAITS.in_place:
        own = {**fused_updates.IN_PLACE, **row_updates.IN_PLACE, **HOST_COPIES}
        if f"sbp.{kind}_.default" in own:
            continue
        packet = getattr(torch.ops.aten, kind)
        for overload in packet.overloads():
            first = packet.__getattr__(overload)._schema.arguments[0].type
            if "out" not in overload and str(first) == "Tensor":
                assert operator_of(f"aten.{kind}_.{overload}")


def test_fused_updates_write_over_states_that_do_not_lie_in_order() -> None:
    def tensors() -> list[torch.Tensor]:
        source = torch.Generator().manual_seed(0)
        return [torch.rand(3, 5, generator=source).t() for _ in range(4)]

    settings = {"beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1, "eps": 1e-8, "maximize": False}
    p, g, mean, square = given = tensors()
    functional = torch.ops.sbp.fused_adam.default
    wanted = functional(p, g, mean, square, [], 3, 0.1, decoupled=True, **settings)

    made_over = fused_updates.fused_adam_(
        p, g, mean, square, [], 3, 0.1, decoupled=True, **settings
    )

    assert all(one is other for one, other in zip(made_over, (p, mean, square), strict=True))
    assert all(map(torch.equal, made_over, wanted))
    assert torch.equal(given[1], tensors()[1])

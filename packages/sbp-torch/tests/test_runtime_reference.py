from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from sbp_aten.passes import prepare_step
from sbp_core.compile import compile_plan
from sbp_core.compile.physical import PhysicalPlan
from sbp_core.errors import ConfigError, RunError, SbpValueError
from sbp_core.graph import LogicalGraph
from sbp_core.infer import infer_strategy
from sbp_core.infer.pins import PinValue
from sbp_core.placement import Placement
from sbp_core.plan_check import check
from sbp_core.planning import PlanRequest
from sbp_core.testing.graphs import cluster
from sbp_torch.boxing.execute import shard
from sbp_torch.graph_capture import capture, initial_states
from sbp_torch.runtime.configs import ReferenceConfig
from sbp_torch.runtime.reference import ReferenceRuntime, ReferenceSession
from sbp_torch.runtime.single import run_graph
from sbp_torch.testing.models import PROGRAMS, Program, eager_step, graph_states, same_states

_LR = {"lr": 1e-2}
_TENSOR = {
    "blocks.*.attention.qkv.weight": "S(0)",
    "blocks.*.attention.out.weight": "S(1)",
    "blocks.*.up.weight": "S(0)",
    "blocks.*.down.weight": "S(1)",
    "head.weight": "S(0)",
}


@dataclass(frozen=True, kw_only=True)
class _Case:
    mesh: Placement
    pins: Mapping[str, PinValue]
    num_micro_batches: int = 1
    in_flight: tuple[int, ...] | None = None


_PIPE = Placement.grid((2,), ("pipe",))
_CASES = {
    "data": _Case(mesh=Placement.grid((2,), ("data",)), pins={"batch": "S(0)", "parameters": "B"}),
    "data over four": _Case(
        mesh=Placement.grid((4,), ("data",)),
        pins={"batch": "S(0)", "parameters": "B"},
        num_micro_batches=2,
    ),
    "sharded states": _Case(
        mesh=Placement.grid((2,), ("data",)),
        pins={"batch": "S(0)", "parameters": "S(0)", "optimizer_states": "S(0)"},
    ),
    "tensor": _Case(mesh=Placement.grid((2,), ("tensor",)), pins={"batch": "B", **_TENSOR}),
    "data and tensor": _Case(
        mesh=Placement.grid((2, 2), ("data", "tensor")),
        pins={
            "batch": {"data": "S(0)", "tensor": "B"},
            "parameters": {"data": "B"},
            **{name: {"tensor": sbp} for name, sbp in _TENSOR.items()},
        },
    ),
    "pipeline 1F1B": _Case(mesh=_PIPE, pins={}, num_micro_batches=4, in_flight=(2, 1)),
    "pipeline GPipe": _Case(mesh=_PIPE, pins={}, num_micro_batches=3, in_flight=(3, 3)),
    "pipeline and data": _Case(
        mesh=Placement.grid((2, 2), ("pipe", "data")),
        pins={"batch": "S(0)", "parameters": "B"},
        num_micro_batches=2,
    ),
}


def _plan(graph: LogicalGraph, case: _Case) -> PhysicalPlan:
    request = PlanRequest(graph=graph, mesh=case.mesh, cluster=cluster())
    strategy = infer_strategy(request, planner="test", pins=case.pins, in_flight=case.in_flight)
    plan = compile_plan(graph, strategy)
    check(plan)
    return plan


def _start(plan: PhysicalPlan, states: Mapping[str, torch.Tensor]) -> ReferenceSession:
    session = ReferenceRuntime(ReferenceConfig()).start(plan, states, None)
    assert isinstance(session, ReferenceSession)
    return session


def _compare(
    program: Program, graph: LogicalGraph, plan: PhysicalPlan, num_steps: int, size: int
) -> None:
    """Compare a plan with one device, micro-batch by micro-batch: losses and all shards."""
    count = graph.num_micro_batches
    states = initial_states(*program.build(torch.float64))
    expected = graph_states(graph, states)
    session = _start(plan, states)

    for batch in program.batches(num_steps, size * count, torch.float64):
        micro = [
            {name: value[size * m : size * (m + 1)] for name, value in batch.items()}
            for m in range(count)
        ]
        outputs, expected = run_graph(graph, expected, micro, _LR)
        loss = session.step(batch, _LR).loss

        torch.testing.assert_close(loss, outputs["loss"], rtol=0, atol=1e-9)
    for part in plan.ranks:
        for slot in part.slots:
            if slot.name not in expected:
                continue
            held, whole = session.shard(slot.name, part.rank), expected[slot.name]
            if slot.sbp is None:
                assert held == whole
            else:
                own = shard(whole, plan.stages[slot.stage], slot.sbp)[part.rank]
                assert tuple(held.shape) == slot.local_shape
                torch.testing.assert_close(held, own, rtol=0, atol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("name", _CASES)
def test_every_strategy_computes_what_one_device_computes(
    name: str, gpt: Program, gpt_graph: LogicalGraph
) -> None:
    case = _CASES[name]
    graph = prepare_step(gpt_graph, case.num_micro_batches)

    plan = _plan(graph, case)

    assert len(plan.ranks) == case.mesh.size
    assert plan.boxing_bytes > 0
    _compare(gpt, graph, plan, num_steps=3, size=4)


@pytest.mark.slow
def test_a_run_follows_plain_pytorch(gpt: Program, gpt_graph: LogicalGraph) -> None:
    model, optimizer = gpt.build(torch.float64)
    session = _start(
        _plan(prepare_step(gpt_graph), _CASES["data and tensor"]),
        initial_states(model, optimizer),
    )

    for batch in gpt.batches(5):
        expected = eager_step(gpt, model, optimizer, batch)
        loss = session.step(batch, _LR).loss

        torch.testing.assert_close(loss, expected, rtol=0, atol=1e-9)
    states = session.state_dict()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(states[name], parameter.detach(), rtol=0, atol=1e-9)


@pytest.mark.slow(but=4)
@pytest.mark.parametrize("size", [5, 3, 1])
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", ["mlp", "norm without bias"])
def test_batches_may_be_uneven_or_smaller_than_the_ranks(name: str, ranks: int, size: int) -> None:
    program = PROGRAMS[name]
    model, optimizer = program.build(torch.float64)
    (batch,) = program.batches(1, size, torch.float64)
    graph = prepare_step(capture(model, program.loss, batch, optimizer))
    case = _Case(
        mesh=Placement.grid((ranks,), ("data",)), pins={"batch": "S(0)", "parameters": "B"}
    )

    plan = _plan(graph, case)

    rows = [slot.local_shape[0] for part in plan.ranks for slot in part.slots if slot.name == "x"]
    assert sum(rows) == size
    _compare(program, graph, plan, num_steps=2, size=size)


@pytest.mark.slow
def test_an_uneven_batch_of_tokens_computes_what_one_device_computes(gpt: Program) -> None:
    model, optimizer = gpt.build(torch.float64)
    (batch,) = gpt.batches(1, 5)
    graph = prepare_step(capture(model, gpt.loss, batch, optimizer))

    plan = _plan(graph, _CASES["data"])

    _compare(gpt, graph, plan, num_steps=2, size=5)


@pytest.fixture(scope="module")
def plan(gpt_graph: LogicalGraph) -> PhysicalPlan:
    return _plan(prepare_step(gpt_graph), _CASES["sharded states"])


@pytest.fixture(scope="module")
def states(gpt: Program) -> dict[str, torch.Tensor]:
    return initial_states(*gpt.build(torch.float64))


@pytest.mark.slow
def test_states_come_back_as_they_were_given(
    plan: PhysicalPlan, states: dict[str, torch.Tensor]
) -> None:
    assert same_states(_start(plan, states).state_dict(), states)


def test_a_run_repeated_is_bit_identical(
    gpt: Program, plan: PhysicalPlan, states: dict[str, torch.Tensor]
) -> None:
    runs = []
    for _ in range(2):
        session = _start(plan, states)
        losses = [session.step(batch, _LR).loss for batch in gpt.batches(3)]
        runs.append((losses, session.state_dict()))

    assert all(torch.equal(a, b) for a, b in zip(runs[0][0], runs[1][0], strict=True))
    assert same_states(runs[0][1], runs[1][1])


def test_a_session_goes_on_from_saved_states(
    gpt: Program, plan: PhysicalPlan, states: dict[str, torch.Tensor]
) -> None:
    first, second = gpt.batches(2)
    straight = _start(plan, states)
    straight.step(first, _LR)
    saved = straight.state_dict()
    expected = straight.step(second, _LR).loss

    resumed = _start(plan, states)
    resumed.load_state_dict(saved)

    assert saved["head.weight.step"].item() == 1
    assert torch.equal(resumed.step(second, _LR).loss, expected)


class _Parts(dict[str, torch.Tensor]):
    """States that are read in parts, and which parts of which states were."""

    def __init__(self, states: Mapping[str, torch.Tensor]) -> None:
        super().__init__(states)
        self.read: list[tuple[str, Any]] = []

    def like(self, name: str) -> torch.Tensor:
        return self[name].to("meta")

    def part(self, name: str, bounds: Any) -> torch.Tensor:
        self.read.append((name, tuple(bounds)))
        return self[name][tuple(slice(*dim) for dim in bounds)].clone()


@pytest.mark.slow
def test_a_part_that_several_ranks_hold_is_read_once_and_is_each_ranks_own(
    gpt_graph: LogicalGraph, states: dict[str, torch.Tensor]
) -> None:
    plan = _plan(prepare_step(gpt_graph), _CASES["data"])
    parts = _Parts(states)

    with _start(plan, parts) as session:
        assert len(parts.read) == len(set(parts.read)) > 0
        name = next(name for name, value in states.items() if value.dim())
        held = [session.shard(name, rank) for rank in plan.by_rank]
        tensors = [value for value in held if isinstance(value, torch.Tensor)]
        assert len({value.data_ptr() for value in tensors}) == len(held) > 1
        found = session.state_dict()
    assert all(torch.equal(found[name], value) for name, value in states.items())


def test_a_session_leaves_the_states_it_was_given_alone(
    gpt: Program, plan: PhysicalPlan, states: dict[str, torch.Tensor]
) -> None:
    before = {name: value.clone() for name, value in states.items()}

    with _start(plan, states) as session:
        session.step(gpt.batches(1)[0], _LR)

    assert same_states(states, before)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": torch.zeros(3, 6, dtype=torch.int64)}, r"'tokens' is torch.int64 of shape \(3"),
        ({"tokens": torch.zeros(4, 6)}, "'tokens' is torch.float32 of shape"),
        ({"tokens": None}, "'tokens' is missing"),
    ],
)
def test_a_batch_that_does_not_fit_is_refused(
    change: dict[str, torch.Tensor | None],
    message: str,
    gpt: Program,
    plan: PhysicalPlan,
    states: dict[str, torch.Tensor],
) -> None:
    batch = {k: v for k, v in {**gpt.batches(1)[0], **change}.items() if v is not None}

    with pytest.raises(SbpValueError, match=message) as caught:
        _start(plan, states).step(batch, _LR)

    assert "int64 of shape (4, 6)" in caught.value.accepted


@pytest.mark.parametrize(
    ("name", "value", "todo"),
    [
        ("token", torch.zeros(4, 6), "did you mean 'tokens'?"),
        ("n", 5, "leave it out"),
        ("other", [torch.zeros(4, 6)], "flatten_batch"),
    ],
)
def test_an_entry_of_the_batch_that_no_rank_would_read_is_refused(
    name: str,
    value: Any,
    todo: str,
    gpt: Program,
    plan: PhysicalPlan,
    states: dict[str, torch.Tensor],
) -> None:
    with pytest.raises(SbpValueError, match=f"the plan has no input '{name}'") as caught:
        _start(plan, states).step({**gpt.batches(1)[0], name: value}, _LR)

    assert "tokens" in caught.value.accepted
    assert todo in caught.value.todo


def test_none_in_a_batch_is_left_out_as_by_capture(
    gpt: Program, plan: PhysicalPlan, states: dict[str, torch.Tensor]
) -> None:
    batch: dict[str, Any] = {**gpt.batches(1)[0], "mask": None}

    loss = _start(plan, states).step(batch, _LR).loss

    assert torch.equal(loss, _start(plan, states).step(gpt.batches(1)[0], _LR).loss)


def test_a_missing_learning_rate_is_refused(
    gpt: Program, plan: PhysicalPlan, states: dict[str, torch.Tensor]
) -> None:
    with pytest.raises(SbpValueError, match="scalar 'lr' is missing"):
        _start(plan, states).step(gpt.batches(1)[0], {})


@pytest.mark.slow
def test_changing_a_tensor_that_went_in_or_came_out_changes_no_session(
    gpt_graph: LogicalGraph, states: dict[str, torch.Tensor]
) -> None:
    given = {name: value.clone() for name, value in states.items()}
    session = _start(_plan(prepare_step(gpt_graph), _CASES["data"]), given)

    given["norm.weight"].zero_()
    saved = session.state_dict()
    saved["norm.bias"].fill_(7)

    assert same_states(session.state_dict(), states)


def test_states_that_do_not_fit_are_refused(
    plan: PhysicalPlan, states: dict[str, torch.Tensor]
) -> None:
    lacking = {name: value for name, value in states.items() if name != "head.weight"}
    uneven = {**states, "head.weight.step": torch.tensor(3.0)}

    with pytest.raises(SbpValueError, match=r"'head\.weight' is missing"):
        _start(plan, lacking)
    with pytest.raises(SbpValueError, match=r"'head\.weight' is torch.float64 of shape"):
        _start(plan, {**states, "head.weight": torch.zeros(2, 2, dtype=torch.float64)})
    with pytest.raises(SbpValueError, match="no state called 'nobody'"):
        _start(plan, {**states, "nobody": torch.zeros(2)})
    with pytest.raises(
        SbpValueError, match="the states tied into 'step_counter' are not one number"
    ):
        _start(plan, uneven)
    with pytest.raises(SbpValueError, match=r"'head\.weight\.step' is missing"):
        _start(plan, {k: v for k, v in states.items() if k != "head.weight.step"})
    with pytest.raises(SbpValueError, match=r"'head\.weight\.step' is of shape \(2,\)"):
        _start(plan, {**states, "head.weight.step": torch.zeros(2)})


def test_states_that_a_clock_stands_for_keep_their_dtype(
    plan: PhysicalPlan, states: dict[str, torch.Tensor]
) -> None:
    # torch.optim makes its step counters float64 where that is the default dtype.
    given = {k: v.double() if k.endswith(".step") else v for k, v in states.items()}

    saved = _start(plan, given).state_dict()

    assert {saved[name].dtype for name in saved if name.endswith(".step")} == {torch.float64}


def test_states_that_do_not_fit_change_nothing(
    plan: PhysicalPlan, states: dict[str, torch.Tensor]
) -> None:
    session = _start(plan, states)

    with pytest.raises(SbpValueError, match="nobody"):
        session.load_state_dict({**states, "nobody": torch.zeros(2)})

    assert same_states(session.state_dict(), states)


def test_a_plan_in_a_wrong_order_comes_to_a_stand(
    gpt: Program, plan: PhysicalPlan, states: dict[str, torch.Tensor]
) -> None:
    first = plan.ranks[0]
    order = {name: firings[::-1] for name, firings in first.orders.items()}
    broken = replace(plan, ranks=(replace(first, orders=order), *plan.ranks[1:]))

    with pytest.raises(RunError, match="the step deadlocked") as caught:
        _start(broken, states).step(gpt.batches(1)[0], _LR)

    assert caught.value.where[0].startswith("rank 0: ")


@pytest.mark.slow
def test_operators_use_the_threads_that_the_config_allows(
    gpt: Program, plan: PhysicalPlan, states: dict[str, torch.Tensor]
) -> None:
    before = torch.get_num_threads()

    ReferenceRuntime(ReferenceConfig(threads_per_rank=2)).start(plan, states, None).step(
        gpt.batches(1)[0], _LR
    )

    assert torch.get_num_threads() == before
    with pytest.raises(ConfigError, match="threads_per_rank=0"):
        ReferenceConfig(threads_per_rank=0)

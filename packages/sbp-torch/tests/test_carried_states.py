"""States that every micro-batch replaces: each reads what the one before has written."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from sbp_aten.passes import prepare_step
from sbp_core.compile import CompileOptions, compile_plan
from sbp_core.compile.actors import Collective
from sbp_core.compile.physical import PLAN, PhysicalPlan, RankPlan, Register
from sbp_core.errors import GraphError, PlanError
from sbp_core.graph import LogicalGraph, verify_graph
from sbp_core.graph.ir import GraphOutput, InputKind, OutputKind, Phase, Ref, ScalarType
from sbp_core.infer import infer_strategy
from sbp_core.memory import MemoryKind, predict_memory
from sbp_core.passes import accumulate
from sbp_core.placement import Placement
from sbp_core.plan_check import check
from sbp_core.planning import PlanRequest
from sbp_core.testing.graphs import Builder, cluster
from sbp_core.testing.plans import strategy_of
from sbp_torch.boxing.execute import shard
from sbp_torch.graph_capture import capture, initial_states
from sbp_torch.runtime.configs import ReferenceConfig
from sbp_torch.runtime.reference import ReferenceSession
from sbp_torch.runtime.single import run_graph
from sbp_torch.testing.models import (
    PROGRAMS,
    Program,
    adamw,
    eager_states,
    square_batch,
    square_loss,
)
from sbp_torch.testing.programs import RunningNorm


class Normed(nn.Module):
    """A batch norm between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 4)
        self.norm = RunningNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.norm(self.up(x)).relu())


_NORMED = Program(model=Normed, loss=square_loss, batch=square_batch, optimizer=adamw)
_MODELS = {"batch norm": _NORMED, "running mean": PROGRAMS["buffers"]}


def _train(program: Program, num_micro_batches: int) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Train as a user would: a loop over the micro-batches, then a step of the optimizer."""
    model, optimizer = program.build(torch.float64)
    losses = []
    for batch in program.batches(3, 4 * num_micro_batches, torch.float64):
        optimizer.zero_grad()
        total = torch.zeros((), dtype=torch.float64)
        for index in range(num_micro_batches):
            part = {name: value[4 * index : 4 * index + 4] for name, value in batch.items()}
            loss = program.loss(model, part) / num_micro_batches
            loss.backward()
            total += loss.detach()
        optimizer.step()
        losses.append(total)
    return losses, eager_states(model, optimizer)


def _step_graph(program: Program, num_micro_batches: int) -> tuple[LogicalGraph, dict[str, Tensor]]:
    model, optimizer = program.build(torch.float64)
    batch = program.batches(1, 4, torch.float64)[0]
    graph = capture(model, program.loss, batch, optimizer)
    return prepare_step(graph, num_micro_batches), initial_states(model, optimizer)


def _compare(
    plan: PhysicalPlan,
    states: Mapping[str, Tensor],
    program: Program,
    expected: tuple[list[Tensor], dict[str, Tensor]],
) -> None:
    session = ReferenceSession(plan, states, ReferenceConfig())
    batches = program.batches(3, 4 * plan.num_micro_batches, torch.float64)
    losses = [session.step(batch, {"lr": 1e-2}).loss for batch in batches]

    torch.testing.assert_close(losses, expected[0], rtol=1e-9, atol=1e-9)
    for part in plan.ranks:
        for slot in part.slots:
            if slot.name in expected[1] and slot.sbp is not None:
                whole = expected[1][slot.name]
                wanted = shard(whole, plan.stages[slot.stage], slot.sbp)[part.rank]
                found = session.shard(slot.name, part.rank)
                torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("name", _MODELS)
@pytest.mark.parametrize("num_micro_batches", [1, 2, 4])
@pytest.mark.parametrize(
    ("mesh", "pins"),
    [
        (Placement.grid((1,), ("data",)), {}),
        (Placement.grid((2,), ("data",)), {"batch": "S(0)"}),
        (Placement.grid((3,), ("data",)), {"batch": "S(0)", "*mean": "S(0)"}),
        (Placement.grid((2, 2), ("data", "tensor")), {"batch": {"data": "S(0)", "tensor": "B"}}),
        (Placement.grid((2, 2), ("pipe", "data")), {"batch": "S(0)"}),
    ],
    ids=["one rank", "data", "sharded buffers", "2-D", "two stages"],
)
def test_batch_statistics_are_those_of_a_loop_over_the_micro_batches(
    name: str, num_micro_batches: int, mesh: Placement, pins: Mapping[str, str]
) -> None:
    program = _MODELS[name]
    graph, states = _step_graph(program, num_micro_batches)
    request = PlanRequest(graph=graph, mesh=mesh, cluster=cluster(), pins={})
    strategy = infer_strategy(request, planner="test", pins=pins)
    expected = _train(program, num_micro_batches)

    for boxing_thread in (False, True):
        plan = compile_plan(graph, strategy, CompileOptions(boxing_thread=boxing_thread))
        check(plan)

        assert PLAN.load(PLAN.dump(plan)).hash == plan.hash
        _compare(plan, states, program, expected)


def test_counters_of_batches_count_every_micro_batch() -> None:
    graph, states = _step_graph(_NORMED, 4)
    names = [entry.name for entry in graph.inputs if entry.kind is InputKind.BATCH]
    batch = dict(zip(names, _NORMED.batches(1, 4, torch.float64)[0].values(), strict=True))
    held = {
        entry.name: states[entry.stands_for[0]].item() if entry.stands_for else states[entry.name]
        for entry in graph.inputs
        if entry.kind.is_state
    }

    _, new = run_graph(graph, held, [batch] * 4, {"lr": 1e-2})

    assert new["norm.num_batches_tracked"].item() == 4
    assert new["norm.num_batches_tracked"].dtype == torch.int64


def _moving(*, late: bool = False, partial: bool = False) -> LogicalGraph:
    """Return n = mean + sum(x); y = mean * x; loss = sum(y), in which n replaces mean.

    `late` lets a backward node read the old mean; `partial` lets x be split, so that n is a sum.
    """
    b = Builder()
    b.add_input("x", InputKind.BATCH, (4, 2))
    b.add_input("mean", InputKind.BUFFER, (2,))
    b.op("s", "sum.dim_IntList", (Ref("x"), (0,)), (2,))
    b.op("n", "add.Tensor", (Ref("mean"), Ref("s")), (2,), pointwise=True)
    b.op("y", "mul.Tensor", (Ref("x"), Ref("mean")), (4, 2), pointwise=True)
    b.op("loss", "sum.default", (Ref("y"),), ())
    b.outputs.append(GraphOutput(name="loss", kind=OutputKind.LOSS, value="loss"))
    b.outputs.append(GraphOutput(name="mean", kind=OutputKind.STATE, value="n"))
    if late:
        b.op(
            "g", "mul.Tensor", (Ref("y"), Ref("mean")), (4, 2), phase=Phase.BACKWARD, pointwise=True
        )
        b.op("seen", "sum.default", (Ref("g"),), (), phase=Phase.BACKWARD)
        b.outputs.append(GraphOutput(name="seen", kind=OutputKind.METRIC, value="seen"))
    return b.graph("moving")


_PARTIAL = {"s": "S(0) -> P", "y": "S(0) | B -> S(0)", "loss": "S(0) -> P", "x": "S(0)"}


def _moving_plan(
    options: CompileOptions | None = None, *, late: bool = False, in_flight: int = 3
) -> PhysicalPlan:
    """Return the plan for three micro-batches on two ranks; the sum of x is boxed, P -> B."""
    graph = verify_graph(accumulate(_moving(late=late), 3))
    storage = {"x": "S(0)"}
    plan = compile_plan(
        graph,
        strategy_of(graph, signatures=_PARTIAL, storage=storage, in_flight=(in_flight,)),
        options,
    )
    check(plan)
    return plan


def _carrying(plan: PhysicalPlan, rank: int = 0) -> Register:
    (found,) = [r for r in plan.by_rank[rank].registers if r.carries]
    return found


def test_a_register_hands_the_state_from_its_writer_to_its_readers() -> None:
    plan = _moving_plan()

    register = _carrying(plan)
    writer = plan.by_rank[0].by_name[register.producer]
    assert (register.carries, register.keys) == (("mean",), ("n",))
    assert writer.writes == (("mean", "n"),)
    readers = {actor.name for actor in plan.by_rank[0].actors if "mean" in actor.reads}
    assert set(register.consumers) == readers


@pytest.mark.parametrize("in_flight", [1, 2, 3])
@pytest.mark.parametrize("boxing_thread", [False, True])
def test_readers_behind_the_writer_get_what_their_micro_batch_had(
    in_flight: int, boxing_thread: bool
) -> None:
    graph = verify_graph(accumulate(_moving(late=True), 3))
    plan = _moving_plan(CompileOptions(boxing_thread=boxing_thread), late=True, in_flight=in_flight)
    state = {"mean": torch.tensor([1.0, 2.0])}
    batch = torch.arange(24.0).view(12, 2)

    session = ReferenceSession(plan, state, ReferenceConfig())
    for _ in range(2):
        found = session.step({"x": batch}, {})
        wanted, state = run_graph(graph, state, [{"x": x} for x in batch.split(4)], {})

        assert torch.equal(found.loss, wanted["loss"])
        assert torch.equal(found.outputs["seen"], wanted["seen"])
        assert torch.equal(session.state_dict()["mean"], state["mean"])


def _changed(plan: PhysicalPlan, change: Callable[[Register], Register]) -> PhysicalPlan:
    def of(part: RankPlan) -> RankPlan:
        return replace(part, registers=tuple(change(r) if r.carries else r for r in part.registers))

    return replace(plan, ranks=tuple(map(of, plan.ranks)))


def test_an_order_that_reads_before_the_last_micro_batch_wrote_is_refused() -> None:
    plan = _moving_plan()
    writer = _carrying(plan).producer

    def late(part: RankPlan) -> RankPlan:
        order = part.orders["compute"]
        moved = [entry for entry in order if entry != (writer, 0)]
        place = max(moved.index((reader, 1)) for reader in _carrying(plan).consumers)
        moved.insert(place + 1, (writer, 0))
        return replace(part, orders={"compute": tuple(moved)})

    broken = replace(plan, ranks=tuple(late(part) for part in plan.ranks))
    with pytest.raises(PlanError):
        check(broken)


def test_a_register_without_room_for_the_new_state_is_refused() -> None:
    plan = _changed(_moving_plan(late=True), lambda register: replace(register, quota=1))

    with pytest.raises(PlanError, match="the plan would deadlock"):
        check(plan)


@pytest.mark.parametrize("changes", [{"staleness": -1}, {"staleness": 1, "carries": ()}])
def test_a_staleness_that_is_none_is_refused(changes) -> None:
    plan = _changed(_moving_plan(), lambda register: replace(register, **changes))

    with pytest.raises(PlanError, match="is stale by"):
        check(plan)


def test_carrying_what_the_producer_does_not_write_is_refused() -> None:
    plan = _changed(_moving_plan(), lambda register: replace(register, carries=("x",)))

    with pytest.raises(PlanError, match=r"carries \['x'\] as \['n'\]"):
        check(plan)


def test_the_new_state_is_counted_once_beside_the_old_one() -> None:
    one = Placement([0], ["rank"])
    b = Builder()
    b.add_input("x", InputKind.BATCH, (4, 2))
    b.add_input("mean", InputKind.BUFFER, (4, 2))
    b.op("n", "add.Tensor", (Ref("mean"), Ref("x")), (4, 2), pointwise=True)
    b.outputs.append(GraphOutput(name="mean", kind=OutputKind.STATE, value="n"))
    graph = accumulate(b.graph(), 3)
    plan = compile_plan(graph, strategy_of(graph, (one,)))

    memory = predict_memory(plan).ranks[0]
    # The state, what a micro-batch has written, and what the next one is writing.
    assert memory.peak - memory.kinds[MemoryKind.BATCH] == 3 * 4 * 2 * 4


def test_a_state_that_nobody_reads_needs_no_register() -> None:
    b = Builder()
    b.add_input("x", InputKind.BATCH, (2,))
    b.add_input("last", InputKind.BUFFER, (2,))
    b.op("n", "neg.default", (Ref("x"),), (2,), pointwise=True)
    b.outputs.append(GraphOutput(name="last", kind=OutputKind.STATE, value="n"))
    graph = accumulate(b.graph(), 2)
    plan = compile_plan(graph, strategy_of(graph))
    check(plan)

    session = ReferenceSession(plan, {"last": torch.zeros(2)}, ReferenceConfig())
    session.step({"x": torch.tensor([1.0, 2.0, 3.0, 4.0])}, {})

    assert not [r for part in plan.ranks for r in part.registers if r.carries]
    assert session.state_dict()["last"].tolist() == [-3.0, -4.0]


def test_the_optimizer_reads_the_state_from_before_the_step_and_the_last_new_value() -> None:
    b = Builder()
    b.add_input("x", InputKind.BATCH, (2,))
    b.add_input("mean", InputKind.BUFFER, (2,))
    b.add_input("w", InputKind.PARAMETER, (2,))
    b.op("n", "add.Tensor", (Ref("mean"), Ref("x")), (2,), pointwise=True)
    b.op("d", "sub.Tensor", (Ref("n"), Ref("mean")), (2,), phase=Phase.OPTIMIZER, pointwise=True)
    b.outputs.append(GraphOutput(name="mean", kind=OutputKind.STATE, value="n"))
    b.outputs.append(GraphOutput(name="w", kind=OutputKind.STATE, value="d"))
    graph = verify_graph(accumulate(b.graph(), 2))
    plan = compile_plan(graph, strategy_of(graph, storage={"mean": "S(0)"}))
    check(plan)

    session = ReferenceSession(
        plan, {"mean": torch.ones(2), "w": torch.zeros(2)}, ReferenceConfig()
    )
    session.step({"x": torch.tensor([1.0, 2.0, 3.0, 4.0])}, {})

    assert session.state_dict()["mean"].tolist() == [5.0, 7.0]
    assert session.state_dict()["w"].tolist() == [4.0, 6.0]


def test_a_boxed_statistic_is_carried_by_the_collective_that_makes_it() -> None:
    graph = verify_graph(accumulate(_moving(), 3))
    signatures = {**_PARTIAL, "n": "P | P -> P", "mean": "B", "y": "S(0) | B -> S(0)"}
    plan = compile_plan(
        graph, strategy_of(graph, signatures=signatures, storage={"x": "S(0)"}),
        CompileOptions(boxing_thread=True),
    )  # fmt: skip
    check(plan)
    state, batch = {"mean": torch.tensor([1.0, 2.0])}, torch.arange(24.0).view(12, 2)

    session = ReferenceSession(plan, state, ReferenceConfig())
    found = session.step({"x": batch}, {})
    wanted, state = run_graph(graph, state, [{"x": x} for x in batch.split(4)], {})

    writer = plan.by_rank[0].by_name[_carrying(plan).producer]
    assert isinstance(writer, Collective)
    assert torch.equal(found.loss, wanted["loss"])
    assert torch.equal(session.state_dict()["mean"], state["mean"])


def test_a_host_number_cannot_be_carried() -> None:
    graph = _moving()
    b = Builder()
    b.inputs, b.outputs, b.nodes = [*graph.inputs], [*graph.outputs], [*graph.nodes]
    b.types = {**graph.types}
    b.add_input("step_counter", InputKind.OPTIMIZER_STATE, ())
    b.op("tick", "add", (Ref("step_counter"), 1), ())
    b.nodes[-1] = replace(b.nodes[-1], op="host.add")
    b.types["step_counter"] = b.types["tick"] = ScalarType()
    b.outputs.append(GraphOutput(name="step_counter", kind=OutputKind.STATE, value="tick"))

    with pytest.raises(
        GraphError, match="host number 'step_counter' is replaced at micro-batch rate"
    ):
        accumulate(b.graph(), 2)

"""A session on another kind of device than the CPU: nothing stays behind, the host never looks.

`meta` stands in for a GPU: its tensors have no values, so that an operator which meets one of a CPU
fails, and so does whatever asks for a value. With a GPU the same plans train, and are compared with
eager PyTorch on it.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from programs import (
    LEARNING_RATE,
    Case,
    batch,
    loss_of,
    make_model,
    make_optimizer,
    planner_settings,
    registry,
)
from torch import Tensor, nn

from sbp_aten.passes import place_on_device, prepare_step
from sbp_core import Placement, PlanRequest, check, compile_plan
from sbp_core.compile import CompileOptions, PhysicalPlan
from sbp_core.errors import ConfigError
from sbp_core.graph import LogicalGraph
from sbp_core.runtime import Session, Snapshot
from sbp_torch.graph_capture import capture, initial_states

CASES = (
    Case(planner="manual/data_parallel", mesh=(2,), axes=("data",)),
    Case(planner="manual/zero", mesh=(2,), axes=("data",)),
    Case(planner="manual/data_tensor", mesh=(2, 2), axes=("data", "tensor")),
    Case(planner="manual/pipeline", mesh=(2,), axes=("pipe",), micro_batches=2),
    Case(
        planner="manual/zero1",
        mesh=(2,),
        axes=("data",),
        settings=(("offload", ("optimizer_states",)),),
    ),
)


class MetaDevice:
    """Tensors without values; counts the threads that have entered it."""

    device = torch.device("meta")

    def __init__(self) -> None:
        self.num_threads = 0

    def enter(self) -> None:
        self.num_threads += 1

    def put(self, value: Tensor) -> Tensor:
        return value.to("meta")

    def put_host(self, value: Tensor) -> Tensor:
        return value.to("meta")

    def put_batches(self, fed: dict[int, Any]) -> dict[int, Any]:
        return {
            rank: [{k: v.to("meta") if torch.is_tensor(v) else v for k, v in p.items()} for p in ps]
            for rank, ps in fed.items()
        }


def _program() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = make_model(torch.float32)
    return model, make_optimizer(model)


def _captured(case: Case, device: str) -> LogicalGraph:
    micro = batch(0, case.batch_size // case.micro_batches)
    model, optimizer = _program()
    return capture(model, loss_of, micro, optimizer, device=device)


def _plan(graph: LogicalGraph, case: Case, device: str) -> PhysicalPlan:
    mesh = Placement.grid(case.mesh, case.axes, device)
    graph = prepare_step(graph, case.micro_batches)
    machine = {"mesh": case.mesh, "host_memory_bytes": 2**30}
    cluster = registry().make("cluster", "local", machine)(mesh.size)
    planner: Any = registry().make("planner", *planner_settings(case))
    strategy = planner.plan(PlanRequest(graph=graph, mesh=mesh, cluster=cluster))
    plan = compile_plan(graph, strategy, CompileOptions(cluster=cluster))
    check(plan)
    return plan


def _start(plan: PhysicalPlan, states: dict[str, Tensor]) -> Session:
    session: Session = (
        registry().make("runtime", "actor").start(plan, states, registry().make("boxing", "local"))
    )
    return session


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_step_of_another_device_leaves_nothing_on_the_cpu(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = MetaDevice()
    monkeypatch.setattr("sbp_torch.runtime.store.device_of", lambda plan: device)
    monkeypatch.setattr("sbp_core.compile.plan_spec._DEVICES", ("meta",))
    plan = _plan(place_on_device(_captured(case, "cpu"), "meta"), case, "meta")

    with _start(plan, initial_states(*_program())) as session:
        losses = [
            session.step(batch(index, case.batch_size), {"lr": LEARNING_RATE}).loss
            for index in range(2)
        ]
        shards = [
            session.shard(slot.name, part.rank)
            for part in plan.ranks
            for slot in part.slots
            if slot.kind.is_state
        ]

    tensors = [*losses, *(shard for shard in shards if isinstance(shard, Tensor))]
    assert {tensor.device.type for tensor in tensors} == {"meta"}
    assert device.num_threads == sum(len(part.orders) for part in plan.ranks)


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_plan_for_gpus_is_refused_where_there_are_none() -> None:
    plan = _plan(_captured(CASES[0], "cuda"), CASES[0], "cuda")

    with pytest.raises(ConfigError, match="PyTorch sees none"):
        _start(plan, initial_states(*_program()))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_ranks_that_share_a_gpu_train_like_eager_pytorch_on_it(case: Case) -> None:
    plan = _plan(_captured(case, "cuda"), case, "cuda")
    states = initial_states(*_program())
    model = make_model(torch.float32).cuda()
    optimizer = make_optimizer(model)

    with _start(plan, states) as session:
        for index in range(3):
            data = batch(index, case.batch_size)
            found = session.step(data, {"lr": LEARNING_RATE}).loss
            wanted = loss_of(model, {name: value.cuda() for name, value in data.items()})
            optimizer.zero_grad()
            wanted.backward()  # type: ignore[no-untyped-call] # torch leaves it untyped
            optimizer.step()
            assert found.device.type == "cuda"
            torch.testing.assert_close(found, wanted.detach(), rtol=1e-5, atol=1e-6)
        trained = session.state_dict()

    for name, value in model.named_parameters():
        torch.testing.assert_close(trained[name], value.detach().cpu(), rtol=1e-3, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("case", [*CASES[:2], CASES[-1]], ids=str)
def test_a_snapshot_on_a_gpu_keeps_what_later_steps_overwrite(case: Case) -> None:
    plan = _plan(_captured(case, "cuda"), case, "cuda")
    with _start(plan, initial_states(*_program())) as session:
        taken = []
        for index in range(4):
            taken.append((session.state_dict(), session.snapshot()))
            session.step(batch(index, case.batch_size), {"lr": LEARNING_RATE})

        for states, snapshot in taken:
            with snapshot:
                _assert_pieces(snapshot, states)
        # In a limit, beside steps: copied as there is room, or read where they are.
        for index, limit_bytes in enumerate((0, 1000, 100_000)):
            states, snapshot = session.state_dict(), session.snapshot(limit_bytes=limit_bytes)
            with ThreadPoolExecutor(1) as reader, snapshot:
                reading = reader.submit(_assert_pieces, snapshot, states)
                session.step(batch(index, case.batch_size), {"lr": LEARNING_RATE})
                reading.result(60.0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_offloaded_states_lie_in_pinned_memory_and_change_no_bit() -> None:
    case = CASES[-1]
    usual = replace(case, settings=())
    graph = _captured(case, "cuda")
    plans = [_plan(graph, one, "cuda") for one in (usual, case)]
    found = []

    for plan in plans:
        with _start(plan, initial_states(*_program())) as session:
            losses = [
                session.step(batch(index, case.batch_size), {"lr": LEARNING_RATE}).loss
                for index in range(3)
            ]
            offloaded = [
                session.shard(slot.name, part.rank)
                for part in plan.ranks
                for slot in part.slots
                if slot.offloaded
            ]
            found.append((torch.stack(losses), session.state_dict()))

    assert offloaded
    assert all(isinstance(one, Tensor) and one.is_pinned() for one in offloaded)
    assert torch.equal(found[0][0], found[1][0])
    assert all(torch.equal(value, found[1][1][name]) for name, value in found[0][1].items())


def _assert_pieces(snapshot: Snapshot, states: Mapping[str, torch.Tensor]) -> None:
    for piece in snapshot.pieces():
        place = tuple(slice(*dim) for dim in piece.bounds)
        assert torch.equal(torch.as_tensor(piece.value).cpu(), states[piece.name][place])

"""Plans of a small training step, and an operator at which a test can stop a rank."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from sbp_actor_runtime.configs import ActorConfig
from sbp_actor_runtime.runtime import ActorRuntime
from sbp_actor_runtime.session import ActorSession
from sbp_core.boxing.backend import BoxingBackend
from sbp_core.compile import CompileOptions, PhysicalPlan, compile_plan
from sbp_core.infer import infer_strategy
from sbp_core.placement import Placement
from sbp_core.planning import PlanRequest
from sbp_torch.boxing.local import LocalBackend
from sbp_torch.testing.cases import CASES, compile_case
from sbp_torch.testing.programs import OneDeviceStep, small_cluster

DATA = "uneven batch"  # four ranks, one thread each
THREADS = "boxing threads"  # four ranks, two threads each
PIPELINE = "pipeline with boxing threads"

#: Seconds after which what waits in vain gives up: longer than a test may take.
HANGS_S = 600.0

#: Opened by a test, for the operators that wait at it.
gate = threading.Event()

#: Set when an operator has come to the gate.
at_gate = threading.Event()


#: What the operators of `operator` saw.
seen: list[int] = []


def _wait_at_gate() -> None:
    at_gate.set()
    gate.wait(HANGS_S)


def _fail_after_gate() -> None:
    gate.wait(HANGS_S)
    raise ArithmeticError("late and wrong")


def _count_threads() -> None:
    seen.append(torch.get_num_threads())


ACTS = {
    "wait_at_gate": _wait_at_gate,
    "fail_after_gate": _fail_after_gate,
    "count_threads": _count_threads,
}


@cache
def _registered(name: str) -> Callable[[Tensor], Tensor]:
    """Register an operator; it lives as long as somebody holds it."""

    def act(value: Tensor) -> Tensor:
        ACTS[name]()
        return value.new_zeros(())

    made: Callable[[Tensor], Tensor] = torch.library.custom_op(
        f"sbp_actor_tests::{name}", act, mutates_args=()
    )
    return made


def operator(name: str) -> str:
    """Return the name in plans of one of `ACTS`, as an operator."""
    _registered(name)
    return f"sbp_actor_tests.{name}.default"


def compiled(name: str, options: CompileOptions) -> PhysicalPlan:
    """Return the plan of a case with other options of the compiler."""
    case = CASES[name]
    mesh = Placement.grid(case.mesh_shape, case.axes)
    request = PlanRequest(graph=case.step.graph, mesh=mesh, cluster=small_cluster(mesh.size))
    strategy = infer_strategy(request, planner="test", pins=case.pins)
    return compile_plan(case.step.graph, strategy, options)


def training_step(name: str) -> OneDeviceStep:
    return CASES[name].step


class OpeningBackend(LocalBackend):
    """Opens the gate when it is told that the step has failed."""

    def fail(self, error: BaseException) -> None:
        super().fail(error)
        gate.set()


def start(
    name: str,
    plan: PhysicalPlan | None = None,
    backend: BoxingBackend | None = None,
    **settings: Any,
) -> ActorSession:
    """Start a session of a case, or of a changed plan of it."""
    config = ActorConfig(**{"first_deadline_s": 30.0, "deadline_s": 30.0, **settings})
    session = ActorRuntime(config).start(
        plan or compile_case(name), training_step(name).states, backend or LocalBackend()
    )
    assert isinstance(session, ActorSession)
    return session


def run_step(session: ActorSession, name: str, index: int = 0) -> Tensor:
    step = training_step(name)
    return session.step(step.batches[index], step.scalars).loss


def worker_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("sbp rank")]


def wait_until(holds: Callable[[], bool], limit_s: float = 60.0) -> bool:
    end = time.monotonic() + limit_s
    while not holds() and time.monotonic() < end:
        time.sleep(0.005)
    return holds()


def assert_states(session: ActorSession, wanted: Mapping[str, Tensor]) -> None:
    found = session.state_dict()
    assert set(found) == set(wanted)
    for name, value in wanted.items():
        assert torch.equal(found[name], value), name


class SharedBackend(BoxingBackend):
    """The part of a common backend that one of several processes would have."""

    def __init__(self, whole: LocalBackend, ranks: Sequence[int]) -> None:
        self.whole, self.ranks = whole, tuple(ranks)

    def open(self, ranks: Sequence[int]) -> None:
        if not self.whole.local_ranks():
            self.whole.open(ranks)

    def local_ranks(self) -> tuple[int, ...]:
        return self.ranks

    def communicator(self, rank: int) -> Any:
        return self.whole.communicator(rank)

    def fail(self, error: BaseException) -> None:
        self.whole.fail(error)

    def failure_reason(self) -> str:
        reason, cause = self.whole._end or ("", None)
        return "" if cause is None else reason

    def close(self) -> None:
        self.whole.close()

"""One cell of the matrix: a program under a layout in a dtype, compared with plain PyTorch."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from models.layouts import LAYOUTS, Layout
from models.programs import BATCH, PROGRAMS, Program
from sbp_aten.pass_options import PassOptions
from sbp_aten.passes import prepare_step
from sbp_core.cluster import Cluster, Device, Link
from sbp_core.compile import CompileOptions, PhysicalPlan, compile_plan
from sbp_core.graph import LogicalGraph
from sbp_core.infer import infer_strategy
from sbp_core.memory import predict_memory
from sbp_core.passes import RecomputeOptions
from sbp_core.placement import Placement
from sbp_core.plan_check import check
from sbp_core.planning import PlanRequest
from sbp_core.plugins import discover
from sbp_core.strategy import Strategy
from sbp_torch.boxing import shard
from sbp_torch.graph_capture import capture, initial_states
from sbp_torch.memory import MemoryMeter

LEARNING_RATE = 1e-3

#: dtype name -> (largest deviation of a loss, relative; largest deviation of a state, absolute).
#: Casting to bfloat16 has a precision of 2^-8; states are not compared if the loss is rounded.
TOLERANCES: Mapping[str, tuple[float, float | None]] = {
    "float64": (1e-9, 1e-9),
    "float32": (1e-5, None),
    "bfloat16": (2e-2, None),
}


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The outcome of one cell.

    Args:
        loss_error: Largest relative deviation of a loss.
        state_error: Largest deviation of an element of any rank's shard of any state.
        predicted_bytes, counted_bytes: Bytes that ranks send to each other in all steps, predicted
            by the plan and counted by the backend.
        peaks: The predicted and the measured peak of memory of each rank, in bytes.
        compile_s, run_s: Time of planning and compiling, and of the steps.
        error: The error, if the cell did not run; or why it does not apply.
    """

    program: str
    layout: str
    dtype: str
    loss_error: float = float("nan")
    state_error: float = float("nan")
    predicted_bytes: int = 0
    counted_bytes: int = 0
    peaks: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    compile_s: float = 0.0
    run_s: float = 0.0
    error: str = ""

    @property
    def memory_error(self) -> float:
        """The largest relative deviation of the predicted from the measured peak."""
        return max((abs(p - m) / m for p, m in self.peaks.values()), default=float("nan"))

    @property
    def passed(self) -> bool:
        """Whether all requirements are met."""
        loss, state = TOLERANCES[self.dtype]
        return (
            not self.error
            and self.loss_error <= loss
            and (state is None or self.state_error <= state)
            and self.predicted_bytes == self.counted_bytes
            and (not self.peaks or self.memory_error <= 0.1)
        )


@dataclass(frozen=True, kw_only=True)
class Truth:
    """The results of plain PyTorch: losses, and every state at the end."""

    losses: tuple[float, ...]
    states: Mapping[str, Tensor]


def batches(program: Program, num_steps: int, dtype: torch.dtype) -> Iterator[dict[str, Tensor]]:
    """Yield the batches of all steps, always the same."""
    for index in range(num_steps):
        made = program.batch(torch.Generator().manual_seed(100 + index))
        yield {
            name: value.to(dtype) if value.is_floating_point() else value
            for name, value in made.items()
        }


def make(program: Program, dtype: torch.dtype) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return the seeded model and its optimizer."""
    torch.manual_seed(0)
    model = program.build().to(dtype)
    if program.sgd:
        return model, torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.9)
    return model, torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.1)


@cache
def truth(name: str, dtype_name: str, micro_batches: int, num_steps: int) -> Truth:
    """Train the plain program, one micro-batch after the other."""
    program, dtype = PROGRAMS[name], storage_dtype(dtype_name)
    model, optimizer = make(program, dtype)
    losses = []
    for batch in batches(program, num_steps, dtype):
        optimizer.zero_grad()
        total = 0.0
        for index in range(micro_batches):
            with torch.autocast("cpu", torch.bfloat16, enabled=dtype_name == "bfloat16"):
                loss = program.loss(model, part_of(batch, index, micro_batches))
            (loss / micro_batches).backward()
            total += loss.item() / micro_batches
        optimizer.step()
        losses.append(total)
    states = {name: value.detach() for name, value in model.named_parameters()}
    states |= dict(model.named_buffers())
    for key, parameter in model.named_parameters():
        states |= {f"{key}.{kind}": value for kind, value in optimizer.state[parameter].items()}
    return Truth(losses=tuple(losses), states=states)


def storage_dtype(name: str) -> torch.dtype:
    """Return the dtype of stored states: bfloat16 is for compute only (autocast)."""
    return torch.float64 if name == "float64" else torch.float32


def part_of(batch: Mapping[str, Tensor], index: int, count: int) -> dict[str, Tensor]:
    """Return one micro-batch of a batch."""
    size = BATCH // count
    return {name: value[index * size : (index + 1) * size] for name, value in batch.items()}


def prepared(name: str, layout: Layout, dtype_name: str) -> LogicalGraph:
    """Capture the step of a program and prepare it for a layout."""
    program, dtype = PROGRAMS[name], storage_dtype(dtype_name)
    model, optimizer = make(program, dtype)
    batch = part_of(next(batches(program, 1, dtype)), 0, layout.micro_batches)
    autocast = "bfloat16" if dtype_name == "bfloat16" else ""
    graph = capture(model, program.loss, batch, optimizer, autocast=autocast)
    again = RecomputeOptions(modules=program.blocks if layout.recompute else ())
    return prepare_step(graph, layout.micro_batches, options=PassOptions(recompute=again))


def cluster(num_devices: int) -> Cluster:
    """Return a declared machine."""
    device = Device(
        memory_bytes=2**34,
        flop_per_s={"float32": 1e11, "float64": 5e10},
        memory_bytes_per_s=1e10,
        launch_s=5e-6,
    )
    link = Link(latency_s=2e-5, bytes_per_s=5e9)
    return Cluster(
        name="test",
        num_devices=num_devices,
        devices_per_node=num_devices,
        device=device,
        intra_node=link,
    )


def planned(
    name: str, layout: Layout, dtype_name: str, machine: Cluster | None = None
) -> tuple[LogicalGraph, Strategy]:
    """Capture and plan a cell; see `compiled` for the arguments."""
    program = PROGRAMS[name]
    graph = prepared(name, layout, dtype_name)
    mesh = Placement.grid(layout.mesh, layout.axes)
    strategy = infer_strategy(
        PlanRequest(graph=graph, mesh=mesh, cluster=machine or cluster(mesh.size)),
        planner="manual",
        pins=layout.pins(program),
        stage_patterns=program.stages if "pipe" in layout.axes else (),
    )
    return graph, strategy


def compiled(
    name: str, layout: Layout, dtype_name: str, machine: Cluster | None = None
) -> PhysicalPlan:
    """Capture, plan, compile and check a cell.

    Args:
        name: Name of the program.
        layout: The layout.
        dtype_name: A key of `TOLERANCES`.
        machine: The machine for planning and compiling; without it, the cell is planned for a
            declared machine and compiled for a nominal one.
    """
    graph, strategy = planned(name, layout, dtype_name, machine)
    plan = compile_plan(graph, strategy, CompileOptions(cluster=machine))
    check(plan)
    return plan


def attempt(name: str, layout_name: str, dtype_name: str, num_steps: int) -> Outcome:
    """Run one cell and compare it; an exception becomes the error of the outcome."""
    layout = LAYOUTS[layout_name]
    cell = {"program": name, "layout": layout_name, "dtype": dtype_name}
    try:
        return _attempt(cell, layout, num_steps)
    except Exception as error:
        return Outcome(**cell, error=f"{type(error).__name__}: {error}")


def _attempt(cell: dict[str, str], layout: Layout, num_steps: int) -> Outcome:
    name, dtype_name = cell["program"], cell["dtype"]
    program, dtype = PROGRAMS[name], storage_dtype(dtype_name)
    began = time.perf_counter()
    plan = compiled(name, layout, dtype_name)
    compile_s = time.perf_counter() - began
    model, optimizer = make(program, dtype)
    registry = discover(strict=True)
    backend: Any = registry.make("boxing", "local", {})
    engine: Any = registry.make("runtime", "actor", {})
    meter = MemoryMeter(plan)
    began = time.perf_counter()
    states = initial_states(model, optimizer)
    with (
        engine.start(plan, states, meter.backend(backend)) as session,
        meter.watching(session),
    ):
        losses = [
            session.step(batch, {"lr": LEARNING_RATE, "seed": 0, "step": index}).loss.item()
            for index, batch in enumerate(batches(program, num_steps, dtype))
        ]
        run_s = time.perf_counter() - began
        expected = truth(name, dtype_name, layout.micro_batches, num_steps)
        state_error = worst_shard(plan, session, expected)
        sent = sum(backend.communicator(part.rank).sent_bytes for part in plan.ranks)
    pairs = list(zip(losses, expected.losses, strict=True))
    return Outcome(
        **cell,
        loss_error=max(abs(a - b) / abs(b) for a, b in pairs),
        state_error=state_error,
        predicted_bytes=plan.boxing_bytes * num_steps,
        counted_bytes=sent,
        peaks={
            rank: (entry.peak, meter.peak(rank))
            for rank, entry in predict_memory(plan).ranks.items()
        },
        compile_s=compile_s,
        run_s=run_s,
    )


def worst_shard(plan: PhysicalPlan, session: Any, expected: Truth) -> float:
    """Return the largest deviation of any local rank's shard of any state from plain PyTorch."""
    worst = 0.0
    for part in (plan.by_rank[rank] for rank in session.local_ranks):
        for slot in part.slots:
            if slot.kind not in ("parameter", "buffer", "optimizer_state"):
                continue
            value = session.shard(slot.name, part.rank)
            if slot.sbp is None:
                known = {float(expected.states[name]) for name in plan.ties[slot.name]}
                assert known == {float(value)}, f"{slot.name} is {value}, not {known}"
                continue
            whole = expected.states[slot.name]
            wanted = shard(whole, plan.stages[slot.stage], slot.sbp)[part.rank]
            assert value.shape == wanted.shape, (slot.name, part.rank, value.shape, wanted.shape)
            if value.numel():
                worst = max(worst, (value.double() - wanted.double()).abs().max().item())
    return worst

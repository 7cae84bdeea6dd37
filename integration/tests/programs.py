"""The one-device program of the integration tests, and the parallel runs compared with it."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

import torch
import yaml
from torch import Tensor, nn

from models.trial import cluster
from sbp_aten.passes import prepare_step
from sbp_core import Placement, PlanRequest, Strategy, check, compile_plan
from sbp_core.compile import CompileOptions, PhysicalPlan
from sbp_core.graph import LogicalGraph
from sbp_core.plugins import PluginRegistry, discover
from sbp_core.runtime import Session
from sbp_torch.boxing import shard
from sbp_torch.graph_capture import capture, initial_states

NUM_STEPS = 10
LEARNING_RATE = 1e-3
MODEL = {"vocabulary": 64, "context": 16, "num_layers": 2, "num_heads": 4, "hidden": 32}


@cache
def registry() -> PluginRegistry:
    """Return the installed plugins: our own come through the same door as everybody's."""
    return discover(strict=True)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One way to run the program on several ranks."""

    planner: str
    mesh: tuple[int, ...]
    axes: tuple[str, ...]
    micro_batches: int = 1
    batch_size: int = 8
    settings: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        mesh = "x".join(map(str, self.mesh))
        extra = "".join(f"-{value}" for _, value in self.settings)
        return f"{self.planner}-{mesh}-batch{self.batch_size}-micro{self.micro_batches}{extra}"


CASES = (
    Case(planner="manual/data_parallel", mesh=(4,), axes=("data",)),
    Case(planner="manual/data_parallel", mesh=(4,), axes=("data",), batch_size=6),
    Case(planner="manual/tensor_parallel", mesh=(1, 2), axes=("data", "tensor")),
    Case(planner="manual/tensor_parallel", mesh=(4,), axes=("tensor",)),
    Case(planner="manual/data_tensor", mesh=(2, 2), axes=("data", "tensor")),
    Case(planner="manual/data_tensor", mesh=(2, 2), axes=("data", "tensor"), micro_batches=2),
    Case(planner="manual/zero", mesh=(4,), axes=("data",)),
    Case(planner="manual/zero", mesh=(3,), axes=("data",), micro_batches=2),
    Case(planner="manual/zero1", mesh=(4,), axes=("data",)),
    Case(planner="manual/pipeline", mesh=(2,), axes=("pipe",), micro_batches=4),
    Case(
        planner="manual/pipeline",
        mesh=(2,),
        axes=("pipe",),
        micro_batches=4,
        settings=(("pipeline", "gpipe"),),
    ),
    Case(planner="manual/pipeline", mesh=(2, 2), axes=("pipe", "data"), micro_batches=2),
    Case(planner="osdp", mesh=(4,), axes=("data",), settings=(("memory_bytes", 560e3),)),
)


@dataclass(frozen=True, kw_only=True)
class OneDevice:
    """What plain PyTorch gives: eager model, autograd, `torch.optim.AdamW`, the whole batch."""

    losses: tuple[float, ...]
    states: Mapping[str, Tensor]


def make_model(dtype: torch.dtype) -> nn.Module:
    """Return the seeded model of the zoo."""
    torch.manual_seed(0)
    model = registry().make("model", "gpt", MODEL)
    assert isinstance(model, nn.Module)
    return model.to(dtype)


def make_optimizer(model: nn.Module) -> torch.optim.AdamW:
    """Return the optimizer of all runs."""
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.1, foreach=False)


def batch(index: int, size: int) -> dict[str, Tensor]:
    """Return batch `index`: int64 tokens and targets of shape (size, context)."""
    generator = torch.Generator().manual_seed(1000 + index)
    shape = (size, MODEL["context"])
    return {
        name: torch.randint(MODEL["vocabulary"], shape, generator=generator)
        for name in ("tokens", "targets")
    }


def loss_of(model: nn.Module, data: Mapping[str, Tensor]) -> Tensor:
    """Return the model's own loss."""
    loss: Tensor = model.loss(data)  # type: ignore[operator] # a method of the zoo's models
    return loss


@cache
def one_device(dtype: torch.dtype, batch_size: int) -> OneDevice:
    """Train the plain program."""
    model = make_model(dtype)
    optimizer = make_optimizer(model)
    losses = []
    for index in range(NUM_STEPS):
        optimizer.zero_grad()
        loss = loss_of(model, batch(index, batch_size))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    states = {name: parameter.detach() for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters():
        states |= {f"{name}.{key}": value for key, value in optimizer.state[parameter].items()}
    return OneDevice(losses=tuple(losses), states=states)


def planner_settings(case: Case) -> tuple[str, dict[str, Any]]:
    """Return the planner's name and settings as the preset's own file gives them."""
    text = files("sbp_planner").joinpath(f"conf/planner/{case.planner}.yaml").read_text()
    settings = {**yaml.safe_load(text), **dict(case.settings)}
    return settings.pop("name"), settings


@cache
def make_graph(dtype: torch.dtype, size: int, micro_batches: int) -> LogicalGraph:
    """Capture and prepare the training step for a batch of `size`."""
    model = make_model(dtype)
    micro = batch(0, size // micro_batches)
    captured = capture(model, loss_of, micro, make_optimizer(model))
    return prepare_step(captured, micro_batches)


@cache
def make_strategy(case: Case, dtype: torch.dtype) -> Strategy:
    """Plan a case; memory limits are given for float32 and grow with the element."""
    name, settings = planner_settings(case)
    if "memory_bytes" in dict(case.settings):
        settings["memory_bytes"] *= dtype.itemsize / torch.float32.itemsize
    mesh = Placement.grid(case.mesh, case.axes)
    planner: Any = registry().make("planner", name, settings)
    graph = make_graph(dtype, case.batch_size, case.micro_batches)
    strategy: Strategy = planner.plan(
        PlanRequest(graph=graph, mesh=mesh, cluster=cluster(mesh.size))
    )
    return strategy


@cache
def make_plan(case: Case, dtype: torch.dtype, *, boxing_thread: bool = False) -> PhysicalPlan:
    """Compile and check a case."""
    graph = make_graph(dtype, case.batch_size, case.micro_batches)
    options = CompileOptions(boxing_thread=boxing_thread)
    plan = compile_plan(graph, make_strategy(case, dtype), options)
    check(plan)
    return plan


@dataclass(frozen=True, kw_only=True)
class ParallelRun:
    """What a session gave: losses, every rank's shard of every state, and bytes sent."""

    losses: tuple[Tensor, ...]
    shards: Mapping[tuple[int, str], Tensor | float]
    sent_bytes: int


@cache
def run(
    case: Case,
    dtype: torch.dtype,
    runtime: str,
    *,
    boxing_thread: bool = False,
    repetition: int = 0,
) -> ParallelRun:
    """Run a case for `NUM_STEPS` steps on a runtime, with the `local` backend.

    Results are kept; another `repetition` runs again.
    """
    plan = make_plan(case, dtype, boxing_thread=boxing_thread)
    model = make_model(dtype)
    states = initial_states(model, make_optimizer(model))
    backend: Any = registry().make("boxing", "local", {})
    engine: Any = registry().make("runtime", runtime, {})
    session: Session
    with engine.start(plan, states, backend) as session:
        losses = tuple(
            session.step(batch(index, case.batch_size), {"lr": LEARNING_RATE}).loss
            for index in range(NUM_STEPS)
        )
        shards = {
            (part.rank, slot.name): copy.deepcopy(session.shard(slot.name, part.rank))
            for part in plan.ranks
            for slot in part.slots
            if slot.kind in ("parameter", "optimizer_state")
        }
        sent = 0
        if runtime != "reference":
            sent = sum(backend.communicator(part.rank).sent_bytes for part in plan.ranks)
    return ParallelRun(losses=losses, shards=shards, sent_bytes=sent)


def expected_shard(plan: PhysicalPlan, rank: int, name: str, whole: Tensor) -> Tensor:
    """Return the slice of a whole state that a rank should hold."""
    slot = next(slot for slot in plan.by_rank[rank].slots if slot.name == name)
    assert slot.sbp is not None, f"{name} is a host scalar"
    return shard(whole, plan.stages[slot.stage], slot.sbp)[rank]


def worst_shard(plan: PhysicalPlan, found: ParallelRun, truth: OneDevice) -> float:
    """Return the largest deviation of any rank's shard of any state from the one-device program."""
    worst = 0.0
    for (rank, name), value in found.shards.items():
        if not isinstance(value, Tensor):
            assert value == NUM_STEPS, f"{name} counts steps"
            continue
        expected = expected_shard(plan, rank, name, truth.states[name])
        assert value.shape == expected.shape, (rank, name)
        if value.numel():
            worst = max(worst, (value - expected).abs().max().item())
    return worst


def same_bits(one: Sequence[Tensor] | Tensor | float, other: object) -> bool:
    """Whether two values are equal bit for bit."""
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and torch.equal(one, other)
    return one == other

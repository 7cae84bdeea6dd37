"""A step by sbp: capture, the preset's pins, the compiler, the actor runtime."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from importlib.resources import files
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
import yaml
from matrix import Ours
from programs import LEARNING_RATE, Batch, Model, model_loss
from torch import Tensor
from torch_ways import Step

from sbp_aten.pass_options import PassOptions
from sbp_boxing_torch import TorchBackend, TorchBoxingConfig, TorchWorld
from sbp_core import Cluster, Device, Link, Placement
from sbp_core.boxing import BoxingBackend
from sbp_core.compile import PhysicalPlan
from sbp_core.compile.rank_calls import rank_calls
from sbp_core.graph import LogicalGraph
from sbp_core.operators import MeasuredOperator
from sbp_core.planning import Planner
from sbp_core.runtime import Session
from sbp_core.strategy import Strategy
from sbp_launch.compile_config import CompileConfig
from sbp_launch.planning import PlanSettings, StepFamily, capture_training, compiled
from sbp_torch.call_times import CallTimer
from sbp_torch.graph_capture import initial_states

#: What two processes on one machine reach over gloo (TCP) and over MPI (shared memory), roughly as
#: steps took them on 2 cores in November 2026 (docs/reference/speed.md); calls in a loop: faster.
LINKS = {
    "torch": Link(latency_s=3e-4, bytes_per_s=1e9),
    "mpi": Link(latency_s=1e-5, bytes_per_s=8e9),
    "local": Link(latency_s=2e-5, bytes_per_s=5e9),
}

#: What one of their cores does, likewise, and what starting an operator and a boxing step takes.
DEVICE = Device(
    memory_bytes=2**32,
    flop_per_s={"float32": 1.2e11},
    memory_bytes_per_s=1.2e10,
    launch_s=3e-6,
    boxing_launch_s=1e-4,
)


def machine(
    boxing: str,
    num_ranks: int,
    clusters: Mapping[str, str] = MappingProxyType({}),
    operators: Sequence[MeasuredOperator] = (),
) -> Cluster:
    """Return what is planned for: what a file of sbp-calibrate says, or declared rates.

    Args:
        boxing: Over which the ranks talk.
        num_ranks: How many.
        clusters: Files of sbp-calibrate by boxing backend.
        operators: What operators were measured to take.
    """
    if boxing in clusters:
        found = Cluster.load(Path(clusters[boxing])).priced_by(boxing)
        known = {one.call: one for one in (*found.device.operators, *operators)}
        return replace(found, device=replace(found.device, operators=tuple(known.values())))
    return Cluster(
        name=boxing,
        num_devices=num_ranks,
        devices_per_node=num_ranks,
        device=replace(DEVICE, operators=tuple(operators)),
        intra_node=LINKS[boxing],
    )


def make_planner(registry: Any, ours: Ours) -> Planner:
    text = files("sbp_planner").joinpath(f"conf/planner/{ours.preset}.yaml").read_text("utf-8")
    settings = {**yaml.safe_load(text), **ours.settings}
    if ours.pins:
        settings["pins"] = {**settings["pins"], **ours.pins}
    planner: Planner = registry.make("planner", settings.pop("name"), settings)
    return planner


def make_backend(registry: Any, boxing: str, name: str, store: dist.Store | None) -> BoxingBackend:
    if boxing == "torch":
        assert store is not None
        apart = dist.PrefixStore(name, store)
        world = TorchWorld(rank=dist.get_rank(), size=dist.get_world_size(), store=apart)
        return TorchBackend(TorchBoxingConfig(), world=world)
    backend: BoxingBackend = registry.make("boxing", boxing, {})
    return backend


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What all ways of a comparison have in common.

    Args:
        model: What is trained.
        registry: Of all plugins.
        store: Where processes meet; None for one rank.
        options: Of the compiler, beside the machine.
        passes: Which run before planning.
        clusters: Files of sbp-calibrate by boxing backend.
        operators: What operators were measured to take.
    """

    model: Model
    registry: Any
    store: dist.Store | None
    options: Mapping[str, Any] = field(default_factory=dict)
    passes: PassOptions = field(default_factory=PassOptions)
    clusters: Mapping[str, str] = field(default_factory=dict)
    operators: Sequence[MeasuredOperator] = ()


@dataclass(frozen=True, kw_only=True)
class Started:
    """A session, and what it runs."""

    session: Session
    plan: PhysicalPlan
    graph: LogicalGraph
    strategy: Strategy


def start_session(ours: Ours, name: str, setting: Setting, *, stack: ExitStack) -> Started:
    """Return a session on the initial states.

    Args:
        ours: How it is planned, and over what it talks.
        name: Equal on all ranks, different for each session.
        setting: Everything else.
        stack: Closes the session.
    """
    model, registry, store = setting.model, setting.registry, setting.store
    num_ranks = dist.get_world_size() if store is not None else 1
    program = model.program(registry)
    optimizer = model.make_optimizer(program.parameters())
    batch = {
        key: value[: len(value) // ours.micro_batches] for key, value in model.batch_of(0).items()
    }
    settings = PlanSettings(
        mesh=Placement.grid((num_ranks,), (ours.axis,)),
        cluster=machine(ours.boxing, num_ranks, setting.clusters, setting.operators),
        compile=CompileConfig(passes=setting.passes, **setting.options),
        micro_batches=ours.micro_batches,
    )
    planner = make_planner(registry, ours)
    captured = capture_training(program, model_loss, batch, optimizer, settings)
    family = StepFamily(
        settings=settings,
        captured=lambda _: captured.original,  # of the only size of a micro-batch that is asked for
        batch_size=len(next(iter(batch.values()))) * ours.micro_batches,
    )

    def planned(graph: LogicalGraph) -> Strategy:
        request = settings.request(graph)
        if graph is captured.graph:
            request = replace(request, family=family)
        return _of_first_rank(lambda: planner.plan(request))

    graph, strategy = captured.planned(planned)
    if strategy.variant is not None:
        settings, graph = family.settings_of(strategy.variant), family.graph(strategy.variant)
    plan = compiled(graph, strategy, settings).plan
    backend = make_backend(registry, ours.boxing, name, store)
    runtime = registry.make("runtime", "actor", {})
    states = initial_states(program, optimizer)
    session = stack.enter_context(runtime.start(plan, states, backend))
    return Started(session=session, plan=plan, graph=graph, strategy=strategy)


def _of_first_rank(make: Callable[[], Strategy]) -> Strategy:
    """Return what the first rank decides: on others a search may end elsewhere in its time."""
    if not dist.is_initialized():
        return make()
    made = [make() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(made)
    (strategy,) = made
    assert strategy is not None
    return strategy


def sbp_step(
    ours: Ours, name: str, setting: Setting, *, stack: ExitStack
) -> tuple[Step, PhysicalPlan]:
    """Return the step, and its plan; see `start_session`."""
    started = start_session(ours, name, setting, stack=stack)

    def step(batch: Batch) -> Tensor | None:
        done = started.session.step(batch, {"lr": LEARNING_RATE})
        found: torch.Tensor | None = done.outputs.get("loss")
        return found

    return step, started.plan


#: Seconds in which the calls of a step are measured, and bytes of the tensors of one, at most.
CALLS_S, CALL_BYTES = 60.0, 2e9

#: Seconds from the ranks' agreement on when to begin, to that moment.
HEAD_START_S = 3e-4


def measured_calls(setting: Setting, num_ranks: int) -> tuple[MeasuredOperator, ...]:
    """Return what the calls of a step take, however it is cut on an axis; equal on all ranks.

    What a rank may be asked to call is listed as `sbp-plan calls=FILE` does, and measured as by
    `sbp-calibrate ops=FILE`.
    """
    model = setting.model
    program = model.program(setting.registry)
    optimizer = model.make_optimizer(program.parameters())
    settings = PlanSettings(
        mesh=Placement.grid((num_ranks,), ("data",)),
        cluster=machine("local", num_ranks),
        compile=CompileConfig(passes=setting.passes, **setting.options),
    )
    captured = capture_training(program, model_loss, model.batch_of(0), optimizer, settings)
    forms = [captured.graph, *([captured.whole] if captured.whole is not None else [])]
    listed = rank_calls(forms, [settings.mesh], settings.cluster.device)
    timer = CallTimer(
        device=torch.device("cpu"),
        ready=_meet,
        slowest=_slowest,
        time_s=CALLS_S,
        max_bytes=CALL_BYTES,
    )
    return timer.run(listed.calls).operators


def _slowest(values: Sequence[float]) -> list[float]:
    found = torch.tensor(values, dtype=torch.float64)
    if dist.is_initialized():
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
    largest: list[float] = found.tolist()
    return largest


def _meet() -> None:
    """Return on all ranks at the same time."""
    (begin_s,) = _slowest([time.perf_counter() + HEAD_START_S])
    while time.perf_counter() < begin_s:
        time.sleep(0)

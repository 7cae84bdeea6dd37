"""A step by sbp: capture, the preset's pins, the compiler, the actor runtime."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from importlib.resources import files
from pathlib import Path
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
from sbp_core.plugins import Planner
from sbp_core.runtime import Session
from sbp_core.strategy import Strategy
from sbp_launch.compile_config import CompileConfig
from sbp_launch.planning import PlanSettings, capture_training, compiled
from sbp_torch.capture import initial_states

#: What two processes on one machine reach over gloo (TCP) and over MPI (shared memory), roughly as
#: `sbp-calibrate` measures them on 2 cores.
LINKS = {
    "torch": Link(latency_s=3e-4, bytes_per_s=1.8e9),
    "mpi": Link(latency_s=1e-5, bytes_per_s=4e9),
    "local": Link(latency_s=2e-5, bytes_per_s=5e9),
}


def machine(boxing: str, num_ranks: int, clusters: Mapping[str, str]) -> Cluster:
    """Return what is planned for: what a file of sbp-calibrate says, or declared rates."""
    if boxing in clusters:
        return Cluster.load(Path(clusters[boxing]))
    device = Device(memory_bytes=2**32, flop_per_s={"float32": 1e11}, memory_bytes_per_s=1e10)
    return Cluster(
        name=boxing,
        num_devices=num_ranks,
        devices_per_node=num_ranks,
        device=device,
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


def start_session(
    ours: Ours,
    name: str,
    model: Model,
    registry: Any,
    store: dist.Store | None,
    options: Mapping[str, Any] | None = None,
    passes: PassOptions | None = None,
    clusters: Mapping[str, str] | None = None,
    *,
    stack: ExitStack,
) -> tuple[Session, PhysicalPlan]:
    """Return a session on the initial states, and its plan.

    Args:
        name: Equal on all ranks, different for each session.
        store: Where processes meet; None for one rank.
        options: Of the compiler, beside the machine.
        passes: Which run before planning.
        clusters: Files of sbp-calibrate by boxing backend.
        stack: Closes the session.
    """
    num_ranks = dist.get_world_size() if store is not None else 1
    program = model.program(registry)
    optimizer = model.make_optimizer(program.parameters())
    batch = {
        key: value[: len(value) // ours.micro_batches] for key, value in model.batch_of(0).items()
    }
    cluster = machine(ours.boxing, num_ranks, clusters or {})
    settings = PlanSettings(
        mesh=Placement.grid((num_ranks,), (ours.axis,)),
        cluster=cluster,
        compile=CompileConfig(passes=passes or PassOptions(), **(options or {})),
        micro_batches=ours.micro_batches,
    )
    planner = make_planner(registry, ours)
    captured = capture_training(program, model_loss, batch, optimizer, settings)
    graph, strategy = captured.planned(
        lambda graph: _of_first_rank(lambda: planner.plan(settings.request(graph)))
    )
    plan = compiled(graph, strategy, settings).plan
    backend = make_backend(registry, ours.boxing, name, store)
    runtime = registry.make("runtime", "actor", {})
    states = initial_states(program, optimizer)
    return stack.enter_context(runtime.start(plan, states, backend)), plan


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
    ours: Ours,
    name: str,
    model: Model,
    registry: Any,
    store: dist.Store | None,
    options: Mapping[str, Any],
    passes: PassOptions,
    clusters: Mapping[str, str],
    *,
    stack: ExitStack,
) -> tuple[Step, PhysicalPlan]:
    """Return the step, and its plan; see `start_session`."""
    given = (ours, name, model, registry, store, options, passes, clusters)
    session, plan = start_session(*given, stack=stack)

    def step(batch: Batch) -> Tensor | None:
        found: torch.Tensor | None = session.step(batch, {"lr": LEARNING_RATE}).outputs.get("loss")
        return found

    return step, plan

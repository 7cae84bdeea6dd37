"""The flow of a run: capture, plan, compile, check, train, evaluate, sample.

Everything that can be swapped is asked of the registry; what happens in between is `sbp_core`'s.
"""

from __future__ import annotations

import copy
import json
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from rich.console import Console
from safetensors.torch import save_file
from torch import Tensor, nn

from sbp_core.boxing.backend import BoxingBackend
from sbp_core.capture import capture, initial_states
from sbp_core.check import CheckReport, check
from sbp_core.compile import CompileOptions, PhysicalPlan, compile_plan
from sbp_core.compile.physical import to_json as plan_to_json
from sbp_core.errors import ConfigError
from sbp_core.graph.ir import InputKind, LogicalGraph
from sbp_core.graph.passes import allow_unknown, prepare_step
from sbp_core.infer import infer_strategy
from sbp_core.placement import Cluster, Placement
from sbp_core.plugins import Registry
from sbp_core.plugins.kinds import (
    ClusterFactory,
    Dataset,
    GraphPass,
    LanguageModel,
    MetricSinkFactory,
    OptimizerFactory,
    Planner,
    PlanRequest,
    TextDataset,
)
from sbp_core.runtime import Runtime, Session
from sbp_core.signatures import Unknown
from sbp_core.strategy import Strategy
from sbp_launch.config import Choice, RunConfig
from sbp_launch.progress import StepProgress
from sbp_launch.report import counted, plan_rows, plan_table, plan_text, summary
from sbp_launch.sampling import sample_text

#: Where a run keeps every row of its plan.
_ALL_ROWS = "see plan.txt of the run folder"


class _Model(Protocol):
    def loss(self, batch: Mapping[str, Tensor]) -> Tensor: ...


def make_console() -> Console:
    """Return the console of a run; lines for files and pipes are as wide as the plan's table."""
    width = None if sys.stdout.isatty() else 140
    return Console(width=width)


def model_loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Return the model's own loss of a batch: a 0-d tensor."""
    return cast(_Model, model).loss(batch)


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """The one-device program and the machine it is for."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    data: Dataset
    mesh: Placement
    cluster: Cluster


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A graph, how it was planned, and the checked plan."""

    graph: LogicalGraph
    strategy: Strategy
    plan: PhysicalPlan
    checked: CheckReport


def make_program(run: RunConfig, registry: Registry) -> Program:
    """Build model, optimizer, data set and cluster from their plugins."""
    torch.manual_seed(run.trainer.seed)
    model = cast(nn.Module, _make(registry, "model", run.model))
    model = model.to(getattr(torch, run.trainer.dtype)).train()
    make_optimizer = cast(OptimizerFactory, _make(registry, "optimizer", run.optimizer))
    mesh = Placement.grid(run.mesh, run.axes)
    make_cluster = cast(ClusterFactory, _make(registry, "cluster", run.cluster))
    return Program(
        model=model,
        optimizer=make_optimizer(model.parameters()),
        data=cast(Dataset, _make(registry, "data", run.data)),
        mesh=mesh,
        cluster=make_cluster(mesh.size),
    )


def _make(registry: Registry, kind: str, choice: Choice) -> object:
    return registry.make(kind, choice.name, choice.settings)


def plan_step(run: RunConfig, registry: Registry, program: Program) -> Planned:
    """Capture, plan, compile and check the training step."""
    batch = program.data.batch(0, run.trainer.micro_batch_size)
    captured = capture(program.model, model_loss, batch, program.optimizer)
    passes = [cast(GraphPass, registry.make("pass", name)) for name in run.trainer.passes]
    graph = prepare_step(captured, run.trainer.micro_batches, [*passes, _unknown_ops(run)])
    planner = cast(Planner, _make(registry, "planner", run.planner))
    request = PlanRequest(graph=graph, mesh=program.mesh, cluster=program.cluster)
    return _compiled(run, program, graph, planner.plan(request))


def _unknown_ops(run: RunConfig) -> Callable[[LogicalGraph], LogicalGraph]:
    return partial(allow_unknown, unknown=Unknown(run.trainer.unknown_ops))


def _compiled(run: RunConfig, program: Program, graph: LogicalGraph, strategy: Strategy) -> Planned:
    options = CompileOptions(boxing_thread=run.trainer.boxing_thread)
    plan = compile_plan(graph, strategy, options)
    checked = check(plan, memory_bytes=program.cluster.device.memory_bytes)
    return Planned(graph=graph, strategy=strategy, plan=plan, checked=checked)


def plan_evaluation(run: RunConfig, program: Program, train: Planned) -> Planned:
    """Plan forward and loss on held-out data, with every state stored as in training.

    The model is in evaluation mode from here on.
    """
    batch = program.data.batch(0, run.trainer.micro_batch_size)
    program.model.eval()
    captured = capture(program.model, model_loss, batch, name="evaluate")
    graph = prepare_step(captured, extra=[_unknown_ops(run)])
    stored = {
        entry.name: str(train.strategy.storage[entry.name].sbp)
        for entry in graph.inputs
        if entry.kind is not InputKind.SCALAR
    }
    modules: list[list[str]] = [[] for _ in train.strategy.stages]
    for node in train.graph.nodes:
        if node.name in train.strategy.nodes and node.module:
            stage = train.strategy.nodes[node.name].stage
            if node.module not in modules[stage]:
                modules[stage].append(node.module)
    strategy = infer_strategy(
        PlanRequest(graph=graph, mesh=program.mesh, cluster=program.cluster),
        planner=train.strategy.planner,
        pins=stored,
        stages=train.strategy.stages,
        stage_patterns=modules if len(modules) > 1 else (),
        in_flight=(1,) * len(modules),
    )
    return _compiled(run, program, graph, strategy)


def plan_only(run: RunConfig, registry: Registry) -> None:
    """Plan and print the plan."""
    console = make_console()
    program = make_program(run, registry)
    planned = plan_step(run, registry, program)
    show_plan(console, run, planned, todo="raise trainer.plan_rows to see them")


def show_plan(console: Console, run: RunConfig, planned: Planned, todo: str = _ALL_ROWS) -> None:
    """Print the plan's table and its summary; `todo` says how to see the rest."""
    if run.trainer.plan_rows:
        rows = list(plan_rows(planned.graph, planned.strategy))
        console.print(plan_table(rows, run.trainer.plan_rows, console.width, todo))
    for line in summary(planned.plan, planned.strategy, planned.checked):
        console.print(line)


def start(
    run: RunConfig, registry: Registry, plan: PhysicalPlan, states: Mapping[str, Tensor]
) -> Session:
    """Start a plan on the chosen runtime and boxing backend."""
    runtime = cast(Runtime, _make(registry, "runtime", run.runtime))
    return runtime.start(plan, states, make_backend(run, registry))


def make_backend(run: RunConfig, registry: Registry) -> BoxingBackend:
    """Return the chosen boxing backend, not yet open.

    Raises:
        ConfigError: its ranks live in several processes, which the trainer does not start yet.
    """
    backend = cast(BoxingBackend, _make(registry, "boxing", run.boxing))
    if backend.spans_processes:
        raise ConfigError(
            f"boxing={run.boxing.name} connects one process a rank, and sbp-train runs all ranks "
            "in one process",
            accepted="boxing=local",
            todo="leave out boxing, or drive the backend from your own program",
        )
    return backend


def train(run: RunConfig, registry: Registry, run_folder: Path) -> None:
    """Train as the config says; print the plan, the progress, and what came of it.

    Leaves in the run folder: `strategy.json`, `plan.json`, `plan.txt`, the metrics, and the trained
    states as `states.safetensors`, which are written also if the run is interrupted or fails.
    """
    console = make_console()
    make_backend(run, registry)
    program = make_program(run, registry)
    parameters = sum(p.numel() for p in program.model.parameters())
    console.print(
        f"{run.model.name}: {parameters:,} parameters; data: {program.data.describe()}",
    )
    began = time.perf_counter()
    planned = plan_step(run, registry, program)
    _save_plan(planned, run_folder)
    show_plan(console, run, planned)
    console.print(f"captured, planned and compiled in {time.perf_counter() - began:.1f} s")
    twin = _Twin(program) if run.trainer.compare_steps else None
    states = initial_states(program.model, program.optimizer)
    session = start(run, registry, planned.plan, states)
    speed = ""
    try:
        with session:
            try:
                speed = _train_steps(run, registry, run_folder, console, program, session, twin)
            finally:
                states = session.state_dict()
                save_file(
                    {k: v.contiguous() for k, v in states.items()},
                    run_folder / "states.safetensors",
                )
                if not speed:
                    console.print("stopped early; the states so far are in states.safetensors")
        console.print(f"{counted(run.trainer.steps, 'step')}, {speed}")
        _conclude(run, registry, console, program, planned, states, twin)
    finally:
        console.print(f"run folder: {run_folder}", highlight=False, soft_wrap=True)


def _save_plan(planned: Planned, run_folder: Path) -> None:
    run_folder.mkdir(parents=True, exist_ok=True)
    planned.strategy.save(run_folder / "strategy.json")
    text = json.dumps(plan_to_json(planned.plan))
    (run_folder / "plan.json").write_text(text, encoding="utf-8")
    rows = list(plan_rows(planned.graph, planned.strategy))
    (run_folder / "plan.txt").write_text(plan_text(rows), encoding="utf-8")


class _Twin:
    """The one-device program, run beside the first steps: eager model, autograd, `torch.optim`."""

    def __init__(self, program: Program) -> None:
        self.model, self.optimizer = copy.deepcopy((program.model, program.optimizer))
        self.losses: list[float] = []
        self.deviations: list[float] = []

    def step(self, batch: Mapping[str, Tensor], loss: float) -> None:
        """Take one step and note how far the parallel loss is from it."""
        self.optimizer.zero_grad()
        own = model_loss(self.model, batch)
        own.backward()  # type: ignore[no-untyped-call] # torch leaves it untyped
        self.optimizer.step()
        self.losses.append(own.item())
        self.deviations.append(abs(loss - own.item()))

    def verdict(self) -> str:
        """Return the line that is printed."""
        worst = max(self.deviations)
        pairs = zip(self.deviations, self.losses, strict=True)
        relative = max(deviation / abs(loss or 1.0) for deviation, loss in pairs)
        return (
            f"largest deviation of the loss from the one-device program over the first "
            f"{counted(len(self.losses), 'step')}: {worst:.2e} ({relative:.2e} relative)"
        )


def _train_steps(
    run: RunConfig,
    registry: Registry,
    run_folder: Path,
    console: Console,
    program: Program,
    session: Session,
    twin: _Twin | None,
) -> str:
    """Run all steps; return the speed as text."""
    make_sink = cast(MetricSinkFactory, _make(registry, "logger", run.logger))
    sink = make_sink(run_folder)
    settings = run.trainer
    rates = {
        "lr" if len(program.optimizer.param_groups) == 1 else f"lr.{i}": float(group["lr"])
        for i, group in enumerate(program.optimizer.param_groups)
    }
    is_text = isinstance(program.data, TextDataset)
    unit = "tokens" if is_text else "samples"
    try:
        with StepProgress(console, settings.steps, settings.log_every, unit) as progress:
            for index in range(settings.steps):
                batch = program.data.batch(index, settings.batch_size)
                loss = session.step(batch, rates).loss.item()
                if twin is not None and index < settings.compare_steps:
                    twin.step(batch, loss)
                count = next(iter(batch.values())).numel() if is_text else settings.batch_size
                progress.advance(index + 1, loss, count)
                sink.log(index + 1, {"loss": loss, f"{unit}_per_s": progress.rate(), **rates})
            return f"{progress.rate():,.0f} {unit}/s"
    finally:
        sink.close()


def _conclude(
    run: RunConfig,
    registry: Registry,
    console: Console,
    program: Program,
    planned: Planned,
    states: Mapping[str, Tensor],
    twin: _Twin | None,
) -> None:
    """Print held-out loss, a sample of text, and the deviation from the one-device program."""
    if run.trainer.eval_batches:
        loss = evaluate(run, registry, program, planned, states)
        batches = counted(run.trainer.eval_batches, "batch", "es")
        console.print(f"held-out loss: {loss:.4f} ({batches})", highlight=False)
    model: Any = program.model
    talks = isinstance(program.data, TextDataset) and isinstance(model, LanguageModel)
    if run.trainer.sample_tokens and talks:
        names = {name for name, _ in (*model.named_parameters(), *model.named_buffers())}
        model.load_state_dict({k: v for k, v in states.items() if k in names}, strict=False)
        model.eval()
        data = cast(TextDataset, program.data)
        text = sample_text(model, data, "\ndef ", run.trainer.sample_tokens, run.trainer.seed)
        console.rule("a sample of text")
        console.print(text, markup=False)
        console.rule()
    if twin is not None and twin.losses:
        console.print(twin.verdict())


def evaluate(
    run: RunConfig,
    registry: Registry,
    program: Program,
    planned: Planned,
    states: Mapping[str, Tensor],
) -> float:
    """Return the mean loss over held-out batches, by all ranks, a micro-batch at a time."""
    evaluation = plan_evaluation(run, program, planned)
    names = {entry.name for entry in evaluation.graph.inputs if entry.kind.is_state}
    held = {name: states[name] for name in names}
    total, count = 0.0, run.trainer.eval_batches * run.trainer.micro_batches
    with start(run, registry, evaluation.plan, held) as session:
        for index in range(count):
            batch = program.data.batch(index, run.trainer.micro_batch_size, "validation")
            total += session.step(batch, {}).loss.item()
    return total / count

"""From the one-device program to a checked plan: capture, passes, planner, compiler, check."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import cast

from torch import nn

from sbp_aten.passes import prepare_step
from sbp_core.boxing import StepKind
from sbp_core.check import CheckReport, check
from sbp_core.compile import CompileOptions, Lowered, PhysicalPlan, compile_plan, lower
from sbp_core.errors import CaptureError, ConfigError, PlanError
from sbp_core.graph import InputKind, LogicalGraph, Phase, Rate
from sbp_core.infer import infer_strategy
from sbp_core.memory import MemoryReport, check_memory, predict_memory
from sbp_core.passes import allow_unknown
from sbp_core.plugins import GraphPass, Planner, PlanRequest
from sbp_core.signatures import UnknownOperator
from sbp_core.strategy import Strategy
from sbp_launch.compile_config import CompileConfig
from sbp_launch.config import RunConfig
from sbp_launch.patterns import check_patterns
from sbp_launch.program import Program, model_loss
from sbp_launch.rows import ModuleRow, OpRow, module_rows, op_rows
from sbp_launch.run import Run
from sbp_torch.capture import capture


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A graph, how it was planned, and the checked plan.

    `memory` says what each rank's memory holds, or why it is not known.
    """

    graph: LogicalGraph
    strategy: Strategy
    plan: PhysicalPlan
    checked: CheckReport
    memory: MemoryReport | str = ""

    @cached_property
    def lowered(self) -> Lowered:
        """The ops with their boxing, before small tensors are merged to travel together."""
        return lower(self.graph, self.strategy)

    @property
    def num_steps(self) -> Mapping[StepKind, int]:
        """Boxing steps that send something in a training step, by kind, before some are merged."""
        found: Counter[StepKind] = Counter()
        for item in self.lowered.items:
            if item.step is not None and item.step.size_bytes:
                is_micro = item.rate is Rate.MICRO
                found[item.step.kind] += self.graph.num_micro_batches if is_micro else 1
        return found

    @cached_property
    def module_rows(self) -> tuple[ModuleRow, ...]:
        """The rows of the printed plan."""
        return module_rows(self.graph, self.strategy, self.lowered)

    @cached_property
    def op_rows(self) -> tuple[OpRow, ...]:
        """The rows of `plan.txt`."""
        return tuple(op_rows(self.graph, self.strategy, self.lowered))


def plan_step(run: Run, program: Program) -> Planned:
    """Capture, plan, compile and check the training step."""
    config = run.config
    with run.stage("capturing the step"):
        captured = _captured(config, program)
        _check_precision(config, captured)
        extra = _extra_passes(run)
        micro_batches = config.trainer.micro_batches
        graph = prepare_step(captured, micro_batches, extra, options=config.compile.passes)
    with run.stage("planning"):
        planner: Planner = run.make("planner")
        request = PlanRequest(
            graph=graph,
            mesh=program.mesh,
            cluster=program.cluster,
            options=_compile_options(config, program),
            regather=config.compile.regather,
        )
        found = _plan(planner, request, config.planner.file)
        if not isinstance(found, Strategy):
            raise run.entry("planner").returned(found, "a Strategy", by="plan")
        strategy = _regathering(found, config)
    with run.stage("compiling and checking the plan"):
        planned = _compiled(config, program, graph, strategy)
    with run.stage("predicting its memory"):
        return _with_memory(planned, program)


def _captured(config: RunConfig, program: Program) -> LogicalGraph:
    """Capture the training step.

    Raises:
        CaptureError: it cannot be captured.
        ConfigError: the model asks its batch for what the data do not give; names both files.
    """
    try:
        return capture(
            program.model,
            model_loss,
            program.batch(0, config.trainer.micro_batch_size),
            program.optimizer,
            update=config.trainer.update,
            autocast=config.compile.autocast,
            per_shard_random=config.compile.random == "per_shard",
        )
    except CaptureError as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, ConfigError):
            cause = cause.__cause__
        if cause is None:
            raise
        where = (*cause.where, config.model.file, config.data.file)
        raise ConfigError(
            cause.what, where=where, accepted=cause.accepted, todo=cause.todo
        ) from error


def _plan(planner: Planner, request: PlanRequest, file: str) -> Strategy:
    """Plan; what a planner refuses is said with the file of its option.

    Raises:
        ConfigError: see `Planner`.
    """
    try:
        return planner.plan(request)
    except ConfigError as error:
        where = error.where if file in error.where else (*error.where, file)
        raise ConfigError(
            error.what, where=where, accepted=error.accepted, todo=error.todo
        ) from error


def _with_memory(planned: Planned, program: Program) -> Planned:
    """Predict what the plan needs, and compare it with the memory of a rank.

    Raises:
        ConfigError: a rank would not fit its memory.
    """
    try:
        memory = predict_memory(planned.plan)
    except PlanError as error:
        return replace(planned, memory=error.what)
    try:
        check_memory(memory, program.cluster.device.memory_bytes)
    except PlanError as error:
        raise ConfigError(
            error.what, where="cluster.memory_bytes", accepted=error.accepted, todo=error.todo
        ) from error
    return replace(planned, memory=memory)


def _regathering(strategy: Strategy, config: RunConfig) -> Strategy:
    """Return the strategy with what the config says of gathers; left alone, it says its own."""
    chosen = config.compile.regather
    return strategy if chosen == CompileConfig().regather else replace(strategy, regather=chosen)


def _check_precision(config: RunConfig, graph: LogicalGraph) -> None:
    """Check the patterns of mixed precision, which may name operators, too.

    Raises:
        ConfigError: one matches nothing.
    """
    how = config.compile.passes.mixed_precision
    if how is None:
        return
    kinds = sorted({node.kind for node in graph.nodes})
    modules = sorted({node.module for node in graph.nodes if node.module})
    key = "compile.passes.mixed_precision"
    check_patterns(f"{key}.keep", how.keep, [*modules, *kinds], "module and no operator")
    check_patterns(f"{key}.lower", how.lower, kinds, "operator")


def _extra_passes(run: Run) -> list[GraphPass]:
    """Return the passes of plugins, and what becomes of operators without a rule."""
    config = run.config.compile
    chosen = [cast(GraphPass, run.registry.make("pass", name)) for name in config.plugins]
    return [*chosen, partial(allow_unknown, unknown=UnknownOperator(config.unknown_ops))]


def _compiled(
    config: RunConfig, program: Program, graph: LogicalGraph, strategy: Strategy
) -> Planned:
    plan = compile_plan(graph, strategy, _compile_options(config, program))
    checked = check(plan)
    return Planned(graph=graph, strategy=strategy, plan=plan, checked=checked)


def _compile_options(config: RunConfig, program: Program) -> CompileOptions:
    return CompileOptions(
        boxing_thread=config.compile.boxing_thread,
        bucket_bytes=config.compile.bucket_bytes,
        cluster=program.cluster,
        prefetch=config.compile.prefetch,
        in_place_states=config.compile.in_place_states,
    )


def plan_evaluation(run: Run, program: Program, train: Planned) -> Planned:
    """Plan forward and loss on held-out data, with every state stored as in training.

    The model is in evaluation mode while it is captured, and as it was afterwards.
    """
    config = run.config
    stored = {name: str(entry.sbp) for name, entry in train.strategy.storage.items()}
    modules: list[list[str]] = [[] for _ in train.strategy.stages]
    for node in train.graph.nodes:
        if node.name in train.strategy.nodes and node.phase is Phase.FORWARD and node.module:
            stage = train.strategy.nodes[node.name].stage
            if node.module not in modules[stage]:
                modules[stage].append(node.module)

    with _evaluating(program.model):
        captured = capture(
            program.model,
            model_loss,
            program.batch(0, config.trainer.micro_batch_size),
            name="evaluate",
            autocast=config.compile.autocast,
            per_shard_random=config.compile.random == "per_shard",
        )
    graph = prepare_step(captured, extra=_extra_passes(run), options=config.compile.passes)
    pins = {e.name: stored[e.name] for e in graph.inputs if e.kind is not InputKind.SCALAR}
    strategy = infer_strategy(
        PlanRequest(graph=graph, mesh=program.mesh, cluster=program.cluster),
        planner=train.strategy.planner,
        pins=pins,
        stages=train.strategy.stages,
        stage_patterns=modules if len(modules) > 1 else (),
        in_flight=(1,) * len(modules),
    )
    regather = train.strategy.regather
    made = _compiled(config, program, graph, replace(strategy, regather=regather))
    return _with_memory(made, program)


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode inside the `with` block."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training

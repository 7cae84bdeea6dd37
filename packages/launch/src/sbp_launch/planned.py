"""From the one-device program to a checked plan: capture, passes, planner, compiler, check.

With `compile.cache` the result of it all is kept on disk under a fingerprint of the program and of
everything that was chosen and matters to the plan, so that the next start of the same run plans
nothing.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from sbp_torch.capture.fingerprint import fingerprint, sources
from torch import nn

from sbp_aten.passes import prepare_step
from sbp_core.check import CheckReport, check, check_memory
from sbp_core.compile import CompileOptions, PhysicalPlan, compile_plan
from sbp_core.compile.cache import PlanCache, default_folder
from sbp_core.errors import CaptureError, PlanError
from sbp_core.graph.ir import InputKind, LogicalGraph, Phase
from sbp_core.infer import infer_strategy
from sbp_core.memory import MemoryReport
from sbp_core.passes import allow_unknown
from sbp_core.plugins import Registry
from sbp_core.plugins.kinds import GraphPass, Planner, PlanRequest
from sbp_core.signatures import Unknown
from sbp_core.strategy import Strategy
from sbp_launch.compile_config import CompileConfig
from sbp_launch.config import Choice, RunConfig
from sbp_launch.patterns import check_patterns
from sbp_launch.program import Program, make_choice, model_loss
from sbp_launch.progress import Stages
from sbp_launch.report import Row, plan_rows
from sbp_torch.capture import capture
from sbp_torch.memory import predict

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A graph, how it was planned, and the checked plan.

    `rows` are those of the plan's table. `memory` says what each rank's memory holds, or why it is
    not known.
    """

    graph: LogicalGraph
    strategy: Strategy
    plan: PhysicalPlan
    checked: CheckReport
    rows: tuple[Row, ...] = ()
    memory: MemoryReport | str = ""


def plan_step(
    run: RunConfig, registry: Registry, program: Program, stages: Stages | None = None
) -> Planned:
    """Capture, plan, compile and check the training step; or find what that gave before."""
    says = stages or Stages()

    def make() -> Planned:
        made = _plan_anew(run, registry, program, says)
        rows = tuple(plan_rows(made.graph, made.strategy))
        with says.of("measuring its memory"):
            return replace(_with_memory(made, program), rows=rows)

    settings = (*_settings(run, program), run.trainer.update, run.trainer.micro_batches)
    return _cached(run, program, settings, make, program.optimizer, says)


def _settings(run: RunConfig, program: Program) -> tuple[Any, ...]:
    """Return what was chosen and matters to any plan, beside model, loss, batch and optimizer."""
    return (run.planner, _files_of(run.planner), run.compile, program.mesh, program.cluster)


def _files_of(choice: Choice) -> dict[str, str]:
    """Return a digest of every file that a plugin's settings name."""
    found = {}
    for name, value in choice.settings.items():
        path = Path(value) if isinstance(value, str) and value else None
        if path is not None and path.is_file():
            found[name] = hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()
    return found


def _cached(
    run: RunConfig,
    program: Program,
    settings: tuple[Any, ...],
    make: Callable[[], Planned],
    optimizer: torch.optim.Optimizer | None = None,
    stages: Stages | None = None,
) -> Planned:
    """Return what `make` makes, or what it made before for this program and these settings."""
    if not run.compile.cache:
        return make()
    cache = PlanCache(default_folder(os.environ, Path.home()))
    try:
        with (stages or Stages()).of("looking for a cached plan"):
            batch = program.batch(0, run.trainer.micro_batch_size)
            key = fingerprint(program.model, model_loss, batch, optimizer, settings=settings)
            found = cache.load(key)
    except CaptureError as error:
        logger.warning("this program is planned anew at every start: %s", error.what)
        return make()
    if found is None:
        found = make()
        cache.store(key, found, sources())
    assert isinstance(found, Planned), f"the cache holds a {type(found).__name__}"
    return found


def _with_memory(planned: Planned, program: Program) -> Planned:
    """Find out what the plan needs, from a replay of the step.

    Raises:
        PlanError: a rank would not fit its memory.
    """
    limit = program.cluster.device.memory_bytes
    try:
        memory = predict(planned.plan)
    except PlanError as error:
        check_memory(planned.checked.needs, limit)
        return replace(planned, memory=error.what)
    check_memory(memory.needs, limit)
    return replace(planned, memory=memory)


def _plan_anew(run: RunConfig, registry: Registry, program: Program, says: Stages) -> Planned:
    with says.of("capturing the step"):
        captured = capture(
            program.model,
            model_loss,
            program.batch(0, run.trainer.micro_batch_size),
            program.optimizer,
            update=run.trainer.update,
            autocast=run.compile.autocast,
            per_shard_random=run.compile.random == "per_shard",
        )
        _check_precision(run, captured)
        graph = prepare_step(
            captured,
            run.trainer.micro_batches,
            _extra_passes(run, registry),
            options=run.compile.passes,
        )
    with says.of("planning"):
        planner = cast(Planner, make_choice(registry, "planner", run.planner))
        request = PlanRequest(graph=graph, mesh=program.mesh, cluster=program.cluster)
        strategy = _regathering(planner.plan(request), run)
    with says.of("compiling and checking the plan"):
        return _compiled(run, program, graph, strategy)


def _regathering(strategy: Strategy, run: RunConfig) -> Strategy:
    """Return the strategy with what the config says of gathers; left alone, it says its own."""
    chosen = run.compile.regather
    return strategy if chosen == CompileConfig().regather else replace(strategy, regather=chosen)


def _check_precision(run: RunConfig, graph: LogicalGraph) -> None:
    """Check the patterns of mixed precision, which may name operators, too.

    Raises:
        ConfigError: one matches nothing.
    """
    how = run.compile.passes.mixed_precision
    if how is None:
        return
    kinds = sorted({node.kind for node in graph.nodes})
    modules = sorted({node.module for node in graph.nodes if node.module})
    key = "compile.passes.mixed_precision"
    check_patterns(f"{key}.keep", how.keep, [*modules, *kinds], "module and no operator")
    check_patterns(f"{key}.lower", how.lower, kinds, "operator")


def _extra_passes(run: RunConfig, registry: Registry) -> list[GraphPass]:
    """Return the passes of plugins, and what becomes of operators without a rule."""
    chosen = [cast(GraphPass, registry.make("pass", name)) for name in run.compile.plugins]
    return [*chosen, partial(allow_unknown, unknown=Unknown(run.compile.unknown_ops))]


def _compiled(run: RunConfig, program: Program, graph: LogicalGraph, strategy: Strategy) -> Planned:
    options = CompileOptions(
        boxing_thread=run.compile.boxing_thread,
        bucket_bytes=run.compile.bucket_bytes,
        cluster=program.cluster,
        prefetch=run.compile.prefetch,
        in_place_states=run.compile.in_place_states,
    )
    plan = compile_plan(graph, strategy, options)
    checked = check(plan)
    return Planned(graph=graph, strategy=strategy, plan=plan, checked=checked)


def plan_evaluation(
    run: RunConfig, registry: Registry, program: Program, train: Planned
) -> Planned:
    """Plan forward and loss on held-out data, with every state stored as in training.

    The model is in evaluation mode while it is captured, and as it was afterwards.
    """
    stored = {name: str(entry.sbp) for name, entry in train.strategy.storage.items()}
    modules: list[list[str]] = [[] for _ in train.strategy.stages]
    for node in train.graph.nodes:
        if node.name in train.strategy.nodes and node.phase is Phase.FORWARD and node.module:
            stage = train.strategy.nodes[node.name].stage
            if node.module not in modules[stage]:
                modules[stage].append(node.module)

    def make() -> Planned:
        captured = capture(
            program.model,
            model_loss,
            program.batch(0, run.trainer.micro_batch_size),
            name="evaluate",
            autocast=run.compile.autocast,
            per_shard_random=run.compile.random == "per_shard",
        )
        extra = _extra_passes(run, registry)
        graph = prepare_step(captured, extra=extra, options=run.compile.passes)
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
        made = _compiled(run, program, graph, replace(strategy, regather=regather))
        check_memory(made.checked.needs, program.cluster.device.memory_bytes)
        return made

    # As values of their own: the mesh may or may not be the very object that the stages hold.
    meshes = [stage.to_json() for stage in train.strategy.stages]
    planned = (train.strategy.planner, stored, modules, meshes, train.strategy.regather)
    settings = ("evaluate", *_settings(run, program), planned)
    with _evaluating(program.model):
        return _cached(run, program, settings, make)


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

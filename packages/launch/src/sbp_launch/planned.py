"""From the one-device program to a checked plan: capture, passes, planner, compiler, check.

With `compile.cache` the result of it all is kept on disk under a fingerprint of the program and of
everything that was chosen, so that the next start of the same run plans nothing.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import cast

from sbp_core.capture import capture
from sbp_core.capture.fingerprint import fingerprint, sources
from sbp_core.check import CheckReport, check
from sbp_core.compile import CompileOptions, PhysicalPlan, compile_plan
from sbp_core.compile.cache import PlanCache, default_folder
from sbp_core.errors import CaptureError
from sbp_core.graph.ir import InputKind, LogicalGraph
from sbp_core.graph.passes import allow_unknown, prepare_step
from sbp_core.infer import infer_strategy
from sbp_core.plugins import Registry
from sbp_core.plugins.kinds import GraphPass, Planner, PlanRequest
from sbp_core.signatures import Unknown
from sbp_core.strategy import Strategy
from sbp_launch.config import RunConfig
from sbp_launch.program import Program, make_choice, model_loss

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A graph, how it was planned, and the checked plan."""

    graph: LogicalGraph
    strategy: Strategy
    plan: PhysicalPlan
    checked: CheckReport


def plan_step(run: RunConfig, registry: Registry, program: Program) -> Planned:
    """Capture, plan, compile and check the training step; or find what that gave before."""
    make = partial(_plan_anew, run, registry, program)
    if not run.compile.cache:
        return make()
    try:
        batch = program.data.batch(0, run.trainer.micro_batch_size)
        settings = (run.planner, run.compile, run.trainer, program.mesh, program.cluster)
        key = fingerprint(program.model, model_loss, batch, program.optimizer, settings=settings)
    except CaptureError as error:
        logger.warning("this program is planned anew at every start: %s", error.what)
        return make()

    def values() -> tuple[LogicalGraph, Strategy, PhysicalPlan, CheckReport]:
        made = make()
        return made.graph, made.strategy, made.plan, made.checked

    cache = PlanCache(default_folder(os.environ, Path.home()))
    graph, strategy, plan, checked = cache.value(key, values, sources)
    return Planned(graph=graph, strategy=strategy, plan=plan, checked=checked)


def _plan_anew(run: RunConfig, registry: Registry, program: Program) -> Planned:
    captured = capture(
        program.model,
        model_loss,
        program.data.batch(0, run.trainer.micro_batch_size),
        program.optimizer,
        update=run.trainer.update,
        autocast=run.compile.autocast,
        per_shard_random=run.compile.random == "per_shard",
    )
    passes = [cast(GraphPass, registry.make("pass", name)) for name in run.compile.plugins]
    graph = prepare_step(
        captured,
        run.trainer.micro_batches,
        [*passes, _unknown_ops(run)],
        options=run.compile.passes,
    )
    planner = cast(Planner, make_choice(registry, "planner", run.planner))
    request = PlanRequest(graph=graph, mesh=program.mesh, cluster=program.cluster)
    strategy = replace(planner.plan(request), regather=run.compile.regather)
    return _compiled(run, program, graph, strategy)


def _unknown_ops(run: RunConfig) -> Callable[[LogicalGraph], LogicalGraph]:
    return partial(allow_unknown, unknown=Unknown(run.compile.unknown_ops))


def _compiled(run: RunConfig, program: Program, graph: LogicalGraph, strategy: Strategy) -> Planned:
    options = CompileOptions(
        boxing_thread=run.compile.boxing_thread,
        bucket_bytes=run.compile.bucket_bytes,
        cluster=program.cluster,
        prefetch=run.compile.prefetch,
        in_place_states=run.compile.in_place_states,
    )
    plan = compile_plan(graph, strategy, options)
    checked = check(plan, memory_bytes=program.cluster.device.memory_bytes)
    return Planned(graph=graph, strategy=strategy, plan=plan, checked=checked)


def plan_evaluation(run: RunConfig, program: Program, train: Planned) -> Planned:
    """Plan forward and loss on held-out data, with every state stored as in training.

    The model is in evaluation mode from here on.
    """
    batch = program.data.batch(0, run.trainer.micro_batch_size)
    program.model.eval()
    captured = capture(
        program.model, model_loss, batch, name="evaluate", autocast=run.compile.autocast
    )
    graph = prepare_step(captured, extra=[_unknown_ops(run)], options=run.compile.passes)
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

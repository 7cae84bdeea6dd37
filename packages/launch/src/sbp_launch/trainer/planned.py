"""The plan of a run: what its config says of `planning`, and whose files are to blame."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, cast

from sbp_aten.pass_options import LossMeaning
from sbp_core.collection import collection_paused
from sbp_core.errors import CaptureError, ConfigError
from sbp_core.graph import LogicalGraph
from sbp_core.infer import PinValue
from sbp_core.memory import KeptPlans
from sbp_core.plugins import GraphPass, Planner, PlanRequest
from sbp_core.strategy import Strategy
from sbp_launch.planning.beside import plan_beside
from sbp_launch.planning.checked_planner import CheckedPlanner
from sbp_launch.planning.family import StepFamily
from sbp_launch.planning.flow import (
    Captured,
    Planned,
    PlanSettings,
    capture_forward,
    capture_step,
    check_fits,
    compiled,
    evaluating,
    prepared,
    regathering,
    with_averages,
)
from sbp_launch.planning.proving import proved
from sbp_launch.planning.unchanged import check_unchanged
from sbp_launch.run.run import Run
from sbp_launch.trainer.program import Program, model_loss
from sbp_torch.guards import Guard


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlanner:
    """Plans a captured training step, once or again with other pins.

    Args:
        run: What asks for it; says on its console what is done.
        captured: The step.
        settings: How it is planned.
        family: The variants of the step that a planner may choose.
    """

    run: Run
    captured: Captured
    settings: PlanSettings
    family: StepFamily

    @collection_paused()
    def plan(self, pins: Mapping[str, PinValue] | None = None) -> Planned:
        """Plan, compile and check the step; whether it fits its memory is not checked.

        Args:
            pins: What must hold beside what the config of the planner says, which they override; a
                planner that only reads its plans heeds none.
        """
        run, config = self.run, self.run.config
        with run.stage("planning"):
            planner = CheckedPlanner(planner=run.make("planner"), entry=run.entry("planner"))
            kept = KeptPlans()

            def plan(graph: LogicalGraph) -> Strategy:
                request = replace(self.settings.request(graph, pins), kept=kept)
                if graph is self.captured.graph:
                    request = replace(request, family=self.family)
                found = _plan(planner, request, config.planner.file)
                return regathering(found, config.compile)

            graph, strategy = self.captured.planned(plan)
            settings = self.settings
            if strategy.variant is not None:
                settings = self.family.settings_of(strategy.variant)
                graph = self.family.graph(strategy.variant)
        with run.stage("compiling and checking the plan"):
            return compiled(graph, strategy, settings, kept)


@collection_paused(plans=True)
def step_planner(run: Run, program: Program) -> StepPlanner:
    """Capture the training step, and return what plans it."""
    settings, trainer = plan_settings(run, program), run.config.trainer
    with run.stage("capturing the step"):
        whole = trainer.batch_size // settings.captured_parts
        guard = program_guard(run, program)
        original = _captured(run, program, settings, whole)
        again = partial(_captured, run, program, settings, whole)
        check_unchanged(guard, original, again, partial(program_guard, run, program))
        graph = prepared(original, settings)

    @cache
    def captured(size: int) -> LogicalGraph:
        return original if size == whole else _captured(run, program, settings, size)

    family = StepFamily(
        settings=settings,
        captured=captured,
        batch_size=trainer.batch_size,
        chooses_micro_batches=run.chooses_micro_batches,
        known=graph,
    )
    found = Captured(graph=graph, original=original, settings=settings)
    return StepPlanner(run=run, captured=found, settings=settings, family=family)


def program_guard(run: Run, program: Program) -> Guard:
    """Return what says later whether the program is what it is now."""
    return Guard(program.model, model_loss, program.optimizer, run.config.trainer.update)


def plan_step(run: Run, program: Program) -> Planned:
    """Capture, plan, compile, check and prove the training step."""
    planner = step_planner(run, program)
    planned = planner.plan()
    check_memory_of(planned, run)
    settings = planned.settings
    size = run.config.trainer.batch_size // settings.captured_parts

    def capture(batch: Any) -> LogicalGraph:
        return capture_step(program.model, model_loss, batch, program.optimizer, settings)

    with run.stage("proving the step") if settings.compile.prove else nullcontext():
        states = partial(program.made.states, program.optimizer, run.config.trainer.update)
        captured = planner.family.captured(size)
        return proved(planned, captured, program.example(size), states, capture)


def check_memory_of(planned: Planned, run: Run) -> None:
    """Check that a plan fits the memory of its ranks.

    Raises:
        ConfigError: it does not.
    """
    with run.stage("checking its memory"):
        check_fits(planned, planned.settings.cluster)


def plan_settings(run: Run, program: Program) -> PlanSettings:
    """Return what the config of a run says of planning."""
    config = run.config
    names = config.compile.plugins
    return PlanSettings(
        mesh=program.mesh,
        cluster=program.cluster,
        compile=config.compile,
        passes=tuple(cast(GraphPass, run.registry.make("pass", name)) for name in names),
        micro_batches=config.trainer.num_micro_batches,
        loss=LossMeaning(config.trainer.loss),
        micro_batches_per_update=config.trainer.micro_batches_per_update,
        update=config.trainer.update,
    )


def _captured(run: Run, program: Program, settings: PlanSettings, size: int) -> LogicalGraph:
    """Capture the training step on so many samples.

    Raises:
        CaptureError: it cannot be captured.
        ConfigError: the model asks its batch for what the data do not give; names both files.
    """
    config = run.config
    batch = program.example(size)
    try:
        return capture_step(program.model, model_loss, batch, program.optimizer, settings)
    except CaptureError as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, ConfigError):
            cause = cause.__cause__
        if cause is None:
            raise
        where = (*cause.where, config.model.file, config.data.file)
        raise cause.replaced(ConfigError, where=where) from error


def _plan(planner: Planner, request: PlanRequest, file: str) -> Strategy:
    """Plan; what a planner refuses is said with the file of its option.

    Raises:
        ConfigError: see `Planner`.
    """
    try:
        return planner.plan(request)
    except ConfigError as error:
        where = error.where if file in error.where else (*error.where, file)
        raise error.replaced(ConfigError, where=where) from error


def plan_evaluation(run: Run, program: Program, train: Planned) -> Planned:
    """Plan forward and loss on held-out data, with every state stored as in training.

    The averages of parameters are evaluated where there are some (`trainer.update.ema_decay`). The
    model is in evaluation mode while it is captured, and as it was afterwards.
    """
    settings = plan_settings(run, program)
    batch = program.example(run.config.trainer.micro_batch_size)
    with evaluating(program.model):
        graph = capture_forward(program.model, model_loss, batch, settings, "evaluate")
    return plan_beside(train, with_averages(graph, train.graph), settings)

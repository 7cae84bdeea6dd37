"""Make, from the config of a run, the settings of planning, the planner, and the engine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

from torch import Tensor

from sbp_aten.pass_options import LossMeaning
from sbp_core.boxing import BoxingBackend
from sbp_core.plugins import GraphPass
from sbp_core.runtime import Runtime
from sbp_launch.planning.checked_planner import CheckedPlanner
from sbp_launch.planning.flow import Planned, PlanSettings
from sbp_launch.run.run import Run
from sbp_launch.step.engine import Engine
from sbp_launch.step.following import Following
from sbp_launch.step.step_capture import StepCapture
from sbp_launch.step.step_planner import PlanChoice, StepPlanner, step_planner
from sbp_launch.trainer.run_program import RunProgram

#: How to save a run to another place, for messages.
ELSEWHERE = "name another place: hydra.run.dir=FOLDER"


def plan_settings(run: Run, program: RunProgram) -> PlanSettings:
    """Return the settings of planning, from the config of a run."""
    config, trainer = run.config, run.config.trainer
    names = config.compile.plugins
    return PlanSettings(
        mesh=program.mesh,
        cluster=program.cluster,
        compile=config.compile,
        passes=tuple(cast(GraphPass, run.registry.make("pass", name)) for name in names),
        micro_batches=1 if trainer.micro_batches == "auto" else trainer.micro_batches,
        loss=LossMeaning(trainer.loss),
        micro_batches_per_update=trainer.micro_batches_per_update,
        update=trainer.update,
    )


def plan_choice(run: Run) -> PlanChoice:
    """Return the planner and pins that the config of a run chooses."""
    config = run.config
    return PlanChoice(
        planner=CheckedPlanner(planner=run.make("planner"), entry=run.entry("planner")),
        chooses_micro_batches=config.trainer.micro_batches == "auto",
        files=(config.model.file, config.data.file),
        planner_file=config.planner.file,
    )


def engine_of(run: Run, program: RunProgram, backend: BoxingBackend) -> Engine:
    """Return the engine that starts the step of a run.

    Args:
        run: The run.
        program: The one-device program.
        backend: The boxing backend, not yet open.
    """
    runtime: Runtime = run.make("runtime")
    return Engine(
        settings=plan_settings(run, program),
        runtime=runtime,
        make_backend=lambda: backend,
        world=run.world,
        registry=run.registry,
        seed=run.config.trainer.seed,
        batch_is="local",
        cuts_batches=True,
        holds_interrupts=False,
        elsewhere=ELSEWHERE,
        stage=run.stage,
        say=run.say,
    )


def planner_of(run: Run, program: RunProgram) -> StepPlanner:
    """Capture the training step of a run, and return its `StepPlanner`.

    Raises:
        CaptureError: it cannot be captured.
        ConfigError: the model reads an entry of the batch that the data do not have; names both
            config files.
    """
    choice, whole = plan_choice(run), whole_example(run, program)
    capture = StepCapture(
        program=program.one_device,
        degree=1,
        settings=plan_settings(run, program),
        whole=whole,
        files=choice.files,
    )
    following = Following(program.one_device)
    return step_planner(capture, whole, choice, following, stage=run.stage, say=run.say)


def whole_example(run: Run, program: RunProgram) -> dict[str, Tensor]:
    """Return an example with the shapes of a step's batch, over all ranks."""
    return program.example(run.config.trainer.batch_size)


def with_micro_batches(run: Run, planned: Planned) -> Run:
    """Return a run with the number of micro-batches of its plan, which replaces `auto`."""
    count = planned.settings.micro_batches
    trainer: Any = replace(run.config.trainer, micro_batches=count)
    return replace(run, config=replace(run.config, trainer=trainer))

"""Train a model from a config: capture and plan its step, start it, train, evaluate, report.

Every process of a run calls `train`. The plugin registry makes everything that can be swapped.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn

from sbp_core.boxing import BoxingBackend
from sbp_core.errors import RunError, SbpValueError, words_of
from sbp_core.plugins import CheckpointStorage, PluginRegistry, TrainerState
from sbp_core.runtime import Session, StepResult
from sbp_core.units import format_count
from sbp_launch.checkpoint.starting_weights import StartingWeights, find_weights
from sbp_launch.clusters.local import usable_cores
from sbp_launch.console import make_console
from sbp_launch.explaining.output import print_plan, write_plan
from sbp_launch.explaining.report import crowding
from sbp_launch.optimizers import optimizer_over
from sbp_launch.planning.flow import Planned
from sbp_launch.planning.source_lines import with_source_line
from sbp_launch.run.environment import write_environment
from sbp_launch.run.folder import LOGS, writing
from sbp_launch.run.run import Run
from sbp_launch.run.status import StatusSignal
from sbp_launch.run.stopping import STARTING, StopSignals
from sbp_launch.settings.config import RunConfig
from sbp_launch.step.buckets import Padding
from sbp_launch.step.comparison import OneDeviceComparison
from sbp_launch.step.following import Following
from sbp_launch.step.planning import plan_program
from sbp_launch.step.training import Training
from sbp_launch.step.training_step import TrainingStep
from sbp_launch.team import stop_together
from sbp_launch.tracing.tracer import StepTracer
from sbp_launch.trainer.checkpoints import RunCheckpoints, claim_storage, run_storage
from sbp_launch.trainer.figures import MeasuredUsage, StepMeter
from sbp_launch.trainer.loop import TrainingLoop, allowance_of
from sbp_launch.trainer.planned import engine_of, plan_choice, whole_example, with_micro_batches
from sbp_launch.trainer.resume import Resume
from sbp_launch.trainer.run_program import RunProgram, make_program
from sbp_launch.trainer.sampling import printable, sample_text
from sbp_launch.trainer.session import (
    check_devices,
    check_traces,
    make_backend,
    save_states,
    save_states_after_error,
)
from sbp_launch.trainer.summary import (
    held_out_lines,
    leave_result,
    predicted_of,
    saved_lines,
    speed_lines,
)
from sbp_launch.world import World
from sbp_torch.kinds import LanguageModel, TextDataset

#: The file of a run that has every row of its plan, for messages.
_ALL_ROWS = "see plan.txt of the run folder"


def train(
    config: RunConfig,
    registry: PluginRegistry,
    folder: Path,
    world: World | None = None,
    console: Console | None = None,
) -> None:
    """Train as configured; print the plan, the progress, and the result.

    The run folder gets `environment.json`, `strategy.yaml`, `strategy.json`, `plan.json`,
    `plan.txt`, `memory.txt`, the metrics, and checkpoints of the trained states in `checkpoints`;
    the last checkpoint is also written if the run is interrupted, terminated or fails.

    Args:
        config: The config of the run.
        registry: The plugins.
        folder: The run folder.
        world: This process among the processes of the run, each with one rank; if None, a single
            process has all ranks. All processes call this, and rank 0 writes the files.
        console: The console to print on; standard output if None.
    """
    run = Run(
        config=config,
        registry=registry,
        folder=folder,
        console=console or make_console(),
        world=world or World(),
    )
    check_devices(run)  # first, because it may be refused
    backend = make_backend(run)  # may be refused, too
    check_traces(run)
    storage = run_storage(run)
    status = StatusSignal(folder / LOGS, run.world)
    with StopSignals() as signals, status, claim_storage(run, storage):
        resume = Resume.of(run, storage)
        if run.is_first:
            with writing(folder):
                folder.mkdir(parents=True, exist_ok=True)
                write_environment(folder, registry)
        program = make_program(run)
        allowance_of(run, program)  # may be refused, too
        if resume is not None:
            resume.check_data(program.cursor().order)
            resume.check_states(program)
        num_parameters = sum(parameter.numel() for parameter in program.model.parameters())
        run.console.print(
            f"{config.model.name}: {num_parameters:,} parameters; data: {program.data.describe()}",
            soft_wrap=True,
        )
        weights = None if resume is not None else starting_weights(run, program)
        if not backend.spans_processes:
            run.say(crowding(program.mesh.size, usable_cores()))
        try:
            made = make_step(run, program, backend)
            planned = made.step.planned
            run = with_micro_batches(run, planned)
            if run.is_first:
                with writing(folder):
                    write_plan(folder, planned)
            show_plan(run, planned)
            loop = train_states(run, program, made, signals, status, storage, resume or weights)
            if run.is_first:
                show_sample(run, program, loop.checkpoints)
            if loop.comparison is not None:
                run.say(loop.comparison.lines())
            run.say(saved_lines(run, loop))
        finally:
            run.console.print(f"run folder: {folder}", soft_wrap=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredStep:
    """The step of a run, planned but not started, with its meter and tracer.

    Args:
        step: The step.
        meter: Measures its time, memory and bytes sent.
        tracer: Traces the steps that are selected for it.
        comparison: Takes the first steps on one device, too, if that is requested.
    """

    step: TrainingStep
    meter: StepMeter
    tracer: StepTracer
    comparison: OneDeviceComparison | None


def make_step(run: Run, program: RunProgram, backend: BoxingBackend) -> MeasuredStep:
    """Capture, plan, compile, check and prove the training step of a run.

    Args:
        run: The run.
        program: The one-device program.
        backend: The boxing backend, not yet open.

    Raises:
        SbpError: it cannot be planned, or does not fit its memory.
    """
    config, one = run.config, program.one_device
    engine, choice = engine_of(run, program, backend), plan_choice(run)
    training = Training(one.model, has_states=False, holds_interrupts=engine.holds_interrupts)
    following, whole = Following(one), whole_example(run, program)
    found = plan_program(one, whole, choice, engine, following, training, whole=whole)
    # Compiled segments do not call single operators, whose memory could be measured.
    eager = config.runtime.settings.get("compile", "eager") == "eager"
    here = [run.world.rank] if backend.spans_processes else None
    meter = StepMeter(found.planned.plan, backend, counts_memory=eager, ranks=here)
    tracer = StepTracer(
        found.planned,
        backend,
        config.trainer.traced_steps,
        run.folder,
        operators_of=config.boxing.name if config.trainer.trace_operators else "",
    )

    def measuring(session: Session, take: Callable[[], StepResult]) -> StepResult:
        with tracer.step(step.steps_done + 1, session):
            return meter.take(session, take)

    engine = replace(engine, make_backend=lambda: meter.backend, measuring=measuring)
    step = TrainingStep(found, choice, engine, following, training, Padding())
    comparison = None
    if config.trainer.compare_steps:

        def copied() -> tuple[nn.Module, torch.optim.Optimizer]:
            model = program.made.whole_model()
            return model, optimizer_over(program.make_optimizer, model)

        steps = config.trainer.compare_steps
        comparison = OneDeviceComparison(one, found.planned, engine, steps, copied)
    return MeasuredStep(step=step, meter=meter, tracer=tracer, comparison=comparison)


def show_plan(run: Run, planned: Planned, todo: str = _ALL_ROWS) -> None:
    """Print the plan's table and its summary; `todo` is the hint on how to see omitted rows."""
    if not planned.knows_memory:
        with run.stage("predicting the memory of each rank"):
            _ = planned.memory
    mesh = dict(zip(run.config.axes, run.config.mesh, strict=True))
    print_plan(run.console, planned, mesh, run.config.trainer.plan_rows, todo)


def train_states(
    run: Run,
    program: RunProgram,
    made: MeasuredStep,
    signals: StopSignals,
    status: StatusSignal,
    storage: CheckpointStorage,
    begin: Resume | StartingWeights | None,
) -> TrainingLoop:
    """Make or load the states, train, save and evaluate them; print measured figures.

    Returns:
        The completed loop.
    """
    step, meter, tracer, planned = made.step, made.meter, made.tracer, made.step.planned
    resume = begin if isinstance(begin, Resume) else None
    weights = begin if isinstance(begin, StartingWeights) else None
    with ExitStack() as started:
        if resume is not None:
            with run.stage(f"loading the states and {STARTING}"), resume.fitting():
                step.start(resume.states)
        else:
            with run.stage(f"making the states and {STARTING}"):
                states = program.made.states(program.optimizer, run.config.trainer.update)
                with weights.over(states) if weights is not None else nullcontext(states) as first:
                    step.start(first)
        started.push(step)
        status.session, team = step.session, step.team
        state = TrainerState()
        if resume is not None:
            state = resume.agree(step.session, step.processes)
            step.steps_done = state.step
        loop = TrainingLoop(
            run=run,
            program=program,
            step=step,
            step_meter=meter,
            tracer=tracer,
            comparison=made.comparison,
            signals=signals,
            checkpoints=RunCheckpoints(run, planned, storage, step.processes, state.step),
            state=state,
        )
        try:
            with signals.training(), tracer:
                try:
                    loop.train()
                except BaseException as error:
                    leave_result(run, loop, words_of(error))
                    raise
                leave_result(run, loop)
        except BaseException as error:
            with signals.saving():
                save_states_after_error(run, loop, error)
            if isinstance(error, RunError):
                raise with_source_line(error, planned.graph) from error.__cause__
            raise
        with signals.saving():
            save_states(run, loop)
        measured = MeasuredUsage.of_all(team.gather(meter.measured.to_text()))
        steps = format_count(loop.state.step, "step")
        if team.highest(signals.pending_number):
            run.say([f"the states of all {steps} are saved"])
            stop_together(team, signals)
        if loop.stopped_for:
            run.say([f"stopped after step {loop.state.step}: {loop.stopped_for}"])
        run.say(speed_lines(run, loop))
        run.say(meter.lines(predicted_of(run, program, planned), measured))
        run.say(tracer.lines)
        run.say([f"time of training: {loop.phases.line()}"])
        run.say(held_out_lines(run, loop))
    return loop


def starting_weights(run: Run, program: RunProgram) -> StartingWeights | None:
    """Return the weights that the run starts from, if it is to start from some; print their source.

    Raises:
        ConfigError: they do not exist, or do not fit the model.
    """
    path = run.config.trainer.init_from
    if path is None:
        return None
    update = run.config.trainer.update
    found = find_weights(path, program.model, program.optimizer, update, where="trainer.init_from")
    run.say([f"starting from the weights in {found.found.place}"])
    return found


def show_sample(run: Run, program: RunProgram, checkpoints: RunCheckpoints) -> None:
    """Print a text that the trained model generates, if it is a language model."""
    settings, data = run.config.trainer, program.data
    if not settings.sample_tokens or not isinstance(data, TextDataset):
        return
    if not isinstance(program.model, LanguageModel):
        return
    model: Any = program.made.whole_model()
    names = {name for name, _ in (*model.named_parameters(), *model.named_buffers())}
    model.load_state_dict(checkpoints.read(names), strict=False)
    model.eval()
    try:
        text = sample_text(model, data, "\ndef ", settings.sample_tokens, settings.seed)
    except SbpValueError as error:
        run.warn(f"no sample of text: {error}")
        return
    run.console.rule("a sample of text")
    run.console.print(printable(text))
    run.console.rule()

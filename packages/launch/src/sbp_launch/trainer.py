"""The flow of a run: program, plan, session, steps, evaluation, summary.

Everything that can be swapped is asked of the registry; what happens in between is `sbp_core`'s.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast

from rich.console import Console
from torch import Tensor

from sbp_core.boxing import BoxingBackend
from sbp_core.errors import RunError, SbpValueError
from sbp_core.graph import LogicalGraph
from sbp_core.infer import step_time_s
from sbp_core.memory import MemoryReport
from sbp_core.plugins import MetricSink, MetricSinkFactory, PluginRegistry
from sbp_core.runtime import NotFiniteStepError, Runtime, Session
from sbp_core.strategy import Strategy
from sbp_launch.clusters import usable_cores
from sbp_launch.config import RunConfig
from sbp_launch.environment import write_environment
from sbp_launch.figures import Measured, Predicted, StepMeter, prediction_basis
from sbp_launch.finite_loss import FiniteLoss
from sbp_launch.first_bad_value import first_bad_value
from sbp_launch.plan_output import print_plan, write_plan
from sbp_launch.planned import plan_evaluation, plan_step
from sbp_launch.planning import Planned
from sbp_launch.program import EagerReference, Program, make_program
from sbp_launch.progress import StepProgress
from sbp_launch.report import counted, crowding
from sbp_launch.run import Run, make_console
from sbp_launch.run_folder import writing
from sbp_launch.sampling import printable, sample_text
from sbp_launch.session import (
    check_traces,
    make_backend,
    save_states,
    save_states_after_error,
    start,
)
from sbp_launch.source_lines import with_source_line
from sbp_launch.speed import Speed
from sbp_launch.stopping import StopSignals
from sbp_launch.team import DEADLINE_S, Team, stop_together
from sbp_launch.tracing import StepTracer
from sbp_launch.world import World
from sbp_torch.capture import scalar_values
from sbp_torch.kinds import LanguageModel, TextDataset

#: Where a run keeps every row of its plan.
_ALL_ROWS = "see plan.txt of the run folder"


def plan_only(config: RunConfig, registry: PluginRegistry) -> Strategy:
    """Plan, print the plan, and return what was decided."""
    run = Run(config=config, registry=registry, console=make_console())
    planned = plan_step(run, make_program(run))
    show_plan(run, planned, todo="raise trainer.plan_rows to see them")
    return planned.strategy


def train(
    config: RunConfig,
    registry: PluginRegistry,
    folder: Path,
    world: World | None = None,
    console: Console | None = None,
) -> None:
    """Train as the config says; print the plan, the progress, and what came of it.

    Leaves in the run folder: `environment.json`, `strategy.yaml`, `strategy.json`, `plan.json`,
    `plan.txt`, `memory.txt`, the metrics, and the trained states as `states.safetensors`, which are
    written also if the run is interrupted, terminated or fails.

    Args:
        config: What was chosen.
        registry: The plugins.
        folder: Of the run.
        world: This process among those of the run, one a rank; alone, with all ranks, if None. All
            of them call this. Rank 0 writes the files.
        console: Where this process prints; the standard output if None.
    """
    run = Run(
        config=config,
        registry=registry,
        folder=folder,
        console=console or make_console(),
        world=world or World(),
    )
    backend = make_backend(run)  # first, as it may be refused
    check_traces(run)
    with StopSignals() as signals:
        if run.is_first:
            with writing(folder):
                folder.mkdir(parents=True, exist_ok=True)
                write_environment(folder, registry)
        program = make_program(run)
        num_parameters = sum(parameter.numel() for parameter in program.model.parameters())
        run.console.print(
            f"{config.model.name}: {num_parameters:,} parameters; data: {program.data.describe()}",
            soft_wrap=True,
        )
        if not backend.spans_processes:
            run.say(crowding(program.mesh.size, usable_cores()))
        try:
            planned = plan_step(run, program)
            if run.is_first:
                with writing(folder):
                    write_plan(folder, planned)
            show_plan(run, planned)
            states, reference = train_states(run, program, planned, backend, signals)
            if run.is_first:
                show_sample(run, program, states)
            if reference is not None and reference.losses:
                run.console.print(reference.verdict())
        finally:
            run.console.print(f"run folder: {folder}", highlight=False, soft_wrap=True)


def show_plan(run: Run, planned: Planned, todo: str = _ALL_ROWS) -> None:
    """Print the plan's table and its summary; `todo` says how to see the rest."""
    mesh = dict(zip(run.config.axes, run.config.mesh, strict=True))
    print_plan(run.console, planned, mesh, run.config.trainer.plan_rows, todo)


def train_states(
    run: Run,
    program: Program,
    planned: Planned,
    backend: BoxingBackend,
    signals: StopSignals,
) -> tuple[dict[str, Tensor], EagerReference | None]:
    """Make the states, train them, write and evaluate them; say what was measured and predicted.

    Returns:
        The trained states, and the one-device program that took the first steps beside the ranks.
    """
    config = run.config
    # Compiled segments call no operators that could be watched.
    eager = config.runtime.settings.get("compile", "eager") == "eager"
    ranks = [part.rank for part in planned.plan.ranks]
    here = [run.world.rank] if backend.spans_processes else None
    step_meter = StepMeter(planned.plan, backend, counts_memory=eager, ranks=here)
    tracer = StepTracer(
        planned.plan, planned.graph, backend, config.trainer.traced_steps, run.folder
    )
    with run.stage("making the states and starting the ranks"):
        reference = (
            EagerReference(program, config.trainer)
            if config.trainer.compare_steps and run.is_first
            else None
        )
        first = program.made.states(program.optimizer, config.trainer.update)
        session = start(run, planned.plan, first, step_meter.backend)
    with session:
        team = Team.of(backend, ranks)
        try:
            with signals.training(), tracer:
                speed = train_steps(
                    run,
                    program,
                    session,
                    planned.graph,
                    step_meter,
                    tracer,
                    reference,
                    signals,
                    team,
                )
        except BaseException as error:
            with signals.saving():
                save_states_after_error(run, session, error, team)
            if isinstance(error, RunError):
                raise with_source_line(error, planned.graph) from error.__cause__
            raise
        with signals.saving():
            states = save_states(run, session)
        measured = Measured.of_all(team.gather(step_meter.measured.to_text()))
        if team.highest(signals.pending_number):
            run.say([f"the states of all {counted(config.trainer.steps, 'step')} are saved"])
            stop_together(team, signals)
        run.say([", ".join(filter(None, [counted(config.trainer.steps, "step"), speed.summary()]))])
        run.say(step_meter.lines(predicted_of(run, program, planned), measured))
        run.say(tracer.lines)
        if config.trainer.eval_batches:
            show_held_out(run, program, planned, session)
    return states, reference


def predicted_of(run: Run, program: Program, planned: Planned) -> Predicted:
    """Return what was predicted of a step of the run, and what the prediction rests on."""
    peak = None
    if isinstance(planned.memory, MemoryReport):
        peak = max(rank.peak for rank in planned.memory.ranks.values())
    return Predicted(
        step_s=step_time_s(planned.plan),
        peak_bytes=peak,
        sent_bytes=planned.plan.boxing_bytes,
        basis=prediction_basis(
            program.cluster,
            run.config.cluster.name,
            str(run.config.cluster.settings.get("file", "")),
            run.config.boxing.name,
        ),
    )


def train_steps(
    run: Run,
    program: Program,
    session: Session,
    graph: LogicalGraph,
    step_meter: StepMeter,
    tracer: StepTracer,
    reference: EagerReference | None,
    signals: StopSignals,
    team: Team,
) -> Speed:
    """Run all steps; return their speed.

    Args:
        run: The run.
        program: Gives the batches.
        session: Takes the steps.
        graph: What it runs, before it was planned.
        step_meter: Measures them.
        tracer: Traces those that are to be traced.
        reference: The one-device program, which takes the first steps, too.
        signals: May ask to stop after a step.
        team: The processes of the run, which stop together.

    Raises:
        NotFiniteError: the loss is infinite or no number, and `trainer.on_nan` says to stop.
        RunError: the metrics cannot be written.
    """
    settings = run.config.trainer
    given = scalar_values(program.model, program.optimizer, settings.update)
    is_text = isinstance(program.data, TextDataset)
    speed = Speed("tokens" if is_text else "samples")
    finite = FiniteLoss(run.config)
    session.only_finite = finite.undoes
    steps = StepProgress(run.console, settings.steps, settings.log_every, speed)
    with metric_sink(run) as sink, steps as progress:
        for index in range(settings.steps):
            speed.begin()
            batch = program.batch(index, settings.batch_size)
            factor = settings.schedule.factor(index, settings.steps)
            rates = {n: v * factor for n, v in given.items() if n.partition(".")[0] == "lr"}
            scalars = {**given, **rates, "seed": settings.seed, "step": index}
            bad_value: tuple[str, ...] = ()
            try:
                with tracer.step(index + 1, session):
                    outputs = step_meter.step(session, batch, scalars)
            except NotFiniteStepError as error:
                outputs = error.outputs
                bad_value = first_bad_value(session, graph, batch, scalars, team.gather)
            speed.end(next(iter(batch.values())).numel() if is_text else settings.batch_size)
            metrics = {name: value.item() for name, value in outputs.items() if not value.dim()}
            problem: Exception | None = None
            try:
                tracer.finish(index + 1)  # first, as the ranks of all processes meet there
                if reference is not None and index < settings.compare_steps:
                    reference.step(batch, metrics["loss"], factor)
                progress.advance(index + 1, metrics["loss"])
                times = {f"{speed.unit}_per_s": speed.step_rate, "step_s": speed.step_s}
                with writing(run.folder):
                    sink.log(index + 1, {**metrics, **times, **rates})
                run.warn(finite.check(index + 1, metrics, rates, bad_value))
            except Exception as error:  # raised behind the step, on all ranks together
                problem = error
            stop_together(team, signals, problem, vote_deadline_s(run.config, index))
    return speed


def vote_deadline_s(config: RunConfig, index: int) -> float:
    """Return how long a rank waits for the others behind a step: as long as in it, in seconds.

    Longer behind the steps, counted from 0, that the first rank compares with one device.
    """
    deadline_s = config.runtime.settings.get("deadline_s")
    if index < config.trainer.compare_steps or not isinstance(deadline_s, int | float):
        return DEADLINE_S
    return float(deadline_s)


@contextmanager
def metric_sink(run: Run) -> Iterator[MetricSink]:
    """Open the chosen metric sink, and close it.

    Raises:
        RunError: its file cannot be written; only if nothing else has failed before.
    """
    if not run.is_first:
        yield cast(MetricSinkFactory, run.registry.make("logger", "none"))(run.folder)
        return
    with writing(run.folder):
        sink: MetricSink = run.make("logger")(run.folder)
    try:
        yield sink
    except BaseException:
        with suppress(OSError):  # what it could not write it tries again
            sink.close()
        raise
    with writing(run.folder):
        sink.close()


def show_held_out(run: Run, program: Program, planned: Planned, session: Session) -> None:
    """Print the mean loss over held-out data of what a session has trained."""
    with run.stage("evaluating"):
        loss = evaluate(run, program, planned, session)
    run.say(
        [f"held-out loss: {loss:.4f} ({counted(run.config.trainer.eval_batches, 'batch', 'es')})"]
    )
    if not math.isfinite(loss):
        run.warn("the trained states have diverged: try a smaller optimizer.lr")


def evaluate(run: Run, program: Program, planned: Planned, session: Session) -> float:
    """Return the mean loss over held-out batches, by all ranks, a micro-batch at a time.

    Args:
        run: The run.
        program: Gives the batches.
        planned: What the session runs.
        session: Whose states are evaluated, where they are.
    """
    evaluation = plan_evaluation(run, program, planned)
    settings = run.config.trainer
    runtime: Runtime = run.make("runtime")
    total, count = 0.0, settings.eval_batches * settings.micro_batches
    with runtime.start(evaluation.plan, session) as evaluating:
        for index in range(count):
            batch = program.batch(index, settings.micro_batch_size, "validation")
            scalars = {"seed": settings.seed, "step": index}
            total += evaluating.step(batch, scalars).loss.item()
    return total / count


def show_sample(run: Run, program: Program, states: Mapping[str, Tensor]) -> None:
    """Print a text that the trained model writes, if it is one that writes."""
    settings, data = run.config.trainer, program.data
    if not settings.sample_tokens or not isinstance(data, TextDataset):
        return
    if not isinstance(program.model, LanguageModel):
        return
    model: Any = program.made.whole_model()
    names = {name for name, _ in (*model.named_parameters(), *model.named_buffers())}
    model.load_state_dict({k: v for k, v in states.items() if k in names}, strict=False)
    model.eval()
    try:
        text = sample_text(model, data, "\ndef ", settings.sample_tokens, settings.seed)
    except SbpValueError as error:
        run.warn(f"no sample of text: {error}")
        return
    run.console.rule("a sample of text")
    run.console.print(printable(text), markup=False, highlight=False)
    run.console.rule()

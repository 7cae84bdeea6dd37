"""The flow of a run: capture, plan, compile, check, train, evaluate, sample.

Everything that can be swapped is asked of the registry; what happens in between is `sbp_core`'s.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from rich.console import Console
from safetensors.torch import save_file
from torch import Tensor

from sbp_core import strategy_yaml
from sbp_core.boxing.backend import BoxingBackend
from sbp_core.compile.physical import PhysicalPlan
from sbp_core.compile.physical import to_json as plan_to_json
from sbp_core.errors import ConfigError, SbpError
from sbp_core.memory import MemoryReport
from sbp_core.plugins import Registry
from sbp_core.plugins.kinds import (
    LanguageModel,
    MetricSinkFactory,
    TextDataset,
)
from sbp_core.runtime import Runtime, Session
from sbp_launch.config import RunConfig
from sbp_launch.planned import Planned, plan_evaluation, plan_step
from sbp_launch.program import Program, Twin, make_choice, make_program
from sbp_launch.progress import Stages, StepProgress
from sbp_launch.report import (
    counted,
    legend,
    memory_lines,
    plan_table,
    plan_text,
    summary,
)
from sbp_launch.sampling import printable, sample_text
from sbp_launch.savings import saving_lines
from sbp_torch.capture import scalar_values

#: Where a run keeps every row of its plan.
_ALL_ROWS = "see plan.txt of the run folder"


def make_console() -> Console:
    """Return the console of a run; lines for files and pipes have 100 characters."""
    width = None if sys.stdout.isatty() else 100
    return Console(width=width)


def plan_only(run: RunConfig, registry: Registry) -> None:
    """Plan and print the plan."""
    console = make_console()
    program = make_program(run, registry)
    planned = plan_step(run, registry, program, Stages(console))
    show_plan(console, run, planned, todo="raise trainer.plan_rows to see them")


def show_plan(console: Console, run: RunConfig, planned: Planned, todo: str = _ALL_ROWS) -> None:
    """Print the plan's table and its summary; `todo` says how to see the rest."""
    if run.trainer.plan_rows:
        console.print(plan_table(planned.rows, run.trainer.plan_rows, console.width, todo))
        console.print(legend(planned.strategy), highlight=False)
    for line in (
        *summary(planned.plan, planned.strategy, planned.checked, planned.rows),
        *saving_lines(planned.graph, planned.strategy),
        *memory_lines(planned.plan, planned.memory),
    ):
        console.print(line, highlight=False)


def start(
    run: RunConfig, registry: Registry, plan: PhysicalPlan, states: Mapping[str, Tensor]
) -> Session:
    """Start a plan on the chosen runtime and boxing backend."""
    runtime = cast(Runtime, make_choice(registry, "runtime", run.runtime))
    return runtime.start(plan, states, make_backend(run, registry))


def make_backend(run: RunConfig, registry: Registry) -> BoxingBackend:
    """Return the chosen boxing backend, not yet open.

    Raises:
        ConfigError: its ranks live in several processes, which the trainer does not start yet.
    """
    backend = cast(BoxingBackend, make_choice(registry, "boxing", run.boxing))
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

    Leaves in the run folder: `strategy.yaml`, `strategy.json`, `plan.json`, `plan.txt`,
    `memory.txt`, the metrics, and the trained states as `states.safetensors`, which are written
    also if the run is interrupted or fails.
    """
    console = make_console()
    make_backend(run, registry)
    program = make_program(run, registry)
    parameters = sum(p.numel() for p in program.model.parameters())
    console.print(
        f"{run.model.name}: {parameters:,} parameters; data: {program.data.describe()}",
    )
    stages = Stages(console)
    planned = plan_step(run, registry, program, stages)
    _save_plan(planned, run, run_folder)
    show_plan(console, run, planned)
    with stages.of("making the states and starting the ranks"):
        twin = Twin(program, run) if run.trainer.compare_steps else None
        first = program.made.states(program.optimizer, run.trainer.update)
        session = start(run, registry, planned.plan, first)
    try:
        with session:
            try:
                speed = _train_steps(run, registry, run_folder, console, program, session, twin)
            except BaseException as error:
                _save_what_is_left(session, run_folder, console, error)
                raise
            states = _save_states(session, run_folder)
        console.print(f"{counted(run.trainer.steps, 'step')}, {speed}")
        _conclude(run, registry, console, program, planned, states, twin)
    finally:
        console.print(f"run folder: {run_folder}", highlight=False, soft_wrap=True)


def _save_states(session: Session, run_folder: Path) -> dict[str, Tensor]:
    """Write the states as they are and return them."""
    states = session.state_dict()
    kept = {name: value.contiguous() for name, value in states.items()}
    save_file(kept, run_folder / "states.safetensors")
    return states


def _save_what_is_left(
    session: Session, run_folder: Path, console: Console, error: BaseException
) -> None:
    """Write the states of a run that ended early, or say why there are none.

    What goes wrong here never takes the place of the error that ended the run.
    """
    try:
        _save_states(session, run_folder)
    except (SbpError, OSError) as other:
        error.add_note(f"the states were not saved: {other}")
        console.print(f"stopped early; the states are not saved: {other}", highlight=False)
    else:
        console.print("stopped early; the states so far are in states.safetensors")


def _save_plan(planned: Planned, run: RunConfig, run_folder: Path) -> None:
    run_folder.mkdir(parents=True, exist_ok=True)
    planned.strategy.save(run_folder / "strategy.json")
    strategy_yaml.save(planned.strategy, run_folder / "strategy.yaml")
    if isinstance(planned.memory, MemoryReport):
        text = "\n".join(planned.memory.lines()) + "\n"
        (run_folder / "memory.txt").write_text(text, encoding="utf-8")
    text = json.dumps(plan_to_json(planned.plan))
    (run_folder / "plan.json").write_text(text, encoding="utf-8")
    (run_folder / "plan.txt").write_text(plan_text(planned.rows), encoding="utf-8")


def _train_steps(
    run: RunConfig,
    registry: Registry,
    run_folder: Path,
    console: Console,
    program: Program,
    session: Session,
    twin: Twin | None,
) -> str:
    """Run all steps; return the speed as text."""
    make_sink = cast(MetricSinkFactory, make_choice(registry, "logger", run.logger))
    sink = make_sink(run_folder)
    settings = run.trainer
    given = scalar_values(program.model, program.optimizer, settings.update)
    is_text = isinstance(program.data, TextDataset)
    unit = "tokens" if is_text else "samples"
    try:
        with StepProgress(console, settings.steps, settings.log_every, unit) as progress:
            for index in range(settings.steps):
                batch = program.batch(index, settings.batch_size)
                factor = settings.schedule.factor(index, settings.steps)
                rates = {n: v * factor for n, v in given.items() if n.partition(".")[0] == "lr"}
                scalars = {**given, **rates, "seed": settings.seed, "step": index}
                outputs = session.step(batch, scalars).outputs
                loss = outputs["loss"].item()
                if twin is not None and index < settings.compare_steps:
                    twin.step(batch, loss, factor)
                count = next(iter(batch.values())).numel() if is_text else settings.batch_size
                progress.advance(index + 1, loss, count)
                metrics = {name: value.item() for name, value in outputs.items() if not value.dim()}
                sink.log(index + 1, {**metrics, f"{unit}_per_s": progress.rate(), **rates})
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
    twin: Twin | None,
) -> None:
    """Print held-out loss, a sample of text, and the deviation from the one-device program."""
    if run.trainer.eval_batches:
        with Stages(console).of("evaluating"):
            loss = evaluate(run, registry, program, planned, states)
        batches = counted(run.trainer.eval_batches, "batch", "es")
        console.print(f"held-out loss: {loss:.4f} ({batches})", highlight=False)
    talks = isinstance(program.data, TextDataset) and isinstance(program.model, LanguageModel)
    if run.trainer.sample_tokens and talks:
        model: Any = program.made.whole_model()
        names = {name for name, _ in (*model.named_parameters(), *model.named_buffers())}
        model.load_state_dict({k: v for k, v in states.items() if k in names}, strict=False)
        model.eval()
        data = cast(TextDataset, program.data)
        text = sample_text(model, data, "\ndef ", run.trainer.sample_tokens, run.trainer.seed)
        console.rule("a sample of text")
        console.print(printable(text), markup=False, highlight=False)
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
    evaluation = plan_evaluation(run, registry, program, planned)
    names = {entry.name for entry in evaluation.graph.inputs if entry.kind.is_state}
    held = {name: states[name] for name in names}
    total, count = 0.0, run.trainer.eval_batches * run.trainer.micro_batches
    with start(run, registry, evaluation.plan, held) as session:
        for index in range(count):
            batch = program.batch(index, run.trainer.micro_batch_size, "validation")
            scalars = {"seed": run.trainer.seed, "step": index}
            total += session.step(batch, scalars).loss.item()
    return total / count

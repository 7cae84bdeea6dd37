"""Report a training run when it ends: lines to print, and `result.json` for programs."""

from __future__ import annotations

import math
from contextlib import suppress

from sbp_core.memory import MemoryReport
from sbp_core.units import format_count
from sbp_launch.planning.flow import Planned
from sbp_launch.run.folder import resume_command
from sbp_launch.run.result import RunResult, write_result
from sbp_launch.run.run import Run
from sbp_launch.trainer.figures import Predicted, prediction_basis
from sbp_launch.trainer.loop import TrainingLoop
from sbp_launch.trainer.run_program import RunProgram


def leave_result(run: Run, loop: TrainingLoop, failure: str = "") -> None:
    """Write the result of a run to its folder, if possible; only the first process does this."""
    if not run.is_first:
        return
    state, typical_s = loop.state, loop.speed.typical_s
    result = RunResult(
        step=state.step,
        samples=state.samples,
        tokens=state.tokens,
        epoch=state.epoch,
        train_s=state.train_s,
        loss=loop.loss,
        held_out_loss=loop.held_out.get("held_out_loss"),
        best=state.best,
        best_step=state.best_step,
        unit=loop.speed.unit,
        rate=loop.speed.rate,
        mfu=None if typical_s is None else loop.work.mfu(typical_s),
        stopped_for=loop.stopped_for,
        failure=failure,
    )
    with suppress(OSError):
        write_result(run.folder, result)


def speed_lines(run: Run, loop: TrainingLoop) -> list[str]:
    """Return lines on the steps of this process: speed, utilization."""
    steps = format_count(loop.state.step, "step")
    lines = [", ".join(filter(None, [steps, loop.speed.summary()]))]
    if loop.speed.typical_s is not None:
        lines.append(loop.work.line(loop.speed.typical_s, run.config.cluster.name))
    return lines


def held_out_lines(run: Run, loop: TrainingLoop) -> list[str]:
    """Return lines on the evaluations: the latest held-out loss, and the best one."""
    if not loop.held_out:
        return []
    loss, state = loop.held_out["held_out_loss"], loop.state
    batches = format_count(run.config.trainer.evaluate.batches, "batch", "es")
    averaged = " of the averaged parameters" if run.config.trainer.update.ema_decay else ""
    lines = [f"held-out loss{averaged}: {loss:.4f} ({batches})"]
    if state.best is not None and state.best_step != loop.evaluated_step:
        lines[0] += f"; the lowest was {state.best:.4f}, after step {state.best_step}"
    if not math.isfinite(loss):
        lines.append("warning: the trained states have diverged: try a smaller optimizer.lr")
    return lines


def saved_lines(run: Run, loop: TrainingLoop) -> list[str]:
    """Return lines on where the states of an ended run are, and how to continue training."""
    unit = run.config.trainer.budget.unit
    more = "" if loop.stopped_for else f" trainer.{unit}=MORE"
    resume = f"  to continue: {resume_command(run.folder)}{more}"
    return [f"saved: {loop.checkpoints.newest}", resume]


def predicted_of(run: Run, program: RunProgram, planned: Planned) -> Predicted:
    """Return the predictions for a step of the run, and their basis."""
    peak = None
    if isinstance(planned.memory, MemoryReport):
        peak = max(rank.peak for rank in planned.memory.ranks.values())
    return Predicted(
        step_s=planned.simulation.step_s,
        peak_bytes=peak,
        sent_bytes=planned.plan.boxing_bytes,
        basis=prediction_basis(
            program.cluster,
            run.config.cluster.name,
            str(run.config.cluster.settings.get("file", "")),
            run.config.boxing.name,
        ),
    )

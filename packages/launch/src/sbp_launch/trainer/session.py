"""The session of a run: how it starts, and what is saved of it."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from sbp_core.boxing import BoxingBackend
from sbp_core.compile import PhysicalPlan
from sbp_core.errors import ConfigError, RunError
from sbp_core.runtime import Runtime, Session
from sbp_launch.run.run import Run
from sbp_launch.run.stopping import Terminated
from sbp_launch.trainer.finite_loss import NotFiniteError
from sbp_launch.trainer.loop import TrainingLoop
from sbp_launch.trainer.summary import going_on


def make_backend(run: Run) -> BoxingBackend:
    """Return the chosen boxing backend, not yet open.

    Raises:
        ConfigError: it connects processes, and its config does not say so.
    """
    backend: BoxingBackend = run.make("boxing")
    if backend.spans_processes and run.world.is_alone:
        raise ConfigError(
            f"boxing={run.config.boxing.name} connects one process a rank, and all ranks are in "
            "this one",
            accepted="boxing=local; or a launcher, such as launcher=spawn",
            todo="its config has to say `spans_processes = True`",
        )
    return backend


def start(
    run: Run, plan: PhysicalPlan, states: Mapping[str, Tensor], backend: BoxingBackend
) -> Session:
    """Start a plan on the chosen runtime."""
    runtime: Runtime = run.make("runtime")
    return runtime.start(plan, states, backend)


def check_traces(run: Run) -> None:
    """See that the chosen runtime traces steps, if any are to be traced.

    Raises:
        ConfigError: it does not.
    """
    runtime: Runtime = run.make("runtime")
    if run.config.trainer.traced_steps and not runtime.traces:
        raise ConfigError(
            f"trainer.trace={run.config.trainer.trace}: runtime={run.config.runtime.name} does not "
            "trace its steps",
            accepted="a runtime that does, such as runtime=actor",
            todo="leave out trainer.trace or runtime",
        )


def save_states(run: Run, loop: TrainingLoop) -> None:
    """Save the states as they are; all processes of the run call this.

    Raises:
        RunError: they cannot be saved; earlier ones are still there.
    """
    try:
        loop.save()
    except KeyboardInterrupt:
        run.say(["abandoned by Ctrl-C: the states are not saved"])
        raise


def save_states_after_error(run: Run, loop: TrainingLoop, error: BaseException) -> None:
    """Save the states of a run that ended early, or say why that cannot be.

    A failure to save never replaces the error that ended the run, nor does Ctrl-C, which abandons
    it. States after a loss that is no number are kept under another name, unless that step was
    undone. Where each rank is a process, all of them have to have stopped together: their parts
    have to be those of one step.
    """
    is_finite = error.is_undone if isinstance(error, NotFiniteError) else True
    ended = f"stopped by {error}" if isinstance(error, Terminated) else "stopped early"
    try:
        if not loop.team.stops_together:
            raise RunError("the ranks of the other processes did not stop behind the same step")
        place = loop.save(is_finite=is_finite)
    except KeyboardInterrupt:
        error.add_note("the states were not saved: abandoned by Ctrl-C")
        run.say(["abandoned by Ctrl-C: the states are not saved"])
    except Exception as other:
        error.add_note(f"the states were not saved: {other}")
        run.say([f"{ended}; the states are not saved: {other}"])
        if newest := loop.checkpoints.newest:
            run.say([f"the newest checkpoint is {newest}", f"  to go on: {going_on(run)}"])
    else:
        run.say([f"{ended}; the states so far are in {place}"])
        if is_finite:
            run.say([f"  to go on: {going_on(run)}"])

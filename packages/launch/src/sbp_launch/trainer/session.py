"""Check devices and plugins of an `sbp-train` run at its start; save its states at its end."""

from __future__ import annotations

import math

from sbp_core.boxing import BoxingBackend
from sbp_core.errors import BoxingError, ConfigError, RunError
from sbp_core.plugins import ClusterFactory
from sbp_core.runtime import Runtime
from sbp_launch.run.folder import resume_command
from sbp_launch.run.run import Run
from sbp_launch.run.stopping import Terminated
from sbp_launch.trainer.finite_loss import NotFiniteError
from sbp_launch.trainer.loop import TrainingLoop
from sbp_launch.trainer.survivor_saving import save_with_survivors
from sbp_torch.runtime import check_device


def make_backend(run: Run) -> BoxingBackend:
    """Return the chosen boxing backend, not yet open.

    Raises:
        ConfigError: it connects processes, and its config does not declare that.
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


def check_devices(run: Run) -> None:
    """Check, before anything is captured, that this process can run plans for the chosen cluster.

    Raises:
        ConfigError: the cluster has GPUs, and this process has none.
    """
    make_cluster: ClusterFactory = run.make("cluster")
    check_device(make_cluster(math.prod(run.config.mesh)).device.kind)


def check_traces(run: Run) -> None:
    """Check that the chosen runtime can trace steps, if steps are to be traced.

    Raises:
        ConfigError: it cannot.
    """
    runtime: Runtime = run.make("runtime")
    if run.config.trainer.traced_steps and not runtime.traces:
        raise ConfigError(
            f"trainer.trace={run.config.trainer.trace}: runtime={run.config.runtime.name} does not "
            "trace its steps",
            accepted="a runtime that does, such as runtime=actor",
            todo="leave out trainer.trace or runtime",
        )
    if run.config.trainer.trace_operators and not runtime.traces_operators:
        raise ConfigError(
            f"trainer.trace_operators=true: runtime={run.config.runtime.name} runs segments that "
            "were compiled, and cannot tell where in them an operator is",
            accepted="runtime=actor with runtime.compile=eager",
            todo="leave out trainer.trace_operators, or runtime.compile",
        )


def save_states(run: Run, loop: TrainingLoop) -> None:
    """Save the present states; all processes of the run call this.

    Raises:
        RunError: they cannot be saved; earlier checkpoints are kept.
        BoxingError: a rank has failed meanwhile; the surviving ranks have saved what they could.
    """
    try:
        loop.save()
    except BoxingError as error:
        save_states_after_error(run, loop, error)
        raise
    except KeyboardInterrupt:
        run.say(["abandoned by Ctrl-C: the states are not saved"])
        raise


def save_states_after_error(run: Run, loop: TrainingLoop, error: BaseException) -> None:
    """Save the states of a run that ended early, or report why they cannot be saved.

    A failure to save never replaces the error that ended the run; nor does Ctrl-C, which abandons
    saving. States after an infinite or NaN loss are kept under another name, unless that step was
    undone. If each rank is a process and they have not stopped together, because one has failed,
    the surviving processes save what they can (`survivors`).
    """
    is_finite = error.is_undone if isinstance(error, NotFiniteError) else True
    ended = f"stopped by {error}" if isinstance(error, Terminated) else "stopped early"
    try:
        place = _save(run, loop, error, is_finite=is_finite)
    except KeyboardInterrupt:
        error.add_note("the states were not saved: abandoned by Ctrl-C")
        run.say(["abandoned by Ctrl-C: the states are not saved"])
    except Exception as other:
        error.add_note(f"the states were not saved: {other}")
        run.say([f"{ended}; the states are not saved: {other}"])
        if newest := loop.checkpoints.newest:
            run.say([f"the newest checkpoint is {newest}"])
            run.say([f"  to continue: {resume_command(run.folder)}"])
    else:
        run.say([f"{ended}; the states so far are in {place}"])
        if is_finite:
            run.say([f"  to continue: {resume_command(run.folder)}"])


def _save(run: Run, loop: TrainingLoop, error: BaseException, *, is_finite: bool) -> str:
    """Save with all processes, or with the surviving ones; return the place.

    Raises:
        RunError, BoxingError: see `TrainingLoop.save` and `save_with_survivors`.
    """
    if loop.team.stops_together:
        try:
            return loop.save(is_finite=is_finite)
        except BoxingError as other:
            if not is_finite:
                raise
            return save_with_survivors(run, loop, other)
    if not isinstance(error, Exception):  # Ctrl-C that did not wait for the step
        raise RunError("the ranks of the other processes did not stop after the same step")
    return save_with_survivors(run, loop, error)

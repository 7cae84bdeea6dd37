"""The session of a run: how it starts, and what it leaves in the run folder."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from sbp_core.boxing import BoxingBackend
from sbp_core.compile import PhysicalPlan
from sbp_core.errors import ConfigError, RunError
from sbp_core.runtime import Runtime, Session
from sbp_launch.finite_loss import NotFiniteError
from sbp_launch.run import Run
from sbp_launch.states_file import NOT_FINITE_STATES, STATES, write_states
from sbp_launch.stopping import Terminated
from sbp_launch.team import Team


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


def save_states(run: Run, session: Session, name: str = STATES) -> dict[str, Tensor]:
    """Write the states as they are into the run folder and return them, in the first process.

    Args:
        run: The run.
        session: Whose states; all processes of the run call this.
        name: Of the file.

    Raises:
        RunError: they cannot be written; nothing has been replaced.
    """
    try:
        states = session.state_dict(to=0)
        if run.is_first:
            write_states(run.folder / name, states)
    except KeyboardInterrupt:
        run.say(["abandoned by Ctrl-C: the states are not saved"])
        raise
    return states


def save_states_after_error(run: Run, session: Session, error: BaseException, team: Team) -> None:
    """Write the states of a run that ended early, or say why there are none.

    A failure to save never replaces the error that ended the run, nor does Ctrl-C, which abandons
    it. States after a loss that is no number are kept under another name, unless that step was
    undone. Where each rank is a process, all of them have to have stopped together: one alone
    cannot gather the states.
    """
    is_finite = error.is_undone if isinstance(error, NotFiniteError) else True
    name = STATES if is_finite else NOT_FINITE_STATES
    ended = f"stopped by {error}" if isinstance(error, Terminated) else "stopped early"
    try:
        if not team.stops_together:
            raise RunError("the ranks of the other processes did not stop behind the same step")
        save_states(run, session, name)
        team.highest(0)  # nobody leaves before all is written
    except KeyboardInterrupt:
        error.add_note("the states were not saved: abandoned by Ctrl-C")
    except Exception as other:
        error.add_note(f"the states were not saved: {other}")
        run.say([f"{ended}; the states are not saved: {other}"])
    else:
        run.say([f"{ended}; the states so far are in {name}"])

"""The session of a run: how it starts, and what it leaves in the run folder."""

from __future__ import annotations

from collections.abc import Mapping

from safetensors.torch import save_file
from torch import Tensor

from sbp_core.boxing import BoxingBackend
from sbp_core.compile import PhysicalPlan
from sbp_core.errors import ConfigError, SbpError
from sbp_core.runtime import Runtime, Session
from sbp_launch.run import Run


def make_backend(run: Run) -> BoxingBackend:
    """Return the chosen boxing backend, not yet open.

    Raises:
        ConfigError: its ranks live in several processes, which the trainer does not start yet.
    """
    backend: BoxingBackend = run.make("boxing")
    if backend.spans_processes:
        raise ConfigError(
            f"boxing={run.config.boxing.name} connects one process a rank, and sbp-train runs all "
            "ranks in one process",
            accepted="boxing=local",
            todo="leave out boxing, or drive the backend from your own program",
        )
    return backend


def start(
    run: Run, plan: PhysicalPlan, states: Mapping[str, Tensor], backend: BoxingBackend
) -> Session:
    """Start a plan on the chosen runtime."""
    runtime: Runtime = run.make("runtime")
    return runtime.start(plan, states, backend)


def save_states(run: Run, session: Session) -> dict[str, Tensor]:
    """Write the states as they are and return them."""
    states = session.state_dict()
    contiguous = {name: value.contiguous() for name, value in states.items()}
    save_file(contiguous, run.folder / "states.safetensors")
    return states


def save_states_after_error(run: Run, session: Session, error: BaseException) -> None:
    """Write the states of a run that ended early, or say why there are none.

    A failure to save never replaces the error that ended the run.
    """
    try:
        save_states(run, session)
    except (SbpError, OSError) as other:
        error.add_note(f"the states were not saved: {other}")
        run.say([f"stopped early; the states are not saved: {other}"])
    else:
        run.say(["stopped early; the states so far are in states.safetensors"])

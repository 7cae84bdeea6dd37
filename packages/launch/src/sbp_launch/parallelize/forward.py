"""Forward and loss on what a parallel step trains: evaluation, and steps without an update.

Each form of batch is captured and planned when it is first seen; states stay where training has
them, and none of them changes.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from sbp_core.runtime import BatchIs, Session, StepResult
from sbp_launch.parallelize.engine import Engine
from sbp_launch.parallelize.program import OneDeviceProgram, micro_batch
from sbp_launch.planning import Planned, capture_forward, evaluating, plan_beside
from sbp_torch.capture import flatten_batch

#: Most forms of batches whose plans are kept; beyond it, the oldest one is forgotten.
_MOST_FORMS = 8


@dataclass(slots=True)
class _Started:
    """A session, and the step of training whose states it has."""

    session: Session
    steps_done: int


class Forwards:
    """The sessions that evaluate, by the form of their batches.

    Args:
        program: What is evaluated.
        train: How it is trained.
        engine: Starts sessions.
        degree: Of how many parts of processes a batch consists; 1 if they give whole batches.
    """

    def __init__(
        self, program: OneDeviceProgram, train: Planned, engine: Engine, degree: int
    ) -> None:
        self._program, self._train, self._engine = program, train, engine
        self._degree = degree
        self._started: dict[tuple[object, ...], _Started] = {}

    def step(
        self,
        training: Session,
        batch: Any,
        scalars: Mapping[str, float],
        *,
        batch_is: BatchIs,
        in_evaluation: bool,
    ) -> StepResult:
        """Return the loss and the metrics of a batch.

        Args:
            training: The session whose states are used.
            batch: Of any size; every process calls this with one of the same size.
            scalars: `seed` and `step`.
            batch_is: What this process gives.
            in_evaluation: Whether in `model.eval()`; else in the mode that the model is in.
        """
        flat = flatten_batch(batch)
        form = tuple((name, tuple(value.shape), value.dtype) for name, value in flat.items())
        key = (in_evaluation, batch_is, form)
        if key not in self._started:
            if len(self._started) >= _MOST_FORMS:
                oldest = next(iter(self._started))
                self._started.pop(oldest).session.close()
            example = micro_batch(batch, 1, self._degree if batch_is == "local" else 1)
            self._started[key] = self._start(training, example, in_evaluation=in_evaluation)
        found = self._started[key]
        if found.steps_done != training.steps_done:
            found.session.load_state_dict(self._states(training, found.session))
            found.steps_done = training.steps_done
        return found.session.step(flat, scalars, batch_is=batch_is)

    def _start(self, training: Session, example: Any, *, in_evaluation: bool) -> _Started:
        settings = self._engine.settings
        # The states belong to training: a buffer that the forward updates is not to be overwritten.
        plain = replace(settings, compile=replace(settings.compile, in_place_states=False))
        model = self._program.model
        mode = evaluating(model) if in_evaluation else nullcontext()
        with mode:
            name = "evaluate" if in_evaluation else "no_update"
            graph = capture_forward(model, self._program.loss, example, plain, name)
        planned = plan_beside(self._train, graph, plain)
        names = [entry.name for entry in graph.inputs if entry.kind.is_state]
        states = {name: _whole(training, name) for name in names}
        session = self._engine.runtime.start(planned.plan, states, self._engine.make_backend())
        return _Started(session=session, steps_done=training.steps_done)

    def _states(self, training: Session, session: Session) -> dict[str, Tensor]:
        return {name: _whole(training, name) for name in session.state_dict()}

    def forget(self) -> None:
        """Forget the states of all sessions: training has loaded others."""
        for started in self._started.values():
            started.steps_done = -1

    def close(self, error: BaseException | None) -> None:
        """Close all sessions; other ranks are told of an error."""
        for started in self._started.values():
            started.session.__exit__(type(error) if error else None, error, None)
        self._started.clear()


def _whole(session: Session, name: str) -> Tensor:
    found: Tensor | None = session.gather(name)
    assert found is not None, "it goes to all ranks"
    return found

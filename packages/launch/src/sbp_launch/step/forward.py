"""Run forward and loss on the states of a parallel step, for evaluation or without an update.

Each shape of batch is captured and planned when it first occurs. The plan runs on the session that
trains: it reads the same shards, sends through the same backend, and changes no state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from enum import Enum
from typing import Any

from sbp_core.runtime import BatchIs, Session, StepResult
from sbp_launch.planning.flow import (
    Planned,
    PlanSettings,
    capture_forward,
    evaluating,
    with_averages,
)
from sbp_launch.planning.one_at_a_time import one_at_a_time
from sbp_launch.planning.shared_states import plan_on_states
from sbp_launch.planning.source_lines import naming_source_lines
from sbp_launch.step.agreement import EVALUATED
from sbp_launch.step.engine import Engine
from sbp_launch.step.following import Following
from sbp_launch.step.program import OneDeviceProgram
from sbp_launch.step.step_capture import captured_batch
from sbp_launch.step.training import Training
from sbp_torch.graph_capture import flatten_batch


class Mode(Enum):
    """The purpose of a forward step."""

    TRAINING = "no_update"
    EVALUATION = "evaluate"
    #: Evaluation with moving averages in place of the parameters that have one.
    AVERAGED = "evaluate averages"


#: The number of forms of batches whose plans are kept, unless batches are padded to more sizes.
_MOST_FORMS = 8


def plan_forward(
    program: OneDeviceProgram, example: Any, settings: PlanSettings, train: Planned, mode: Mode
) -> Planned:
    """Plan forward and loss, with every state stored as in training.

    Args:
        program: The program; its model returns to its previous mode.
        example: An example of the batch of all processes.
        settings: The settings with which training was planned.
        train: The plan of training.
        mode: The purpose of the step.
    """
    # The states belong to training: the forward must not overwrite a buffer that it updates.
    plain = replace(settings, compile=replace(settings.compile, in_place_states=False))
    is_step = mode is Mode.TRAINING
    with nullcontext() if is_step else evaluating(program.model):
        name = "no_update" if is_step else "evaluate"
        graph = capture_forward(program.model, program.loss_of_step, example, plain, name)
    if mode is Mode.AVERAGED:
        graph = with_averages(graph, train.graph)
    return plan_on_states(train, graph, plain)


class Forwards:
    """The sessions that evaluate, by the form of their batches.

    Args:
        program: The program that is evaluated.
        train: The plan of training.
        engine: Starts sessions.
        degree: Number of parts of processes that make a batch; 1 if they give whole batches.
        following: Reports whether the program has changed.
        training: Has the states.
        prove: Proves again, for a changed program, that padding is neutral.
    """

    def __init__(
        self,
        program: OneDeviceProgram,
        train: Planned,
        engine: Engine,
        degree: int,
        following: Following,
        training: Training,
        prove: Callable[[], None],
    ) -> None:
        self._program, self._train, self._engine = program, train, engine
        #: The number of forms of batches that are kept; the oldest one is dropped first.
        self.most_forms = _MOST_FORMS
        self._following, self._training = following, training
        self._degree, self._prove, self._is_proved = degree, prove, True
        self._sessions: dict[tuple[object, ...], tuple[Session, Planned]] = {}

    def step(
        self,
        training: Session,
        batch: Any,
        scalars: Mapping[str, float],
        mode: Mode,
        *,
        batch_is: BatchIs,
        call: str,
    ) -> StepResult:
        """Return the loss and the metrics of a batch.

        Args:
            training: The session whose states are used.
            batch: A batch of any size, but of the same size in every process.
            scalars: `seed` and `step`.
            mode: The purpose of the step.
            batch_is: Whether this process gives the whole batch or its part.
            call: The call that the user made, for messages.

        Raises:
            ConfigError: processes were given batches of several forms.
        """
        flat = flatten_batch(batch)
        told = ", ".join(
            f"{name!r} {value.dtype} {tuple(value.shape)}" for name, value in flat.items()
        )
        self._training.enter(call, {EVALUATED: f"{batch_is}: {told}"})
        session, planned = self.start(training, batch, mode, batch_is=batch_is)
        with self._training.until_done(), naming_source_lines(planned.graph):
            return session.step(flat, scalars, batch_is=batch_is)

    def start(
        self, training: Session, batch: Any, mode: Mode, *, batch_is: BatchIs
    ) -> tuple[Session, Planned]:
        """Return the session for batches of one form, and its plan.

        Args:
            training: The session whose states are used.
            batch: A batch of that form.
            mode: The purpose of the step.
            batch_is: Whether this process gives the whole batch or its part.
        """
        if self._following.has_other_forward():
            self.close()
            self._is_proved = False
        if not self._is_proved:
            with one_at_a_time(), self._training.disconnected():
                self._prove()
            self._is_proved = True
        is_step = mode is Mode.TRAINING
        modes = tuple(one.training for one in self._program.model.modules()) if is_step else ()
        tensors = flatten_batch(batch).items()
        form = tuple((name, tuple(value.shape), value.dtype) for name, value in tensors)
        key = (mode, batch_is, form, modes)
        if key not in self._sessions:
            if len(self._sessions) >= self.most_forms:
                oldest, _ = self._sessions.pop(next(iter(self._sessions)))
                oldest.close()
            example = captured_batch(batch, 1, self._degree if batch_is == "local" else 1, 1)
            planned = self._plan(example, mode)
            with self._training.until_done():
                started = self._engine.runtime.start(planned.plan, training)
                self._sessions[key] = started, planned
        return self._sessions[key]

    def _plan(self, example: Any, mode: Mode) -> Planned:
        with one_at_a_time(), self._training.disconnected():
            return plan_forward(self._program, example, self._engine.settings, self._train, mode)

    def close(self) -> None:
        """Close all sessions; the backend stays open until the session of training closes it."""
        for session, _ in self._sessions.values():
            session.close()
        self._sessions.clear()

"""Forward and loss on what a parallel step trains: evaluation, and steps without an update.

Each form of batch is captured and planned when it is first seen. The plan runs on the session that
trains: it reads the same shards, sends through the same backend, and changes no state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

from sbp_core.graph import LogicalGraph
from sbp_core.runtime import BatchIs, Session, StepResult
from sbp_launch.parallelize.agreement import EVALUATED
from sbp_launch.parallelize.engine import Engine
from sbp_launch.parallelize.following import Following
from sbp_launch.parallelize.interrupts import until_done
from sbp_launch.parallelize.program import OneDeviceProgram, captured_batch
from sbp_launch.parallelize.training import Training
from sbp_launch.planning.beside import plan_beside
from sbp_launch.planning.flow import Planned, capture_forward, evaluating
from sbp_launch.planning.one_at_a_time import one_at_a_time
from sbp_launch.planning.source_lines import naming_source_lines
from sbp_torch.capture import flatten_batch

#: Most forms of batches whose plans are kept, unless they are padded to more sizes.
_MOST_FORMS = 8


class Forwards:
    """The sessions that evaluate, by the form of their batches.

    Args:
        program: What is evaluated.
        train: How it is trained.
        engine: Starts sessions.
        degree: Of how many parts of processes a batch consists; 1 if they give whole batches.
        following: Says whether the program has changed.
        training: Has the states.
        prove: Proves what has to hold of a program that has changed.
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
        #: Beyond so many forms of batches, the oldest one is forgotten.
        self.most_forms = _MOST_FORMS
        self._following, self._training = following, training
        self._degree, self._prove, self._is_proved = degree, prove, True
        self._sessions: dict[tuple[object, ...], tuple[Session, LogicalGraph]] = {}

    def step(
        self,
        training: Session,
        batch: Any,
        scalars: Mapping[str, float],
        *,
        batch_is: BatchIs,
        in_evaluation: bool,
        call: str,
    ) -> StepResult:
        """Return the loss and the metrics of a batch.

        Args:
            training: The session whose states are used.
            batch: Of any size; every process calls this with one of the same size.
            scalars: `seed` and `step`.
            batch_is: What this process gives.
            in_evaluation: Whether in `model.eval()`; else in the mode that the model is in.
            call: What the user calls.

        Raises:
            ConfigError: processes were given batches of several forms.
        """
        flat = flatten_batch(batch)
        form = tuple((name, tuple(value.shape), value.dtype) for name, value in flat.items())
        told = ", ".join(f"{name!r} {dtype} {shape}" for name, shape, dtype in form)
        self._training.enter(call, {EVALUATED: f"{batch_is}: {told}"})
        if self._following.has_other_forward():
            self.close()
            self._is_proved = False
        if not self._is_proved:
            with one_at_a_time(), self._training.apart():
                self._prove()
            self._is_proved = True
        modes = () if in_evaluation else tuple(m.training for m in self._program.model.modules())
        key = (in_evaluation, batch_is, form, modes)
        if key not in self._sessions:
            if len(self._sessions) >= self.most_forms:
                oldest, _ = self._sessions.pop(next(iter(self._sessions)))
                oldest.close()
            example = captured_batch(batch, 1, self._degree if batch_is == "local" else 1, 1)
            planned = self._planned(example, in_evaluation=in_evaluation)
            with until_done():
                started = self._engine.runtime.start(planned.plan, training)
                self._sessions[key] = started, planned.graph
        session, graph = self._sessions[key]
        with until_done(), naming_source_lines(graph):
            return session.step(flat, scalars, batch_is=batch_is)

    def _planned(self, example: Any, *, in_evaluation: bool) -> Planned:
        settings = self._engine.settings
        # The states belong to training: a buffer that the forward updates is not to be overwritten.
        plain = replace(settings, compile=replace(settings.compile, in_place_states=False))
        model = self._program.model
        name = "evaluate" if in_evaluation else "no_update"
        mode = evaluating(model) if in_evaluation else nullcontext()
        with one_at_a_time():
            with self._training.apart(), mode:
                loss = self._program.loss_of_step
                graph = capture_forward(model, loss, example, plain, name)
            return plan_beside(self._train, graph, plain)

    def close(self) -> None:
        """Close all sessions; that of training closes what they send through."""
        for session, _ in self._sessions.values():
            session.close()
        self._sessions.clear()

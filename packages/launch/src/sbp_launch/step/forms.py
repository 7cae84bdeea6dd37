"""Capture and plan a step again for each new batch shape, and each change that a loop makes to it.

A plan holds for one batch shape, and for the program as it was captured. The last, smaller batch
of an epoch, a frozen layer, another mode or another number gives another form of the step. A form
is captured and planned when it first occurs, and then kept. All forms train the same states, which
stay where they are. Floats that vary become inputs of a form, where possible; see `numbers`.

    step(batch of 64)                  the first form, planned by `parallelize`
    step(batch of 40)                  a second one: captured, planned around the same shards
    model.head.requires_grad_(False)
    step(batch of 64)                  a third one
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from sbp_core.compile import PhysicalPlan
from sbp_core.errors import RunError, SbpError
from sbp_core.graph import LogicalGraph, Node, graph_hash
from sbp_core.runtime import BatchPart, Session, batch_parts
from sbp_launch.planning.flow import Captured, Planned
from sbp_launch.planning.shared_states import plan_form
from sbp_launch.step.engine import Engine
from sbp_launch.step.following import Following
from sbp_launch.step.numbers import FollowedNumbers, Places, told_numbers
from sbp_launch.step.planning import PlannedProgram
from sbp_launch.step.training import Training
from sbp_launch.step.unseen import UnseenChanges
from sbp_torch.graph_capture import check_modes, flatten_batch, host_numbers, rebuild_batch
from sbp_torch.guards import ChangedValue

logger = logging.getLogger(__name__)

#: The largest number of forms of a step.
MOST_FORMS = 16

#: Name, shape and dtype of each tensor of a batch.
Shapes = tuple[tuple[str, tuple[int, ...], str], ...]

#: How to get fewer forms, by a part of the text that says what varies; "" is the default.
_WAYS_OUT = {
    "batches ": "pad batches to few sizes, as pad_to does, or drop what is left over: "
    "DataLoader(..., drop_last=True)",
    "parameter group ": "name settings of the optimizer that are scheduled: "
    "update=UpdateOptions(scheduled=(...))",
    "": "give numbers that change to the loss in the batch, as tensors without dims, where PyTorch "
    "takes tensors",
}


class TooManyFormsError(RunError):
    """A step has so many forms that another one is refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepForm:
    """One form of a step.

    Args:
        captured: The hash of the captured graph.
        original: The captured graph.
        planned: Its plan.
        parts: The parts of batch tensors that a process gives, by name.
        session: The session that takes its steps; None before it is started.
        why: Why it is another form, for messages.
        numbers: The places of the Python numbers that are inputs of it, by the names of the inputs.
        host: The nodes that are computed from numbers alone, on the host.
    """

    captured: str
    original: LogicalGraph
    planned: Planned
    parts: Mapping[str, BatchPart]
    session: Session | None
    why: str = ""
    numbers: Places = field(default_factory=dict)
    host: tuple[Node, ...] = ()


class Forms:
    """The forms of the step of one program.

    Args:
        first: The program with the plan of its first form.
        engine: Starts the further forms.
        following: Reports whether the program has changed.
        training: Has the states.
        number: The number of the program among the programs of the training.
        prove: Proves again, for a changed program and for varied numbers, that padding is neutral.
    """

    def __init__(
        self,
        first: PlannedProgram,
        engine: Engine,
        following: Following,
        training: Training,
        number: int,
        prove: Callable[[Places], None],
    ) -> None:
        self._engine, self._following, self._training = engine, following, training
        self._capture, self._plan, self._program_number = first.capture, first.plan, number
        self._numbers, self._prove = FollowedNumbers(first.capture), prove
        self._ranks = engine.ranks if engine.batch_is == "local" else engine.settings.mesh.rank_list
        self.first = self._form(first.planned, first.captured.original, None)
        self._forms = {self.first.captured: self.first}
        #: The forms for the program in its present condition, by the shapes of batches.
        self._known: dict[Shapes, StepForm] = {}
        #: The shapes for which a form was made, and for each of them a batch without values.
        self._met: set[Shapes] = set()
        self._templates: dict[Shapes, Any] = {}
        #: Whether the program is as it was when the first form was planned.
        self._is_as_planned = True
        self._has_warned = False
        self._unseen = UnseenChanges(first.capture_s)
        #: The form of the last step, and a batch of its shapes.
        self._last: tuple[StepForm, Any] | None = None
        #: The number of forms from which on a warning names what varies, and the largest number.
        self._many_forms, self._most_forms = 4, MOST_FORMS

    def _form(
        self, planned: Planned, original: LogicalGraph, session: Session | None, why: str = ""
    ) -> StepForm:
        return StepForm(
            captured=graph_hash(original),
            original=original,
            planned=planned,
            parts=batch_parts(planned.plan, self._ranks),
            session=session,
            why=why,
        )

    @property
    def call(self) -> str:
        """The name of a step of the program in messages."""
        number = self._program_number
        return f"step(batch) of program {number + 1}" if number else "step(batch)"

    @property
    def plans(self) -> tuple[PhysicalPlan, ...]:
        """The plans of all forms, in the order in which they first occurred."""
        return tuple(form.planned.plan for form in self._forms.values())

    def begin(self) -> None:
        """Start the first form, if possible on the session that has the states."""
        planned, name = self.first.planned, self.first.captured
        training = self._training
        if self._program_number == 0:
            session = training.started
        else:
            self._check_runtime()
            if not training.states.counts_as(planned.plan):
                training.count_apart()  # because two programs share one optimizer
            session = self._start(planned)
        self.first = self._forms[name] = self._form(planned, self.first.original, session)

    def _check_runtime(self) -> None:
        if not self._engine.runtime.has_forms:
            raise RunError(
                f"the runtime {type(self._engine.runtime).__name__} takes steps of one form only",
                accepted="the form that was planned first; runtime='actor' takes steps of "
                "several forms",
            )

    def _start(self, planned: Planned) -> Session:
        """Start a plan on the states of the training, after adding the states that are missing."""
        training = self._training
        training.states.check_memory(planned)
        training.widen(planned.plan, self._capture.program)
        return self._engine.runtime.start(planned.plan, training.started, keeps=True)

    def count_apart(self) -> None:
        """Forget all forms, because from now on each parameter has its own step counter."""
        self.close()
        self._forms.clear()
        self._known.clear()
        settings = self._capture.settings.without_tied_counters()
        self._capture = self._numbers.capture = replace(self._capture, settings=settings)

    def plan_ahead(self, batches: Iterable[Any]) -> None:
        """Capture, plan and start forms before steps need them; all processes call this.

        Args:
            batches: A batch of this process for each form.

        Raises:
            SbpError: a form cannot be planned.
        """
        for batch in batches:
            self._find(batch, [])
            self._many_forms += 1
            self._most_forms += MOST_FORMS

    def before_step(
        self, batch: Any, scalars: Mapping[str, float]
    ) -> tuple[StepForm, dict[str, float]]:
        """Return the form of the next step, and its scalars; all processes call this.

        Values that were written to model and optimizer since the last step are copied to the ranks.

        Args:
            batch: The batch of this process.
            scalars: The scalars of the update.

        Raises:
            RunError: the program has changed and cannot be followed; names the changes.
            ConfigError: the processes are about to take different steps; names what differs.
            SbpError: the batch has another shape, and the step cannot be taken with it.
        """
        problem: SbpError | None = None
        form, written, numbers = self.first, {}, dict[str, float]()
        try:
            check_modes()
            changes = self._following.changes()
            if structure := [one for one in changes if one.is_structure]:
                raise self._following.refusal(structure)
            written = self._following.take_over(self._training)
            form = self._find(batch, changes)
            if not changes and self._unseen.is_due():
                self._look(form, batch)
            self._last = form, self._template(batch)
            numbers = {name: float(one.read()) for name, one in form.numbers.items()}
            host_numbers(form.host, numbers)
        except SbpError as error:
            problem = error
        whole = None if self._engine.gives_parts else flatten_batch(batch)
        shapes = _shapes_text(self._shapes(batch))
        why = form.why or "as it was planned first"
        if "batches " not in why:
            why += f", for batches {shapes}"
        alike = "" if self._engine.cuts_batches else shapes
        told = f"{form.captured} {alike}\0{why} (form {form.captured[:8]})"
        compared = {**scalars, **told_numbers(numbers)}
        self._training.agree(self.call, problem, told, compared, whole, written)
        return form, {**scalars, **numbers}

    def _look(self, form: StepForm, batch: Any) -> None:
        """Check that capturing the program again gives the same form, if no guard saw a change.

        Raises:
            RunError: it gives another form.
        """
        with self._training.capturing(self._capture.program):
            self._unseen.look(form.original, lambda: self._capture(batch, self._numbers.places))

    def look_at_the_end(self) -> None:
        """Warn if the program no longer gives the step taken last, and no guard saw a change."""
        if self._last is None or not self._unseen.is_due(at_the_end=True):
            return
        try:
            if not self._following.changes():
                self._look(*self._last)
        except RunError as error:
            warnings.warn(str(error), RuntimeWarning, stacklevel=4)
        except SbpError:  # the program has changed since, and cannot be captured any more
            return

    def _find(self, batch: Any, changes: list[ChangedValue]) -> StepForm:
        shapes = self._shapes(batch)
        if not changes and shapes in self._known:
            return self._known[shapes]
        is_first = self._is_as_planned and bool(self._forms)
        if not changes and not self._is_other_shape(shapes) and (is_first or self._is_odd(shapes)):
            self._known[shapes] = self.first
            return self.first
        numbers = self._numbers.places
        try:
            with self._training.capturing(self._capture.program):
                form = self._of_program(batch, shapes, changes)
        except TooManyFormsError:
            raise
        except SbpError as error:
            if changes and not self._is_other_shape(shapes):
                raise self._following.refusal(changes, error.what) from error
            raise
        if changes or numbers != self._numbers.places:
            self._following.accept(self._numbers.places.values())
            self._known.clear()
            self._is_as_planned = False
        self._known[shapes] = form
        return form

    def _shapes(self, batch: Any) -> Shapes:
        return tuple(
            (name, tuple(value.shape), str(value.dtype))
            for name, value in flatten_batch(batch).items()
        )

    def _template(self, batch: Any) -> Any:
        """Return a batch of the same form without values, which takes no memory."""
        shapes = self._shapes(batch)
        if shapes not in self._templates:
            empty = {
                name: torch.empty_strided(
                    value.shape, value.stride(), dtype=value.dtype, device="meta"
                )
                for name, value in flatten_batch(batch).items()
            }
            self._templates[shapes] = rebuild_batch(batch, empty)
        return self._templates[shapes]

    def _is_odd(self, shapes: Shapes) -> bool:
        """Whether a batch has other entries or dtypes than the batches of the first form.

        If so, the session of the first form raises the error.
        """
        given = {name: dtype.removeprefix("torch.") for name, _, dtype in shapes}
        return any(given.get(name) != part.dtype for name, part in self.first.parts.items())

    def _is_other_shape(self, shapes: Shapes) -> bool:
        """Whether a batch differs from the batches of the first form only in its shape."""
        given = {name: shape for name, shape, _ in shapes}
        parts = self.first.parts.items()
        return not self._is_odd(shapes) and any(given[name] != part.shape for name, part in parts)

    def _of_program(self, batch: Any, shapes: Shapes, changes: list[ChangedValue]) -> StepForm:
        """Return the form of the program in its present condition: a known one, or a new one."""
        captured = self._numbers.recapture(batch, changes)
        try:
            return self._of_captured(captured, batch, shapes, changes)
        except SbpError as error:
            if not captured.numbers or len(self._forms) >= self._most_forms:
                raise
            captured = self._numbers.by_value(captured, error)
        return self._of_captured(captured, batch, shapes, changes)

    def _of_captured(
        self, captured: Captured, batch: Any, shapes: Shapes, changes: list[ChangedValue]
    ) -> StepForm:
        """Return the form of a captured step: a known one, or a new one."""
        name, inputs = graph_hash(captured.original), captured.original.input_kinds
        numbers = {key: one for key, one in captured.numbers.items() if key in inputs}
        if name in self._forms:  # by now, other objects may hold its numbers
            self._forms[name] = replace(self._forms[name], numbers=numbers)
            return self._forms[name]
        why = self._varies(shapes, changes)
        self._check_number(why)
        self._check_runtime()
        planned = self._plan_captured(captured)
        if not self._training.states.counts_as(planned.plan):
            # A layer was frozen or unfrozen: its step count differs from now on.
            with self._training.until_done():
                self._training.count_apart()
            captured = self._capture.prepare(captured.original, captured.numbers)
            planned = self._plan_captured(captured)
        planned = self._capture.add_proof(planned, captured.original, batch, captured.numbers)
        if changes:
            self._prove(numbers)
        training = self._training
        training.states.check_optimizer(self._capture.program)
        host = tuple(node for node in captured.original.nodes if numbers and node.is_host)
        with self._training.until_done():
            form = self._form(planned, captured.original, self._start(planned), why)
            form = replace(form, numbers=numbers, host=host)
            training.states.add_form(planned)
            if not self._forms:
                self.first = form
            self._forms[name] = form
            self._met.add(shapes)
        return form

    def _varies(self, shapes: Shapes, changes: list[ChangedValue]) -> str:
        """Return why the form is another one, as far as that is known: size, program, or both."""
        told = []
        if not changes or (shapes not in self._met and self._is_other_shape(shapes)):
            told.append(f"batches {_shapes_text(shapes)}")
        if changes:
            told.append(changes[0].what.removesuffix(" when the step was captured"))
            told[-1] += self._numbers.reason_text(changes[:1])
        return "; ".join(told)

    def _plan_captured(self, captured: Captured) -> Planned:
        settings = self._capture.settings
        states = self._training.states
        given = states.planned, captured, settings, self._plan, states.stored, states.counted
        return plan_form(*given)

    def _check_number(self, why: str) -> None:
        """Warn if there are many forms.

        Raises:
            RunError: there are too many.
        """
        known = [form.why for form in self._forms.values() if form.why][-1:]
        ways = {
            next(way for part, way in _WAYS_OUT.items() if part in told)
            for one in (*known, why)
            for told in one.split("; ")
        }
        todo = "; ".join(way for way in _WAYS_OUT.values() if way in ways)
        before = f" (before that: {known[-1]})" if known else ""
        if len(self._forms) >= self._most_forms:
            raise TooManyFormsError(
                f"the step has {self._most_forms} forms, and this would be another one: "
                f"{why}{before}",
                accepted=f"at most {self._most_forms} forms: each is captured, planned and kept",
                todo=todo,
            )
        if len(self._forms) == self._many_forms and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "the step has %d forms by now, each of which was captured and planned. What "
                "varies: %s%s. To have fewer: %s",
                len(self._forms) + 1,
                why,
                before,
                todo,
            )

    def close(self) -> None:
        """Close all sessions except the one that has the states."""
        for form in self._forms.values():
            if form.session is not None and form.session is not self._training.started:
                form.session.close()


def _shapes_text(shapes: Shapes) -> str:
    return ", ".join(f"{name!r} {list(shape)}" for name, shape, _ in shapes)

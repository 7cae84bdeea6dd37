"""Forms of a step: one for each shape of batch, and for each program that the loop makes of it.

A plan is of one shape, and of the program as it was when it was captured. The last, smaller batch
of an epoch, a frozen layer, another mode or number is another form of the step: captured and
planned when it is met first, and kept. All forms train the same states, which stay where they are.
Floats that vary are inputs of a form, where that can be; see `numbers`.

    step(batch of 64)                  the first form, planned by `parallelize`
    step(batch of 40)                  a second one: captured, planned around the same shards
    model.head.requires_grad_(False)
    step(batch of 64)                  a third one
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from sbp_core.compile import PhysicalPlan
from sbp_core.errors import RunError, SbpError
from sbp_core.graph import graph_hash
from sbp_core.runtime import BatchPart, Session, batch_parts
from sbp_launch.parallelize.engine import Engine
from sbp_launch.parallelize.following import Following, refusal
from sbp_launch.parallelize.numbers import FollowedNumbers, Places, told_numbers
from sbp_launch.planning.beside import plan_form
from sbp_launch.planning.flow import Captured, Planned
from sbp_torch.capture import flatten_batch
from sbp_torch.guards import Changed

logger = logging.getLogger(__name__)

#: Most forms of a step.
MOST_FORMS = 16

#: From so many on, a warning names what varies.
_MANY_FORMS = 4

#: Name, shape and dtype of each tensor of a batch.
Shapes = tuple[tuple[str, tuple[int, ...], str], ...]

_TODO = (
    "give numbers that change to the loss in the batch, as tensors without dims; pad batches to "
    "few sizes; or drop what is left over: DataLoader(..., drop_last=True)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """A form of a step.

    Args:
        captured: The hash of what was captured.
        planned: How it is done.
        parts: What of a batch a process gives.
        session: Takes its steps; None before the first form is started.
        why: What made it another form, for messages.
        numbers: Places of the numbers of Python that are inputs of it, by the names of these.
    """

    captured: str
    planned: Planned
    parts: Mapping[str, BatchPart]
    session: Session | None
    why: str = ""
    numbers: Places = field(default_factory=dict)


class Forms:
    """The forms of one step.

    Args:
        first: What `parallelize` has planned.
        captured: Of which captured step.
        engine: Starts the others.
        following: Says whether the program has changed.
        numbers: Captures the step as it is now, of a batch of one process.
        prove: Proves what was planned of it, of such a batch.
    """

    def __init__(
        self,
        first: Planned,
        captured: Captured,
        engine: Engine,
        following: Following,
        numbers: FollowedNumbers,
        prove: Callable[[Planned, Captured, Any], Planned],
    ) -> None:
        self._engine, self._following = engine, following
        self._numbers, self._prove = numbers, prove
        self._ranks = engine.ranks if engine.batch_is == "local" else engine.settings.mesh.rank_list
        self.first = self._form(first, graph_hash(captured.original), None)
        self._forms = {self.first.captured: self.first}
        #: By the shapes of batches: the form for the program as it is.
        self._known: dict[Shapes, Form] = {}
        self._training: Session | None = None
        #: Whether the program is what it was when the first form was captured.
        self._is_as_first = True
        self._has_warned = False

    def _form(
        self, planned: Planned, captured: str, session: Session | None, why: str = ""
    ) -> Form:
        return Form(
            captured=captured,
            planned=planned,
            parts=batch_parts(planned.plan, self._ranks),
            session=session,
            why=why,
        )

    @property
    def plans(self) -> tuple[PhysicalPlan, ...]:
        """Of all forms, in the order in which they were met."""
        return tuple(form.planned.plan for form in self._forms.values())

    def begin(self, session: Session) -> None:
        """Note the session of the first form."""
        self._training = session
        self.first = self._form(self.first.planned, self.first.captured, session)
        self._forms[self.first.captured] = self.first

    def before_step(
        self, batch: Any, scalars: Mapping[str, float]
    ) -> tuple[Form, dict[str, float]]:
        """Return the form of the next step, and its scalars; all processes call this.

        What was written to model and optimizer since the last step is taken over.

        Args:
            batch: Of this process.
            scalars: Of the update.

        Raises:
            RunError: the program has changed, and cannot be followed; names what has.
            ConfigError: the processes are about to take different steps; names what differs.
            SbpError: the batch is of another shape, with which the step cannot be taken.
        """
        problem: SbpError | None = None
        form, written = self.first, {}
        try:
            form = self._find(batch)
            written = self._following.take_over(is_checked=True)
        except SbpError as error:
            problem = error
        whole = None if self._engine.gives_parts else flatten_batch(batch)
        told = f"form {form.captured} of batches {_told(self._shapes(batch))}"
        numbers: dict[str, float] = {name: one.read() for name, one in form.numbers.items()}
        compared = {**scalars, **told_numbers(numbers)}
        self._following.agree(problem, told, compared, whole, written)
        return form, {**scalars, **numbers}

    def _find(self, batch: Any) -> Form:
        changes = self._following.changes()
        shapes = self._shapes(batch)
        if not changes and shapes in self._known:
            return self._known[shapes]
        if not changes and not self._is_other_shape(shapes) and self._is_as_first:
            self._known[shapes] = self.first
            return self.first
        if structure := [one for one in changes if one.is_structure]:
            raise refusal(structure)
        numbers = self._numbers.places
        try:
            with self._following.apart():
                form = self._of_program(batch, shapes, changes)
        except SbpError as error:
            if changes and not self._is_other_shape(shapes):
                raise refusal(changes, error.what) from error
            raise
        if changes or numbers != self._numbers.places:
            self._following.accept(self._numbers.places.values())
            self._known.clear()
            self._is_as_first = False
        self._known[shapes] = form
        return form

    def _shapes(self, batch: Any) -> Shapes:
        return tuple(
            (name, tuple(value.shape), str(value.dtype))
            for name, value in flatten_batch(batch).items()
        )

    def _is_other_shape(self, shapes: Shapes) -> bool:
        """Whether a batch is one of the first form, but for its shape.

        Of one that has other entries or dtypes, the session of the first form says what is wrong.
        """
        parts = self.first.parts
        given = {name: (shape, dtype.removeprefix("torch.")) for name, shape, dtype in shapes}
        if any(name not in given or given[name][1] != parts[name].dtype for name in parts):
            return False
        return any(given[name][0] != part.shape for name, part in parts.items())

    def _of_program(self, batch: Any, shapes: Shapes, changes: list[Changed]) -> Form:
        """Return the form that the program has now: one that is known, or a new one."""
        captured = self._numbers.captured(batch, changes)
        try:
            return self._of_captured(captured, batch, shapes, changes)
        except SbpError as error:
            if not captured.numbers or len(self._forms) >= MOST_FORMS:
                raise
            captured = self._numbers.by_value(captured, error)
        return self._of_captured(captured, batch, shapes, changes)

    def _of_captured(
        self, captured: Captured, batch: Any, shapes: Shapes, changes: list[Changed]
    ) -> Form:
        """Return the form of a captured step: one that is known, or a new one."""
        name, inputs = graph_hash(captured.original), captured.original.input_kinds
        numbers = {key: one for key, one in captured.numbers.items() if key in inputs}
        if name in self._forms:  # other objects may hold its numbers by now
            self._forms[name] = replace(self._forms[name], numbers=numbers)
            return self._forms[name]
        why = changes[0].what if changes else f"batches {_told(shapes)}"
        why += self._numbers.told(changes[:1])
        self._check_number(why)
        if not self._engine.runtime.has_forms:
            raise RunError(
                f"the runtime {type(self._engine.runtime).__name__} takes steps of one form only",
                accepted="the form that was planned first; runtime='actor' has others",
            )
        planned = plan_form(self.first.planned, captured, self._engine.settings)
        planned = self._prove(planned, captured, batch)
        assert self._training is not None, "the step is started"
        session = self._engine.runtime.start(planned.plan, self._training, keeps=True)
        form = replace(self._form(planned, name, session, why), numbers=numbers)
        self._forms[name] = form
        return form

    def _check_number(self, why: str) -> None:
        """Say that there are many forms.

        Raises:
            RunError: there are too many.
        """
        known = [form.why for form in self._forms.values() if form.why]
        if len(self._forms) >= MOST_FORMS:
            raise RunError(
                f"the step has {MOST_FORMS} forms, and this would be another one: {why}",
                where=tuple(known[-2:]),
                accepted=f"at most {MOST_FORMS} forms: each is captured, planned and kept",
                todo=_TODO,
            )
        if len(self._forms) == _MANY_FORMS and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "the step has %d forms by now, each of which was captured and planned: %s; %s; %s",
                _MANY_FORMS + 1,
                "; ".join(known[-2:]),
                why,
                _TODO,
            )

    def close(self) -> None:
        """Close the sessions of all forms but the first."""
        for form in self._forms.values():
            if form is not self.first and form.session is not None:
                form.session.close()


def _told(shapes: Shapes) -> str:
    return ", ".join(f"{name!r} {list(shape)}" for name, shape, _ in shapes)

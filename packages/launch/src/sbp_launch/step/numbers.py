"""Floats that a loop changes and forward reads: inputs of the step, where that can be.

a float that is calculated with       an input: one form of the step for all its values
... whose value is looked at          a form for each value, see `forms`
... for which PyTorch does otherwise  the same: a step with inputs is taken only if it is proved to
                                      be that of the numbers, for their values now and for others
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from math import isfinite
from typing import Any, Protocol

from sbp_core.errors import SbpError
from sbp_core.graph import LogicalGraph, graph_hash
from sbp_launch.planning.flow import Captured
from sbp_torch.graph_capture import NumberPlace, check_numbers, placed
from sbp_torch.guards import ChangedValue

#: How the names of inputs that are numbers begin.
_NUMBER = "number."

#: What PyTorch says of a symbolic number whose value something asks for.
_LOOKED_AT = "data-dependent"

#: How far other numbers are from the present ones, with which a step is compared.
_SCALES = (1.0, 1.3e6, -1.7e6)

#: Most characters of a reason that messages show.
_SHOWN = 160

#: Places by the names of the inputs that they become.
Places = Mapping[str, NumberPlace]


class Capture(Protocol):
    """Captures the step of a batch of one process; see `flow.StepCapture`."""

    def __call__(self, batch: Any, numbers: Places, /) -> LogicalGraph:
        """Capture it as the program is now, with some numbers as inputs.

        Raises:
            SbpError: that cannot be.
        """
        ...

    def prepare(self, graph: LogicalGraph, numbers: Places) -> Captured:
        """Bring what was captured, with some inputs, into the forms that are planned.

        Raises:
            SbpError: that cannot be.
        """
        ...


class FollowedNumbers:
    """The numbers of a program that are inputs of its step, and those that cannot be.

    Args:
        capture: Captures the step.

    Attributes:
        places: What a guard need not compare.
    """

    def __init__(self, capture: Capture) -> None:
        self.capture = capture
        self.places: Places = {}
        #: The step that was captured last, without such inputs; None if that was with them only.
        self._plain: LogicalGraph | None = None
        #: What `recapture` returned for shapes of batches, by the hash of its graph.
        self._checked: dict[str, Captured] = {}
        # Places are kept with what is known of them, so that no other one gets their ids.
        self._names: dict[tuple[int, Hashable], tuple[str, NumberPlace]] = {}
        self._refused: dict[tuple[int, Hashable], tuple[str, NumberPlace]] = {}

    def recapture(self, batch: Any, changes: Sequence[ChangedValue]) -> Captured:
        """Capture the step as it is now, with inputs for the numbers that vary.

        Args:
            batch: Of one process.
            changes: What is not as it was when this was called last.

        Raises:
            SbpError: it cannot be captured, with or without inputs.
        """
        wanted = {name: one for name, one in self.places.items() if _holds_float(one)}
        for number in (one.number for one in changes):
            if number is not None and number.at not in self._refused:
                wanted[self._name(number)] = number
        if wanted and wanted.keys() == self.places.keys():
            known = self._known_with_inputs(batch, wanted)
            if known is not None:
                self._plain = None
                return known
        self._plain = plain = self.capture(batch, {})
        made = self._with_inputs(batch, wanted, plain) or self.capture.prepare(plain, {})
        self.places = made.numbers
        if self.places:
            self._checked[graph_hash(made.original)] = made
        return made

    def _known_with_inputs(self, batch: Any, wanted: Places) -> Captured | None:
        """Return the step with inputs if it is one that was checked; None if it is another one.

        So what changes in each step, such as a counter that makes no difference, takes one capture.
        """
        try:
            return self._checked.get(graph_hash(self.capture(batch, wanted)))
        except SbpError:
            return None

    def _with_inputs(self, batch: Any, wanted: Places, plain: LogicalGraph) -> Captured | None:
        """Return the step with as many of some inputs as can be; None without any."""
        made: Captured | None = None
        good: dict[str, NumberPlace] = {}
        # All at once; if that fails, one after the other tells which of them cannot be.
        tries = [dict(wanted)] if wanted else []
        if len(wanted) > 1:
            tries += [{name: place} for name, place in wanted.items()]
        for added in tries:
            tried = {**good, **added}
            try:
                graph = self.capture(batch, tried)
                self._check(batch, graph, tried, plain)
                made, good = self.capture.prepare(graph, tried), tried
            except SbpError as error:
                if len(added) == 1:
                    self._refuse(added, error)
            if len(good) == len(wanted):
                break
        return made

    def _check(self, batch: Any, graph: LogicalGraph, places: Places, plain: LogicalGraph) -> None:
        """See that a step with inputs is that of the numbers: of those now, and of others.

        One set of numbers would not be enough. A program that asks for the type of 1.0 may leave it
        out for a symbolic number, and times 1.0 is what that computes, too; and one that asks for
        the type first may compare large numbers only. So some are near, and some far to each side.

        Raises:
            SbpError: it is not.
        """
        now = {name: float(place.read()) for name, place in places.items()}
        check_numbers(graph, now, plain)
        for scale in _SCALES:
            others = {
                name: scale * _another(value, at) for at, (name, value) in enumerate(now.items())
            }
            with placed(places, others):
                try:
                    twin = self.capture(batch, {})
                except SbpError as error:
                    # Such as 2**beta of a large beta: neither can be computed.
                    if abs(scale) > 1 and isinstance(error.__cause__, ArithmeticError):
                        continue
                    raise
            check_numbers(graph, others, twin)

    def by_value(self, captured: Captured, error: SbpError) -> Captured:
        """Return a step without inputs, in the place of one with inputs that cannot be planned.

        Args:
            captured: The latter, which was captured last.
            error: Why; raised if the step was not captured without inputs.
        """
        if self._plain is None:
            raise error
        self._refuse(captured.numbers, error)
        self.places = {}
        return self.capture.prepare(self._plain, {})

    def reason_text(self, changes: Sequence[ChangedValue]) -> str:
        """Return why numbers that have changed are no inputs, for messages; or ""."""
        numbers = [one.number for one in changes if one.number is not None]
        found = (self._refused[one.at][0] for one in numbers if one.at in self._refused)
        return next((f" ({reason})" for reason in found), "")

    def _refuse(self, places: Places, error: SbpError) -> None:
        where = next((one for one in error.where if one), "")
        reason = error.what
        if _LOOKED_AT in reason:
            reason = "the program looks at its value"
        reason = f"{reason[:_SHOWN]}, in {where}" if where else reason[:_SHOWN]
        for place in places.values():
            self._refused[place.at] = f"it cannot be an input of the step: {reason}", place

    def _name(self, place: NumberPlace) -> str:
        """Return the name of a number's input, which is that of no other one."""
        if place.at not in self._names:
            taken = {name for name, _ in self._names.values()}
            name, count = f"{_NUMBER}{place.label}", 1
            while name in taken:
                count += 1
                name = f"{_NUMBER}{place.label}.{count}"
            self._names[place.at] = name, place
        return self._names[place.at][0]


def told_numbers(values: Mapping[str, float]) -> dict[str, float]:
    """Return numbers by what messages call them."""
    return {f"the number {name.removeprefix(_NUMBER)}": value for name, value in values.items()}


def _holds_float(place: NumberPlace) -> bool:
    try:
        return isinstance(place.read(), float)
    except (LookupError, ValueError, AttributeError):  # it is empty
        return False


def _another(value: float, index: int) -> float:
    """Return another number of the same magnitude, with many digits; to each index another one."""
    factor = 0.8137291545 + 0.0137519 * (index % 8) + 0.0000371 * index
    return value * factor if value and isfinite(value) else factor

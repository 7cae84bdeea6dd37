"""Turn floats that a loop changes and forward reads into inputs of the step, where possible.

a float that is calculated with        an input: one form of the step for all its values
... whose value the program looks at   a form for each value, see `forms`
... which PyTorch treats differently   the same: a step with inputs is used only if it gives the
    as an input                        same results as the numbers, now and for other values
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

#: The beginning of the names of inputs that are numbers.
_NUMBER = "number."

#: A part of PyTorch's error when a program asks for the value of a symbolic number.
_LOOKED_AT = "data-dependent"

#: Factors from the present numbers to the other numbers with which a step is compared.
_SCALES = (1.0, 1.3e6, -1.7e6)

#: The largest number of characters of a reason that messages show.
_SHOWN = 160

#: Places by the names of the inputs that they become.
Places = Mapping[str, NumberPlace]


class Capture(Protocol):
    """Captures the step for a batch of one process; see `step_capture.StepCapture`."""

    def __call__(self, batch: Any, numbers: Places, /) -> LogicalGraph:
        """Capture the step of the program in its present condition, with some numbers as inputs.

        Raises:
            SbpError: it cannot be captured.
        """
        ...

    def prepare(self, graph: LogicalGraph, numbers: Places) -> Captured:
        """Prepare a captured graph, in which some numbers are inputs, for planning.

        Raises:
            SbpError: it cannot be prepared.
        """
        ...


class FollowedNumbers:
    """The numbers of a program that are inputs of its step, and the numbers that cannot be.

    Args:
        capture: Captures the step.

    Attributes:
        places: Places of the numbers that are inputs; a guard need not compare them.
    """

    def __init__(self, capture: Capture) -> None:
        self.capture = capture
        self.places: Places = {}
        #: The step last captured, without such inputs; None if it was captured only with inputs.
        self._plain: LogicalGraph | None = None
        #: Results of `recapture` that have inputs, by the hash of their graph.
        self._checked: dict[str, Captured] = {}
        # Places are kept alive, so that no other place gets their ids.
        self._names: dict[tuple[int, Hashable], tuple[str, NumberPlace]] = {}
        self._refused: dict[tuple[int, Hashable], tuple[str, NumberPlace]] = {}

    def recapture(self, batch: Any, changes: Sequence[ChangedValue]) -> Captured:
        """Capture the step in its present condition, with inputs for the numbers that vary.

        Args:
            batch: A batch of one process.
            changes: The values that have changed since the last call.

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
        """Return the step with inputs if it was checked before, otherwise None.

        So a value that changes in each step without effect, such as a counter, costs one capture.
        """
        try:
            return self._checked.get(graph_hash(self.capture(batch, wanted)))
        except SbpError:
            return None

    def _with_inputs(self, batch: Any, wanted: Places, plain: LogicalGraph) -> Captured | None:
        """Return the step with as many of the wanted inputs as possible; None if none is."""
        made: Captured | None = None
        good: dict[str, NumberPlace] = {}
        # Try all at once; if that fails, try one after the other to find those that cannot be.
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
        """Check a step with inputs against steps with fixed numbers: the present ones, and others.

        One set of numbers would not be enough. A program that checks the type of a number may skip
        it if it is symbolic, which gives the right result while the number is the factor 1.0; and a
        program may compare large numbers only. So some are near, and some far to each side.

        Raises:
            SbpError: it computes something else.
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
                    # For example, 2**beta of a large beta can be computed in neither step.
                    if abs(scale) > 1 and isinstance(error.__cause__, ArithmeticError):
                        continue
                    raise
            check_numbers(graph, others, twin)

    def by_value(self, captured: Captured, error: SbpError) -> Captured:
        """Return the step without inputs, to replace a step with inputs that cannot be planned.

        Args:
            captured: The step with inputs, which was captured last.
            error: Why it cannot be planned; raised if the step was not captured without inputs.
        """
        if self._plain is None:
            raise error
        self._refuse(captured.numbers, error)
        self.places = {}
        return self.capture.prepare(self._plain, {})

    def reason_text(self, changes: Sequence[ChangedValue]) -> str:
        """Return why changed numbers cannot be inputs, for messages; or ""."""
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
        """Return a unique name for the input of a number."""
        if place.at not in self._names:
            taken = {name for name, _ in self._names.values()}
            name, count = f"{_NUMBER}{place.label}", 1
            while name in taken:
                count += 1
                name = f"{_NUMBER}{place.label}.{count}"
            self._names[place.at] = name, place
        return self._names[place.at][0]


def told_numbers(values: Mapping[str, float]) -> dict[str, float]:
    """Return numbers by their names in messages."""
    return {f"the number {name.removeprefix(_NUMBER)}": value for name, value in values.items()}


def _holds_float(place: NumberPlace) -> bool:
    try:
        return isinstance(place.read(), float)
    except (LookupError, ValueError, AttributeError):  # it is empty
        return False


def _another(value: float, index: int) -> float:
    """Return another number of the same magnitude, with many digits, different for each index."""
    factor = 0.8137291545 + 0.0137519 * (index % 8) + 0.0000371 * index
    return value * factor if value and isfinite(value) else factor

"""What is asked for of one value, and what it costs: the terms between variables of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sbp_core.graph.ir import Rate
from sbp_core.sbp import Sbp

Table = NDArray[np.float64]
Numbers = NDArray[np.int64]

#: The SBP of a tensor on the axes of a problem.
Entries = tuple[Sbp, ...]

#: As the variable of an end: there is none, the end is always the same.
NO_VARIABLE = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversionEnd:
    """One end of conversions: what a tensor is made as, or asked for as.

    Args:
        variable: The variable that decides it; `NO_VARIABLE` if it is always the first of
            `entries`.
        entries: The SBP on the axes of the problem for each value of the variable.
        stage: Where.
        before: The entries on the axes before.
        phase: For the use of a value that each phase boxes for itself, that phase; else empty.
        rate: For such a use, how often it is boxed; else None, as often as it is made.
        as_stored: Whether it is not boxed at all, if it can be used as it is stored.
    """

    variable: int
    entries: tuple[Entries, ...]
    stage: int
    before: tuple[Sbp, ...]
    phase: str = ""
    rate: Rate | None = None
    as_stored: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class ConversionRequest:
    """What one variable asks for of a value: the target by its number, for each of its values.

    Args:
        variable: Which; `NO_VARIABLE` if the request is always that of `targets[0]`.
        targets: (values of the variable,), numbers of columns of `ConversionGroup.costs`.
    """

    variable: int
    targets: Numbers


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ConversionGroup:
    """All that is asked for of one value on one stage in one phase; equal targets are made once.

        cost = sum over the distinct targets t that are asked for of costs[value of source, t]

    Args:
        value: Which value.
        source: The variable that decides what it is made as.
        costs: (values of the source, targets), seconds of a step.
        requests: Of all users.
    """

    value: str
    source: int
    costs: Table
    requests: tuple[ConversionRequest, ...]

    def cost(self, values: Sequence[int]) -> float:
        """Return what is paid for a value of each variable, in seconds of a step."""
        row = self.costs[values[self.source]]
        asked = {
            int(request.targets[0 if request.variable < 0 else values[request.variable]])
            for request in self.requests
        }
        return sum(float(row[target]) for target in asked)

    def own(self) -> tuple[ConversionRequest, ...]:
        """Return the requests that the source's own variable makes, or none."""
        return tuple(r for r in self.requests if r.variable in (NO_VARIABLE, self.source))

    def own_targets(self) -> NDArray[np.bool_]:
        """Return which targets each value of the source asks for itself: (values, targets)."""
        return _asked(self.own(), *self.costs.shape)

    def targets_by_variable(self) -> dict[int, NDArray[np.bool_]]:
        """Return which targets each value of each other variable asks for: (values, targets)."""
        return {
            variable: _asked(requests, len(requests[0].targets), self.costs.shape[1])
            for variable, requests in self.requests_by_variable().items()
        }

    def requests_by_variable(self) -> dict[int, list[ConversionRequest]]:
        """Return the requests of each other variable."""
        found: dict[int, list[ConversionRequest]] = {}
        for request in self.requests:
            if request.variable not in (NO_VARIABLE, self.source):
                found.setdefault(request.variable, []).append(request)
        return found


def _asked(
    requests: Sequence[ConversionRequest], num_values: int, num_targets: int
) -> NDArray[np.bool_]:
    found = np.zeros((num_values, num_targets), dtype=bool)
    for request in requests:
        found[np.arange(num_values), np.broadcast_to(request.targets, (num_values,))] = True
    return found

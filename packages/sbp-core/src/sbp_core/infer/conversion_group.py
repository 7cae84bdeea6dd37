"""`ConversionGroup`: the cost of resharding one tensor for all operators that use it.

It is a term of `infer.problem`. Its variables are the shardings of the tensor's maker and users;
a target is a sharding that a user asks for.
"""

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

#: Instead of a variable: the end has no choice.
NO_VARIABLE = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversionEnd:
    """One end of conversions: the SBP in which a tensor is made, or in which it is needed.

    Args:
        variable: The variable that decides it; `NO_VARIABLE` if it is always the first of
            `entries`.
        entries: The SBP on the axes of the problem for each value of the variable.
        stage: The stage of this end.
        before: The entries on the earlier axes.
        phase: The phase, for the use of a value that each phase boxes separately; else empty.
        rate: For such a use, how often it is boxed; else None, as often as it is made.
        as_stored: Whether no boxing is needed if it can be used as it is stored.
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
    """The targets of a value that one variable asks for: a column number for each of its values.

    Args:
        variable: The variable; `NO_VARIABLE` if the request is always `targets[0]`.
        targets: (values of the variable,), numbers of columns of `ConversionGroup.costs`.
    """

    variable: int
    targets: Numbers


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ConversionGroup:
    """All requests for one value on one stage in one phase; equal targets are made once.

        cost = sum over the distinct requested targets t of costs[value of source, t]

    Args:
        value: Name of the value.
        source: The variable that decides in which SBP the value is made.
        costs: (values of the source, targets), seconds of a step.
        requests: The requests of all users.
    """

    value: str
    source: int
    costs: Table
    requests: tuple[ConversionRequest, ...]

    def cost(self, values: Sequence[int]) -> float:
        """Return the cost for a value of each variable, in seconds of a step."""
        row = self.costs[values[self.source]]
        asked = {
            int(request.targets[0 if request.variable < 0 else values[request.variable]])
            for request in self.requests
        }
        return sum(float(row[target]) for target in asked)

    def own(self) -> tuple[ConversionRequest, ...]:
        """Return the requests that depend on no other variable than the source's."""
        return tuple(r for r in self.requests if r.variable in (NO_VARIABLE, self.source))

    def own_targets(self) -> NDArray[np.bool_]:
        """Return which targets the `own` requests ask for: (values of the source, targets)."""
        return _asked(self.own(), *self.costs.shape)

    def targets_by_variable(self) -> dict[int, NDArray[np.bool_]]:
        """Return which targets the values of each other variable ask for: (values, targets)."""
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

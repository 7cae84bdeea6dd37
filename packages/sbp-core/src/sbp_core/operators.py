"""Measured times of operator calls, and estimates for calls that were not measured.

    {"call": "aten.mm.default(float32[64,128], float32[128,128])->float32[64,128]", ...}

A call is identified by its operator and by the types of its tensors on one rank, so one measurement
serves every layout with that call on a rank. The estimate for an unknown call is its roofline (see
`sbp_core.cost`), times a correction: the ratio of measured time to roofline of the nearest known
call of the same operator and dtype. Nearest is by the ratio of rooflines. An operator that was
never measured keeps its roofline. `Device.operator_table` uses this.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf, log

from sbp_core.errors import SbpValueError

__all__ = ["MeasuredOperator", "OperatorTable"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredOperator:
    """One call of an operator on one rank, and its time while all other ranks compute, too.

    Args:
        call: `sbp_core.cost.local_call`: operator, and types of its tensors on the rank.
        dtype: The dtype whose rate its roofline uses.
        flop: Its work on the rank, in flop; 0 for a view.
        num_bytes: The bytes that it reads and writes on the rank.
        time_s: Seconds from its start until the next operator can start.
    """

    call: str
    dtype: str
    flop: float
    num_bytes: int
    time_s: float

    def __post_init__(self) -> None:
        if not 0 <= self.time_s < inf or not self.flop >= 0 or self.num_bytes < 0:
            raise SbpValueError(
                f"{self.call} with {self.flop} flop, {self.num_bytes} bytes, {self.time_s} s",
                accepted="flop, bytes and seconds from 0 on",
            )

    @property
    def op(self) -> str:
        """The operator: `aten.mm.default`."""
        return self.call.partition("(")[0]


class OperatorTable:
    """Finds the time of calls.

    Args:
        measured: The measured calls.
        rooflines_s: The roofline of each, in the same order.
    """

    def __init__(self, measured: Iterable[MeasuredOperator], rooflines_s: Sequence[float]) -> None:
        self._times_s: dict[str, float] = {}
        #: For each operator and dtype: log of the roofline, and measured time over roofline.
        self._ratios: dict[tuple[str, str], list[tuple[float, float]]] = {}
        for one, roofline_s in zip(measured, rooflines_s, strict=True):
            self._times_s[one.call] = one.time_s
            if roofline_s > 0:
                entry = (log(roofline_s), one.time_s / roofline_s)
                self._ratios.setdefault((one.op, one.dtype), []).append(entry)

    def measured_s(self, call: str) -> float | None:
        """Return the time of a call that was measured, in seconds; else None."""
        return self._times_s.get(call)

    def estimated_s(self, op: str, dtype: str, roofline_s: float) -> float:
        """Return the expected time of a call that was not measured, in seconds."""
        known = self._ratios.get((op, dtype))
        if not known or roofline_s <= 0:
            return roofline_s
        at = log(roofline_s)
        return roofline_s * min(known, key=lambda entry: (abs(entry[0] - at), entry))[1]

"""Timelines: lanes of bars over time, for Gantt charts of simulated or measured schedules.

This module has only the data; `sbp_launch.explaining.timelines` draws it.
"""

from __future__ import annotations

from dataclasses import dataclass

from sbp_core.errors import SbpValueError

__all__ = ["Bar", "Lane", "Timeline"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A bar: one activity with its time.

    Args:
        label: A few letters to write on it, such as the number of the micro-batch.
        kind: Bars of one kind have the same colour: `F`, `B`, `I` and `W` as in
            `sbp_core.pipeline`, or words such as `collective`.
        start_s: Its begin, in seconds.
        end_s: Its end, in seconds.
        micro_batch: The micro-batch that it works on, if there is one.
        chunk: The number of its model chunk on the rank.
        detail: A longer text, for a tooltip.

    Raises:
        SbpValueError: It ends before it begins.
    """

    label: str
    kind: str
    start_s: float
    end_s: float
    micro_batch: int | None = None
    chunk: int = 0
    detail: str = ""

    def __post_init__(self) -> None:
        if not self.start_s <= self.end_s:
            raise SbpValueError(
                f"bar {self.label!r} ends at {self.end_s} s, before it begins at {self.start_s} s",
                accepted="start_s <= end_s",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """Bars of one rank, thread or link, drawn in one row.

    Args:
        name: The label of the row.
        bars: In the order in which they began.
    """

    name: str
    bars: tuple[Bar, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """Lanes over one axis of time.

    Args:
        title: The title of the picture.
        lanes: From top to bottom.
        unit: The unit of the axis: `s`, or empty for times without a unit.
    """

    title: str
    lanes: tuple[Lane, ...]
    unit: str = "s"

    @property
    def end_s(self) -> float:
        """The end of the last bar, in seconds; 0.0 if there is none."""
        return max((bar.end_s for lane in self.lanes for bar in lane.bars), default=0.0)

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of bars, in the order in which they first begin."""
        bars = sorted(
            (bar for lane in self.lanes for bar in lane.bars), key=lambda bar: bar.start_s
        )
        return tuple(dict.fromkeys(bar.kind for bar in bars))

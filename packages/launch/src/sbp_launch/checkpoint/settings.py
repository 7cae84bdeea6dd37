"""Settings of saving: how often a run saves a checkpoint, and how many it keeps."""

from __future__ import annotations

import re
from dataclasses import dataclass

from sbp_core.errors import ConfigError
from sbp_launch.checks import check_least

_SECONDS = {"s": 1.0, "min": 60.0, "h": 3600.0}
_TIME = re.compile(r"(\d+(?:\.\d+)?) ?(s|min|h)")


#: Default of `copy_bytes`; with the buffers of the writer, less than 256 MB.
COPY_BYTES = 240 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointConfig:
    """When checkpoints are saved (one is always saved at the end), and how many are kept.

    Args:
        every: Steps between two checkpoints, >= 1, or a time: `10min`, `90s`, `1.5h`. None: never.
        keep: Number of newest checkpoints to keep, >= 1; 0 for all. The checkpoint with the lowest
            held-out loss is kept, too, if there is one of that step.
        best: Whether to save after each evaluation whose loss is lower than all before.
        wait: Whether the next step waits until a checkpoint is written. If not, it is written while
            training continues, from copies of the states, which need memory.
        copy_bytes: Most bytes of these copies in a process, >= 0. An update that finds no room for
            a copy waits until others are written. None for no limit.
    """

    every: int | str | None = "10min"
    keep: int = 2
    best: bool = False
    wait: bool = False
    copy_bytes: int | None = COPY_BYTES

    def __post_init__(self) -> None:
        check_least(self, 0, "keep", accepted="an integer >= 0; 0: all")
        accepted = "an integer >= 0, or with a unit, such as 1GiB; null: copies of all"
        check_least(self, 0, "copy_bytes", accepted=accepted)
        if self.every is not None and not (self.every_steps or self.every_s):
            raise ConfigError(
                f"every={self.every!r} is no number of steps and no time",
                accepted="an integer >= 1; a time such as 90s, 10min or 1.5h; null for none",
            )

    @property
    def every_steps(self) -> int | None:
        """Steps between two checkpoints; None if `every` is a time or None."""
        text = str(self.every)
        return int(text) if text.isdecimal() else None

    @property
    def every_s(self) -> float | None:
        """Seconds between two checkpoints; None if `every` is a number of steps or None."""
        found = _TIME.fullmatch(str(self.every))
        return float(found[1]) * _SECONDS[found[2]] if found else None

"""Messages between the command and its processes: job file, result file, lines of progress."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Self

from sbp_core.calibration import Measurement
from sbp_core.errors import SbpError
from sbp_core.operators import MeasuredOperator
from sbp_core.serialize import dump, load, parse, read_text
from sbp_launch.calibrate.calibration_config import CalibrateConfig
from sbp_launch.settings.config import PluginChoice

#: Prefix of a line of progress; all other lines are output of the processes.
_MARK = "sbp-calibrate-progress "


class _InFolder:
    """What the command and its processes tell each other by a file in their folder."""

    __slots__ = ()

    FILE: ClassVar[str] = "found.json"

    def save(self, folder: Path) -> None:
        """Write it where `load` finds it."""
        (folder / self.FILE).write_text(json.dumps(dump(self, type(self))), encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Read what `save` wrote."""
        return load(parse(read_text(folder / cls.FILE)), cls, root=cls.FILE)


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationJob(_InFolder):
    """What every process is to measure.

    Args:
        boxing: The backend to measure.
        runtime: The runtime whose launches are measured.
        device: Where its tensors live.
        settings: What to measure.
        max_call_bytes: Largest S for which a rank has the memory.
        calls: The file of a list of calls of operators, which then are all that is measured.
    """

    FILE: ClassVar[str] = "job.json"

    boxing: PluginChoice
    runtime: PluginChoice
    device: str
    settings: CalibrateConfig
    max_call_bytes: int
    calls: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What one rank computes and copies, while all others do the same.

    Args:
        flop_per_s: Rate of a matrix multiplication by dtype, in flop/s.
        memory_bytes_per_s: Bytes read and written by a copy, a second.
        launch_s: Seconds to start one small operator.
    """

    flop_per_s: Mapping[str, float]
    memory_bytes_per_s: float
    launch_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationResult(_InFolder):
    """The measurements of all ranks.

    Args:
        rates: Rates of the slowest rank.
        samples: The measured calls.
        rounds: Times that all calls were repeated.
        skipped: Sizes that were left out, with the reason; empty if none were.
        library: Version of torch.
        measured_s: Seconds from the ranks being connected to the last call.
        step_s: Seconds that a step of each plan of `launch_overhead` takes; empty if none was run.
        large_s: Seconds of each large all-reduce in steps, by its bytes; empty if there was none.
        busy: What `Device` calls `boxing_busy`; None if it was not measured.
    """

    rates: Rates
    samples: tuple[Measurement, ...]
    rounds: int
    skipped: str
    library: str
    measured_s: float = 0.0
    step_s: Mapping[str, float] = field(default_factory=dict)
    large_s: Mapping[int, tuple[float, ...]] = field(default_factory=dict)
    busy: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CallTimes(_InFolder):
    """What the calls of a list take, of the slowest rank.

    Args:
        operators: The calls with their times.
        rounds: Times that all calls were repeated.
        failed: Calls that could not be made, and what was said.
        left_out: Calls for which time or memory was short.
        library: Version of torch.
        measured_s: Seconds that it took.
    """

    operators: tuple[MeasuredOperator, ...]
    rounds: int
    failed: tuple[tuple[str, str], ...]
    left_out: int
    library: str
    measured_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """The progress of the measurement.

    Args:
        what: The phase that it is in.
        done: Calls that were made since `what` began.
        of: Calls that it takes.
        left_s: Seconds until all is done, as far as known; 0 if not.
    """

    what: str
    done: int = 0
    of: int = 0
    left_s: float = 0.0

    def to_line(self) -> str:
        """Return it as a line of text."""
        return _MARK + json.dumps(dump(self, Progress))

    @classmethod
    def of_line(cls, line: str) -> Progress | None:
        """Read what `to_line` made; None for any other line."""
        if not line.startswith(_MARK):
            return None
        try:
            return load(parse(line.removeprefix(_MARK)), Progress)
        except SbpError:  # a launcher mixed the lines of two processes
            return None

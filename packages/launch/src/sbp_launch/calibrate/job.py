"""Messages between `sbp-calibrate` and its processes: job file, result file, lines of progress."""

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
    """A message as a JSON file in the folder that the command and its processes share."""

    __slots__ = ()

    FILE: ClassVar[str] = "found.json"

    def save(self, folder: Path) -> None:
        """Write the file that `load` reads."""
        (folder / self.FILE).write_text(json.dumps(dump(self, type(self))), encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Read the file that `save` wrote."""
        return load(parse(read_text(folder / cls.FILE)), cls, root=cls.FILE)


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationJob(_InFolder):
    """The job of every process.

    Args:
        boxing: The backend to measure.
        runtime: The runtime whose launch overheads are measured.
        device: Device of the tensors.
        settings: The settings of the measurement.
        max_call_bytes: Largest S for which a rank has the memory.
        calls: File with a list of operator calls; if given, only these are measured.
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
    """Rates at which one rank computes and copies, while all other ranks do the same.

    Args:
        flop_per_s: Rate of a matrix multiplication by dtype, in flop/s.
        memory_bytes_per_s: Bytes read and written per second by a copy.
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
        rounds: Number of repetitions of all calls.
        skipped: Sizes that were left out, with the reason; empty if none were.
        library: Version of torch.
        measured_s: Seconds from connecting the ranks to the last call.
        step_s: Seconds of a step of each plan of `launch_overhead`; empty if none was run.
        large_s: Seconds of each large all-reduce in steps, by its bytes; empty if there was none.
        busy: The value for `Device.boxing_busy`; None if it was not measured.
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
    """Times of the calls of a list, on the slowest rank.

    Args:
        operators: The calls with their times.
        rounds: Number of repetitions of all calls.
        failed: Calls that failed, each with its error message.
        left_out: Number of calls for which time or memory was short.
        library: Version of torch.
        measured_s: Duration of the measurement in seconds.
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
        what: The current phase.
        done: Calls made in this phase.
        of: Calls of this phase.
        left_s: Estimated seconds until the end of the measurement; 0 if unknown.
    """

    what: str
    done: int = 0
    of: int = 0
    left_s: float = 0.0

    def to_line(self) -> str:
        """Return the progress as a line of text."""
        return _MARK + json.dumps(dump(self, Progress))

    @classmethod
    def of_line(cls, line: str) -> Progress | None:
        """Parse the output of `to_line`; return None for any other line."""
        if not line.startswith(_MARK):
            return None
        try:
            return load(parse(line.removeprefix(_MARK)), Progress)
        except SbpError:  # a launcher mixed the lines of two processes
            return None

"""What came of a run, as `result.json` in its folder: written at its end, however it ends."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from sbp_core.errors import SbpError
from sbp_core.serialize import Document

#: The file in the run folder.
RESULT = "result.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """What came of a run, as far as it went.

    Args:
        step: Updates that are done.
        samples: Samples that they took.
        tokens: Tokens that they took, of text.
        epoch: Times that the data were gone through whole.
        train_s: Seconds of training over all stops.
        loss: Of the newest step; None if there was none.
        held_out_loss: Of the newest evaluation.
        best: The lowest held-out loss.
        best_step: The step after which that was found.
        unit: What `rate` counts: `tokens` or `samples`.
        rate: Of these a second, the median without the first steps; None of too few.
        mfu: Model flop utilization at that speed.
        stopped_for: Why a callback has ended the run; empty if none has.
        failure: What else has ended it before its budget was spent; empty if nothing has.
    """

    step: int
    samples: int
    tokens: int
    epoch: int
    train_s: float
    loss: float | None = None
    held_out_loss: float | None = None
    best: float | None = None
    best_step: int | None = None
    unit: str
    rate: float | None = None
    mfu: float | None = None
    stopped_for: str = ""
    failure: str = ""


DOCUMENT = Document(
    kind=RunResult, format="sbp-result", version=1, todo="it is written at the end of a run"
)


def write_result(folder: Path, result: RunResult) -> None:
    """Write the result of a run into its folder.

    Raises:
        OSError: it cannot be written.
    """
    DOCUMENT.write(result, folder / RESULT)


def read_result(folder: Path) -> RunResult | None:
    """Return the result of the run in a folder; None if there is none that can be read."""
    try:
        return DOCUMENT.read(folder / RESULT)
    except SbpError:
        return None

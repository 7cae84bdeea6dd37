"""Write the result of a run to `result.json` in its folder, at its end or after a failure."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from sbp_core.errors import SbpError
from sbp_core.serialize import Document

#: Name of the file in the run folder.
RESULT = "result.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """The result of a run, up to its end or failure.

    Args:
        step: Number of updates.
        samples: Samples used.
        tokens: Tokens used, for text.
        epoch: Number of complete epochs.
        train_s: Seconds of training, summed over all parts of a resumed run.
        loss: Loss of the last step; None if there was none.
        held_out_loss: Loss of the last evaluation.
        best: The lowest held-out loss.
        best_step: The step of the lowest held-out loss.
        unit: Unit of `rate`: `tokens` or `samples`.
        rate: Units per second: the median without the first steps; None after too few steps.
        mfu: Model flop utilization at that speed.
        stopped_for: Reason for which a callback has ended the run; empty if none has.
        failure: Any other reason for an early end of the run; empty if there is none.
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
    """Return the result of the run in a folder; None if it is missing or cannot be read."""
    try:
        return DOCUMENT.read(folder / RESULT)
    except SbpError:
        return None

"""Cross-validate the predicted times of collectives: fit a part of the samples, predict the rest.

Three ways to leave samples out, from the mildest to the hardest:

* `size`: one size of one case; its curve is fitted to the sizes around it. The smallest and the
  largest size are never left out, because that would be extrapolation.
* `group`: all samples of one case (a kind, a group size, a number of groups at once).
* `collective`: all samples of one collective, in groups of any size. Transfers always stay, because
  no collective determines the time of a message.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from sbp_core.calibration.held_out import HELD_OUT_BY, FitError, HeldOut
from sbp_core.calibration.model import Calibration
from sbp_core.calibration.sample import Measurement
from sbp_core.errors import SbpValueError


def calibrate(samples: Iterable[Measurement]) -> Calibration:
    """Fit the samples of one backend, and estimate the errors of the fit.

    Raises:
        SbpValueError: there are no samples, or they are of several backends.
    """
    given = tuple(samples)
    return replace(Calibration.of(given), errors=cross_validate(given)[0])


def cross_validate(
    samples: Iterable[Measurement], ways: Sequence[str] = HELD_OUT_BY
) -> tuple[tuple[FitError, ...], tuple[HeldOut, ...]]:
    """Return the errors of each way that the samples allow, and all predictions.

    Args:
        samples: The samples of one backend.
        ways: Some of `HELD_OUT_BY`.

    Raises:
        SbpValueError: no such way.
    """
    given = tuple(samples)
    errors: list[FitError] = []
    everything: list[HeldOut] = []
    for way in ways:
        if way not in HELD_OUT_BY:
            raise SbpValueError(
                f"no way to leave samples out is {way!r}", accepted=", ".join(HELD_OUT_BY)
            )
        held_out = [entry for left in _folds(given, way) for entry in _predict(given, left, way)]
        if held_out:
            errors.append(FitError.of(way, held_out))
            everything += held_out
    return tuple(errors), tuple(everything)


def _folds(samples: Sequence[Measurement], way: str) -> Iterator[tuple[Measurement, ...]]:
    """Yield sets of samples that are left out together."""
    if way == "collective":
        for kind in dict.fromkeys(sample.kind for sample in samples if sample.kind != "transfer"):
            yield tuple(sample for sample in samples if sample.kind == kind)
        return
    cases = {sample.case: [s for s in samples if s.case == sample.case] for sample in samples}
    if way == "group":
        yield from map(tuple, cases.values())
        return
    # One size of every case at once: the cases have their own curves, so this equals leaving out
    # one at a time, and needs fewer fits.
    inner = {case: sorted({s.shared_bytes for s in of})[1:-1] for case, of in cases.items()}
    for turn in range(max(map(len, inner.values()), default=0)):
        yield tuple(
            sample
            for case, of in cases.items()
            for sample in of
            if turn < len(inner[case]) and sample.shared_bytes == inner[case][turn]
        )


def _predict(
    samples: Sequence[Measurement], left: tuple[Measurement, ...], way: str
) -> Iterator[HeldOut]:
    out = set(map(id, left))
    kept = [sample for sample in samples if id(sample) not in out]
    if not kept:
        return
    model = Calibration.of(kept)
    for sample in left:
        predicted_s = model.time_s(
            sample.kind,
            sample.group_size,
            sample.concurrent_groups,
            sample.shared_bytes,
            num_nodes=sample.num_nodes,
        )
        if predicted_s is not None:
            yield HeldOut(way=way, sample=sample, predicted_s=predicted_s)

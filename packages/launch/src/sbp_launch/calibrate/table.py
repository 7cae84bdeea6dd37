"""What `sbp-calibrate` prints: how fast each kind of call is, and how far predictions are off."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median

from rich import box
from rich.table import Table

from sbp_core.calibration import Calibration, Curve, HeldOut, MeasuredCase
from sbp_core.cluster import Cluster
from sbp_core.units import format_bytes, format_seconds

#: What errors should stay below: the median, and the 90th percentile.
GOALS = (0.15, 0.35)

#: A call whose repetitions disagree by more was disturbed.
_DISTURBED = 0.15

#: Below this, nothing is copied: faster than any memory, in seconds a byte.
_NO_COPY_S_PER_BYTE = 1e-14

_LEGEND = """\
at once: groups that called at the same time
latency: of a call, however small
bandwidth: bytes that a group shares (the whole tensor, a message) a second,
  added by a large call; - if it takes no longer than a small one
error: of predictions for sizes that were left out of the fit
?: disturbed; one half of the repetitions is over 15% off the other
"""


def rate_lines(cluster: Cluster) -> Iterator[str]:
    """Yield what one rank computes and copies."""
    device = cluster.device
    rates = ", ".join(f"{plain(rate / 1e9)} ({name})" for name, rate in device.flop_per_s.items())
    yield f"matrix multiplication of one rank, in GFLOP/s: {rates}"
    yield (
        f"memory of one rank: {plain(device.memory_bytes_per_s / 1e9)} GB/s, "
        f"{format_bytes(device.memory_bytes)}"
    )
    beside_s = device.boxing_launch_s
    boxing = f"; a boxing step, beside its call: {format_seconds(beside_s)}" if beside_s else ""
    yield f"starting an operator: {format_seconds(device.launch_s)}{boxing}"
    calibration = cluster.calibration
    if calibration is None:
        return
    if calibration.in_steps > 1:
        yield f"bytes of a call between segments: {calibration.in_steps:.2f} times as long"
    if calibration.busy is not None:
        yield f"of a call under way, a rank cannot compute in {calibration.busy:.0%}"


def plain(number: float) -> str:
    """Return a number with three digits, or all before the point: `9.81`, `116`, `1,030`."""
    return f"{number:,.0f}" if number >= 99.95 else f"{number:.3g}"


def call_table(calibration: Calibration, held_out: Sequence[HeldOut]) -> Table:
    """Return a row for every kind of call that was measured in more than one size."""
    table = Table(
        title=f"boxing={calibration.backend}",
        # Fits into 80 columns.
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        caption=_LEGEND,
        caption_justify="left",
        title_justify="left",
    )
    table.add_column("call", no_wrap=True)
    for name in ("ranks", "at once", "latency", "bandwidth", "largest", "took", "error"):
        table.add_column(name, justify="right", no_wrap=True)
    for case, curve in calibration.curves.items():
        largest = max(
            (sample for sample in calibration.samples if sample.case == case),
            key=lambda sample: sample.shared_bytes,
        )
        table.add_row(
            case.kind,
            str(case.group_size),
            str(case.concurrent_groups),
            format_seconds(curve.latency_s),
            bandwidth(curve),
            format_bytes(largest.shared_bytes),
            format_seconds(largest.median_s),
            _error(case, calibration, held_out),
        )
    return table


def bandwidth(curve: Curve) -> str:
    """Return the rate of a curve's last segment; `-` if no memory could be so fast."""
    rate = curve.s_per_byte[-1]
    return f"{plain(1e-9 / rate)} GB/s" if rate > _NO_COPY_S_PER_BYTE else "-"


def _error(case: MeasuredCase, calibration: Calibration, held_out: Sequence[HeldOut]) -> str:
    errors = [
        entry.error for entry in held_out if entry.way == "size" and entry.sample.case == case
    ]
    doubts = [sample.doubt for sample in calibration.samples if sample.case == case]
    mark = "?" if median(doubts) > _DISTURBED else ""
    return f"{median(errors):.0%}{mark}" if errors else "-"


def error_lines(calibration: Calibration) -> Iterator[str]:
    """Yield how far predictions are off what was left out of the fit, and whether that is much."""
    yield "error of predictions for what was left out of the fit (one size of a call,"
    yield "all of a call in groups of one size, all calls of a collective):"
    for error in calibration.errors:
        good = error.way != "size" or (error.median <= GOALS[0] and error.p90 <= GOALS[1])
        yield f"  {error}" + ("" if good else "; measure again on an idle machine")
    doubts = sorted(sample.doubt for sample in calibration.samples)
    yield (
        "one half of the repetitions is off the other half, which nothing can predict:\n"
        f"  median {median(doubts):.1%}, 90th percentile {doubts[int(0.9 * len(doubts))]:.1%}"
    )

"""Measure a machine for `sbp-calibrate`: start ranks, show progress, write the results, report.

The results are a cluster file, from which planners predict the time of a step. The report gives the
speed of each kind of call, and the errors of predictions.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import TypeVar, cast

from rich import box
from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar
from rich.table import Table

from sbp_core.boxing import BoxingBackend
from sbp_core.calibration import Calibration, Curve, HeldOut, cross_validate
from sbp_core.cluster import Cluster, Device, Link
from sbp_core.machine_memory import free_memory_bytes, total_memory_bytes
from sbp_core.plugins import PluginRegistry
from sbp_core.processes import Line, supervise
from sbp_core.units import format_bytes, format_seconds
from sbp_launch.calibrate.calibration_config import CalibrateRun
from sbp_launch.calibrate.job import CalibrationJob, CalibrationResult, CallTimes, Progress
from sbp_launch.calibrate.launch_overhead import SmallModel, in_steps, launches
from sbp_launch.calibrate.operators import save_operators, with_times
from sbp_launch.console import make_console
from sbp_launch.machine import describe_machine
from sbp_launch.tracing.operator_times import OperatorTimes

T = TypeVar("T")

#: Upper bound of the copies of a message that a rank and its transport hold during a call.
_COPIES = 5

#: Size in bytes of the message from which the bandwidth of a link is derived.
_LARGE = 2**26

#: A link counts as shared if messages take so much longer when all ranks send at once.
_SHARED = 1.5

#: The link of a cluster with only one rank.
_NO_LINK = Link(latency_s=2e-5, bytes_per_s=5e9)

#: Seconds allowed for starting the processes, computing and copying, in addition to the calls.
_BESIDE_S = 600.0


def calibrate_machine(run: CalibrateRun, registry: PluginRegistry) -> None:
    """Measure this machine through a backend, print the results, and write the cluster file.

    Raises:
        RunError: a rank failed.
    """
    console = make_console()
    settings, among = run.settings, _among(run.settings.ranks)
    console.print(
        f"measuring boxing={run.boxing.name} {among} on this machine: about "
        f"{format_seconds(settings.time_s)} at most, up to {settings.repetitions} repetitions; "
        "in addition it starts the ranks, trains a small model and fits the costs",
        soft_wrap=True,
    )
    began = time.monotonic()
    found = measure(run, registry, console, CalibrationResult.load)
    console.print("fitting what was found")
    cluster, held_out = make_cluster(run, found)
    cluster.save(Path(settings.out))
    what = f"{len(found.samples)} calls, {found.rounds} times each or more,"
    if not found.samples:
        what = "computation and copies of a rank (a single rank makes no calls)"
    console.print(
        f"measured {what} in {format_seconds(found.measured_s)}; with the start, the small model "
        f"and the fit {format_seconds(time.monotonic() - began)}",
        soft_wrap=True,
    )
    if found.skipped:
        console.print(f"left out: {found.skipped}")
    for line in rate_lines(cluster):
        console.print(line)
    calibration = cluster.calibrations.get(run.boxing.name)
    if calibration is not None:
        console.print(call_table(calibration, held_out))
        for line in error_lines(calibration):
            console.print(line)
    kept = ""
    if run.kept.calibrations:
        kept += f"; kept its measurements of boxing={', '.join(run.kept.calibrations)}"
    if run.kept.operators:
        kept += f"; kept the times of {len(run.kept.operators)} calls of operators"
    console.print(f"wrote {settings.out}{kept}", soft_wrap=True)
    mesh = "" if settings.ranks == 2 else f' "cluster.mesh=[{settings.ranks}]"'
    console.print(
        f"use it: sbp-plan cluster=measured cluster.file={settings.out}{mesh} "
        "planner=manual/data_parallel",
        soft_wrap=True,
    )


def _among(num_ranks: int) -> str:
    return "on 1 rank" if num_ranks == 1 else f"among {num_ranks} ranks"


def measure_calls(run: CalibrateRun, registry: PluginRegistry) -> None:
    """Measure the times of a list of operator calls, and add them to the cluster file.

    Raises:
        RunError: a rank failed.
    """
    console = make_console()
    settings, among = run.settings, _among(run.settings.ranks)
    console.print(
        f"measuring the calls of {settings.ops[0]} {among} on this machine: about "
        f"{format_seconds(settings.time_s)} at most",
        soft_wrap=True,
    )
    found = measure(run, registry, console, CallTimes.load)
    times = OperatorTimes(
        backend=run.boxing.name,
        num_ranks=settings.ranks,
        machine=describe_machine(found.library),
        operators=found.operators,
    )
    out = settings.out
    cluster = with_times(Cluster.load(Path(out)), out, settings.ops[0], times)
    console.print(
        f"measured {len(found.operators)} calls, {found.rounds} times each, in "
        f"{format_seconds(found.measured_s)}"
    )
    if found.left_out:
        console.print(
            f"left out for lack of time or memory: {found.left_out} of the shortest calls; "
            "raise time_s to measure them"
        )
    if found.failed:
        call, why = found.failed[0]
        console.print(
            f"left out: {len(found.failed)} calls that fail on random data, such as {call}: {why}",
            soft_wrap=True,
        )
    save_operators(cluster, out)


def measure(
    run: CalibrateRun, registry: PluginRegistry, console: Console, load: Callable[[Path], T]
) -> T:
    """Start the ranks, and return their results.

    Raises:
        RunError: a rank failed, or they took far too long.
    """
    settings = run.settings
    backend = cast(BoxingBackend, registry.make("boxing", run.boxing.name, run.boxing.settings))
    limit = free_memory_bytes() // (_COPIES * settings.ranks)
    with tempfile.TemporaryDirectory(prefix="sbp-calibrate-") as name, _shown(console) as show:
        folder = Path(name)
        job = CalibrationJob(
            boxing=run.boxing,
            runtime=run.runtime,
            device=run.device,
            settings=settings,
            max_call_bytes=limit if run.device == "cpu" else settings.chosen_sizes[-1],
            calls=run.calls,
        )
        job.save(folder)
        command = [sys.executable, "-m", "sbp_launch.calibrate", str(folder)]
        ended = supervise(
            backend.launch_specs(settings.ranks, command),
            on_line=show,
            timeout_s=_BESIDE_S + 3 * settings.time_s,
        )
        error = ended.error(quote=False)
        if error is not None:
            raise error
        return load(folder)


@contextmanager
def _shown(console: Console) -> Iterator[Callable[[Line], None]]:
    """Show the progress of the ranks: a bar on a terminal, plain lines elsewhere.

    Yields:
        A function to call with each line that a process wrote.
    """
    bar = Bar(
        *(TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[left]}")),
        TimeElapsedColumn(),
        console=console,
        disable=not console.is_terminal,
    )
    task, before = bar.add_task("starting the ranks", total=None, left=""), ""

    def show(line: Line) -> None:
        nonlocal before
        at = Progress.of_line(line.text)
        if at is None:
            console.print(str(line), soft_wrap=True)
            return
        left = f"{at.left_s:.0f} s left" if at.left_s >= 0.5 else ""
        if console.is_terminal:
            total = at.of or None
            bar.update(task, description=at.what, completed=at.done, total=total, left=left)
        elif at.what != before:
            console.print(f"{at.what}: {left}" if left else at.what)
        before = at.what

    with bar:
        yield show


def make_cluster(
    run: CalibrateRun, found: CalibrationResult
) -> tuple[Cluster, tuple[HeldOut, ...]]:
    """Return the measured machine, and the predictions from which its errors were computed."""
    settings, name = run.settings, run.boxing.name
    calibrations = dict(run.kept.calibrations)
    held_out: tuple[HeldOut, ...] = ()
    link, shared = _NO_LINK, False
    if found.samples:
        errors, held_out = cross_validate(found.samples)
        calibration = replace(
            Calibration.of(found.samples),
            errors=errors,
            operators=run.kept.operators,
            busy=found.busy,
        )
        calibrations[name] = calibration
        link, shared = link_of(calibration, settings.ranks)
    device = Device(
        kind=run.device.partition(":")[0],
        memory_bytes=total_memory_bytes() // settings.ranks,
        flop_per_s=found.rates.flop_per_s,
        memory_bytes_per_s=found.rates.memory_bytes_per_s,
        launch_s=found.rates.launch_s,
        boxing_busy=found.busy or 0.0,
        operators=() if found.samples else run.kept.operators,
    )
    cluster = Cluster(
        name=settings.name,
        num_devices=settings.ranks,
        devices_per_node=settings.ranks,
        device=device,
        intra_node=link,
        inter_node=link,
        intra_node_shared=shared,
        calibrations=calibrations,
        backend=name if name in calibrations else "",
        machine=describe_machine(found.library),
    )
    if not found.step_s:
        return cluster, held_out
    launch_s, boxing_launch_s = launches(cluster, found.step_s, SmallModel.within(settings.time_s))
    if name not in calibrations:  # one rank calls nobody
        return replace(cluster, device=replace(cluster.device, launch_s=launch_s)), held_out
    calibration = replace(calibrations[name], launch_s=launch_s, boxing_launch_s=boxing_launch_s)
    stretch = in_steps(calibration, settings.ranks, found.large_s)
    calibrations[name] = replace(calibration, in_steps=stretch)
    device = replace(device, launch_s=launch_s, boxing_launch_s=boxing_launch_s)
    return replace(cluster, device=device, calibrations=calibrations), held_out


def link_of(calibration: Calibration, num_ranks: int) -> tuple[Link, bool]:
    """Return the link between two ranks, and whether all messages share it."""

    def message_s(at_once: int, size_bytes: int) -> float:
        time_s = calibration.time_s("transfer", 2, at_once, size_bytes)
        assert time_s is not None, "a calibration on one node knows calls on one node"
        return time_s

    small_s, large_s = message_s(1, _LARGE // 4), message_s(1, _LARGE)
    # A transport that only passes a reference takes the same time for any size.
    step_s = max(large_s - small_s, 1e-3 * large_s, 1e-9)
    link = Link(latency_s=message_s(1, 0), bytes_per_s=(_LARGE - _LARGE // 4) / step_s)
    return link, message_s(num_ranks, _LARGE) > _SHARED * large_s


#: Targets for the relative errors of predictions: the median, and the 90th percentile.
GOALS = (0.15, 0.35)

#: A call whose repetitions differ by more was disturbed by other load.
_DISTURBED = 0.15

#: A lower slope, in seconds per byte, is faster than any memory: nothing is copied.
_NO_COPY_S_PER_BYTE = 1e-14

_LEGEND = """\
at once: groups that called at the same time
latency: of a call, however small
bandwidth: bytes that a group shares (the whole tensor, a message) a second,
  added by a large call; - if it takes no longer than a small one
error: of predictions for sizes that were left out of the fit
?: disturbed; the two halves of the repetitions differ by over 15%
"""


def rate_lines(cluster: Cluster) -> Iterator[str]:
    """Yield lines with the rates at which one rank computes and copies."""
    device = cluster.device
    rates = ", ".join(f"{plain(rate / 1e9)} ({name})" for name, rate in device.flop_per_s.items())
    yield f"matrix multiplication of one rank, in GFLOP/s: {rates}"
    yield (
        f"memory of one rank: {plain(device.memory_bytes_per_s / 1e9)} GB/s, "
        f"{format_bytes(device.memory_bytes)}"
    )
    beside_s = device.boxing_launch_s
    boxing = f"; a boxing step, without its call: {format_seconds(beside_s)}" if beside_s else ""
    yield f"starting an operator: {format_seconds(device.launch_s)}{boxing}"
    calibration = cluster.calibration
    if calibration is None:
        return
    if calibration.in_steps > 1:
        yield f"bytes of a call take {calibration.in_steps:.2f} times as long between segments"
    if calibration.busy is not None:
        yield f"a rank cannot compute during {calibration.busy:.0%} of a running call"


def plain(number: float) -> str:
    """Return a number with three digits, or all digits before the point: `9.81`, `116`, `1,030`."""
    return f"{number:,.0f}" if number >= 99.95 else f"{number:.3g}"


def call_table(calibration: Calibration, held_out: Sequence[HeldOut]) -> Table:
    """Return a table with a row for each kind of call that was measured in several sizes."""
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
        of_case = [one for one in held_out if one.way == "size" and one.sample.case == case]
        doubts = [sample.doubt for sample in calibration.samples if sample.case == case]
        mark = "?" if median(doubts) > _DISTURBED else ""
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
            f"{median(one.error for one in of_case):.0%}{mark}" if of_case else "-",
        )
    return table


def bandwidth(curve: Curve) -> str:
    """Return the rate of a curve's last segment; `-` if no memory could be so fast."""
    rate = curve.s_per_byte[-1]
    return f"{plain(1e-9 / rate)} GB/s" if rate > _NO_COPY_S_PER_BYTE else "-"


def error_lines(calibration: Calibration) -> Iterator[str]:
    """Yield lines with the errors of predictions for samples that were left out of the fit."""
    yield "error of predictions for what was left out of the fit (one size of a call,"
    yield "all of a call in groups of one size, all calls of a collective):"
    for error in calibration.errors:
        good = error.way != "size" or (error.median <= GOALS[0] and error.p90 <= GOALS[1])
        yield f"  {error}" + ("" if good else "; measure again on an idle machine")
    doubts = sorted(sample.doubt for sample in calibration.samples)
    yield (
        "difference between the two halves of the repetitions, which no fit can predict:\n"
        f"  median {median(doubts):.1%}, 90th percentile {doubts[int(0.9 * len(doubts))]:.1%}"
    )

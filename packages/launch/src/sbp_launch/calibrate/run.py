"""Start the ranks of a calibration, show how far they are, and make a cluster of the findings."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TypeVar, cast

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from sbp_core.boxing import BoxingBackend
from sbp_core.calibration import Calibration, HeldOut, cross_validate
from sbp_core.cluster import Cluster, Device, Link
from sbp_core.machine_memory import free_memory_bytes, total_memory_bytes
from sbp_core.plugins import PluginRegistry
from sbp_core.processes import Line, supervise
from sbp_core.units import format_seconds
from sbp_launch.calibrate.config import CalibrateRun
from sbp_launch.calibrate.job import CalibrationResult, CallTimes, Job, Progress
from sbp_launch.calibrate.operators import save_operators, with_times
from sbp_launch.calibrate.steps import SmallModel, in_steps, launches
from sbp_launch.calibrate.table import call_table, error_lines, rate_lines
from sbp_launch.console import make_console
from sbp_launch.machine import describe_machine
from sbp_launch.tracing.operators import OperatorTimes

T = TypeVar("T")

#: Copies of a message that a rank and its transport hold, at most, while it is under way.
_COPIES = 5

#: Message that tells the bandwidth of a link, in bytes.
_LARGE = 2**26

#: A link whose messages take so much longer when all ranks send at once is shared.
_SHARED = 1.5

#: What is said of links if there is but one rank.
_NO_LINK = Link(latency_s=2e-5, bytes_per_s=5e9)

#: Seconds that starting the processes, computing and copying may take beside the calls.
_BESIDE_S = 600.0


def calibrate_machine(run: CalibrateRun, registry: PluginRegistry) -> None:
    """Measure this machine through a backend, print what was found, and write the cluster file.

    Raises:
        RunError: a rank ended badly.
    """
    console = make_console()
    settings = run.settings
    console.print(
        f"measuring boxing={run.boxing.name} {_among(settings.ranks)} on this machine: about "
        f"{format_seconds(settings.time_s)} at most, up to {settings.repetitions} repetitions; "
        "starting the ranks, a small model and the fit come on top",
        soft_wrap=True,
    )
    began = time.monotonic()
    found = measure(run, registry, console, CalibrationResult.load)
    console.print("fitting what was found")
    cluster, held_out = make_cluster(run, found)
    cluster.save(Path(settings.out))
    what = f"{len(found.samples)} calls, {found.rounds} times each or more,"
    if not found.samples:
        what = "what a rank computes and copies (one rank calls nobody)"
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
        kept += f"; kept what it says of boxing={', '.join(run.kept.calibrations)}"
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
    """Measure what the calls of a list take, and add it to the cluster file.

    Raises:
        RunError: a rank ended badly.
    """
    console = make_console()
    settings = run.settings
    console.print(
        f"measuring the calls of {settings.ops[0]} {_among(settings.ranks)} on this machine: about "
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
        f"{format_seconds(found.measured_s)}",
    )
    if found.left_out:
        console.print(
            f"left out for want of time or memory: {found.left_out} calls, of those that take "
            "least; raise time_s to measure them",
        )
    if found.failed:
        call, why = found.failed[0]
        console.print(
            f"left out: {len(found.failed)} calls that made-up data does not fit, such as {call}: "
            f"{why}",
            soft_wrap=True,
        )
    save_operators(cluster, out)


def measure(
    run: CalibrateRun, registry: PluginRegistry, console: Console, load: Callable[[Path], T]
) -> T:
    """Start the ranks, and return what they found.

    Args:
        run: What was asked for.
        registry: Of the backends.
        console: Shows how far they are.
        load: Reads what they left in their folder.

    Raises:
        RunError: a rank ended badly, or they took far too long.
    """
    settings = run.settings
    backend = cast(BoxingBackend, registry.make("boxing", run.boxing.name, run.boxing.settings))
    limit = free_memory_bytes() // (_COPIES * settings.ranks)
    with tempfile.TemporaryDirectory(prefix="sbp-calibrate-") as name, _Show(console) as show:
        folder = Path(name)
        job = Job(
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
            on_line=show.line,
            timeout_s=_BESIDE_S + 3 * settings.time_s,
        )
        error = ended.error(quote=False)
        if error is not None:
            raise error
        return load(folder)


class _Show:
    """Shows how far the ranks are: a bar on a terminal, plain lines elsewhere."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._what = ""
        self._bar = Bar(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[left]}"),
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("starting the ranks", total=None, left="")

    def __enter__(self) -> _Show:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def line(self, line: Line) -> None:
        """Take a line that a process wrote."""
        progress = Progress.of_line(line.text)
        if progress is None:
            self._console.print(str(line), soft_wrap=True)
            return
        left = f"{progress.left_s:.0f} s left" if progress.left_s >= 0.5 else ""
        if self._console.is_terminal:
            self._bar.update(
                self._task,
                description=progress.what,
                completed=progress.done,
                total=progress.of or None,
                left=left,
            )
        elif progress.what != self._what:
            text = f"{progress.what}: {left}" if left else progress.what
            self._console.print(text)
        self._what = progress.what


def make_cluster(
    run: CalibrateRun, found: CalibrationResult
) -> tuple[Cluster, tuple[HeldOut, ...]]:
    """Return the measured machine, and the predictions behind the errors of its calibration.

    Args:
        run: What was asked for.
        found: What was measured.
    """
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
    # A transport that only hands over a reference takes as long for any size.
    step_s = max(large_s - small_s, 1e-3 * large_s, 1e-9)
    link = Link(latency_s=message_s(1, 0), bytes_per_s=(_LARGE - _LARGE // 4) / step_s)
    return link, message_s(num_ranks, _LARGE) > _SHARED * large_s

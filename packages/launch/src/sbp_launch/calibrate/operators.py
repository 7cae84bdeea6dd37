"""Add to a cluster file what the operators of traced runs took.

A file is for one machine and one number of ranks, and the times of operators are of one backend
beside: ranks that are threads of one process wait for its interpreter, and processes do not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from sbp_core.cluster import Cluster
from sbp_core.errors import ConfigError
from sbp_launch.calibrate.kept import differing_part
from sbp_launch.tracing.operators import OPERATORS, OperatorTimes

if TYPE_CHECKING:
    from sbp_core.operators import MeasuredOperator
    from sbp_launch.calibrate.config import CalibrateRun


def add_operators(out: str, folders: Sequence[str]) -> Cluster:
    """Return what a cluster file says once the operators of some runs are in it.

    A call that it knows already has its newest time; of several folders the last one counts.

    Args:
        out: The file, which `sbp-calibrate` wrote.
        folders: Of runs whose operators were traced.

    Raises:
        ConfigError: there is no such file, or no times in a folder; or they are of another machine,
            another number of ranks, or a backend that the file does not know.
    """
    found = [(folder, OperatorTimes.load(Path(folder) / OPERATORS)) for folder in folders]
    _, first = found[0]
    if not Path(out).exists():
        raise ConfigError(
            f"out={out!r} does not exist: times of operators are added to what was measured of a "
            "machine",
            accepted="a cluster file",
            todo=f"sbp-calibrate boxing={first.backend} ranks={first.num_ranks} out={out}, and "
            "then this command again",
        )
    cluster = Cluster.load(Path(out))
    for folder, times in found:
        cluster = _with(cluster, out, folder, times)
    return cluster


def _with(cluster: Cluster, out: str, folder: str, times: OperatorTimes) -> Cluster:
    if times.num_ranks != cluster.num_devices:
        raise ConfigError(
            f"ops={folder!r} has operators of {times.num_ranks} ranks, and out={out!r} was "
            f"measured with {cluster.num_devices}",
            accepted=f"runs of {cluster.num_devices} ranks, or another file",
            todo=f"sbp-calibrate boxing={times.backend} ranks={times.num_ranks} out=FILE",
        )
    key = differing_part(cluster, times.machine)
    if key:
        raise ConfigError(
            f"ops={folder!r} ran on another machine than out={out!r}: {key} "
            f"{times.machine.get(key, 'not said')!r}, not {cluster.machine.get(key, 'not said')!r}",
            accepted="runs on the machine of the file, or another file",
        )
    if not cluster.calibrations:  # of one rank, which calls nobody
        operators = merged(cluster.device.operators, times.operators)
        return replace(cluster, device=replace(cluster.device, operators=operators))
    if times.backend not in cluster.calibrations:
        raise ConfigError(
            f"ops={folder!r} ran with boxing={times.backend}, of which out={out!r} says nothing",
            accepted=", ".join(f"boxing={name}" for name in cluster.calibrations),
            todo=f"sbp-calibrate boxing={times.backend} ranks={times.num_ranks} out={out}, and "
            "then this command again",
        )
    of = cluster.calibrations[times.backend]
    of = replace(of, operators=merged(of.operators, times.operators))
    return replace(cluster, calibrations={**cluster.calibrations, times.backend: of})


def merged(
    old: Sequence[MeasuredOperator], new: Sequence[MeasuredOperator]
) -> tuple[MeasuredOperator, ...]:
    """Return both, sorted, the new one of each call."""
    by_call = {one.call: one for one in (*old, *new)}
    return tuple(by_call[call] for call in sorted(by_call))


def save_operators(run: CalibrateRun) -> None:
    """Write the cluster file with the operators that were added, and say so."""
    cluster, out = run.with_operators, run.settings.out
    assert cluster is not None, "operators were added"
    cluster.save(Path(out))
    console = Console(soft_wrap=True, highlight=False)
    known = {"": cluster.device.operators} | {
        f" of boxing={name}": of.operators for name, of in cluster.calibrations.items()
    }
    for whose, operators in known.items():
        if operators:
            console.print(f"{out} has the times of {len(operators)} calls of operators{whose}")

"""Add to a cluster file what operators took: of traced runs, or of a list that was measured.

A file is for one machine and one number of ranks, and the times of operators are of one backend
beside: ranks that are threads of one process wait for its interpreter, and processes do not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from sbp_core.cluster import Cluster
from sbp_core.compile.rank_calls import RankCalls
from sbp_core.errors import ConfigError
from sbp_core.operators import MeasuredOperator
from sbp_launch.calibrate.kept_measurements import differing_part
from sbp_launch.console import make_console
from sbp_launch.machine import describe_machine
from sbp_launch.tracing.times import OPERATORS, OperatorTimes


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
    cluster = _cluster_file(out, first.backend, first.num_ranks)
    for folder, times in found:
        cluster = with_times(cluster, out, folder, times)
    return cluster


def ranks_of_list(out: str, file: str, boxing: str) -> int:
    """Return on how many ranks the calls of a list are measured: as many as a file is for.

    Args:
        out: The cluster file, which `sbp-calibrate` wrote.
        file: The list, of `sbp-plan calls=FILE`.
        boxing: The backend that starts the ranks.

    Raises:
        ConfigError: there is no such file or list, or times of this machine and backend cannot be
            added to it.
    """
    RankCalls.load(Path(file))
    cluster = _cluster_file(out, boxing, 2)
    none = OperatorTimes(
        backend=boxing, num_ranks=cluster.num_devices, machine=describe_machine(""), operators=()
    )
    with_times(cluster, out, file, none)
    return cluster.num_devices


def _cluster_file(out: str, boxing: str, num_ranks: int) -> Cluster:
    if not Path(out).exists():
        raise ConfigError(
            f"out={out!r} does not exist: times of operators are added to what was measured of a "
            "machine",
            accepted="a cluster file",
            todo=f"sbp-calibrate boxing={boxing} ranks={num_ranks} out={out}, and "
            "then this command again",
        )
    return Cluster.load(Path(out))


def with_times(cluster: Cluster, out: str, folder: str, times: OperatorTimes) -> Cluster:
    """Return a machine whose operators are known to take some times, in place of older ones.

    Args:
        cluster: The machine.
        out: Its file, for messages.
        folder: What the times are of, likewise.
        times: The times.

    Raises:
        ConfigError: they are of another machine, another number of ranks, or a backend that the
            file does not know.
    """
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


def save_operators(cluster: Cluster, out: str) -> None:
    """Write a cluster file to which operators were added, and say so."""
    cluster.save(Path(out))
    console = make_console()
    known = {"": cluster.device.operators} | {
        f" of boxing={name}": of.operators for name, of in cluster.calibrations.items()
    }
    for whose, operators in known.items():
        if operators:
            told = f"{out} has the times of {len(operators)} calls of operators{whose}"
            console.print(told, soft_wrap=True)

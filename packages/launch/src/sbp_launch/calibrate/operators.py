"""Add measured times of operators to a cluster file: from traced runs, or from a list.

A cluster file has the speeds of one machine, for one number of ranks; planners read it. Times of
operators also belong to one backend, because ranks that are threads of one process wait for its
interpreter, and processes do not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from sbp_core.cluster import Cluster
from sbp_core.compile.rank_calls import RANK_CALLS
from sbp_core.errors import ConfigError
from sbp_core.operators import MeasuredOperator
from sbp_launch.calibrate.kept_measurements import differing_part
from sbp_launch.console import make_console
from sbp_launch.machine import describe_machine
from sbp_launch.tracing.operator_times import OPERATOR_TIMES, OPERATORS, OperatorTimes


def add_operators(out: str, folders: Sequence[str]) -> Cluster:
    """Return a cluster file's contents with the times of the operators of some runs added.

    A new time replaces the old time of a call; of several folders, the last one counts.

    Args:
        out: The file, which `sbp-calibrate` wrote.
        folders: Folders of runs whose operators were traced.

    Raises:
        ConfigError: there is no such file, or no times in a folder; or they are for another
            machine, another number of ranks, or a backend that the file does not know.
    """
    found = [(folder, OPERATOR_TIMES.read(Path(folder) / OPERATORS)) for folder in folders]
    _, first = found[0]
    cluster = _cluster_file(out, first.backend, first.num_ranks)
    for folder, times in found:
        cluster = with_times(cluster, out, folder, times)
    return cluster


def ranks_of_list(out: str, file: str, boxing: str) -> int:
    """Return on how many ranks to measure the calls of a list: the number of the cluster file.

    Args:
        out: The cluster file, which `sbp-calibrate` wrote.
        file: The list, written by `sbp-plan calls=FILE`.
        boxing: The backend that starts the ranks.

    Raises:
        ConfigError: there is no such file or list, or times of this machine and backend cannot be
            added to it.
    """
    RANK_CALLS.read(Path(file))
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
    """Return a cluster with times of operators added; they replace older times.

    Args:
        cluster: The cluster.
        out: Its file, for messages.
        folder: The folder or file of the times, for messages.
        times: The times.

    Raises:
        ConfigError: they are for another machine, another number of ranks, or a backend that the
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
            f"{times.machine.get(key, 'unknown')!r}, not {cluster.machine.get(key, 'unknown')!r}",
            accepted="runs on the machine of the file, or another file",
        )
    if not cluster.calibrations:  # of one rank, which calls nobody
        operators = merge_operators(cluster.device.operators, times.operators)
        return replace(cluster, device=replace(cluster.device, operators=operators))
    if times.backend not in cluster.calibrations:
        raise ConfigError(
            f"ops={folder!r} ran with boxing={times.backend}, which out={out!r} did not measure",
            accepted=", ".join(f"boxing={name}" for name in cluster.calibrations),
            todo=f"sbp-calibrate boxing={times.backend} ranks={times.num_ranks} out={out}, and "
            "then this command again",
        )
    of = cluster.calibrations[times.backend]
    of = replace(of, operators=merge_operators(of.operators, times.operators))
    return replace(cluster, calibrations={**cluster.calibrations, times.backend: of})


def merge_operators(
    old: Sequence[MeasuredOperator], new: Sequence[MeasuredOperator]
) -> tuple[MeasuredOperator, ...]:
    """Return the operators of both, sorted; for a call in both, the new time."""
    by_call = {one.call: one for one in (*old, *new)}
    return tuple(by_call[call] for call in sorted(by_call))


def save_operators(cluster: Cluster, out: str) -> None:
    """Write a cluster file to which operators were added, and print how many it has."""
    cluster.save(Path(out))
    console = make_console()
    known = {"": cluster.device.operators} | {
        f" of boxing={name}": of.operators for name, of in cluster.calibrations.items()
    }
    for whose, operators in known.items():
        if operators:
            told = f"{out} has the times of {len(operators)} calls of operators{whose}"
            console.print(told, soft_wrap=True)

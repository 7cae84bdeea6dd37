"""`World`: the rank of this process and the number of processes, read from the environment.

This is the only module that reads a launcher's environment variables. They are read in this order,
because a launcher may itself have been started by one further below in this list:

    torchrun   RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE
    mpiexec    OMPI_COMM_WORLD_RANK and kin (Open MPI); PMI_RANK, PMI_SIZE, MPI_LOCALRANKID (MPICH)
    slurm      SLURM_PROCID and kin, inside a step of `srun` only
    none       one process that holds all ranks as threads

If torchrun's variables are set together with those of another launcher, they must agree. This
module connects nothing: the boxing backends connect by the address in `World.variables`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import islice

from sbp_core.errors import ConfigError

__all__ = ["World"]

#: Ports for connecting the processes of a job, below the systems' ports for outgoing connections.
_PORTS = range(20_000, 32_000)

#: Step ids of Slurm from here on are not of `srun`, but of batch scripts, interactive steps etc.
_NO_STEP = 0xFFFF_FFF0

#: Names of launchers, as in the config group `launcher`.
THREADS, TORCHRUN, MPIEXEC, SLURM = "threads", "torchrun", "mpiexec", "slurm"

#: Variables with the rank of a process, and with the number of processes, except torchrun's.
_RANKS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")

#: Prefixes of the variables of a launcher; torchrun's variables have no common prefix.
_PREFIXES = ("OMPI_", "PMI_", "SLURM_")
_OF_TORCHRUN = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "RANK", "WORLD_SIZE")

#: Largest number of variables in a message.
_MOST_TOLD = 6

#: Settings that hide the launcher of the parent process, so that `RANK` and `WORLD_SIZE` count.
FORGET_LAUNCHER = {
    "TORCHELASTIC_RUN_ID": "",
    "OMPI_COMM_WORLD_RANK": "",
    "PMI_RANK": "",
    "SLURM_PROCID": "",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """The place of this process in a run. By default it is alone, and has all ranks as threads.

    Args:
        rank: Rank of this process, 0 .. size - 1.
        size: Number of processes, >= 1.
        local_rank: Rank of this process among those of its host, 0 .. local_size - 1.
        local_size: Number of processes of its host, >= 1.
        launcher: The launcher: `threads` (none), `torchrun`, `mpiexec` or `slurm`.
        variables: Values for torchrun's variables that the launcher did not set; they give the
            address for connecting. `MASTER_ADDR` is left out if it is unknown.
        said_by: The variables that were read, for messages; empty if none were.

    Raises:
        ConfigError: the numbers contradict each other.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    launcher: str = THREADS
    variables: Mapping[str, str] = field(default_factory=dict)
    said_by: str = ""

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ConfigError(
                f"{self.launcher} calls this process rank {self.rank} of {self.size}",
                where=f"the environment: {self.said_by}" if self.said_by else "the environment",
                accepted=f"0 .. {self.size - 1}",
            )
        if not 0 <= self.local_rank < self.local_size <= self.size:
            raise ConfigError(
                f"{self.launcher} calls this process rank {self.local_rank} of {self.local_size} "
                f"on its host, and rank {self.rank} of {self.size} of all",
                where="the environment",
                accepted="a local rank below the number of ranks of its host",
            )

    @classmethod
    def of_environment(cls, environment: Mapping[str, str] | None = None) -> World:
        """Read the variables of the launcher.

        Args:
            environment: Variables and values; those of this process if None.

        Raises:
            ConfigError: variables are missing, are not numbers, or contradict each other.
        """
        read = _Environment(os.environ if environment is None else environment)
        if read.has("TORCHELASTIC_RUN_ID"):
            return _torchrun(read)
        for launcher in (_open_mpi, _hydra, _slurm):
            world = launcher(read)
            if world is not None:
                read.refuse_conflict(world, _RANK_OF[launcher])
                return world
        if read.has("RANK") or read.has("WORLD_SIZE"):
            return _torchrun(read)
        return cls()

    @property
    def is_alone(self) -> bool:
        """Whether no launcher has started this process: it holds all ranks, or starts them."""
        return self.launcher == THREADS

    def export(self) -> None:
        """Write `variables` into the environment of this process, where boxing backends look."""
        os.environ.update(self.variables)


def is_slurm_job(environment: Mapping[str, str] | None = None) -> bool:
    """Whether this process is part of a Slurm or submitit job, according to the environment."""
    found = os.environ if environment is None else environment
    return "SLURM_JOB_ID" in found or "SUBMITIT_EXECUTOR" in found


class _Environment:
    """Reads numbers from the environment, with errors that name the variable."""

    def __init__(self, variables: Mapping[str, str]) -> None:
        self.variables = variables

    def has(self, name: str) -> bool:
        return bool(self.variables.get(name))

    def text(self, *names: str) -> str:
        """Return the first variable that is set, or `""`."""
        return next((self.variables[name] for name in names if self.has(name)), "")

    def number(self, *names: str, default: int | None = None) -> int:
        """Return the number in the first variable that is set.

        Raises:
            ConfigError: none is set and there is no default, or it is not a number.
        """
        name = next((name for name in names if self.has(name)), names[0])
        text = self.variables.get(name, "")
        if not text and default is not None:
            return default
        if not (text.isascii() and text.isdecimal()):
            beside = self.of_the_launcher_of(name)
            what = f"has {name}={text!r}" if text else f"does not say {name}"
            raise ConfigError(
                f"the environment {what}" + (f", together with {beside}" if beside else ""),
                where="the environment",
                accepted=f"an integer >= 0 in {name}",
                todo="start the program with its launcher; or unset these variables, and the ranks "
                "are threads of this process",
            )
        return int(text)

    def of_the_launcher_of(self, name: str) -> str:
        """Return the other variables of the same launcher that are set, as `NAME=value`."""
        prefix = next((one for one in _PREFIXES if name.startswith(one)), "")
        found = (
            key
            for key in self.variables
            if (key.startswith(prefix) if prefix else key in _OF_TORCHRUN)
        )
        told = (f"{key}={self.variables[key]}" for key in sorted(found) if key != name)
        return ", ".join(islice(told, _MOST_TOLD))

    def settings_text(self, *names: str) -> str:
        """Return the given variables that are set, as `NAME=value`."""
        return ", ".join(f"{name}={self.variables[name]}" for name in names if self.has(name))

    def refuse_conflict(self, world: World, names: tuple[str, str]) -> None:
        """Refuse torchrun's variables if they contradict the launcher's own.

        Args:
            world: The world according to the launcher's own variables.
            names: The launcher's own variables: of the rank, and of the number of ranks.

        Raises:
            ConfigError: they contradict each other.
        """
        for name, other, value in zip(
            ("RANK", "WORLD_SIZE"), names, (world.rank, world.size), strict=True
        ):
            if self.has(name) and self.number(name) != value:
                raise ConfigError(
                    f"{name}={self.variables[name]} contradicts {other}={value}",
                    where="the environment",
                    accepted="one launcher, or the same in both",
                    todo=f"unset {name}, if {world.launcher} started this process",
                )

    def missing(self, **wanted: str) -> dict[str, str]:
        """Return the given variables that have a value here, but are not set yet."""
        return {name: value for name, value in wanted.items() if value and not self.has(name)}


def _torchrun(read: _Environment) -> World:
    """Read torchrun's variables; also if `RANK` and `WORLD_SIZE` were set by hand."""
    size = read.number("WORLD_SIZE")
    rank = read.number("RANK", default=0 if size == 1 else None)
    return World(
        rank=rank,
        size=size,
        # Set by hand, the local ones are often missing: then all processes are on one host.
        local_rank=read.number("LOCAL_RANK", default=rank),
        local_size=read.number("LOCAL_WORLD_SIZE", default=size),
        launcher=TORCHRUN,
        said_by=read.settings_text("RANK", "WORLD_SIZE"),
    )


def _open_mpi(read: _Environment) -> World | None:
    if not read.has("OMPI_COMM_WORLD_RANK"):
        return None
    return _mpi_world(
        read,
        rank=read.number("OMPI_COMM_WORLD_RANK"),
        size=read.number("OMPI_COMM_WORLD_SIZE"),
        local_rank=read.number("OMPI_COMM_WORLD_LOCAL_RANK"),
        local_size=read.number("OMPI_COMM_WORLD_LOCAL_SIZE"),
        job=read.text("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
    )


def _hydra(read: _Environment) -> World | None:
    """Read the variables of MPICH, Intel MPI and MVAPICH; `srun --mpi=pmi2` sets some, too."""
    from_srun = _in_step(read) and not read.has("MPI_LOCALRANKID")
    if not read.has("PMI_RANK") or from_srun:
        return None
    rank, size = read.number("PMI_RANK"), read.number("PMI_SIZE")
    return _mpi_world(
        read,
        rank=rank,
        size=size,
        local_rank=read.number("MPI_LOCALRANKID", "PALS_LOCAL_RANKID", default=rank),
        local_size=read.number("MPI_LOCALNRANKS", "PALS_LOCAL_SIZE", default=size),
        # Jobs have no id here, but all processes of one host have the same parent, a proxy.
        job=str(os.getppid()),
    )


def _mpi_world(
    read: _Environment, *, rank: int, size: int, local_rank: int, local_size: int, job: str
) -> World:
    on_one_host = local_size == size
    return _world(
        read,
        MPIEXEC,
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=local_size,
        host="127.0.0.1" if on_one_host else "",
        port=job_port(job) if on_one_host and job else "",
    )


def _world(
    read: _Environment,
    launcher: str,
    *,
    rank: int,
    size: int,
    local_rank: int,
    local_size: int,
    host: str,
    port: str,
) -> World:
    """Return the world of a launcher; `host` and `port` for connecting are `""` if unknown."""
    return World(
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=local_size,
        launcher=launcher,
        variables=read.missing(
            RANK=str(rank),
            WORLD_SIZE=str(size),
            LOCAL_RANK=str(local_rank),
            LOCAL_WORLD_SIZE=str(local_size),
            MASTER_ADDR=host,
            MASTER_PORT=port,
        ),
        said_by=read.settings_text(*_RANKS, *_SIZES),
    )


def _in_step(read: _Environment) -> bool:
    """Return whether `srun` started this process: a batch script is rank 0 of many, but alone."""
    return read.has("SLURM_PROCID") and read.number("SLURM_STEP_ID", default=_NO_STEP) < _NO_STEP


def _slurm(read: _Environment) -> World | None:
    if not _in_step(read):
        return None
    size = read.number("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    counts = _counts(read.text("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"))
    node = read.number("SLURM_NODEID", default=0)
    hosts = read.text("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    job = f"{read.text('SLURM_JOB_ID', 'SLURM_JOBID')}.{read.text('SLURM_STEP_ID')}"
    return _world(
        read,
        SLURM,
        rank=read.number("SLURM_PROCID"),
        size=size,
        local_rank=read.number("SLURM_LOCALID"),
        local_size=counts[node] if node < len(counts) else size,
        host=first_host(hosts),
        port=job_port(job),
    )


#: For each launcher, the variables with the rank of a process and with the number of processes.
_RANK_OF = dict(zip((_open_mpi, _hydra, _slurm), zip(_RANKS, _SIZES, strict=True), strict=True))


def first_host(hosts: str) -> str:
    """Return the first host of a list in Slurm's format.

    >>> first_host("gpu[08-11,14],login"), first_host("a1,a2"), first_host("r[1-2]n[3-4]")
    ('gpu08', 'a1', 'r1n3')
    """
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", hosts)
    assert first is not None, "it matches the empty text, too"
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first[0])


def _counts(text: str) -> list[int]:
    """Return the number of tasks of each node from a list in Slurm's format.

    >>> _counts("2(x3),1")
    [2, 2, 2, 1]
    """
    found = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    return [int(count) for count, times in found for _ in range(int(times or 1))]


def job_port(job: str) -> str:
    """Return a port that all processes of a job derive alike, and other jobs most likely not."""
    digest = blake2b(job.encode(), digest_size=4).digest()
    return str(_PORTS[int.from_bytes(digest) % len(_PORTS)])

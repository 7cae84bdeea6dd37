"""The built-in launchers (plugins of kind `launcher`): commands that start the ranks of a run.

A launcher returns `LaunchSpec`s: commands with their ranks and environment variables.
`launching.choose_launcher` selects the launcher, and `launching` runs its commands. If torchrun,
mpiexec or srun has started the processes already, no command is run: `world` reads the rank from
the environment.
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

#: Pattern for torchrun's message about the first process that failed.
_TORCHRUN_FAILURES = (r"failed \(exitcode: \S+\) local_rank: (?P<rank>\d+)",)

#: Advice to install submitit, and mpi4py.
_SUBMITIT = 'pip install "sbp-launch[slurm]"'
_MPI4PY = 'pip install "sbp-boxing-nccl[mpi]", and an MPI library such as `openmpi`'


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoLauncherConfig:
    """Choose the launcher by the boxing backend and by how this process was started."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ThreadsConfig:
    """Run all ranks as threads of one process."""

    spans_processes: ClassVar[bool] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessesConfig:
    """Run each rank as a process."""

    spans_processes: ClassVar[bool] = True


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmConfig:
    """Settings of the launcher `slurm`, used if `srun` has not started the ranks already.

    Args:
        nodes: Hosts, >= 1; each gets an equal part of the ranks.
        cpus_per_rank: Cores of a rank, >= 1.
        gpus_per_rank: GPUs of a rank, >= 0.
        timeout_min: Time limit of the job in minutes, >= 1.
        partition: Partition to submit to; Slurm's default if None.
        parameters: More of sbatch, by submitit's names: `{slurm_account: lab}`.
        cluster: `slurm`, or `local` for processes of this machine, to try it out.

    Raises:
        ConfigError: a setting is invalid.
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


class _WithoutSettings:
    """A launcher whose config has no settings."""

    def __init__(self, config: object) -> None:
        pass


class Threads(_WithoutSettings):
    """The launcher `threads`: one process with all ranks."""

    def launch_specs(self, request: LaunchRequest) -> tuple[LaunchSpec, ...]:
        """See `Launcher.launch_specs`."""
        return (LaunchSpec(command=request.command, ranks=tuple(range(request.num_ranks))),)


class Spawn(_WithoutSettings):
    """The launcher `spawn`: the commands that the boxing backend proposes for this machine."""

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


class Torchrun(_WithoutSettings):
    """The launcher `torchrun`: torchrun on this machine, unless it has started this process."""

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


class Mpiexec(_WithoutSettings):
    """The launcher `mpiexec`: mpiexec on this machine, unless it has started this process."""

    def launch_specs(self, request: LaunchRequest) -> tuple[LaunchSpec, ...]:
        """See `Launcher.launch_specs`."""
        if find_spec("mpi4py") is None:
            raise ConfigError("launcher=mpiexec needs mpi4py, which is missing", todo=_MPI4PY)
        with _refusing():
            return mpiexec_specs(request.num_ranks, request.command)


class Slurm:
    """The launcher `slurm`: submit a job, unless `srun` has started this process."""

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
                # By default, submitit sends SIGUSR2 near the time limit: our status request.
                environment={"SUBMITIT_PREEMPT_SIGNAL": "USR1"},
                failure_patterns=(r"task (?P<rank>\d+) of the job failed",),
            ),
        )


@contextmanager
def _refusing() -> Iterator[None]:
    """Raise a `BoxingError` (something is not installed) as a `ConfigError`."""
    try:
        yield
    except BoxingError as error:
        raise error.replaced(ConfigError) from error

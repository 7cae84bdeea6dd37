"""The launchers of this package, by the conformance suite; and what they refuse."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from sbp_core.errors import ConfigError
from sbp_core.processes import Launcher, LaunchRequest
from sbp_core.testing.launcher import LauncherConformance
from sbp_launch.launching import launchers
from sbp_launch.launching.launchers import (
    Mpiexec,
    ProcessesConfig,
    Slurm,
    SlurmConfig,
    Spawn,
    Torchrun,
)
from sbp_torch.boxing import LocalBackend


class TestSpawn(LauncherConformance):
    def make_launcher(self) -> Launcher:
        return Spawn(ProcessesConfig())


class TestTorchrun(LauncherConformance):
    def make_launcher(self) -> Launcher:
        return Torchrun(ProcessesConfig())


def request(folder: Path, num_ranks: int = 4) -> LaunchRequest:
    return LaunchRequest(
        command=(sys.executable, "-c", "pass"),
        num_ranks=num_ranks,
        backend=LocalBackend(),
        folder=folder,
    )


@pytest.mark.parametrize(
    ("launcher", "module", "todo"),
    [
        (Mpiexec(ProcessesConfig()), "mpi4py", "sbp-boxing-nccl[mpi]"),
        (Slurm(SlurmConfig()), "submitit", "[slurm]"),
    ],
)
def test_what_is_not_installed_is_named_before_anything_starts(
    launcher: Launcher, module: str, todo: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launchers, "find_spec", lambda name: None)

    with pytest.raises(ConfigError, match=f"needs {module}, which is missing") as caught:
        launcher.launch_specs(request(tmp_path))

    assert todo in caught.value.todo


def test_hosts_get_equal_parts_of_the_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launchers, "find_spec", lambda name: object())

    with pytest.raises(ConfigError, match=r"4 ranks on launcher\.nodes=3 hosts"):
        Slurm(SlurmConfig(nodes=3)).launch_specs(request(tmp_path))


def test_a_job_whose_time_is_almost_up_is_told_by_the_signal_that_stops_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launchers, "find_spec", lambda name: object())

    (spec,) = Slurm(SlurmConfig()).launch_specs(request(tmp_path))

    assert spec.environment == {"SUBMITIT_PREEMPT_SIGNAL": "USR1"}


def test_ranks_forget_who_started_the_command(tmp_path: Path) -> None:
    class Backend(LocalBackend):
        def launch_specs(self, num_ranks, command):  # type: ignore[no-untyped-def]
            from sbp_core.processes import one_process_per_rank

            return one_process_per_rank(
                num_ranks, command, init_method="env://", rank=None, world_size=None
            )

    specs = Spawn(ProcessesConfig()).launch_specs(
        LaunchRequest(command=("x",), num_ranks=2, backend=Backend(), folder=tmp_path)
    )

    assert [spec.environment["RANK"] for spec in specs] == ["0", "1"]
    assert all(spec.environment["SLURM_PROCID"] == "" for spec in specs)

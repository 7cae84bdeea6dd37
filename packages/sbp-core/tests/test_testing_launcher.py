"""The suite of launchers: passed by one that starts processes side by side, failed by others."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from sbp_core.boxing import LaunchSpec
from sbp_core.processes import Launcher, LaunchRequest
from sbp_core.testing.launcher import LauncherConformance


class AsksTheBackend:
    def launch_specs(self, request: LaunchRequest) -> Sequence[LaunchSpec]:
        return request.backend.launch_specs(request.num_ranks, request.command)


class TestSideBySide(LauncherConformance):
    def make_launcher(self) -> Launcher:
        return AsksTheBackend()


class ForgetsARank(AsksTheBackend):
    def launch_specs(self, request: LaunchRequest) -> Sequence[LaunchSpec]:
        return super().launch_specs(request)[1:]


class StartsOneForAll(AsksTheBackend):
    def launch_specs(self, request: LaunchRequest) -> Sequence[LaunchSpec]:
        return [replace(super().launch_specs(request)[0], ranks=tuple(range(request.num_ranks)))]


class EndsWellInAnyCase(AsksTheBackend):
    def launch_specs(self, request: LaunchRequest) -> Sequence[LaunchSpec]:
        program = f"import subprocess; subprocess.run({list(request.command)!r})"
        command = (sys.executable, "-c", program)
        return [replace(spec, command=command) for spec in super().launch_specs(request)]


Test = Callable[[LauncherConformance, Path], None]


@pytest.mark.parametrize(
    ("launcher", "test"),
    [
        (ForgetsARank, LauncherConformance.test_each_rank_stands_in_one_spec),
        (StartsOneForAll, LauncherConformance.test_every_rank_runs_once),
        (EndsWellInAnyCase, LauncherConformance.test_a_rank_that_ends_badly_is_heard),
    ],
)
def test_a_broken_launcher_fails(
    launcher: Callable[[], Launcher], test: Test, tmp_path: Path
) -> None:
    class Suite(LauncherConformance):
        def make_launcher(self) -> Launcher:
            return launcher()

    with pytest.raises(AssertionError):
        test(Suite(), tmp_path)

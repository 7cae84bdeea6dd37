"""The conformance suite of launchers: subclass `LauncherConformance` and supply one method.

    class TestMyLauncher(LauncherConformance):
        def make_launcher(self):
            return build(MyConfig())

The tests start small programs on this machine, and take pytest's fixture `tmp_path`. A launcher
that asks the boxing backend how ranks are started gets one that starts processes side by side.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

from sbp_core.boxing import BoxingBackend, Communicator, LaunchSpec
from sbp_core.processes import (
    ExitReport,
    Launcher,
    LaunchRequest,
    Line,
    one_process_per_rank,
    supervise,
)

__all__ = ["LauncherConformance"]

#: Leaves a file of its own, whoever it is, and ends badly if it is told to.
_RANK = """
import os, pathlib, sys
pathlib.Path(sys.argv[1], f"ran_{os.getpid()}").touch()
sys.exit(int(sys.argv[2]))
"""

_TIMEOUT_S = 120.0


class LauncherConformance(ABC):
    """What every launcher must do. See the module's docstring for how to use it."""

    #: Ranks that are started.
    num_ranks: int = 2

    @abstractmethod
    def make_launcher(self) -> Launcher:
        """Return what `build(config)` returns."""

    def test_each_rank_stands_in_one_spec(self, tmp_path: Path) -> None:
        """What is started stands for all ranks, each once."""
        specs = self._specs(tmp_path, code=0)
        ranks = sorted(rank for spec in specs for rank in spec.ranks)
        assert ranks == list(range(self.num_ranks)), f"ranks {ranks}"

    def test_every_rank_runs_once(self, tmp_path: Path) -> None:
        """As many processes as ranks run the command, and their end is a good one."""
        report = self._run(tmp_path, code=0)
        assert report.error() is None, str(report)
        assert len(list(tmp_path.glob("ran_*"))) == self.num_ranks

    def test_a_rank_that_ends_badly_is_heard(self, tmp_path: Path) -> None:
        """The run has failed if its ranks have."""
        assert self._run(tmp_path, code=3).error() is not None

    def _specs(self, folder: Path, code: int) -> Sequence[LaunchSpec]:
        request = LaunchRequest(
            command=(sys.executable, "-c", _RANK, str(folder), str(code)),
            num_ranks=self.num_ranks,
            backend=_SideBySide(),
            folder=folder,
        )
        return self.make_launcher().launch_specs(request)

    def _run(self, folder: Path, code: int) -> ExitReport:
        def ignore(line: Line) -> None:
            """Look at no line."""

        return supervise(self._specs(folder, code), on_line=ignore, timeout_s=_TIMEOUT_S)


class _SideBySide(BoxingBackend):
    """Starts one process a rank, and connects none."""

    def launch_specs(self, num_ranks: int, command: Sequence[str]) -> tuple[LaunchSpec, ...]:
        return one_process_per_rank(
            num_ranks, command, init_method="env://", rank=None, world_size=None
        )

    def open(self, ranks: Sequence[int]) -> None:
        raise NotImplementedError

    def local_ranks(self) -> tuple[int, ...]:
        return ()

    def communicator(self, rank: int) -> Communicator:
        raise NotImplementedError

    def fail(self, error: BaseException) -> None:
        """Nobody waits."""

    def close(self) -> None:
        """Nothing is open."""

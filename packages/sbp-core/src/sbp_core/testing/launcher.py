"""The conformance suite of launchers: subclass `LauncherConformance` and supply one method.

    class TestMyLauncher(LauncherConformance):
        def make_launcher(self):
            return build(MyConfig())

The tests start small programs on this machine, and take pytest's fixture `tmp_path`. For launchers
that call the boxing backend's `launch_specs`, the suite has a backend with one process a rank.
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

#: Program of a rank: writes a file of its own, and exits with the given code.
_RANK = """
import os, pathlib, sys
pathlib.Path(sys.argv[1], f"ran_{os.getpid()}").touch()
sys.exit(int(sys.argv[2]))
"""

_TIMEOUT_S = 120.0


class LauncherConformance(ABC):
    """Tests that every launcher must pass. See the module's docstring for how to use it."""

    #: Number of ranks to start.
    num_ranks: int = 2

    @abstractmethod
    def make_launcher(self) -> Launcher:
        """Return the result of `build(config)`."""

    def test_each_rank_stands_in_one_spec(self, tmp_path: Path) -> None:
        """The specifications contain all ranks, each once."""
        specs = self._specs(tmp_path, code=0)
        ranks = sorted(rank for spec in specs for rank in spec.ranks)
        assert ranks == list(range(self.num_ranks)), f"ranks {ranks}"

    def test_every_rank_runs_once(self, tmp_path: Path) -> None:
        """As many processes as ranks run the command, and all end well."""
        report = self._run(tmp_path, code=0)
        assert report.error() is None, str(report)
        assert len(list(tmp_path.glob("ran_*"))) == self.num_ranks

    def test_a_rank_that_ends_badly_is_heard(self, tmp_path: Path) -> None:
        """The run fails if its ranks fail."""
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
            """Ignore the line."""

        return supervise(self._specs(folder, code), on_line=ignore, timeout_s=_TIMEOUT_S)


class _SideBySide(BoxingBackend):
    """A backend that starts one process for each rank, and connects none."""

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
        """Do nothing, because no rank waits."""

    def close(self) -> None:
        """Do nothing, because nothing is open."""

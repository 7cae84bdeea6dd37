"""One trial: start the ranks, kill one at a random moment, and check the other processes.

Times are seconds after the kill.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any
from uuid import uuid4

from sbp_core.boxing import BoxingBackend, LaunchSpec, thread_share
from sbp_core.plugins import discover
from sbp_core.processes import Line, supervise

PROGRAM = Path(__file__).with_name("program.py")

#: Seconds that the ranks may take to start, and to end, before the trial gives up.
_START_S, _END_S = 60.0, 60.0

#: Seconds between two checks of the processes.
_LOOK_S = 0.01


class How(StrEnum):
    """How a rank is killed."""

    SIGKILL = "SIGKILL"
    SIGSTOP = "SIGSTOP"
    EXCEPTION = "exception"
    EXIT = "sys.exit"
    #: With status 0, which is no failure for launchers: with Python's exit handlers, and without.
    EXIT_0 = "sys.exit(0)"
    OS_EXIT_0 = "os._exit(0)"

    @property
    def is_stall(self) -> bool:
        """Whether the rank only stops, so that other ranks notice at their deadline."""
        return self is How.SIGSTOP


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """A backend, and the launcher of its processes.

    Args:
        backend: Name of the plugin; `nccl` runs over fake GPUs.
        launcher: `sbp` for our own supervisor, `torchrun`, or `mpiexec` (without `-m mpi4py`).
        config: Settings of the backend.
        threads: Whether the ranks are threads.
    """

    backend: str
    launcher: str = "sbp"
    config: dict[str, Any] = field(default_factory=dict)
    threads: bool = False

    @property
    def name(self) -> str:
        """Its name in tables."""
        return f"{self.backend} ({self.launcher})"

    @property
    def hows(self) -> tuple[How, ...]:
        """How a rank can be killed; status 0 of the only process is no failure."""
        return tuple(how for how in How if not (self.threads and how is How.OS_EXIT_0))

    def launch_specs(self, num_ranks: int, command: Sequence[str]) -> tuple[LaunchSpec, ...]:
        """Return the commands to start."""
        if self.launcher == "torchrun":
            torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone")
            shown = (f"--nproc-per-node={num_ranks}", *command[1:])
            every = tuple(range(num_ranks))
            return (
                LaunchSpec(
                    command=(*torchrun, *shown), ranks=every, defaults=thread_share(num_ranks)
                ),
            )
        # On fake GPUs, ranks of `nccl` start like ranks of `mpi`: their own way needs real GPUs.
        launched_as = "mpi" if self.backend == "nccl" else self.backend
        backend = discover().make("boxing", launched_as, self.config)
        assert isinstance(backend, BoxingBackend), "kind boxing builds boxing backends"
        specs = backend.launch_specs(num_ranks, command)
        if self.launcher == "mpiexec":
            (spec,) = specs
            at = spec.command.index("mpi4py")
            plain = (*spec.command[: at - 1], *spec.command[at + 1 :])
            return (replace(spec, command=plain),)
        return specs


WAYS = {
    way.name: way
    for way in (
        Way(backend="local", threads=True),
        Way(backend="torch"),
        Way(backend="torch", launcher="torchrun"),
        Way(backend="mpi"),
        Way(backend="mpi", launcher="mpiexec"),
        Way(backend="nccl"),
        Way(backend="nccl", launcher="mpiexec"),
    )
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The outcome of one trial.

    Args:
        way, how, failing_rank: The kill, and the rank that was killed.
        deadline_s: The deadline of the steps.
        others_down_s: When the last of the other ranks had ended; None if one never did.
        named_s: When an error of boxing first named the failing rank on another one; None if never.
        all_down_s: When the launcher and all its processes had ended.
        named_by: What named the failing rank: ranks, the `launcher`, or the message of the `run`.
        told: The error of boxing on each other rank.
        left: Processes that remained.
        exit_status: Exit status of the run.
        lines: All lines that were written.
    """

    way: str
    how: How
    failing_rank: int
    deadline_s: float
    others_down_s: float | None
    named_s: float | None
    all_down_s: float
    named_by: tuple[str, ...]
    told: dict[int, str]
    left: tuple[int, ...]
    exit_status: int
    lines: tuple[str, ...]

    @property
    def faults(self) -> tuple[str, ...]:
        """The violated requirements."""
        limit_s = self.deadline_s + 10.0 if self.how.is_stall else 5.0
        found: list[str] = []
        if self.others_down_s is None or self.others_down_s > limit_s:
            down = "never" if self.others_down_s is None else f"after {self.others_down_s:.1f} s"
            found.append(f"other ranks came down {down}, not within {limit_s:g} s")
        if not self.named_by:
            found.append("nobody named the rank")
        if any("step " not in text for text in self.told.values()):
            found.append("a rank was not told the step that it waited in")
        if self.left:
            found.append(f"processes {list(self.left)} were left behind")
        if self.exit_status == 0:
            found.append("the run ended with exit status 0")
        return tuple(found)


def run_trial(
    way: Way, how: How, *, num_ranks: int, deadline_s: float, draw: random.Random
) -> Outcome:
    """Start ranks, kill one, and wait until everything has ended.

    Raises:
        AssertionError: the ranks did not start.
    """
    with tempfile.TemporaryDirectory(prefix="sbp-kill-") as folder:
        settings = {
            "backend": way.backend,
            "config": way.config,
            "threads": way.threads,
            "ranks": num_ranks,
            "seed": draw.randrange(2**31),
            "deadline_s": deadline_s,
            "folder": folder,
        }
        command = (sys.executable, str(PROGRAM), json.dumps(settings))
        failing_rank, mark = draw.randrange(num_ranks), f"sbp-trial-{uuid4().hex}"
        kill = _Kill(way, how, Path(folder), num_ranks, failing_rank, draw.uniform(0.0, 1.5))
        lines: list[Line] = []
        specs = [
            replace(spec, environment={**spec.environment, "SBP_TRIAL": mark})
            for spec in way.launch_specs(num_ranks, command)
        ]
        kill.start()
        ended = supervise(specs, on_line=lines.append, timeout_s=_START_S + _END_S)
        over = time.monotonic()
        kill.join()
        text = [line.text for line in lines]
        assert kill.at is not None, "the ranks did not start:\n" + "\n".join(text)
        told, told_at = _told(Path(folder), num_ranks, failing_rank)
        naming = _naming(failing_rank)
        named_at = [told_at[rank] for rank, words in told.items() if naming.search(words)]
        message = str(ended.error() or "")
        return Outcome(
            way=way.name,
            how=how,
            failing_rank=failing_rank,
            deadline_s=deadline_s,
            others_down_s=kill.others_down_s,
            named_s=min(named_at) - kill.at if named_at else None,
            all_down_s=over - kill.at,
            named_by=_named_by(failing_rank, told, text, message, way, how),
            told=told,
            left=marked_processes(mark),
            exit_status=ended.exit_status,
            lines=(*text, message),
        )


class _Kill(threading.Thread):
    """Waits for the ranks, kills one, and records when the other ranks have ended."""

    def __init__(
        self, way: Way, how: How, folder: Path, num_ranks: int, failing_rank: int, after_s: float
    ) -> None:
        super().__init__(daemon=True)
        self.way, self.how, self.folder = way, how, folder
        self.num_ranks, self.failing_rank, self.after_s = num_ranks, failing_rank, after_s
        self.at: float | None = None
        self.others_down_s: float | None = None

    def run(self) -> None:
        pids = self._pids()
        if pids is None:
            return
        time.sleep(self.after_s)
        self.at = time.monotonic()
        self._kill(pids[self.failing_rank])
        others = {pids[rank] for rank in range(self.num_ranks) if rank != self.failing_rank}
        end = self.at + _END_S
        while any(_runs(pid) for pid in others):
            if time.monotonic() > end:
                return
            time.sleep(_LOOK_S)
        self.others_down_s = time.monotonic() - self.at

    def _pids(self) -> list[int] | None:
        paths = [self.folder / f"rank-{rank}.pid" for rank in range(self.num_ranks)]
        end = time.monotonic() + _START_S
        while not all(path.exists() for path in paths):
            if time.monotonic() > end:
                return None
            time.sleep(_LOOK_S)
        return [json.loads(path.read_text("utf-8")) for path in paths]

    def _kill(self, pid: int) -> None:
        if self.way.threads and self.how is not How.SIGKILL:
            words = {
                How.EXCEPTION: "exception",
                How.EXIT: "exit",
                How.EXIT_0: "exit 0",
                How.SIGSTOP: "stall",
            }
            path = self.folder / f"rank-{self.failing_rank}.told"
            unfinished = path.with_suffix(".part")
            unfinished.write_text(json.dumps(words[self.how]), "utf-8")
            unfinished.rename(path)
            return
        signals = {
            How.SIGKILL: signal.SIGKILL,
            How.SIGSTOP: signal.SIGSTOP,
            How.EXCEPTION: signal.SIGUSR1,
            How.EXIT: signal.SIGUSR2,
            How.EXIT_0: signal.SIGHUP,
            How.OS_EXIT_0: signal.SIGQUIT,
        }
        os.kill(pid, signals[self.how])


def _runs(pid: int) -> bool:
    """Whether a process is still running."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace")
    except OSError:
        return False
    return text.rpartition(")")[2].split()[0] not in "ZX"


def marked_processes(mark: str) -> tuple[int, ...]:
    """Return the processes of this machine whose environment has a mark, except this one."""
    found: list[int] = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdecimal() or int(folder.name) == os.getpid():
            continue
        try:
            environment = (folder / "environ").read_bytes()
        except OSError:  # it has ended, or is another user's
            continue
        if mark.encode() in environment and _runs(int(folder.name)):
            found.append(int(folder.name))
    return tuple(found)


def _told(
    folder: Path, num_ranks: int, failing_rank: int
) -> tuple[dict[int, str], dict[int, float]]:
    """Return the errors of boxing on ranks other than the failing rank, and their times."""
    told: dict[int, str] = {}
    told_at: dict[int, float] = {}
    for rank in range(num_ranks):
        path = folder / f"rank-{rank}.error"
        if rank != failing_rank and path.exists():
            told_at[rank], told[rank] = json.loads(path.read_text("utf-8"))
    return told, told_at


def _naming(failing_rank: int) -> re.Pattern[str]:
    """Return a pattern of texts that name the failing rank as the cause."""
    # A text that it is running, as for all late ranks, does not count.
    return re.compile(
        rf"\brank:? {failing_rank}\b(?! \([^()]*\): is running)"
        rf"|did not arrive: (\d+, )*{failing_rank}\b"
    )


def _named_by(
    failing_rank: int, told: dict[int, str], lines: Sequence[str], message: str, way: Way, how: How
) -> tuple[str, ...]:
    """Return what named the failing rank.

    These are ranks in their errors of boxing, the launcher in its lines, and the run in the first
    line of its message.
    """
    name = _naming(failing_rank)
    named = [f"rank {rank}" for rank, text in told.items() if name.search(text)]
    if any(name.search(line) for line in lines if "boxing step" not in line):
        named.append("launcher")
    # The only process was killed, and the launcher reports this.
    alone = way.threads and how is How.SIGKILL
    if alone or name.search(message.partition("\n")[0]):
        named.append("run")
    return tuple(named)

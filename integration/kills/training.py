"""One trial of training: let a rank of `sbp-train` fail at a moment, and check the consequences.

The trial starts the command that users type. `hook/sitecustomize.py` lets the rank fail. Times are
seconds after the failure.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from uuid import uuid4

from kills.trial import How, marked_processes
from sbp_core.errors import SbpError
from sbp_launch.checkpoint import Checkpoint, LocalStorage, newest_first

HOOK = Path(__file__).with_name("hook")

#: Seconds that a run may take to reach the moment, and then to end, before the trial gives up.
_START_S, _END_S = 120.0, 90.0

#: Seconds that ranks wait: for each other at the start, in the first step, in a later one.
_CONNECT_S, _FIRST_S, _DEADLINE_S = 20.0, 8.0, 4.0

#: Seconds that ranks may take from one of the first moments until they wait for each other.
_WORK_S = 45.0

#: Seconds that a rank may be stopped while other ranks wait for it outside of a step.
_STOPPED_S = 10.0

#: Seconds between torchrun's request to a rank to end and its kill.
_TORCHRUN_S = 30.0

#: Settings of a tiny model, on which the messages do not depend.
_SMALL = (
    "model.num_layers=1",
    "model.hidden=16",
    "model.num_heads=2",
    "model.context=16",
    "trainer.steps=4",
    "trainer.batch_size=4",
    "trainer.evaluate.batches=0",
    "trainer.sample_tokens=0",
    "trainer.compare_steps=0",
    "planner=manual/data_parallel",
    "cluster.axes=[data]",
    f"runtime.first_deadline_s={_FIRST_S}",
    f"runtime.deadline_s={_DEADLINE_S}",
    f"boxing.connect_timeout_s={_CONNECT_S}",
)

#: The commands that users type, by launcher.
TRAINING_WAYS = {
    "spawn": ("launcher=spawn", "boxing=torch"),
    "torchrun": ("launcher=torchrun", "boxing=torch"),
    "mpiexec": ("launcher=mpiexec", "boxing=mpi"),
}

#: How a rank of a training run fails.
TRAINING_HOWS = tuple(How)


class Moment(StrEnum):
    """When a rank fails."""

    IMPORT = "import"
    CAPTURE = "capture"
    FIRST_STEP = "first step"
    FORWARD = "forward"
    UPDATE = "update"
    WRITING = "writing"
    COMMIT = "commit"
    END = "end"

    @property
    def saves(self) -> bool:
        """Whether it is during a save while steps run."""
        return self in (Moment.WRITING, Moment.COMMIT)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingOutcome:
    """The outcome of one trial.

    Args:
        way, how, moment, failing_rank: The failure, and the rank that failed.
        down_s: When the command had ended; None if it had to be killed.
        left: Processes that remained.
        exit_status: Exit status of the command.
        checkpoints: The steps of the checkpoints, or the fault of one.
        lines: All lines that it wrote.
    """

    way: str
    how: How
    moment: Moment
    failing_rank: int
    down_s: float | None
    left: tuple[int, ...]
    exit_status: int | None
    checkpoints: tuple[int | str, ...]
    lines: tuple[str, ...]

    @property
    def saved_step(self) -> int | None:
        """The step that the surviving ranks have to save; None if they may be unable to save.

        Each rank has all states. Survivors need the control store, which rank 0 or torchrun hosts;
        a stopped rank 0 still has the lock of the folder; mpiexec ends all ranks if one is killed.
        """
        if self.moment in (Moment.IMPORT, Moment.CAPTURE, Moment.FIRST_STEP):
            return None
        # At the end, a rank raises after its last save; at other moments, in a step.
        is_gone = self.how in (How.SIGSTOP, How.SIGKILL, How.OS_EXIT_0) or self.moment is Moment.END
        if is_gone and self.way == "mpiexec":
            return None
        if is_gone and self.failing_rank == 0 and (self.way == "spawn" or self.how is How.SIGSTOP):
            return None
        return 4 if self.moment is Moment.END else 2

    @property
    def limit_s(self) -> float:
        """The seconds within which everything must have ended."""
        if not self.how.is_stall:
            return 5.0
        if self.is_unknown:
            return _WORK_S + _CONNECT_S + 10.0 + (_TORCHRUN_S if self.way == "torchrun" else 0.0)
        if self.moment.saves or self.moment is Moment.END:
            return max(_DEADLINE_S, _STOPPED_S) + 10.0
        return (_FIRST_S if self.moment is Moment.FIRST_STEP else _DEADLINE_S) + 10.0

    @property
    def is_unknown(self) -> bool:
        """Whether the rank stops before other ranks are connected to it, so none can name it."""
        return self.how.is_stall and self.moment in (Moment.IMPORT, Moment.CAPTURE)

    @property
    def _has_recovered(self) -> bool:
        """Whether a checkpoint could not be written, and a later one, of the last step, was."""
        can_go_on = self.moment.saves and self.how in (How.EXCEPTION, How.EXIT, How.EXIT_0)
        return can_go_on and self.checkpoints[:1] == (4,)

    @property
    def message(self) -> str:
        """The last message of the command; messages that it quotes are indented."""
        parts = "\n".join(("", *self.lines)).split("\nsbp-train: ")
        return parts[-1] if len(parts) > 1 else ""

    @property
    def faults(self) -> tuple[str, ...]:
        """The violated requirements."""
        found: list[str] = []
        if self.down_s is None or self.down_s > self.limit_s:
            down = "never" if self.down_s is None else f"after {self.down_s:.1f} s"
            found.append(f"all came down {down}, not within {self.limit_s:g} s")
        if self.left:
            found.append(f"processes {list(self.left)} were left behind")
        if not self.exit_status and self._has_recovered:
            return tuple(found)
        if not self.exit_status:
            found.append(f"the command ended with exit status {self.exit_status}")
        first, name = self.message.partition("\n")[0], rf"\brank {self.failing_rank}\b"
        # Our own supervisor notices that its process is stopped; other launchers need not.
        if not (self.is_unknown and self.way != "spawn") and not re.search(name, first):
            found.append("the first line of the message does not name the rank")
        if "to fix it:" not in self.message:
            found.append("the message does not say what to do")
        found += [text for text in self.checkpoints if isinstance(text, str)]
        newest = max((step for step in self.checkpoints if isinstance(step, int)), default=-1)
        if self.saved_step is not None and newest < self.saved_step:
            found.append(f"step {self.saved_step} is not saved by the ranks that are left")
        if (
            newest >= 0
            and f"to continue from step-{newest:08d}: sbp-train resume=" not in self.message
        ):
            found.append("the message does not say how to continue from the newest checkpoint")
        return tuple(found)


def run_training_trial(
    way: str, how: How, moment: Moment, *, num_ranks: int = 2, failing_rank: int = 1
) -> TrainingOutcome:
    """Train, let a rank fail, and wait until everything has ended.

    Raises:
        AssertionError: the ranks did not reach the moment.
    """
    with tempfile.TemporaryDirectory(prefix="sbp-kill-") as name:
        folder, mark = Path(name), f"sbp-trial-{uuid4().hex}"
        settings = {"rank": failing_rank, "moment": moment, "how": how, "folder": name}
        paths = [str(HOOK), *filter(None, [os.environ.get("PYTHONPATH")])]
        with (folder / "output").open("wb") as output:
            command = subprocess.Popen(
                [
                    *(sys.executable, "-m", "sbp_launch.apps.train"),
                    *(*TRAINING_WAYS[way], *_SMALL, f"cluster.mesh=[{num_ranks}]"),
                    *(("trainer.checkpoint.every=2",) if moment.saves else ()),
                ],
                cwd=folder,
                env={
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join(paths),
                    "SBP_KILL": json.dumps(settings),
                    "SBP_TRIAL": mark,
                    "OMP_NUM_THREADS": "1",
                },
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        try:
            fired_at = _fired_at(folder, command)
            try:
                command.wait(_END_S)
                down_s = None if fired_at is None else time.monotonic() - fired_at
            except subprocess.TimeoutExpired:
                down_s = None
            left = marked_processes(mark)
        finally:
            _end(command, mark)
        text = (folder / "output").read_text("utf-8", "replace")
        assert fired_at is not None, f"the ranks did not come to {moment}:\n{text}"
        return TrainingOutcome(
            way=way,
            how=how,
            moment=moment,
            failing_rank=failing_rank,
            down_s=down_s,
            left=left if down_s is not None else (),
            exit_status=command.returncode,
            checkpoints=tuple(_checkpoints(folder)),
            lines=tuple(text.splitlines()),
        )


def _checkpoints(folder: Path) -> Iterator[int | str]:
    """Yield the steps of the whole checkpoints of a run, and the faults of other checkpoints."""
    for place in folder.glob("runs/*/checkpoints"):
        storage = LocalStorage(place)
        for name in newest_first(storage):
            try:
                with Checkpoint(storage, name) as checkpoint:
                    _ = [checkpoint[state] for state in checkpoint]
                    yield checkpoint.manifest.metadata.step
            except SbpError as error:
                yield f"{name} is damaged: {error}"


def _fired_at(folder: Path, command: subprocess.Popen[bytes]) -> float | None:
    """Wait until the rank has failed, and return the time; None if it did not fail."""
    end = time.monotonic() + _START_S
    while not (folder / "fired").exists():
        if time.monotonic() > end or command.poll() is not None:
            break
        time.sleep(0.02)
    if not (folder / "fired").exists():
        return None
    fired_at: float = json.loads((folder / "fired").read_text("utf-8"))[0]
    return fired_at


def _end(command: subprocess.Popen[bytes], mark: str) -> None:
    """Kill the remaining processes."""
    if command.poll() is None:
        command.kill()
        command.wait()
    for pid in marked_processes(mark):
        os.kill(pid, 9)

"""Kill a process that saves checkpoint after checkpoint: the newest checkpoint has to be whole.

The process is a fork of this one, so that hundreds of kills take a minute. It trains a small model
on two threads, saves after every step, keeps two checkpoints, and reports each finished one. It is
killed at a random moment, and another process continues from the checkpoints in the same folder.
First it saves the same step again, so that some kills come while a checkpoint is replaced. The
right states of every step are known from the same steps in a session of this process.
"""

from __future__ import annotations

import os
import random
import select
import signal
import struct
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from itertools import cycle, islice
from pathlib import Path
from typing import NoReturn

import torch
from torch import Tensor, nn

from sbp_core.errors import SbpError
from sbp_core.runtime import Session
from sbp_launch import parallelize
from sbp_launch.checkpoint import (
    BackgroundSave,
    Checkpoint,
    LocalStorage,
    Metadata,
    Processes,
    newest_first,
    prune,
    save,
    step_name,
    step_of,
)

#: Number of checkpoints that are kept.
KEEP = 2

#: Most seconds from the first report of a process to its kill; and most seconds until that report.
_LONGEST_S, _LIMIT_S = 0.2, 60.0

_REPORT = struct.Struct("<q")


class SavingWay(StrEnum):
    """How the process saves."""

    SYNCHRONOUS = "synchronous"
    ASYNCHRONOUS = "asynchronous"


@dataclass(frozen=True, kw_only=True)
class SavingOutcome:
    """The outcome of one kill.

    Args:
        way: How the process saved.
        kill_s: Seconds from its first report to the kill.
        reported_step: The newest checkpoint that it reported.
        found_step: The newest checkpoint that was found.
        left: Files that the kill left next to whole checkpoints, such as `.step-00000007.part`.
        faults: The faults.
    """

    way: str
    kill_s: float
    reported_step: int
    found_step: int
    left: tuple[str, ...]
    faults: tuple[str, ...]


class Trials:
    """Kills processes that save in one folder, one after the other.

    Args:
        folder: An empty folder.
        draw: The generator of the moments.
    """

    def __init__(self, folder: Path, draw: random.Random) -> None:
        self._storage, self._draw = LocalStorage(folder), draw
        # Not started, because a fork does not copy the threads of a session.
        self._saver = _planned("actor")
        self._known = _planned("reference")
        self._known_step = 0

    def run(self, count: int) -> Iterator[SavingOutcome]:
        """Kill `count` processes that save in each way, in turns."""
        with self._known:
            for way in islice(cycle(SavingWay), count * len(SavingWay)):
                yield self._kill(way)

    def _kill(self, way: SavingWay) -> SavingOutcome:
        reads, writes = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # about threads, not needed here
            child = os.fork()
        if child == 0:
            os.close(reads)
            _save_for_ever(self._saver, self._storage, way, writes)
        os.close(writes)
        kill_s, reported = self._draw.uniform(0.0, _LONGEST_S), -1
        faults: list[str] = []
        try:
            if not select.select([reads], [], [], _LIMIT_S)[0]:
                faults.append("the process saved nothing")
            time.sleep(kill_s)
        finally:
            os.kill(child, signal.SIGKILL)
            status = os.waitpid(child, 0)[1]
        with os.fdopen(reads, "rb") as pipe:
            said = pipe.read()
        if not os.WIFSIGNALED(status):
            faults.append("the process ended by itself")
        whole = len(said) // _REPORT.size * _REPORT.size
        if whole:
            (reported,) = _REPORT.unpack(said[whole - _REPORT.size : whole])
        found, wrong = self._look(reported)
        names = sorted(path.name for path in self._storage.root.iterdir())
        return SavingOutcome(
            way=way,
            kill_s=kill_s,
            reported_step=reported,
            found_step=found,
            left=tuple(name for name in names if name.startswith(".step")),
            faults=(*faults, *wrong),
        )

    def _look(self, reported: int) -> tuple[int, list[str]]:
        """Return the step of the newest checkpoint, and the faults of the checkpoints."""
        names, faults = newest_first(self._storage), []
        steps = [step_of(name) or 0 for name in names]
        newest = max(steps, default=-1)
        if newest < reported:
            faults.append(f"step {reported} was there, and now step {newest} is the newest")
        for name in names:
            try:
                with Checkpoint(self._storage, name) as checkpoint:
                    if name == names[0]:
                        faults += self._compare(checkpoint, newest)
                    else:
                        checkpoint.verify()
            except SbpError as error:
                faults.append(str(error))
        return newest, faults

    def _compare(self, checkpoint: Checkpoint, step: int) -> list[str]:
        """Return the states of a checkpoint that differ in any bit from those of its step."""
        for index in range(self._known_step, step):
            self._known(_batch(index))
        self._known_step = step
        known = self._known.state_dict()
        if known.keys() != checkpoint.keys():
            return ["the names of the states are others"]
        return [
            f"{name} of step {step} has other values"
            for name, value in known.items()
            if not torch.equal(checkpoint[name], value)
        ]


def _planned(runtime: str) -> parallelize.ParallelStep:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 300), nn.GELU(), nn.Linear(300, 8))
    return parallelize(
        model, _loss, _batch(0), torch.optim.AdamW(model.parameters()), mesh=2, runtime=runtime
    )


def _batch(index: int) -> Tensor:
    return torch.randn(8, 256, generator=torch.Generator().manual_seed(index % 5))


def _loss(model: nn.Module, batch: Tensor) -> Tensor:
    found: Tensor = model(batch).square().mean()
    return found


def _save_for_ever(
    step: parallelize.ParallelStep, storage: LocalStorage, way: SavingWay, reports: int
) -> NoReturn:
    """Continue from the newest checkpoint, and save after every step, until killed."""
    try:
        with storage.claim(), step:
            done = 0
            if names := newest_first(storage):
                with Checkpoint(storage, names[0]) as checkpoint:
                    step.session.load_state_dict(checkpoint)
                    done = checkpoint.manifest.metadata.step
            while True:
                metadata = Metadata(step=done, seed=0)
                if way is SavingWay.SYNCHRONOUS:
                    save(storage, step_name(done), metadata, step.session.pieces(), Processes())
                    saved, done = done, done + 1
                    step(_batch(saved))
                else:
                    saved, done = done, _step_beside(storage, metadata, step, done)
                prune(storage, KEEP)
                os.write(reports, _REPORT.pack(saved))
    finally:
        os._exit(1)  # without the exit handlers of the parent process


def _step_beside(
    storage: LocalStorage, metadata: Metadata, step: parallelize.ParallelStep, done: int
) -> int:
    """Take steps until a checkpoint of the first one exists; return how many steps are done."""
    session: Session = step.session
    under_way = BackgroundSave(storage, step_name(done), metadata, session.snapshot(), Processes())
    while not under_way.is_done:
        step(_batch(done))
        done += 1
        if not under_way.is_busy:
            under_way.advance()
    return done

"""Loading ahead of the step: a thread that makes the next batches while the ranks compute.

    loader  | batch 0 | batch 1 | batch 2 |    wait     | batch 3 |        `ahead` = 2: what is
    step              |       step 0      |      step 1     | step 2       loaded and not yet taken

A batch takes a credit before it is loaded and gives it back when it is taken, so no more than
`ahead` of them are in memory next to the one of the step. What is loaded depends on the cursor
only, so it is the same without the thread. A process loads the rows that its ranks hold:

    batch of a step     0  1  2  3  4  5  6  7     micro-batches of 4, split over two ranks
    process of rank 0   0  1        4  5           loads these rows, and nothing else
    process of rank 1         2  3        6  7

Where the ranks of a process hold other rows of one tensor than of another, as the stages of a
pipeline may, it loads the rows of all, and each tensor is cut.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from threading import Condition, Thread
from typing import Self

import numpy as np
import torch
from torch import Tensor

from sbp_core.compile import PhysicalPlan
from sbp_core.errors import PluginError, SbpError, words_of
from sbp_core.runtime import batch_parts
from sbp_launch.data.order import DataCursor
from sbp_launch.data.source import SampleSource


class LocalPart:
    """What some ranks hold of each batch of a plan.

    Args:
        plan: Says how batches are split.
        ranks: Those of this process.

    Attributes:
        rows: Of the batch, ascending: int64 (n,).
    """

    def __init__(self, plan: PhysicalPlan, ranks: Iterable[int]) -> None:
        own = {name: part for name, part in batch_parts(plan, ranks).items() if part.shape}
        none = np.empty(0, np.int64)
        rows = {
            name: np.concatenate([none, *(np.arange(one.start, one.stop) for one in part.samples)])
            for name, part in own.items()
        }
        self.rows = np.unique(np.concatenate([none, *rows.values()]))
        #: Where the rows of each tensor are among `rows`; None if they are all of them.
        self._cuts: dict[str, Tensor | None] = {
            name: None
            if len(found) == len(self.rows)
            else torch.from_numpy(np.searchsorted(self.rows, found))
            for name, found in rows.items()
        }

    def cut(self, loaded: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return what `Session.step(batch_is="local")` takes, of the samples of `rows`."""
        found = {}
        for name, cut in self._cuts.items():
            if name in loaded:  # what is not there is told by the session
                found[name] = loaded[name] if cut is None else loaded[name][cut]
        return found


logger = logging.getLogger(__name__)

#: Seconds that closing waits for a data set that is being asked.
STOP_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalBatch:
    """What one step takes.

    Args:
        values: For `Session.step(batch_is="local")`.
        begin: Where the batch begins, in all processes.
        end: The cursor after it, with which a run goes on after this step.
    """

    values: dict[str, Tensor]
    begin: DataCursor
    end: DataCursor


class BatchLoader:
    """The batches of a session, one after the other; a context manager.

    Args:
        source: Of the samples.
        split: To take.
        cursor: Where the first batch begins.
        batch_size: Samples of a step over all ranks, >= 1.
        part: What the ranks of this process hold of it.
        ahead: Batches to load ahead; 0 loads each when it is asked for.
        num_batches: Batches that will be asked for; None if that is not known.
        pinned: Whether batches are put into page-locked memory, because their way to a GPU begins
            there.
    """

    def __init__(
        self,
        source: SampleSource,
        split: str,
        cursor: DataCursor,
        batch_size: int,
        part: LocalPart,
        *,
        ahead: int = 0,
        num_batches: int | None = None,
        pinned: bool = False,
    ) -> None:
        self._source, self._split, self._part = source, split, part
        self._batch_size, self._pinned, self._left = batch_size, pinned, num_batches
        self._cursor, self._ahead = cursor, ahead
        self._state = Condition()
        self._loaded: deque[LocalBatch | SbpError] = deque()
        self._stopped = False
        self._thread = Thread(target=self._run, name=f"load {split}", daemon=True)
        if ahead:
            self._thread.start()

    def next(self) -> LocalBatch:
        """Return the next batch; waits until it is there.

        Raises:
            SbpError: it cannot be loaded; names the sample.
        """
        if not self._ahead:
            return self._load()
        with self._state:
            self._state.wait_for(lambda: self._loaded)
            first = self._loaded[0]
            if isinstance(first, SbpError):  # stays there: nothing comes after it
                raise first
            self._loaded.popleft()
            self._state.notify_all()
            return first

    def close(self) -> None:
        """End the thread; waits for the data set if it is being asked."""
        with self._state:
            self._stopped = True
            self._state.notify_all()
        if self._thread.is_alive():
            self._thread.join(STOP_S)
        if self._thread.is_alive():
            logger.warning(
                "a sample of split %r has been loading for over %g s, and is given up",
                self._split,
                STOP_S,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def _load(self) -> LocalBatch:
        begin, end = self._cursor, self._cursor.advanced(self._batch_size)
        rows = self._part.rows
        loaded: dict[str, Tensor] = {}
        if len(rows):
            loaded = self._source.load(begin.numbers(rows), self._split, begin.epochs(rows))
        values = self._part.cut(loaded)
        if self._pinned:
            values = {name: value.pin_memory() for name, value in values.items()}
        self._cursor = end
        return LocalBatch(values=values, begin=begin, end=end)

    def _run(self) -> None:
        while self._left is None or self._left > 0:
            with self._state:
                self._state.wait_for(lambda: self._stopped or len(self._loaded) < self._ahead)
                if self._stopped:
                    return
            found: LocalBatch | SbpError
            try:
                found = self._load()
            except SbpError as error:
                found = error
            except BaseException as error:  # the step has to hear of it, whatever it is
                found = PluginError(f"loading split {self._split!r} failed: {words_of(error)}")
                found.__cause__ = error
            with self._state:
                self._loaded.append(found)
                self._state.notify_all()
            if isinstance(found, SbpError):
                return
            if self._left is not None:
                self._left -= 1


def is_for_gpus(plan: PhysicalPlan) -> bool:
    """Return whether a plan runs on GPUs."""
    return any(stage.device == "cuda" for stage in plan.stages)

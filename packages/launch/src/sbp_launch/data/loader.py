"""Load batches in a background thread while the ranks compute.

    loader  | batch 0 | batch 1 | batch 2 |    wait     | batch 3 |        `ahead` = 2: number of
    step              |       step 0      |      step 1     | step 2       batches loaded, not taken

At most `ahead` batches are in memory in addition to the batch of the current step. The batches
depend on the cursor only, so they are the same without the thread. A process loads only the rows
that its ranks hold:

    batch of a step     0  1  2  3  4  5  6  7     micro-batches of 4, split over two ranks
    process of rank 0   0  1        4  5           loads these rows, and nothing else
    process of rank 1         2  3        6  7

If the ranks of a process hold different rows of different tensors, as with pipeline stages, it
loads the union of the rows, and each tensor is cut.
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
    """The rows of each batch that some ranks hold.

    Args:
        plan: The plan; it determines how batches are split.
        ranks: The ranks of this process.

    Attributes:
        rows: Rows of the batch, ascending: int64 (n,).
    """

    def __init__(self, plan: PhysicalPlan, ranks: Iterable[int]) -> None:
        own = {name: part for name, part in batch_parts(plan, ranks).items() if part.shape}
        none = np.empty(0, np.int64)
        rows = {
            name: np.concatenate([none, *(np.arange(one.start, one.stop) for one in part.samples)])
            for name, part in own.items()
        }
        self.rows = np.unique(np.concatenate([none, *rows.values()]))
        #: For each tensor, the indices of its rows in `rows`; None if it has all of them.
        self._cuts: dict[str, Tensor | None] = {
            name: None
            if len(found) == len(self.rows)
            else torch.from_numpy(np.searchsorted(self.rows, found))
            for name, found in rows.items()
        }

    def slice_rows(self, loaded: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the input of `Session.step(batch_is="local")`, from the samples of `rows`."""
        found = {}
        for name, cut in self._cuts.items():
            if name in loaded:  # the session reports missing tensors
                found[name] = loaded[name] if cut is None else loaded[name][cut]
        return found


logger = logging.getLogger(__name__)

#: Seconds that `close` waits for a call of the data set that is running.
STOP_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalBatch:
    """The batch of one step, with the rows of this process.

    Args:
        values: Tensors for `Session.step(batch_is="local")`.
        begin: The cursor at the start of the batch, equal in all processes.
        end: The cursor after the batch, with which a run is resumed after this step.
    """

    values: dict[str, Tensor]
    begin: DataCursor
    end: DataCursor


class BatchLoader:
    """The batches of a session, one after the other; a context manager.

    Args:
        source: The source of the samples.
        split: The split to load.
        cursor: The cursor at the start of the first batch.
        batch_size: Samples of a step over all ranks, >= 1.
        part: The rows that the ranks of this process hold.
        ahead: Batches to load ahead; 0 loads each batch on demand.
        num_batches: Number of batches that will be used; None if that is unknown.
        pinned: Whether to put batches into page-locked memory, for transfers to a GPU.
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
        """Return the next batch; wait until it is loaded.

        Raises:
            SbpError: it cannot be loaded; the message names the sample.
        """
        if not self._ahead:
            return self._load()
        with self._state:
            self._state.wait_for(lambda: self._loaded)
            first = self._loaded[0]
            if isinstance(first, SbpError):  # it stays in the queue: nothing comes after it
                raise first
            self._loaded.popleft()
            self._state.notify_all()
            return first

    def close(self) -> None:
        """End the thread; wait for a running call of the data set."""
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
        values = self._part.slice_rows(loaded)
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
            except BaseException as error:  # any error is raised in the step
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

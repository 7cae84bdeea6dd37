"""What the ranks of a process load of each batch, and what `Session.step` takes of that there.

    batch of a step     0  1  2  3  4  5  6  7     micro-batches of 4, split over two ranks
    process of rank 0   0  1        4  5           loads these rows, and nothing else
    process of rank 1         2  3        6  7

Where the ranks of a process hold other rows of one tensor than of another, as the stages of a
pipeline may, it loads the rows of all, and each tensor is cut.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sbp_core.compile import PhysicalPlan
from sbp_core.runtime import batch_parts


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
        rows = {name: _rows(part.samples) for name, part in own.items()}
        self.rows = np.unique(np.concatenate([np.empty(0, np.int64), *rows.values()]))
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


def _rows(spans: Iterable[range]) -> npt.NDArray[np.int64]:
    parts = [np.arange(span.start, span.stop, dtype=np.int64) for span in spans]
    return np.concatenate([np.empty(0, np.int64), *parts])

"""The data of a run: the order of samples, the rows that a process loads, and loading ahead.

A data set (plugin of kind `data`) returns samples by number; epochs, batches, ranks and threads are
handled here. In the order of use: `order` (shuffling without a stored permutation, epochs, and the
cursor in checkpoints), `source` (a data set whose results are checked), `loader` (the rows of a
batch that the ranks of this process hold, and a thread that loads ahead of the step).
"""

from typing import TYPE_CHECKING

from sbp_core.exports import lazy_room

if TYPE_CHECKING:
    from sbp_launch.data.loader import BatchLoader, LocalBatch, LocalPart, is_for_gpus
    from sbp_launch.data.order import DataCursor, Order, SampleOrder
    from sbp_launch.data.source import SampleSource, checked_dataset

__all__ = [
    "BatchLoader",
    "DataCursor",
    "LocalBatch",
    "LocalPart",
    "Order",
    "SampleOrder",
    "SampleSource",
    "checked_dataset",
    "is_for_gpus",
]

__getattr__, __dir__ = lazy_room(
    __name__,
    loader="BatchLoader LocalBatch LocalPart is_for_gpus",
    order="DataCursor Order SampleOrder",
    source="SampleSource checked_dataset",
)

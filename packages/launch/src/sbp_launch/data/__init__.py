"""The data of a run: in which order its samples come, which of them a process loads, and when.

A data set (kind `data`) returns samples by number; all that is about epochs, batches, ranks and
threads is here, in one place. In the order of use: `order` (a shuffled order without memory,
epochs, and the cursor that a checkpoint keeps), `source` (the data set behind checks), `loader`
(the rows of a batch that the ranks of this process hold, and a thread that loads ahead of the
step).
"""

from typing import TYPE_CHECKING

from sbp_core.exports import lazy

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

__getattr__, __dir__ = lazy(
    __name__,
    {
        "BatchLoader": "loader",
        "DataCursor": "order",
        "LocalBatch": "loader",
        "LocalPart": "loader",
        "Order": "order",
        "SampleOrder": "order",
        "SampleSource": "source",
        "checked_dataset": "source",
        "is_for_gpus": "loader",
    },
)

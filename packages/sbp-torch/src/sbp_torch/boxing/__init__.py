"""Boxing on tensors: the execution of steps, and the backend for ranks in one process.

`execute` runs one step for all ranks at once, or one rank's share of it. `local` is the backend for
threads of one process, which divide large steps by `share` and reuse memory by `buffer_pool`.
`processes` is the part of multi-process backends that handles tensors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sbp_core.exports import lazy_room

if TYPE_CHECKING:
    from sbp_torch.boxing.execute import local_step, reduce_in_order, reduction_of, shard
    from sbp_torch.boxing.local import LocalBackend

__all__ = ["LocalBackend", "local_step", "reduce_in_order", "reduction_of", "shard"]

__getattr__, __dir__ = lazy_room(
    __name__, execute="local_step reduce_in_order reduction_of shard", local="LocalBackend"
)

"""Boxing on tensors: steps executed, and the backend whose ranks are threads of one process.

`execute` runs one step for all ranks at once, or one rank's share of it. `local` is the backend of
one process; its threads divide large steps by `share` and use memory again by `buffer_pool`.
`processes` is the tensor side of backends of several processes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sbp_core.exports import lazy

if TYPE_CHECKING:
    from sbp_torch.boxing.execute import local_step, reduce_in_order, reduction_of, shard
    from sbp_torch.boxing.local import LocalBackend

__all__ = ["LocalBackend", "local_step", "reduce_in_order", "reduction_of", "shard"]

__getattr__, __dir__ = lazy(
    __name__,
    {
        "LocalBackend": "local",
        "local_step": "execute",
        "reduce_in_order": "execute",
        "reduction_of": "execute",
        "shard": "execute",
    },
)

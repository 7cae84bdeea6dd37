"""The Hydra apps, the trainer and the metrics of sbp; and `parallelize`, for a loop of one's own.

`SampleOrder` is the order in which training takes samples, also in such a loop; `World` is this
process among those that torchrun, mpiexec or Slurm started. `compose` returns the config of a
command line of `sbp-train`.

Everything is loaded when first used; importing this package imports no torch.

Stability: provisional.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sbp_core.exports import lazy

if TYPE_CHECKING:
    from sbp_launch.data import SampleOrder
    from sbp_launch.hydra_config import compose
    from sbp_launch.parallelize import parallelize as parallelize
    from sbp_launch.world import World

__all__ = ["SampleOrder", "World", "compose", "parallelize"]

# `parallelize` is a module that is also called: `parallelize(model, ...)`.
__getattr__, __dir__ = lazy(
    __name__,
    {
        "SampleOrder": "data",
        "World": "world",
        "compose": "hydra_config",
        "parallelize": "parallelize",
    },
)

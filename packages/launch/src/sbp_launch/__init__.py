"""The commands and the trainer of sbp; and `parallelize`, for a training loop of your own.

`SampleOrder` is the order in which training takes samples, for use in such a loop. `World` has the
rank of this process and the number of processes that torchrun, mpiexec or Slurm started. `compose`
returns the config of a command line of `sbp-train`.

Everything is loaded on first use; importing this package imports no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sbp_core.exports import lazy_room, moved_module

if TYPE_CHECKING:
    from sbp_launch.data import SampleOrder
    from sbp_launch.hydra_config import compose
    from sbp_launch.parallel import (
        LengthBuckets,
        MicroBatches,
        ParallelStep,
        ProgramStep,
        StepOutput,
        parallelize,
    )
    from sbp_launch.world import World

__all__ = [
    "LengthBuckets",
    "MicroBatches",
    "ParallelStep",
    "ProgramStep",
    "SampleOrder",
    "StepOutput",
    "World",
    "compose",
    "parallelize",
]

__getattr__, __dir__ = lazy_room(
    __name__,
    data="SampleOrder",
    hydra_config="compose",
    parallel="LengthBuckets MicroBatches ParallelStep ProgramStep StepOutput parallelize",
    world="World",
)

moved_module("sbp_launch.parallelize", "sbp_launch.parallel")

"""The settings of recomputation. Values only, so that a config is checked before anything else."""

from __future__ import annotations

from dataclasses import dataclass

from sbp_core.errors import SbpValueError


@dataclass(frozen=True, slots=True, kw_only=True)
class Recompute:
    """Which activations are recomputed in the backward phase instead of being kept.

    Args:
        modules: Patterns of module paths, `blocks.*`: of each call of an outermost matching module
            only what comes into it is kept.
        marked: Whether calls under `torch.utils.checkpoint` are made again.
        keep: Patterns of nodes and of module paths (`*.attention.out`) whose values are kept all
            the same: operators that are dear, or whose results are boxed, which would be boxed
            again.
        memory_bytes: The most bytes of activations alive at once in the backward phase: those that
            are kept, and the most that is made again for one region. Of one micro-batch, of whole
            logical tensors. What is made again is chosen so that it takes the least work. None: no
            budget.
        longest_run: With a budget, most blocks that are made again in one go, of which only what
            comes into the first is kept. 1 where stages may be cut between any two blocks.

    Raises:
        SbpValueError: a number is out of range.
    """

    modules: tuple[str, ...] = ()
    marked: bool = True
    keep: tuple[str, ...] = ()
    memory_bytes: float | None = None
    longest_run: int = 1

    def __post_init__(self) -> None:
        if self.longest_run < 1 or (self.memory_bytes is not None and self.memory_bytes < 0):
            raise SbpValueError(
                f"memory_bytes={self.memory_bytes}, longest_run={self.longest_run}",
                accepted="memory_bytes >= 0 or None, longest_run >= 1",
            )

"""`RecomputeOptions`: the settings of activation checkpointing, for `recompute`."""

from __future__ import annotations

from dataclasses import dataclass

from sbp_core.errors import SbpValueError


@dataclass(frozen=True, slots=True, kw_only=True)
class RecomputeOptions:
    """Which forward values the backward phase recomputes instead of reading saved ones.

    Args:
        modules: Patterns of module paths, `blocks.*`: of each call of an outermost matching module
            only the inputs are saved.
        marked: Whether calls under `torch.utils.checkpoint` are recomputed.
        keep: Patterns of nodes and of module paths (`*.attention.out`) whose values are saved in
            any case: expensive operators, or operators whose results are boxed, because recomputing
            them would repeat the boxing.
        memory_bytes: The most bytes of activations alive at once in the backward phase: the saved
            ones, and the most that is recomputed for one region. For one micro-batch, in whole
            logical tensors. The values to recompute are chosen for the least work. None: no budget.
        longest_run: With a budget, the most consecutive blocks that are recomputed together, with
            only the inputs of the first block saved. 1 where stages may be cut between any two
            blocks.

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

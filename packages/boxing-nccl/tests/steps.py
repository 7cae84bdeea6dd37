"""Steps made by hand, so that a test says exactly what is run."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from sbp_core.boxing.slices import collective_bytes, transfer_bytes
from sbp_core.boxing.step import BoxingStep, StepKind
from sbp_core.placement import Placement
from sbp_core.sbp import NdSbp, Sbp
from sbp_torch.boxing.execute import apply_step, shard


def collective(
    kind: StepKind,
    num_ranks: int,
    before: Sbp,
    after: Sbp,
    shape: tuple[int, ...] = (4, 2),
    dtype: str = "float32",
) -> BoxingStep:
    """A collective of ranks 0 .. n-1."""
    mesh = Placement(list(range(num_ranks)), ("x",))
    step = BoxingStep(
        kind=kind,
        shape=shape,
        dtype=dtype,
        source=(mesh, NdSbp(before)),
        target=(mesh, NdSbp(after)),
        axes=(0,),
        size_bytes=0,
    )
    return replace(step, size_bytes=collective_bytes(step))


def transfer(
    sources: Sequence[int],
    targets: Sequence[int],
    before: Sbp,
    after: Sbp,
    shape: tuple[int, ...] = (4, 2),
    dtype: str = "float32",
) -> BoxingStep:
    """A transfer from some ranks to others."""
    step = BoxingStep(
        kind=StepKind.TRANSFER,
        shape=shape,
        dtype=dtype,
        source=(Placement(list(sources), ("x",)), NdSbp(before)),
        target=(Placement(list(targets), ("x",)), NdSbp(after)),
        axes=(),
        size_bytes=0,
    )
    return replace(step, size_bytes=transfer_bytes(step))


def parts(step: BoxingStep, tensor: torch.Tensor) -> dict[int, torch.Tensor]:
    """What each rank holds of a tensor before a step; every partial is the whole tensor."""
    placement, sbp = step.source
    if sbp.has_partial:
        return {rank: tensor.clone() for rank in placement.rank_list}
    return shard(tensor, placement, sbp)


def expected(step: BoxingStep, given: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
    """What each rank holds after a step."""
    return apply_step(step, given)

"""What each rank of a mesh of one axis makes of its shards: for tests that look at single ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from sbp_core.placement import Placement
from sbp_core.sbp import NdSbp, Sbp, local_bounds
from sbp_core.signatures import localize
from sbp_core.strategy import Signature
from sbp_torch.signatures.torch_call import run_program
from sbp_torch.signatures.verification import Execute, call_of, run_op


def on_each_rank(
    op: str,
    args: Sequence[Any],
    inputs: Sequence[Sbp],
    outputs: Sequence[Sbp],
    size: int,
    execute: Execute = run_op,
) -> list[torch.Tensor]:
    """Return what each of `size` ranks makes as output 0; inputs are B or split."""
    call, tensors = call_of(op, args, {}, execute=execute)
    signature = Signature(tuple(map(NdSbp, inputs)), tuple(map(NdSbp, outputs)))
    mesh = Placement.grid((size,))
    made = []
    for rank in mesh.rank_list:
        shards = {}
        for name, tensor, sbp in zip(call.tensor_names, tensors, signature.inputs, strict=True):
            bounds = local_bounds(tuple(tensor.shape), sbp, (size,), mesh.coordinate(rank))
            shards[name] = tensor[tuple(slice(*window) for window in bounds)].clone()
        made.append(run_program(localize(call, signature, mesh, rank), shards, execute)[0])
    return made

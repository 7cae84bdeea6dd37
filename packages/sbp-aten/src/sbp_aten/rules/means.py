"""Means over shards: a rank's part of a mean, and of the gradient of one.

A mean of means is no mean where shards differ in length. Here a rank's part is the mean of its
elements times its share of all elements, so that the mean is the sum of the parts; no part is
larger than the mean itself, as sums would be. Holds no rules.
"""

from __future__ import annotations

from sbp_core.signatures import (
    LocalCall,
    LocalProgram,
    LocalProgramBuilder,
    OpCall,
    argument,
    run_as_is,
    with_literals,
)


def part_of_mean(
    call: OpCall, local: int, total: int, without: LocalCall
) -> LocalCall | LocalProgram:
    """Return what a rank runs for its part of a mean, output 0; other outputs are of its shard.

    Args:
        call: The mean.
        local: Number of elements (>= 0) that the rank holds.
        total: Number of elements (>= 0) of all ranks.
        without: What it runs if it holds none, and a mean would be 0 / 0: the sum.
    """
    if local == total:
        return run_as_is(call)
    if local == 0:
        return without
    builder = LocalProgramBuilder()
    mean, *others = builder.several(len(call.outputs), call.op, *call.args, **call.kwargs)
    return builder.program(builder("aten.mul.Scalar", mean, local / total), *others)


def part_of_gradient(call: OpCall, local: int, total: int) -> LocalCall | LocalProgram:
    """Return what a rank runs for its shard of the gradient of a mean.

    The operator divides argument 0, the gradient of the mean, by the number of elements it sees.

    Args:
        call: The backward call.
        local: Number of elements (>= 0) that the rank holds.
        total: Number of elements (>= 0) of all ranks.
    """
    if local in (0, total):
        return run_as_is(call)
    builder = LocalProgramBuilder()
    gradient = builder("aten.mul.Scalar", argument(call, 0, "grad_output"), local / total)
    own = with_literals(call, (0, "grad_output", gradient))
    return builder.program(builder(own.op, *own.args, **own.kwargs))

"""An operator of our own, the product of three matrices, registered with `torch.library`.

One line of notation, which `plugin.low_rank_notation` returns, defines how it may be split:
splitting a summed label (`i` or `r`) gives partial sums, and it is linear in each argument.
"""

from typing import Any

import torch


@torch.library.custom_op("sbp_example::low_rank", mutates_args=())
def low_rank(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return x·a·b of shape (n, o) for x (n, i), a (i, r), b (r, o)."""
    return x @ a @ b


@low_rank.register_fake
def _(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape[0], b.shape[1])


def _keep(ctx: Any, inputs: tuple[torch.Tensor, ...], output: object) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, ...]:
    x, a, b = ctx.saved_tensors
    inner = gradient @ b.t()
    return inner @ a.t(), x.t() @ inner, (x @ a).t() @ gradient


low_rank.register_autograd(_backward, setup_context=_keep)

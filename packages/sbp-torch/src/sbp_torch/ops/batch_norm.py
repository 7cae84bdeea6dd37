"""Sums over the batch that batch normalisation needs: `sbp.batch_norm_sums`.

    sbp.batch_norm_sums(x)    [B, C, ...] -> [2, C], float64: sums of x and of x^2 by channel

The kernel behind batch normalisation gives mean and variance of what is at hand, each to its own
rounding; the sums are made from these. In float64 they lose nothing that float32 had: the variance
of a whole from sums of its parts is then as good as from the parts' means and squared deviations
(Chan, Golub and LeVeque, "Algorithms for computing the sample variance", 1983). Data of float64
lose what sums of squares lose: a relative error of 1e-16 (mean / deviation)^2.

Importing this module registers the operator with PyTorch, which is the only way to have it.
"""

from __future__ import annotations

import torch
from torch import Tensor

_LOW = (torch.bfloat16, torch.float16)


def batch_norm_sums(x: Tensor) -> Tensor:
    """Return the sums of elements and of their squares of each channel, [2, C], float64.

    Args:
        x: [B, C, ...], floating; there may be nothing in it.
    """
    channels = x.shape[1]
    count = x.numel() // channels if channels else 0
    if not count:
        return x.new_zeros((2, channels), dtype=torch.float64)
    # Statistics are of the dtype of the running ones, where there are some.
    running = x.new_zeros(channels, dtype=torch.float32) if x.dtype in _LOW else None
    found = torch.ops.aten.batch_norm_update_stats(x, running, running, 0.0)
    mean, variance = (value.double() for value in found)
    return torch.stack([mean, torch.addcmul(variance, mean, mean)]).mul_(count)


def _shape_only(x: Tensor) -> Tensor:
    return x.new_empty((2, x.shape[1]), dtype=torch.float64)


def _register(library: torch.library.Library) -> torch.library.Library:
    library.define("batch_norm_sums(Tensor x) -> Tensor")  # type: ignore[no-untyped-call] # torch leaves it untyped
    library.impl("batch_norm_sums", batch_norm_sums, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call] # as above
    torch.library.register_fake("sbp::batch_norm_sums", _shape_only, lib=library)
    return library


_REGISTERED = _register(torch.library.Library("sbp", "FRAGMENT"))  # type: ignore[no-untyped-call] # as above

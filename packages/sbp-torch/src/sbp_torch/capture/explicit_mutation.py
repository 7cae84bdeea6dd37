"""Operators that write to their arguments although their schema does not say so.

before: y, m, r = native_batch_norm(x, w, b, mean, var, training)      writes mean and var
after:  y, m, r, mean', var' = _native_batch_norm_legit_functional(..); mean.copy_(mean'); ...

Functionalisation of the trace goes by schemas, so that it sees only the explicit writes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

_aten = torch.ops.aten


def make_mutations_explicit(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call an operator, with its hidden writes as `copy_`; None if its schema names all writes.

    Args:
        func: An `OpOverload`.
        args: By position.
        kwargs: By name.
    """
    if func is not _aten.native_batch_norm.default or kwargs:
        return None
    _, _, _, mean, var, training, *_ = args
    if not training or not isinstance(mean, Tensor) or not isinstance(var, Tensor):
        return None
    *made, new_mean, new_var = _aten._native_batch_norm_legit_functional.default(*args)
    mean.copy_(new_mean)
    var.copy_(new_var)
    return tuple(made)

"""Operators that not every PyTorch has."""

from __future__ import annotations

import pytest

#: Operators of the tests that PyTorch has since 2.13 only.
NEWER = frozenset(
    {"aten._foreach_clone.default", "aten._foreach_mm.default"}
    | {"aten._upsample_lanczos2d_aa.default", "aten._upsample_lanczos2d_aa.vec"}
    | {"aten._upsample_lanczos2d_aa_backward.default"}
    | {"torch_nn._linear_cross_entropy_batch_chunked.default"}
    | {"torch_nn._linear_cross_entropy_batch_chunked_no_reduction.default"}
)


def skip_without(op: str) -> None:
    """Skip the test that is running if this PyTorch is too old for an operator, and lacks it."""
    import torch

    from sbp_core.errors import SbpLookupError
    from sbp_torch.signatures.torch_call import overload

    if torch.__version__ >= (2, 13):
        return  # it has to be there
    try:
        overload(op)
    except SbpLookupError:
        pytest.skip(f"PyTorch {torch.__version__} has no operator {op}")

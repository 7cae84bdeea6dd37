"""Which of ATen's operators look at their argument instead of making a new tensor.

Every kind of operator whose schema says that a result may alias an argument, and those that do so
without saying it.

Stability: internal.
"""

from __future__ import annotations

__all__ = ["VIEWS"]

#: Of those that ATen's schemas name: what is traced, and what is taken apart while it is traced.
_DECLARED = frozenset(
    {"_conj", "_fw_primal", "_neg_view", "_reshape_alias", "adjoint", "alias", "as_strided"}
    | {"broadcast_to", "chunk", "conj", "contiguous", "detach", "diagonal", "dsplit", "expand"}
    | {"expand_as", "flatten", "hsplit", "imag", "lift_fresh", "linalg_diagonal", "mH", "mT"}
    | {"matrix_H", "moveaxis", "movedim", "narrow", "numpy_T", "permute", "pin_memory"}
    | {"positive", "ravel", "real", "reshape", "reshape_as", "resolve_conj", "resolve_neg"}
    | {"select", "slice", "slice_inverse", "split", "split_with_sizes", "squeeze", "swapaxes"}
    | {"swapdims", "t", "tensor_split", "to", "transpose", "unbind", "unflatten", "unfold"}
    | {"unsqueeze", "view", "view_as", "view_as_complex", "view_as_real", "vsplit"}
)

#: Kinds (`view` of `aten.view.default`) of operators whose results may lie in the memory of their
#: arguments. The unsafe ones do so without a word.
VIEWS = _DECLARED | {"_unsafe_view", "unsafe_chunk", "unsafe_split", "unsafe_split_with_sizes"}

"""Which operators look at their argument instead of making a new tensor. No torch.

The one list of them: whatever asks whether two values may lie in one memory reads it here. It has
every kind of operator whose schema in ATen says that a result may alias an argument, and the few
that do so without saying it.
"""

from __future__ import annotations

from collections.abc import Iterator

from sbp_core.graph.ir import LogicalGraph

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

#: `_unsafe_view` aliases without a word; `sbp.after` gives back its argument, later.
_SILENT = frozenset({"_unsafe_view", "after"})

#: Kinds (`Node.kind`) of operators whose results may lie in the memory of their arguments. They
#: cost no memory and next to no time.
VIEWS = _DECLARED | _SILENT


def seen_inputs(graph: LogicalGraph, value: str) -> Iterator[str]:
    """Yield the graph inputs that a value is, or may lie in the memory of."""
    todo, met = [value], {value}
    while todo:
        one = todo.pop()
        node = graph.producers.get(one)
        if node is None:
            yield one
        elif node.kind in VIEWS:
            new = [name for name in graph.tensor_inputs(node) if name not in met]
            met.update(new)
            todo += new

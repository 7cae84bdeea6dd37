"""Hand-made operator calls and signatures, for tests of sharding rules."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from sbp_core.graph.ir import Argument, Ref, Symbol, TensorType
from sbp_core.sbp import NdSbp
from sbp_core.signatures import OpCall, Signature1d
from sbp_core.strategy import Signature

__all__ = ["call", "signature", "texts"]

Shape = tuple[int, ...]


def call(
    op: str,
    inputs: Mapping[str, Shape] | Sequence[Shape],
    outputs: Sequence[Shape],
    *rest: Argument,
    dtype: str = "float32",
    tags: Sequence[str] = (),
) -> OpCall:
    """Return a call whose first arguments are tensors.

    Args:
        op: The operator.
        inputs: Shapes of these tensors by name; without names they are x0, x1, ...
        outputs: Shapes of its results.
        rest: The arguments after the tensors.
        dtype: The dtype of all tensors. A call without input tensors passes it, as factories do.
        tags: The tags of the operator.
    """
    if not isinstance(inputs, Mapping):
        inputs = {f"x{index}": shape for index, shape in enumerate(inputs)}
    return OpCall(
        op=op,
        args=(*map(Ref, inputs), *rest),
        kwargs={} if inputs else {"dtype": Symbol("dtype", dtype)},
        inputs=tuple(TensorType(shape, dtype) for shape in inputs.values()),
        tensor_names=tuple(inputs),
        outputs=tuple(TensorType(shape, dtype) for shape in outputs),
        tags=tuple(tags),
        where=("model.py:7",),
    )


def signature(inputs: Sequence[str], outputs: Sequence[str]) -> Signature:
    """Return the signature of texts such as `S(0), B`, one for each input and output."""
    return Signature(tuple(map(NdSbp.parse, inputs)), tuple(map(NdSbp.parse, outputs)))


def texts(found: Iterable[Signature1d]) -> list[str]:
    """Return signatures as readable texts."""
    return [str(one) for one in found]

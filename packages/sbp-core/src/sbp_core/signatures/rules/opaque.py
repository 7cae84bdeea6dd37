"""The rule of last resort: an operator of unknown meaning runs whole on every rank."""

from __future__ import annotations

from sbp_core.signatures.arguments import labels
from sbp_core.signatures.call import OpCall
from sbp_core.signatures.notation import Notation
from sbp_core.signatures.rule import Rule


def _opaque(call: OpCall) -> Notation:
    """Give every dim a label of its own that may not be split."""
    types = (*call.inputs, *call.outputs)
    dims = [
        tuple((name,) for name in labels(f"t{index}_", len(entry.shape)))
        for index, entry in enumerate(types)
    ]
    return Notation(
        inputs=tuple(dims[: len(call.inputs)]),
        outputs=tuple(dims[len(call.inputs) :]),
        whole=frozenset(name for tensor in dims for (name,) in tensor),
    )


OPAQUE = Rule(_opaque)

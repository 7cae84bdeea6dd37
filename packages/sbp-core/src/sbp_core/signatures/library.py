"""`CallLibrary`: the requests of this package to an installed tensor library, such as PyTorch.

It requests the types of a call, and the signatures (ways to shard) of operators without a rule.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, cast

from sbp_core.plugins.tensor_library import tensor_library
from sbp_core.signatures.call import OpCall
from sbp_core.signatures.signature import Signature1d


class CallLibrary(Protocol):
    """The part of a `tensor_library` plugin that signatures use: knows and executes operators."""

    def abstract_call(self, op: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> OpCall:
        """Return a call whose tensors may be shapes; nothing is computed.

        Args:
            op: Operator and overload, such as `aten.mm.default`.
            args: Tensors as tensors, `TensorType`s or shapes (float32); other arguments unchanged.
            kwargs: Arguments by name.

        Raises:
            SbpLookupError: there is no such operator.
            SbpValueError: it does not take such arguments.
        """
        ...

    def discover(self, call: OpCall) -> tuple[Signature1d, ...]:
        """Return the legal signatures of a call along one mesh axis, found by execution."""
        ...


def call_library() -> CallLibrary:
    """Return the installed tensor library.

    Raises:
        SbpLookupError: there is none, or there are several.
    """
    return cast(CallLibrary, tensor_library())

"""What the core asks of the library that executes operators, such as PyTorch; it knows none itself.

A plan can be made without one. What needs one is few: the types that a call makes when somebody
asks for its signatures by hand, the signatures of an operator that nobody has described, and how
results lie in memory. A package that brings one (`sbp-torch`) registers it as a plugin of kind
`tensor_library`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol, cast

from sbp_core.errors import SbpLookupError
from sbp_core.plugins import discover

if TYPE_CHECKING:
    from sbp_core.boxing.step import Step
    from sbp_core.memory.lifetime import CallLayouts
    from sbp_core.signatures.call import OpCall
    from sbp_core.signatures.signature import Signature1d


class TensorLibrary(Protocol):
    """Kind `tensor_library`: `build(config)` returns one."""

    def abstract_call(self, op: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> OpCall:
        """Return a call whose tensors may be shapes; nothing is computed.

        Args:
            op: Operator and overload, such as `aten.mm.default`.
            args: Tensors as tensors, `TensorType`s or shapes (float32); other arguments as they
                are.
            kwargs: Arguments by name.

        Raises:
            SbpLookupError: there is no such operator.
            SbpValueError: it does not take such arguments.
        """
        ...

    def discover(self, call: OpCall) -> tuple[Signature1d, ...]:
        """Return the legal signatures of a call along one mesh axis, as execution finds them."""
        ...

    def call_layouts(self, steps: Sequence[Step]) -> CallLayouts:
        """Return what knows how the results of instructions lie in memory.

        Args:
            steps: The boxing steps that instructions name by index.
        """
        ...


@cache
def tensor_library() -> TensorLibrary:
    """Return the tensor library that is installed.

    Raises:
        SbpLookupError: there is none, or there are several.
    """
    registry = discover()
    names = registry.names("tensor_library")
    if len(names) != 1:
        raise SbpLookupError(
            f"{len(names)} tensor libraries are installed"
            + (f": {', '.join(names)}" * bool(names)),
            accepted="exactly one plugin of kind 'tensor_library'",
            todo="pip install sbp-torch" if not names else "uninstall all but one",
        )
    return cast("TensorLibrary", registry.make("tensor_library", names[0]))

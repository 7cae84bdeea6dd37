"""`TorchLibrary`: the plugin through which `sbp_core` asks PyTorch about operator calls.

It tells the types of a call, discovered signatures (ways to shard it), and memory layouts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sbp_core.plugins import EmptyConfig
from sbp_core.signatures import OpCall, Signature1d
from sbp_torch.memory.layout import Layouts
from sbp_torch.signatures.discovery import discover_call
from sbp_torch.signatures.torch_call import abstract_call


class TorchLibrary:
    """See `sbp_core.signatures.library.CallLibrary` and `sbp_core.memory.LayoutLibrary`."""

    def abstract_call(self, op: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> OpCall:
        """See `CallLibrary.abstract_call`."""
        return abstract_call(op, args, kwargs)

    def discover(self, call: OpCall) -> tuple[Signature1d, ...]:
        """See `CallLibrary.discover`."""
        return discover_call(call).signatures

    def call_layouts(self) -> Layouts:
        """See `LayoutLibrary.call_layouts`."""
        return Layouts()


def build(config: EmptyConfig) -> TorchLibrary:
    """Return the library. Kind `tensor_library`, name `torch`."""
    return TorchLibrary()

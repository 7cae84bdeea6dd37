"""`Signature1d`: one legal way to split the tensors of an operator call along one mesh axis."""

from __future__ import annotations

from dataclasses import dataclass, field

from sbp_core.sbp import Sbp


@dataclass(frozen=True, slots=True, kw_only=True)
class Requirement:
    """A requirement on the sizes of all mesh axes that split one label, together.

    Args:
        label: The label.
        extents: Extents of the dims that the label leads.
        even: The product of the sizes must divide every extent; else it must not exceed any (no
            shard may be empty).
    """

    label: str
    extents: tuple[int, ...]
    even: bool

    def failure(self, parts: int) -> str:
        """Return why `parts` parts are not possible; empty if they are."""
        for extent in sorted(self.extents):
            if self.even and extent % parts:
                return f"needs {extent} to be divisible by {parts}"
            if not self.even and extent < parts:
                return f"needs at least one of {extent} on each of {parts} ranks"
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Signature1d:
    """How a call may be cut along one mesh axis.

    Args:
        inputs, outputs: The entries in argument order (lists flattened) and output order.
        origin: Why it is legal: `split of label k`, `linear in argument 0`, `all B`, `discovered`.
        requires: Requirements on several axes that split the same label.
        label: The label that is split; empty if none is.
        follows: Labels, with their extents, that earlier mesh axes must have split down to one
            element each.
    """

    inputs: tuple[Sbp, ...]
    outputs: tuple[Sbp, ...]
    origin: str
    requires: tuple[Requirement, ...] = field(default=(), compare=False)
    label: str = field(default="", compare=False)
    follows: tuple[tuple[str, int], ...] = field(default=(), compare=False)

    def __str__(self) -> str:
        left = ", ".join(map(repr, self.inputs))
        return f"{left} -> {', '.join(map(repr, self.outputs))}".strip()

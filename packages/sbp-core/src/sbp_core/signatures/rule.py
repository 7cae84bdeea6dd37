"""A rule: what an operator means, and how its arguments change on a shard.

Rules of PyTorch's operators are in `signatures.rules`, by family; third parties add theirs through
the hook `sbp_signatures`. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache

from sbp_core.graph.ir import Argument
from sbp_core.signatures.call import OpCall
from sbp_core.signatures.notation import Notation

#: Half-open bounds of a shard in each dim of the logical tensor.
Bounds = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalCall:
    """What one rank executes; `Ref`s stand for its shards."""

    op: str
    args: tuple[Argument, ...]
    kwargs: Mapping[str, Argument] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shards:
    """Which slices of the logical tensors one rank holds."""

    inputs: tuple[Bounds, ...]
    outputs: tuple[Bounds, ...]

    def output_shape(self, index: int = 0) -> tuple[int, ...]:
        """Return the shape of this rank's shard of an output."""
        return tuple(stop - start for start, stop in self.outputs[index])


Localizer = Callable[[OpCall, Shards], LocalCall]


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule for one operator.

    Args:
        meaning: The notation: as text if it is always the same, else a function of the call.
        localize: How the call changes on a shard; None if it does not.
    """

    meaning: str | Callable[[OpCall], Notation]
    localize: Localizer | None = None

    def notation(self, call: OpCall) -> Notation:
        """Return what this call means."""
        return parsed(self.meaning) if isinstance(self.meaning, str) else self.meaning(call)


@cache
def parsed(text: str) -> Notation:
    """Return `Notation.parse(text)`, read once."""
    return Notation.parse(text)


def resized(index: int, name: str = "size") -> Localizer:
    """Return the localiser for an op that is told the shape of its output in an argument."""

    def localize(call: OpCall, shards: Shards) -> LocalCall:
        args, kwargs = call.args, dict(call.kwargs)
        size = shards.output_shape()
        if index < len(args):
            args = (*args[:index], size, *args[index + 1 :])
        else:
            kwargs[name] = size
        return LocalCall(op=call.op, args=args, kwargs=kwargs)

    return localize

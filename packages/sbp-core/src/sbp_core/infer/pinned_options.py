"""Restrict an operator to the signatures (shardings of its call) that the user's pins allow.

`infer.problem` asks for each node. A pin fixes the SBP (sharding) of a tensor: the users of a
pinned value keep only the signatures that take the pinned SBP; a view of it is pinned to the SBP
that follows. A decision that is kept from an earlier strategy also leaves one signature, unless a
pin overrides it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeAlias

from sbp_core.errors import PlanError
from sbp_core.graph.ir import Node
from sbp_core.infer.pins import PINS, Pin, Pins
from sbp_core.infer.work import FixedDecisions, StepWork
from sbp_core.sbp import Sbp
from sbp_core.signatures.signature import Signature1d

#: The signatures of a node, each with an entry for each of the axes.
Options: TypeAlias = Sequence[tuple[Signature1d, ...]]


class PinnedOptions:
    """The pins on some mesh axes; nodes are asked for in the order of the graph.

    Args:
        work: The step.
        axes: Successive mesh axes.
        pins: The pins.
        kept: Decisions of an earlier strategy that stay where pins allow.
    """

    def __init__(self, work: StepWork, axes: range, pins: Pins, kept: FixedDecisions) -> None:
        self._work, self._axes, self._kept = work, axes, kept
        self._use = [
            {value: pin for (value, at), pin in pins.use.items() if at == axis} for axis in axes
        ]

    def left(self, node: Node, parts: Options) -> tuple[int, ...]:
        """Return the indices of the signatures of a node that pins allow.

        Raises:
            PlanError: a pin asks for an SBP that the operator cannot take.
        """
        left = self._unpinned(node, parts)
        return tuple(self._as_kept(node, parts, left) or left)

    def follow(self, node: Node, first: Node) -> None:
        """Pin the outputs of a node like the outputs of an equal node that was asked for before."""
        for use in self._use:
            for value, other in zip(node.outputs, first.outputs, strict=True):
                if other in use:
                    use.setdefault(value, use[other])

    def _unpinned(self, node: Node, parts: Options) -> list[int]:
        """Return the indices of the options that take the node's arguments as they are pinned."""
        kept = list(range(len(parts)))
        for axis, use in enumerate(self._use):
            kept = self._unpinned_on(axis, use, node, parts, kept)
        return kept

    def _unpinned_on(
        self, axis: int, use: dict[str, Pin], node: Node, parts: Options, kept: list[int]
    ) -> list[int]:
        pinned = [
            (at, value, use[value])
            for at, value in enumerate(self._work.calls[node.name].tensor_names)
            if value in use
        ]
        if not pinned:
            return kept
        # Firm pins first. A pin that is not firm chooses among the remaining options, and is
        # ignored if none of them fits it.
        for at, value, pin in sorted(pinned, key=lambda entry: not entry[2].firm):
            fits = [index for index in kept if parts[index][axis].inputs[at] == pin.entry]
            if not fits and pin.firm:
                possible = {parts[index][axis].inputs[at] for index in kept}
                raise self._untakable(self._axes[axis], node, value, pin, possible)
            kept = fits or kept
        # If the SBP of a view of a pinned value follows, it is pinned for the view's users too.
        left = dict.fromkeys(parts[index][axis] for index in kept)
        if len(left) == 1 and self._work.is_free(node) and pinned[0][2].firm:
            (only,) = left
            for value, entry in zip(node.outputs, only.outputs, strict=True):
                use.setdefault(value, replace(pinned[0][2], entry=entry))
        return kept

    def _as_kept(self, node: Node, parts: Options, among: list[int]) -> list[int]:
        """Return the options that an earlier strategy chose; none if it did not choose."""
        found = self._kept.nodes.get(node.name)
        if found is None:
            return []
        wanted = [
            tuple(tuple(sbp[axis] for sbp in of) for of in (found.inputs, found.outputs))
            for axis in self._axes
        ]
        return [at for at in among if [(p.inputs, p.outputs) for p in parts[at]] == wanted]

    def _untakable(
        self, axis: int, node: Node, value: str, pin: Pin, possible: set[Sbp]
    ) -> PlanError:
        return PlanError(
            f"the pin '{pin.text}' asks that {value!r} is used as {pin.entry!r} on mesh axis "
            f"{self._work.axes[axis]!r}, which {node.op} cannot take",
            where=(*node.where(), PINS),
            accepted=", ".join(sorted(map(repr, possible))),
            todo="pin what is accepted, or pin another value on the way",
        )

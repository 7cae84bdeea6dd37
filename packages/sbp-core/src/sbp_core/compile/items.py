"""`LoweredItems`: the list of work items that `lowering` makes of a graph and its strategy.

An item is an operator, a communication step, a sum or a copy, the same for all ranks. Later steps
of the compiler rewrite the list; `segments` turns it into the actors (units of work) of each rank.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from sbp_core.boxing import BoxingStep
from sbp_core.compile.packing import PackedLayout
from sbp_core.graph.ir import Node, Phase, Rate, TensorType
from sbp_core.sbp import NdSbp


class ItemKind(StrEnum):
    """What an item becomes: instructions of segments, or an actor of its own."""

    OP = "op"
    HOST = "host"
    LOCAL = "local"
    PACK = "pack"
    UNPACK = "unpack"
    COLLECTIVE = "collective"
    TRANSFER = "transfer"
    ACCUMULATE = "accumulate"
    FETCH = "fetch"
    STORE = "store"


@dataclass(frozen=True, slots=True)
class KeyLayout:
    """The meaning and layout of a key: logical value, stage, nd-SBP.

    `kind` is the type of a key that is not a value of the graph, such as a flat buffer; then
    `value` is empty.
    """

    value: str
    stage: int
    sbp: NdSbp
    kind: TensorType | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One op, host op, accumulation, boxing step, packing for one, or copy of an offloaded state.

    `level` is set by `levels.with_levels`. `asked_by` is the node that a boxing step was first
    inserted for; empty if it is for a graph output. `packed` is the layout of a flat buffer, for a
    pack or unpack; see `packing`. `is_apart` marks a pack outside of any segment, because it may
    begin the boxing. `piece` numbers the parts that a segment is cut into; see `cuts`. `behind` is
    set for an item that takes a boxing result at once: the level and piece that it comes after,
    before any later piece. `group` numbers the offloaded states that the item updates or copies;
    see `offload`.
    """

    name: str
    kind: ItemKind
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    stage: int
    target_stage: int
    phase: Phase
    rate: Rate
    level: int = 0
    node: Node | None = None
    step: BoxingStep | None = None
    asked_by: str = ""
    packed: PackedLayout | None = None
    is_apart: bool = False
    piece: int = 0
    behind: tuple[int, int] | None = None
    group: int = 0

    @property
    def is_inside(self) -> bool:
        """Whether it becomes instructions of a segment."""
        inside = (ItemKind.OP, ItemKind.LOCAL, ItemKind.PACK, ItemKind.UNPACK)
        return self.kind in inside and not self.is_apart

    @property
    def segment(self) -> tuple[int, Phase, Rate, int]:
        """The properties that the items of one segment share, before it is cut."""
        return self.stage, self.phase, self.rate, self.level

    @property
    def leaves(self) -> bool:
        """Whether it is done together with other ranks."""
        return self.kind in (ItemKind.COLLECTIVE, ItemKind.TRANSFER)


@dataclass(slots=True)
class LoweredItems:
    """All items in topological order, the layout of every key, and the keys that leave the graph.

    A loss or metric leaves by several keys if there are several stages, so that every rank has it.
    """

    items: list[Item] = field(default_factory=list)
    held: dict[str, KeyLayout] = field(default_factory=dict)
    results: dict[str, tuple[str, ...]] = field(default_factory=dict)
    new_states: dict[str, str] = field(default_factory=dict)

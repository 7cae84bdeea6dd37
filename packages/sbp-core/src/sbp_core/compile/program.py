"""What all ranks of a plan have in common: the items, where keys lie, their sizes. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from sbp_core.boxing import Step
from sbp_core.compile.lower import Item, ItemKind, Lowered
from sbp_core.compile.physical import StateSlot
from sbp_core.graph.ir import ITEMSIZE, LogicalGraph, TensorType
from sbp_core.sbp import local_shape
from sbp_core.signatures.call import OpCall
from sbp_core.signatures.derive import work_flop
from sbp_core.strategy import Strategy

#: Rates that only order firings against each other; predictions come from planners.
ROUGH_FLOP_PER_S = 1e11
ROUGH_BYTES_PER_S = 1e10
ROUGH_LAUNCH_S = 5e-6


class Program:
    """A lowered graph under a strategy."""

    def __init__(self, graph: LogicalGraph, strategy: Strategy, lowered: Lowered) -> None:
        self.graph, self.strategy, self.lowered = graph, strategy, lowered
        self.steps: tuple[Step, ...] = tuple(i.step for i in lowered.items if i.step is not None)
        numbered = (item.name for item in lowered.items if item.step is not None)
        self.step_index = {name: index for index, name in enumerate(numbered)}
        self.hosts = [item for item in lowered.items if item.kind is ItemKind.HOST]
        self.host_makers = {item.outputs[0]: item for item in self.hosts}
        self.inputs = {entry.name for entry in graph.inputs}
        self.kept_keys = self._kept_keys()

    def _kept_keys(self) -> set[str]:
        """Return the keys that outlive the segment that makes them."""
        segment: dict[str, tuple[object, ...]] = {}
        kept = {*self.lowered.results.values(), *self.lowered.new_states.values()}
        for item in self.lowered.items:
            own = (item.stage, item.phase, item.rate, item.level, item.kind is ItemKind.ACCUMULATE)
            inside = item.kind in (ItemKind.OP, ItemKind.LOCAL)
            kept.update(k for k in item.inputs if not inside or segment.get(k, own) != own)
            segment |= dict.fromkeys(item.outputs, own)
        return kept

    def stages_of(self, rank: int) -> set[int]:
        """Return the stages that a rank belongs to."""
        return {i for i, stage in enumerate(self.strategy.stages) if rank in stage}

    def needed_hosts(self, keys: Iterable[str]) -> list[Item]:
        """Return the host ops behind some keys: every rank computes host numbers itself."""
        needed: set[str] = set()
        todo = list(keys)
        while todo:
            maker = self.host_makers.get(todo.pop())
            if maker is not None and maker.name not in needed:
                needed.add(maker.name)
                todo.extend(maker.inputs)
        return [item for item in self.hosts if item.name in needed]

    def bytes_of(self, rank: int | None, key: str) -> int:
        """Return the bytes of a key on one rank (on the first of its stage, if None)."""
        held = self.lowered.held.get(key)
        if held is None:
            return 8
        stage = self.strategy.stages[held.stage]
        kind = self.graph.tensor(held.value)
        at = stage.coordinate(stage.rank_list[0] if rank is None else rank)
        return _size(kind.dtype, local_shape(kind.shape, held.sbp, stage.mesh_shape, at))

    def weight_s(self, item: Item) -> float:
        """Return the rough time of one item, for ordering only."""
        size = sum(self.bytes_of(None, k) for k in (*item.inputs, *item.outputs))
        if item.node is None:
            return ROUGH_LAUNCH_S
        flop = work_flop(OpCall.of(self.graph, item.node))
        share = self.strategy.stages[item.stage].size
        return ROUGH_LAUNCH_S + max(flop / share / ROUGH_FLOP_PER_S, size / ROUGH_BYTES_PER_S)

    def slots(self, rank: int) -> Iterable[StateSlot]:
        """Yield what a rank holds of the graph's inputs."""
        stages = self.stages_of(rank)
        for entry in self.graph.inputs:
            kind = self.graph.types[entry.name]
            if not isinstance(kind, TensorType):
                yield StateSlot(
                    name=entry.name,
                    kind=entry.kind.value,
                    shape=(),
                    dtype=kind.dtype,
                    stage=min(stages),
                    sbp=None,
                    local_shape=(),
                )
                continue
            storage = self.strategy.storage[entry.name]
            if storage.stage not in stages:
                continue
            stage = self.strategy.stages[storage.stage]
            at = stage.coordinate(rank)
            yield StateSlot(
                name=entry.name,
                kind=entry.kind.value,
                shape=kind.shape,
                dtype=kind.dtype,
                stage=storage.stage,
                sbp=storage.sbp,
                local_shape=local_shape(kind.shape, storage.sbp, stage.mesh_shape, at),
            )


def _size(dtype: str, shape: Sequence[int]) -> int:
    size = ITEMSIZE[dtype]
    for extent in shape:
        size *= extent
    return size

"""`LoweredProgram`: the work items of a step with their predicted times and the bytes of values.

The compiler asks it while it forms actors (`segments`); `infer.predict` asks for times.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable

from sbp_core.boxing import BoxingStep
from sbp_core.cluster import Cluster
from sbp_core.compile.items import Item, ItemKind, LoweredItems
from sbp_core.compile.physical import StateSlot
from sbp_core.cost import boxing_step_time_s, copy_time_s, host_copy_time_s, op_time_s
from sbp_core.graph.ir import LogicalGraph, Node, TensorType
from sbp_core.sbp import NdSbp, local_shape
from sbp_core.signatures.arguments import call_key
from sbp_core.signatures.call import OpCall
from sbp_core.strategy import Strategy


class LoweredProgram:
    """A lowered graph under a strategy.

    Args:
        graph: The graph that was lowered.
        strategy: Its strategy.
        lowered: The items.
        cluster: The machine that determines the times of items; a nominal one if None.
    """

    def __init__(
        self,
        graph: LogicalGraph,
        strategy: Strategy,
        lowered: LoweredItems,
        cluster: Cluster | None = None,
    ) -> None:
        self.graph, self.strategy, self.lowered = graph, strategy, lowered
        self.cluster = cluster or Cluster.nominal(1 + strategy.ranks[-1])
        self.steps: tuple[BoxingStep, ...] = tuple(
            i.step for i in lowered.items if i.step is not None
        )
        numbered = (item.name for item in lowered.items if item.step is not None)
        self.step_index = {name: index for index, name in enumerate(numbered)}
        self.hosts = [item for item in lowered.items if item.kind is ItemKind.HOST]
        self.host_makers = {item.outputs[0]: item for item in self.hosts}
        self.inputs = {entry.name for entry in graph.inputs}
        #: For each key, (place, state) of the states whose new value it is.
        self._new_states: dict[str, list[tuple[int, str]]] = defaultdict(list)
        for place, (state, key) in enumerate(lowered.new_states.items()):
            self._new_states[key].append((place, state))
        self._calls: dict[str, OpCall] = {}
        self._times_s: dict[str, float] = {}
        self._op_times_s: dict[object, float] = {}
        #: Sizes by all that determines them: keys of one type and layout have one size.
        self._sizes: dict[object, int] = {}
        #: For ranks of some stages, the shapes of their shards: stage, shape, nd-SBP.
        self._cuts: dict[frozenset[int], tuple[tuple[int, tuple[int, ...], NdSbp], ...]] = {}
        self._slots: dict[object, tuple[StateSlot, ...]] = {}
        self._distinct_slots: dict[tuple[StateSlot, ...], tuple[StateSlot, ...]] = {}

    def stages_of(self, rank: int) -> set[int]:
        """Return the stages that a rank belongs to."""
        return {i for i, stage in enumerate(self.strategy.stages) if rank in stage}

    def needed_hosts(self, keys: Iterable[str]) -> list[Item]:
        """Return the host ops after some keys: every rank computes host numbers itself."""
        needed: set[str] = set()
        todo = list(keys)
        while todo:
            maker = self.host_makers.get(todo.pop())
            if maker is not None and maker.name not in needed:
                needed.add(maker.name)
                todo.extend(maker.inputs)
        return [item for item in self.hosts if item.name in needed]

    def call(self, node: Node) -> OpCall:
        """Return the call of a node, on logical values."""
        if node.name not in self._calls:
            self._calls[node.name] = OpCall.of(self.graph, node)
        return self._calls[node.name]

    def bytes_of(self, key: str) -> int:
        """Return the bytes of a key on the first rank of its stage, which has the largest part."""
        held = self.lowered.held.get(key)
        if held is None:
            return 8  # a host number
        kind = held.kind or self.graph.tensor(held.value)
        what = (kind, held.stage, held.sbp)
        if what not in self._sizes:
            mesh = self.strategy.stages[held.stage].mesh_shape
            shape = local_shape(kind.shape, held.sbp, mesh, (0,) * len(mesh))
            self._sizes[what] = TensorType(shape, kind.dtype).size_bytes
        return self._sizes[what]

    def written(self, keys: Iterable[str]) -> tuple[tuple[str, str], ...]:
        """Return (state, key) of the states whose new values are among the keys, in their order."""
        found = {(*entry, key) for key in keys for entry in self._new_states.get(key, ())}
        return tuple((state, key) for _, state, key in sorted(found))

    def time_s(self, item: Item) -> float:
        """Return the time of one item on the rank with the largest shard, by `sbp_core.cost`.

        Packing copies its values; unpacking copies unless its results are views.
        """
        if item.name not in self._times_s:
            self._times_s[item.name] = self._time_s(item)
        return self._times_s[item.name]

    def begin_s(self, item: Item) -> float:
        """Return how long a boxing item keeps its thread busy to start it, in seconds."""
        return min(self.time_s(item), self.cluster.device.boxing_launch_s)

    def drag_s(self, item: Item) -> float:
        """Return how long a boxing item under way keeps its thread from computing, in seconds."""
        return self.cluster.device.boxing_busy * (self.time_s(item) - self.begin_s(item))

    def _time_s(self, item: Item) -> float:
        if item.step is not None:
            return boxing_step_time_s(item.step, self.cluster)
        if item.packed is not None:
            if item.kind is ItemKind.UNPACK and not item.packed.gathers:
                return 0.0  # views
            num_bytes = sum(self.bytes_of(key) for key in (*item.inputs, *item.outputs))
            num_calls = 1 if item.kind is ItemKind.PACK else len(item.outputs)
            return copy_time_s(num_bytes, num_calls, self.cluster.device)
        if item.kind in (ItemKind.FETCH, ItemKind.STORE):
            return host_copy_time_s(self.bytes_of(item.name), self.cluster.device)
        if item.node is None or item.kind is ItemKind.HOST:
            return 0.0
        signature = self.strategy.nodes[item.node.name].signature
        stage = self.strategy.stages[item.stage]
        # Repeated layers differ in names only.
        key = (call_key(self.call(item.node)), signature, stage.mesh_shape)
        if key not in self._op_times_s:
            call = self.call(item.node)
            self._op_times_s[key] = op_time_s(call, signature, stage, self.cluster)
        return self._op_times_s[key]

    def slots(self, rank: int) -> tuple[StateSlot, ...]:
        """Return a rank's slots for the graph's inputs; equal slots are one object."""
        # The slots follow from the rank's stages and the sizes of its shards, of which there are
        # few, because layers repeat.
        stages = frozenset(self.stages_of(rank))
        if stages not in self._cuts:
            types = ((e.name, self.graph.types[e.name]) for e in self.graph.inputs)
            stored = (
                (self.strategy.storage[name], kind.shape)
                for name, kind in types
                if isinstance(kind, TensorType)
            )
            cuts = ((one.stage, shape, one.sbp) for one, shape in stored if one.stage in stages)
            self._cuts[stages] = tuple(dict.fromkeys(cuts))
        shapes = tuple(self._local_shape(rank, *cut) for cut in self._cuts[stages])
        if (stages, shapes) not in self._slots:
            slots = tuple(self._slots_of(rank, stages))
            self._slots[stages, shapes] = self._distinct_slots.setdefault(slots, slots)
        return self._slots[stages, shapes]

    def _local_shape(
        self, rank: int, stage: int, shape: tuple[int, ...], sbp: NdSbp
    ) -> tuple[int, ...]:
        placement = self.strategy.stages[stage]
        return local_shape(shape, sbp, placement.mesh_shape, placement.coordinate(rank))

    def _slots_of(self, rank: int, stages: Collection[int]) -> Iterable[StateSlot]:
        for entry in self.graph.inputs:
            kind, storage = self.graph.types[entry.name], self.strategy.storage.get(entry.name)
            if not isinstance(kind, TensorType):
                yield StateSlot(
                    name=entry.name,
                    kind=entry.kind,
                    shape=(),
                    dtype=kind.dtype,
                    stage=min(stages),
                    sbp=None,
                    local_shape=(),
                )
            elif storage is not None and storage.stage in stages:
                local = self._local_shape(rank, storage.stage, kind.shape, storage.sbp)
                yield StateSlot(
                    name=entry.name,
                    kind=entry.kind,
                    shape=kind.shape,
                    dtype=kind.dtype,
                    stage=storage.stage,
                    sbp=storage.sbp,
                    local_shape=local,
                    offloaded=storage.offloaded,
                )

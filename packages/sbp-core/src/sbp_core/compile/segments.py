"""Form actors and registers: compute segments, boxing actors, accumulations, for each rank.

Items of one (stage, phase, rate, level) become one compute segment. An actor's results that go to
the same consumers share one register. Names of actors are equal on all ranks. No torch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypedDict

from sbp_core.boxing import Step
from sbp_core.compile.lower import ALIASES, Item, ItemKind, Lowered
from sbp_core.compile.physical import (
    LOCAL_BOX,
    Actor,
    ActorKind,
    Instruction,
    Link,
    PhysicalPlan,
    RankPlan,
    Register,
    StateSlot,
)
from sbp_core.graph.ir import (
    ITEMSIZE,
    PHASE_ORDER,
    Argument,
    LogicalGraph,
    Node,
    Phase,
    Rate,
    Ref,
    TensorType,
    map_refs,
)
from sbp_core.graph.serialize import graph_hash
from sbp_core.sbp import local_shape
from sbp_core.signatures.call import OpCall
from sbp_core.signatures.derive import work_flop
from sbp_core.signatures.localize import localize
from sbp_core.strategy import Strategy

#: Rates that only order firings against each other; predictions come from planners.
ROUGH_FLOP_PER_S = 1e11
ROUGH_BYTES_PER_S = 1e10
ROUGH_LAUNCH_S = 5e-6

_RENAMED = {
    # A part need not be contiguous where the logical tensor is, so views must be able to copy.
    "aten.view.default": "aten.reshape.default",
    "aten._unsafe_view.default": "aten.reshape.default",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileOptions:
    """How plans are laid out.

    Args:
        boxing_thread: Give boxing a thread of its own on every rank, so that it overlaps with
            compute; otherwise one thread a rank does both.
    """

    boxing_thread: bool = False


COMPUTE_THREAD, BOXING_THREAD = "compute", "boxing"


def form_plan(
    graph: LogicalGraph, strategy: Strategy, lowered: Lowered, options: CompileOptions
) -> PhysicalPlan:
    """Return the plan of all ranks, with registers and quotas but without firing orders."""
    former = _Former(graph, strategy, lowered, options)
    ranks = tuple(former.rank_plan(rank) for rank in strategy.ranks)
    return PhysicalPlan(
        graph_hash=graph_hash(graph),
        planner=strategy.planner,
        num_micro_batches=strategy.num_micro_batches,
        ties={entry.name: entry.stands_for for entry in graph.inputs if entry.stands_for},
        stages=strategy.stages,
        steps=former.steps,
        links=former.links(ranks),
        ranks=ranks,
    )


class _Leaving(TypedDict):
    """Fields of an actor that say what leaves the graph there."""

    emits: tuple[tuple[str, str], ...]
    writes: tuple[tuple[str, str], ...]
    written_bytes: int


class _Former:
    """What is common to all ranks, and the making of one rank's plan."""

    def __init__(
        self, graph: LogicalGraph, strategy: Strategy, lowered: Lowered, options: CompileOptions
    ) -> None:
        self.graph, self.strategy, self.lowered = graph, strategy, lowered
        self.boxing_thread = BOXING_THREAD if options.boxing_thread else COMPUTE_THREAD
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

    # One rank.

    def rank_plan(self, rank: int) -> RankPlan:
        """Return the actors, registers and slots of one rank."""
        stages = {i for i, stage in enumerate(self.strategy.stages) if rank in stage}
        groups: dict[str, list[Item]] = defaultdict(list)
        for item in self.lowered.items:
            for name in self._actor_names(item, rank, stages):
                groups[name].append(item)
        ordered = sorted(groups.items(), key=lambda group: _precedence(group[1][0]))
        actors = [self._actor(rank, name, items) for name, items in ordered]
        actors = self._place_host_states(actors, min(stages))
        actors = _finish_outputs(actors)
        registers = self._registers(rank, actors)
        return RankPlan(
            rank=rank,
            slots=tuple(self._slots(rank, stages)),
            actors=tuple(actors),
            registers=tuple(registers),
            orders={},
        )

    def _actor_names(self, item: Item, rank: int, stages: set[int]) -> Iterable[str]:
        """Yield the actors of this rank that an item belongs to: none, one, or send and receive."""
        segment = f"{item.phase.value}.{item.stage}.{item.level}"
        if item.rate is Rate.STEP and item.phase is not Phase.OPTIMIZER:
            segment += ".step"  # boxed after an accumulation: no part of the segment that feeds it
        if item.kind in (ItemKind.OP, ItemKind.LOCAL) and item.stage in stages:
            yield segment
        elif item.kind is ItemKind.ACCUMULATE and item.stage in stages:
            yield f"accumulate.{segment}"  # a loss must not wait for gradients of its level
        elif item.kind is ItemKind.COLLECTIVE and item.stage in stages:
            yield item.name
        elif item.kind is ItemKind.TRANSFER:
            assert item.step is not None
            if rank in item.step.source[0]:
                yield f"send {item.name}"
            if rank in item.step.target[0]:
                yield f"receive {item.name}"

    def _actor(self, rank: int, name: str, items: Sequence[Item]) -> Actor:
        first = items[0]
        if first.step is not None and first.kind is not ItemKind.LOCAL:
            return self._boxing_actor(rank, name, first)
        if first.kind is ItemKind.ACCUMULATE:
            return self._accumulation(name, items)
        return self._segment(rank, name, items)

    def _boxing_actor(self, rank: int, name: str, item: Item) -> Actor:
        assert item.step is not None
        receives = name.startswith("receive ")
        kind = ActorKind.COLLECTIVE
        if item.kind is ItemKind.TRANSFER:
            kind = ActorKind.RECEIVE if receives else ActorKind.SEND
        takes = kind is not ActorKind.RECEIVE or rank in item.step.source[0]
        bytes_each = item.step.size_bytes / max(1, item.step.target[0].size)
        return Actor(
            name=name,
            kind=kind,
            stage=item.target_stage if receives else item.stage,
            phase=item.phase,
            rate=item.rate,
            thread=self.boxing_thread,
            inputs=tuple(k for k in item.inputs if takes and k not in self.inputs),
            reads=tuple(k for k in item.inputs if takes and k in self.inputs),
            outputs=() if kind is ActorKind.SEND else item.outputs,
            step=self.step_index[item.name],
            makes="" if kind is ActorKind.SEND else item.outputs[0],
            weight_s=20 * ROUGH_LAUNCH_S + bytes_each / ROUGH_BYTES_PER_S,
            **self._leaving(() if kind is ActorKind.SEND else item.outputs),
        )

    def _accumulation(self, name: str, items: Sequence[Item]) -> Actor:
        sums = []
        for item in items:
            assert item.node is not None
            sums.append((item.inputs[0], item.outputs[0], float(item.node.args[1])))
        outputs = tuple(total for _, total, _ in sums)
        size = sum(self._bytes(None, key) for key in outputs)
        return Actor(
            name=name,
            kind=ActorKind.ACCUMULATE,
            stage=items[0].stage,
            phase=items[0].phase,
            rate=Rate.MICRO,
            thread=COMPUTE_THREAD,
            inputs=tuple(dict.fromkeys(part for part, _, _ in sums)),
            outputs=outputs,
            accumulates=tuple(sums),
            weight_s=ROUGH_LAUNCH_S * len(sums) + 3 * size / ROUGH_BYTES_PER_S,
            transient_bytes=size,
            **self._leaving(outputs),
        )

    def _segment(self, rank: int, name: str, items: Sequence[Item]) -> Actor:
        instructions = [self._instruction(rank, item) for item in items]
        hosts = self._needed_hosts(items)
        instructions = [self._host_instruction(item) for item in hosts] + instructions
        outputs = tuple(key for item in (*hosts, *items) for key in item.outputs)
        used = dict.fromkeys(key for item in (*hosts, *items) for key in item.inputs)
        made = set(outputs)
        own = tuple(key for item in items for key in item.outputs)
        leaving = self._leaving(own)
        return Actor(
            name=name,
            kind=ActorKind.COMPUTE,
            stage=items[0].stage,
            phase=items[0].phase,
            rate=items[0].rate,
            thread=COMPUTE_THREAD,
            inputs=tuple(k for k in used if k not in made and k not in self.inputs),
            reads=tuple(k for k in used if k in self.inputs),
            outputs=own,
            instructions=tuple(instructions),
            weight_s=sum(self._weight(item) for item in items),
            transient_bytes=self._transient_bytes(rank, items),
            **leaving,
        )

    def _transient_bytes(self, rank: int, items: Sequence[Item]) -> int:
        """Return the most bytes that a segment's own values take at once while it runs."""
        last = {key: index for index, item in enumerate(items) for key in item.inputs}
        kept = self.kept_keys
        sizes: dict[str, int] = {}
        alive = peak = 0
        for index, item in enumerate(items):
            is_alias = item.node is not None and item.node.kind in ALIASES
            for key in item.outputs:
                sizes[key] = 0 if is_alias else self._bytes(rank, key)
                alive += sizes[key]
            peak = max(peak, alive)
            for key in (*item.inputs, *item.outputs):
                if key in sizes and key not in kept and last.get(key, -1) <= index:
                    alive -= sizes.pop(key)
        return peak

    def _leaving(self, keys: Sequence[str]) -> _Leaving:
        """Return which results and new states are among the keys, and the bytes of the latter."""
        made = set(keys)
        writes = tuple((n, k) for n, k in self.lowered.new_states.items() if k in made)
        return {
            "emits": tuple((n, k) for n, k in self.lowered.results.items() if k in made),
            "writes": writes,
            "written_bytes": sum(self._bytes(None, key) for _, key in writes),
        }

    # Instructions.

    def _instruction(self, rank: int, item: Item) -> Instruction:
        if item.kind is ItemKind.LOCAL:
            args = (Ref(item.inputs[0]), self.step_index[item.name])
            return Instruction(op=LOCAL_BOX, args=args, outputs=item.outputs, node=item.name)
        assert item.node is not None
        node = _with_keys(item.node, item.inputs)
        call = replace(
            OpCall.of(self.graph, item.node),
            args=node.args,
            kwargs=node.kwargs,
            tensor_names=tuple(k for k in item.inputs if k in self.lowered.held),
        )
        assigned = self.strategy.nodes[item.node.name]
        local = localize(call, assigned.signature, self.strategy.stages[item.stage], rank)
        return Instruction(
            op=_RENAMED.get(local.op, local.op),
            args=local.args,
            kwargs=local.kwargs,
            outputs=item.outputs,
            node=item.node.name,
        )

    def _host_instruction(self, item: Item) -> Instruction:
        assert item.node is not None
        node = item.node
        return Instruction(
            op=node.op, args=node.args, kwargs=node.kwargs, outputs=node.outputs, node=node.name
        )

    def _needed_hosts(self, items: Sequence[Item]) -> list[Item]:
        """Return the host ops that a segment needs: every rank computes host numbers itself."""
        needed: set[str] = set()
        todo = [key for item in items for key in item.inputs]
        while todo:
            maker = self.host_makers.get(todo.pop())
            if maker is not None and maker.name not in needed:
                needed.add(maker.name)
                todo.extend(maker.inputs)
        return [item for item in self.hosts if item.name in needed]

    def _place_host_states(self, actors: list[Actor], stage: int) -> list[Actor]:
        """Add one actor a rank for the new values of host states, such as clocks."""
        writes = tuple(
            (name, key) for name, key in self.lowered.new_states.items() if key in self.host_makers
        )
        if not writes:
            return actors
        ends = [self.host_makers[key] for _, key in writes]
        hosts = self._needed_hosts(ends)
        hosts = [item for item in self.hosts if item in hosts or item in ends]
        made = {key for item in hosts for key in item.outputs}
        reads = dict.fromkeys(k for item in hosts for k in item.inputs if k not in made)
        clock = Actor(
            name="host",
            kind=ActorKind.COMPUTE,
            stage=stage,
            phase=Phase.OPTIMIZER,
            rate=Rate.STEP,
            thread=COMPUTE_THREAD,
            reads=tuple(reads),
            instructions=tuple(map(self._host_instruction, hosts)),
            outputs=tuple(made),
            writes=writes,
            weight_s=ROUGH_LAUNCH_S,
        )
        return [*actors, clock]

    # Sizes and weights.

    def _bytes(self, rank: int | None, key: str) -> int:
        """Return the bytes of a key on one rank (on the first of its stage, if None)."""
        held = self.lowered.held.get(key)
        if held is None:
            return 8
        stage = self.strategy.stages[held.stage]
        kind = self.graph.tensor(held.value)
        at = stage.coordinate(stage.rank_list[0] if rank is None else rank)
        return _size(kind.dtype, local_shape(kind.shape, held.sbp, stage.mesh_shape, at))

    def _weight(self, item: Item) -> float:
        size = sum(self._bytes(None, k) for k in (*item.inputs, *item.outputs))
        if item.node is None:
            return ROUGH_LAUNCH_S
        flop = work_flop(OpCall.of(self.graph, item.node))
        share = self.strategy.stages[item.stage].size
        return ROUGH_LAUNCH_S + max(flop / share / ROUGH_FLOP_PER_S, size / ROUGH_BYTES_PER_S)

    def _slots(self, rank: int, stages: set[int]) -> Iterable[StateSlot]:
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

    # Registers and links.

    def _registers(self, rank: int, actors: Sequence[Actor]) -> Iterable[Register]:
        consumers: dict[str, list[Actor]] = defaultdict(list)
        for actor in actors:
            for key in actor.inputs:
                consumers[key].append(actor)
        for actor in actors:
            shared: dict[tuple[str, ...], list[str]] = defaultdict(list)
            for key in actor.outputs:
                if consumers[key]:
                    shared[tuple(user.name for user in consumers[key])].append(key)
            rate = Rate.STEP if actor.kind is ActorKind.ACCUMULATE else actor.rate
            for index, (names, keys) in enumerate(shared.items()):
                users = consumers[keys[0]]
                yield Register(
                    name=f"{actor.name}#{index}",
                    producer=actor.name,
                    consumers=names,
                    keys=tuple(keys),
                    rate=rate,
                    quota=self._quota(actor, users, rate),
                    size_bytes=sum(self._bytes(rank, key) for key in keys),
                )

    def _quota(self, producer: Actor, users: Sequence[Actor], rate: Rate) -> int:
        """Return how many fillings may be alive.

        What the backward phase needs of the forward phase lives for the micro-batches in flight,
        which is what tells GPipe from 1F1B; a register between threads is double-buffered.
        """
        if rate is Rate.STEP:
            return 1
        crosses = producer.phase is Phase.FORWARD and any(
            user.phase is not Phase.FORWARD for user in users
        )
        if crosses:
            return self.strategy.in_flight[producer.stage]
        between_threads = any(user.thread != producer.thread for user in users)
        return min(2, self.strategy.num_micro_batches) if between_threads else 1

    def links(self, ranks: Sequence[RankPlan]) -> tuple[Link, ...]:
        """Return the links between senders and receivers of all transfers."""
        found = []
        for part in ranks:
            for actor in part.actors:
                if actor.kind is not ActorKind.SEND:
                    continue
                step = self.steps[actor.step]
                receive = actor.name.replace("send ", "receive ", 1)
                for rank in step.target[0].rank_list:
                    found.append(
                        Link(
                            name=f"{actor.name} {part.rank}>{rank}",
                            sender=(part.rank, actor.name),
                            receiver=(rank, receive),
                            quota=self.strategy.in_flight[actor.stage],
                        )
                    )
        return tuple(found)


def _precedence(item: Item) -> tuple[int, int, bool]:
    """Return the place among actors that could fire: what a segment made leaves first."""
    inside = item.kind in (ItemKind.OP, ItemKind.LOCAL)
    return PHASE_ORDER[item.phase], item.level, not inside


def _with_keys(node: Node, keys: Sequence[str]) -> Node:
    """Return the node with its refs, in order, naming `keys`."""
    queue = iter(keys)

    def change(_: Ref) -> Argument:
        return Ref(next(queue))

    args = map_refs(node.args, change)
    return replace(
        node, args=args, kwargs={key: map_refs(part, change) for key, part in node.kwargs.items()}
    )


def _finish_outputs(actors: Sequence[Actor]) -> list[Actor]:
    """Keep among each actor's outputs only what another actor takes."""
    taken = {key for actor in actors for key in actor.inputs}
    return [
        replace(actor, outputs=tuple(key for key in actor.outputs if key in taken))
        for actor in actors
    ]


def _size(dtype: str, shape: Sequence[int]) -> int:
    size = ITEMSIZE[dtype]
    for extent in shape:
        size *= extent
    return size

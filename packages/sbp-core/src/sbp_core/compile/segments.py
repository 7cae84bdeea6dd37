"""Form the actors of each rank, its units of work, from the compiler's list of work items.

Operators of one (stage, phase, rate, level) become one compute segment; a communication (boxing)
step or an accumulation becomes an actor of its own. Names of actors are equal on all ranks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sbp_core.cluster import Cluster
from sbp_core.compile.actors import (
    Accumulate,
    Actor,
    BoxingActor,
    Collective,
    Compute,
    Receive,
    Send,
)
from sbp_core.compile.cuts import cut
from sbp_core.compile.instructions import Instructions, host_instruction
from sbp_core.compile.items import Item, ItemKind, LoweredItems
from sbp_core.compile.offload import FETCH_THREAD, STORE_THREAD, bound_copies, copy_name, offload
from sbp_core.compile.physical import PhysicalPlan, RankPlan, Register
from sbp_core.compile.program import LoweredProgram
from sbp_core.compile.registers import carried_readers, links, prefetch_registers, registers
from sbp_core.errors import SbpValueError
from sbp_core.graph.ir import PHASE_ORDER, LogicalGraph, Phase, Rate
from sbp_core.graph.serialize import graph_hash
from sbp_core.strategy import Strategy


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileOptions:
    """Settings of the compiler: buckets, overlap of boxing with compute, memory of states.

    Args:
        overlap: Begin collectives as soon as their input is made, and wait for them where their
            result is used; otherwise the boxing thread waits in each.
        boxing_thread: Give boxing a separate thread on every rank, so that it overlaps with
            compute; otherwise one thread a rank does both.
        bucket_bytes: Most bytes of a flat buffer in which small gradients, or parameters of a
            block, travel together; 0 for no buckets, None for the strategy's choice: a size, or
            the size that the price of the step on `cluster` suggests.
        cluster: The machine, which determines how long firings take; a nominal one without.
        piece_s: With either of the first two, least time of the pieces that a segment is cut into,
            so that boxing begins as soon as its input is made; in seconds, `inf` for no cuts.
        prefetch: With either of the first two, or in a pipeline, how many segments ahead of its
            user a parameter may be gathered; 0 gathers it when the segment before its user has
            ended.
        in_place_states: Let updates write over the states, in their memory, once the step is
            committed (`commit`). Otherwise new values are kept next to the old ones to the end of
            the step, which takes more time and memory, but a failing update keeps the old values.
        input_gradients_first: Compute the gradients that another stage waits for, and send them,
            before the gradients of weights. The other stage begins earlier, as in a pipeline of
            half the backward; the gradients of activations of one micro-batch are held until the
            weight gradients are made.
        offload_in_flight: Most groups of offloaded states that are on the device at a time (see
            `offload`); with 2, one group is copied while another one is updated.
    """

    overlap: bool = False
    boxing_thread: bool = False
    bucket_bytes: int | None = None
    cluster: Cluster | None = None
    piece_s: float = 2e-4
    prefetch: int = 1
    in_place_states: bool = True
    input_gradients_first: bool = True
    offload_in_flight: int = 2

    def __post_init__(self) -> None:
        if self.bucket_bytes is not None and self.bucket_bytes < 0:
            raise SbpValueError(f"bucket_bytes={self.bucket_bytes}", accepted="None, 0 or more")
        if self.piece_s < 0 or self.prefetch < 0:
            raise SbpValueError(
                f"piece_s={self.piece_s}, prefetch={self.prefetch}", accepted="0 or more"
            )
        if self.offload_in_flight < 1:
            raise SbpValueError(f"offload_in_flight={self.offload_in_flight}", accepted="1 or more")

    def most_bucket_bytes(self, strategy: Strategy) -> int | None:
        """Return the `bucket_bytes` with which a strategy is compiled."""
        return strategy.bucket_bytes if self.bucket_bytes is None else self.bucket_bytes

    @property
    def boxing_goes_on(self) -> bool:
        """Whether a rank computes while data moves."""
        return self.overlap or self.boxing_thread


COMPUTE_THREAD, BOXING_THREAD = "compute", "boxing"

#: The threads of copies between a device and its host.
_COPYING = {ItemKind.FETCH: FETCH_THREAD, ItemKind.STORE: STORE_THREAD}


def boxing_thread(options: CompileOptions) -> str:
    """Return the name of the thread of a rank that does the boxing."""
    return BOXING_THREAD if options.boxing_thread else COMPUTE_THREAD


def form_plan(
    graph: LogicalGraph, strategy: Strategy, lowered: LoweredItems, options: CompileOptions
) -> PhysicalPlan:
    """Return the plan of all ranks, with registers and quotas but without firing orders."""
    # On one thread that waits, an earlier begin overlaps nothing, but may free memory.
    lowered = cut(
        graph, strategy, lowered, options.piece_s, options.cluster, overlaps=options.boxing_goes_on
    )
    lowered = offload(LoweredProgram(graph, strategy, lowered, options.cluster))
    program = LoweredProgram(graph, strategy, lowered, options.cluster)
    thread = boxing_thread(options)
    ranks = tuple(_rank_plans(program, Instructions(program), thread, options))
    plan = PhysicalPlan(
        graph_hash=graph_hash(graph),
        planner=strategy.planner,
        num_micro_batches=strategy.num_micro_batches,
        num_updates=graph.num_updates,
        ties={entry.name: entry.stands_for for entry in graph.inputs if entry.stands_for},
        stages=strategy.stages,
        steps=program.steps,
        links=tuple(links(program, ranks)),
        ranks=ranks,
    )
    return bound_copies(plan, program.lowered.items, options.offload_in_flight)


def _rank_plans(
    program: LoweredProgram, instructions: Instructions, boxing_thread: str, options: CompileOptions
) -> Iterable[RankPlan]:
    """Yield the plan of each rank; ranks that do the same share actors and registers.

    A rank's actors follow from its stages, the ends of transfers that it has, and its programs,
    which depend on the sizes of its shards.
    """
    steps = [item.step for item in program.lowered.items if item.kind is ItemKind.TRANSFER]
    ends = [end for step in steps if step is not None for end in (step.source[0], step.target[0])]
    meshes = [set(mesh.rank_list) for mesh in dict.fromkeys(ends)]
    known: dict[object, tuple[tuple[Actor, ...], tuple[Register, ...]]] = {}
    # The first of the ranks that differ in programs only, such as in where their shards begin.
    similar: dict[object, tuple[_Actors, tuple[Actor, ...], tuple[Register, ...]]] = {}
    for rank in program.strategy.ranks:
        stages = frozenset(program.stages_of(rank))
        at = tuple(rank in mesh for mesh in meshes)
        what = stages, at, instructions.programs(rank, stages)
        if what not in known and (stages, at) not in similar:
            of_rank = _Actors(program, instructions, rank, boxing_thread, options.overlap)
            actors = of_rank.make()
            made = list(registers(program, actors))
            made += prefetch_registers(
                program, actors, options.prefetch, overlaps=options.boxing_goes_on
            )
            known[what] = tuple(actors), tuple(made)
            similar[stages, at] = of_rank, *known[what]
        if what not in known:
            of_rank, first, its_registers = similar[stages, at]
            known[what] = tuple(of_rank.of_another(rank, actor) for actor in first), its_registers
        yield RankPlan(
            rank=rank,
            slots=program.slots(rank),
            actors=known[what][0],
            registers=known[what][1],
            orders={},
        )


class _Actors:
    """The making of one rank's actors."""

    def __init__(
        self,
        program: LoweredProgram,
        instructions: Instructions,
        rank: int,
        boxing_thread: str,
        overlaps: bool,
    ) -> None:
        self.overlaps = overlaps
        self.program, self.rank, self.boxing_thread = program, rank, boxing_thread
        self.instructions = instructions
        self.stages = program.stages_of(rank)
        #: By name, and whether it is the receiving end of a transfer.
        self._groups: dict[tuple[str, bool], list[Item]] = defaultdict(list)

    def make(self) -> list[Actor]:
        """Return the actors, in their order of priority when several could fire."""
        # Items with the same name become one actor. Names are made from the item alone,
        # never of the rank, so that partners have one name on all ranks:
        #
        #     forward.0.2          a segment: phase, stage, level     backward.0.3.1   its piece 1
        #     backward.0.1.step    items after an accumulation        accumulate.backward.0.1
        #     send x@1(B)          the two ends of a transfer         receive x@1(B)
        for item in self.program.lowered.items:
            for group in self._groups_of(item):
                self._groups[group].append(item)
        ordered = sorted(self._groups.items(), key=lambda group: _precedence(group[1][0]))
        actors: list[Actor] = []
        for (name, receives), items in ordered:
            if items[0].leaves:
                actors.append(self._boxing_actor(name, items[0], receives=receives))
            elif items[0].kind is ItemKind.ACCUMULATE:
                actors.append(self._accumulation(name, items))
            else:
                actors.append(self._segment(name, items))
        actors += self._host_states()
        # Each actor's outputs are the keys that another actor takes, known when all actors are
        # made. Other keys, such as a loss or a new state, leave by `emits` and `writes`; in a
        # register they would only live longer. A new state that later micro-batches of the step
        # read is kept for them (`carries`).
        taken = {key for actor in actors for key in actor.inputs}
        finished: list[Actor] = []
        for actor in actors:
            carried = {k for s, k in actor.writes if carried_readers(self.program, s, actors)}
            outputs = tuple(key for key in actor.outputs if key in taken or key in carried)
            finished.append(actor if isinstance(actor, Send) else replace(actor, outputs=outputs))
        return finished

    def of_another(self, rank: int, actor: Actor) -> Actor:
        """Return the actor of another rank, which may have other programs."""
        if not isinstance(actor, Compute) or (actor.name, False) not in self._groups:
            return actor
        items = self._groups[actor.name, False]
        own = [self.instructions.of(self.rank, item) for item in items]
        others = [self.instructions.of(rank, item) for item in items]
        # Equal programs are one object.
        if all(one is other for one, other in zip(own, others, strict=True)):
            return actor
        num_hosts = len(actor.instructions) - sum(map(len, own))
        parts = (part for other in others for part in other)
        return replace(actor, instructions=(*actor.instructions[:num_hosts], *parts))

    def _groups_of(self, item: Item) -> Iterable[tuple[str, bool]]:
        """Yield the groups of this rank that an item belongs to: none, one, or send and receive."""
        if item.kind is ItemKind.TRANSFER:
            assert item.step is not None
            for receives, (mesh, _) in enumerate((item.step.source, item.step.target)):
                if self.rank in mesh:
                    yield f"{'receive' if receives else 'send'} {item.name}", bool(receives)
            return
        if item.stage not in self.stages or item.kind is ItemKind.HOST:
            return
        segment = f"{item.phase.value}.{item.stage}.{item.level}"
        if item.rate is not Rate.MICRO and item.phase is not Phase.OPTIMIZER:
            # Boxed after an accumulation: no part of the segment that feeds it.
            segment += f".{item.rate.value}"
        segment += f".{item.piece}" if item.piece else ""
        segment += f".offload.{item.group}" if item.group else ""
        if item.is_inside:
            yield segment, False
        elif item.kind is ItemKind.ACCUMULATE:
            # A loss must not wait for gradients of its level, nor for the end of the step.
            until = self.program.graph.rate_of(item.outputs[0])
            late = f".{until.value}" if until is not Rate.STEP else ""
            yield f"accumulate.{segment}{late}", False
        else:
            yield copy_name(item) if item.kind in _COPYING else item.name, False

    def _boxing_actor(self, name: str, item: Item, *, receives: bool) -> BoxingActor:
        program, step = self.program, item.step
        assert step is not None
        # A receiver that is also a source has its own shard, which it takes like a sender.
        keys = item.inputs if not receives or self.rank in step.source[0] else ()
        sends = item.kind is ItemKind.TRANSFER and not receives
        fields: dict[str, Any] = {
            "name": name,
            "stage": item.target_stage if receives else item.stage,
            "phase": item.phase,
            "rate": item.rate,
            "thread": self.boxing_thread,
            "inputs": tuple(key for key in keys if key not in program.inputs),
            "reads": tuple(key for key in keys if key in program.inputs),
            # A sender puts the message out and continues.
            "time_s": 0.0 if sends else program.time_s(item),
            "step": program.step_index[item.name],
        }
        if sends:
            return Send(**fields)
        fields |= {"makes": item.outputs[0], "outputs": item.outputs, **self._leaving(item.outputs)}
        if receives:
            return Receive(**fields)
        if self.overlaps:
            fields |= {"begin_s": program.begin_s(item), "drag_s": program.drag_s(item)}
        return Collective(**fields)

    def _accumulation(self, name: str, items: Sequence[Item]) -> Accumulate:
        sums = []
        for item in items:
            assert item.node is not None
            sums.append((item.inputs[0], item.outputs[0], item.node.args[1]))
        outputs = tuple(total for _, total, _ in sums)
        parts = dict.fromkeys(part for part, _, _ in sums)
        return Accumulate(
            name=name,
            stage=items[0].stage,
            phase=items[0].phase,
            rate=items[0].rate,
            fills=self.program.graph.rate_of(outputs[0]),
            thread=COMPUTE_THREAD,
            inputs=tuple(part for part in parts if part not in self.program.inputs),
            reads=tuple(part for part in parts if part in self.program.inputs),
            outputs=outputs,
            accumulates=tuple(sums),
            time_s=sum(map(self.program.time_s, items)),
            **self._leaving(outputs),
        )

    def _segment(self, name: str, items: Sequence[Item]) -> Compute:
        program, first = self.program, items[0]
        # Host numbers do not travel in registers: each segment computes the ones it needs again,
        # from scalars and step counters, which every rank has.
        hosts = program.needed_hosts(key for item in items for key in item.inputs)
        made = {key for item in (*hosts, *items) for key in item.outputs}
        used = dict.fromkeys(key for item in (*hosts, *items) for key in item.inputs)
        outputs = tuple(key for item in items for key in item.outputs)
        thread = _COPYING.get(first.kind, COMPUTE_THREAD)
        return Compute(
            name=name,
            stage=first.stage,
            phase=first.phase,
            rate=first.rate,
            thread=self.boxing_thread if first.is_apart else thread,
            inputs=tuple(k for k in used if k not in made and k not in program.inputs),
            reads=tuple(k for k in used if k in program.inputs),
            outputs=outputs,
            instructions=(
                *map(host_instruction, hosts),
                *(part for item in items for part in self.instructions.of(self.rank, item)),
            ),
            time_s=sum(map(program.time_s, items)),
            **self._leaving(outputs),
        )

    def _host_states(self) -> Iterable[Compute]:
        """Yield the actor, if any, for the new values of host states, such as step counters."""
        program = self.program
        new_states = program.lowered.new_states
        writes = tuple((n, key) for n, key in new_states.items() if key in program.host_makers)
        if not writes:
            return
        hosts = program.needed_hosts(key for _, key in writes)
        made = {key for item in hosts for key in item.outputs}
        used = dict.fromkeys(key for item in hosts for key in item.inputs)
        yield Compute(
            name="host",
            stage=min(self.stages),
            phase=Phase.OPTIMIZER,
            rate=min((item.rate for item in hosts), key=tuple(Rate).index),
            thread=COMPUTE_THREAD,
            reads=tuple(key for key in used if key not in made),
            outputs=tuple(key for _, key in writes),
            instructions=tuple(map(host_instruction, hosts)),
            writes=writes,
        )

    def _leaving(self, keys: Sequence[str]) -> dict[str, Any]:
        """Return which results and new states are among the keys: `emits` and `writes`."""
        made, lowered = set(keys), self.program.lowered
        emits: list[tuple[str, str]] = []
        for name, places in lowered.results.items():
            for at, key in enumerate(places):
                # A rank returns each result once. A loss that is made on rank 3 goes to a stage on
                # ranks 0 to 3 for the sake of ranks 0 to 2.
                has_it = any(lowered.held[k].stage in self.stages for k in places[:at])
                if key in made and not has_it:
                    emits.append((name, key))
        return {"emits": tuple(emits), "writes": self.program.written(made)}


def _precedence(item: Item) -> tuple[int, int, int, bool]:
    """Return the priority among actors that could fire: results of a segment are sent first."""
    level, piece = item.behind or (item.level, item.piece)
    return PHASE_ORDER[item.phase], level, piece, not item.is_inside

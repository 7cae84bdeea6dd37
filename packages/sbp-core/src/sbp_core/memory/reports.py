"""Reports of the memory of a plan: each rank's peak, the values alive at the peak, and tables.

A table by `MemoryReport.lines`:

    rank  peak      parameters  states    activations  temporaries  at
    0     12.6 MB   4.2 MB      4.2 MB    3.1 MB       1.1 MB       backward.0.0, h.1.mlp.mm_3
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sbp_core.errors import MemoryLimitError, PlanError
from sbp_core.memory.ledger import Buffer
from sbp_core.memory.lifetime import alive_bytes
from sbp_core.memory.memory_kinds import MemoryKind
from sbp_core.memory.storages import RankLifetimes
from sbp_core.units import format_bytes

_TOP_MODULES = 5

#: Kinds below this share of a peak are summed up.
_LEAST_SHARE = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlyReceive:
    """The buffer of a receive that is started ahead, until it is received.

    Args:
        firings: The firings of its thread in that time: actor, index.
        size_bytes: The size of the buffer.
    """

    firings: tuple[tuple[str, int], ...]
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """The memory of one rank over a step.

    Args:
        rank: The rank.
        peak: Most bytes alive at once in device memory, states and batch included.
        resting: Bytes alive in device memory between steps: the states.
        host_peak: Most bytes alive at once in host memory: states that are offloaded.
        kinds: At the peak, bytes of each kind that is alive.
        modules: At the peak, bytes by path of the module.
        actor, firing, node: The position of the peak.
    """

    rank: int
    peak: int
    resting: int
    kinds: Mapping[MemoryKind, int]
    modules: Mapping[str, int]
    actor: str
    firing: int
    node: str
    host_peak: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReport:
    """The memory of every rank of a plan."""

    ranks: Mapping[int, RankMemory]

    @property
    def peak(self) -> int:
        """Peak of the rank that needs most, in bytes."""
        return max(rank.peak for rank in self.ranks.values())

    @property
    def host_peak(self) -> int:
        """Host memory of the rank that needs most of it, in bytes; 0 if nothing is offloaded."""
        return max(rank.host_peak for rank in self.ranks.values())

    def lines(self) -> list[str]:
        """Return a table of kinds at each rank's peak, and the modules that hold most there."""
        kinds = [kind for kind in MemoryKind if any(kind in r.kinds for r in self.ranks.values())]
        on_host = ["on host"] * (self.host_peak > 0)
        rows = [["rank", "peak", *on_host, *(kind.value for kind in kinds), "at"]]
        for rank in self.ranks.values():
            sizes = (format_bytes(rank.kinds.get(kind, 0)) for kind in kinds)
            place = f"{rank.actor}, {rank.node}" if rank.node != rank.actor else rank.actor
            held = [format_bytes(rank.host_peak) for _ in on_host]
            rows.append([str(rank.rank), format_bytes(rank.peak), *held, *sizes, place])
        worst = max(self.ranks.values(), key=lambda rank: rank.peak)
        top = sorted(worst.modules.items(), key=lambda entry: (-entry[1], entry[0]))
        modules = [f"{name or '(root)'} {format_bytes(size)}" for name, size in top[:_TOP_MODULES]]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        table = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
        return [
            "memory at each rank's peak:",
            *(f"  {line}" for line in table),
            f"  most on rank {worst.rank}: {', '.join(modules)}",
        ]

    def to_json(self) -> dict[str, Any]:
        """Return a JSON value: per rank the peak, kinds, modules and where it is, in bytes."""
        return {
            str(name): {
                "peak_bytes": rank.peak,
                "resting_bytes": rank.resting,
                "host_peak_bytes": rank.host_peak,
                "kinds": {kind.value: size for kind, size in rank.kinds.items()},
                "modules": dict(rank.modules),
                "actor": rank.actor,
                "firing": rank.firing,
                "node": rank.node,
            }
            for name, rank in self.ranks.items()
        }


def check_memory(
    found: MemoryReport, limit_bytes: int, host_limit_bytes: int | None = None
) -> None:
    """Check that every rank fits its device memory, and its share of its host's memory.

    Args:
        found: The memory of the ranks of a plan.
        limit_bytes: The memory of each rank's device.
        host_limit_bytes: A rank's share of host memory; None if the device has none to offload to.

    Raises:
        MemoryLimitError: a rank needs more memory than its device has.
        PlanError: a rank needs more host memory than its share, or any on a host that has none.
    """
    rank = max(found.ranks.values(), key=lambda rank: rank.host_peak)
    needs = f"rank {rank.rank} would need {format_bytes(rank.host_peak)} of its host's memory"
    if rank.host_peak > 0 and host_limit_bytes is None:
        raise PlanError(
            f"{needs} for offloaded states, and its device has no host memory",
            accepted="a cluster whose devices have host_memory_bytes and host_link",
            todo="keep the states on the device (planner.offload=[]; 'host' in strategies), or "
            "give these two in the cluster file",
        )
    if host_limit_bytes is not None and rank.host_peak > host_limit_bytes:
        raise PlanError(
            f"{needs}, and has {format_bytes(host_limit_bytes)} of it",
            accepted=f"host_memory_bytes >= {rank.host_peak} of the device",
            todo="offload fewer states, or shard them",
        )
    rank = max(found.ranks.values(), key=lambda rank: (rank.peak, rank.resting))
    if rank.peak > limit_bytes:
        raise MemoryLimitError(
            f"rank {rank.rank} would need {format_bytes(rank.peak)}, "
            f"{format_bytes(rank.resting)} of it for states, and has {format_bytes(limit_bytes)}"
            + " on its device"
            * (found.host_peak > 0),
            where=peak_text(rank),
            accepted=f"cluster.memory_bytes >= {rank.peak}, or plans that need less",
            todo="choose a planner that looks at memory (planner=ilp or auto), shard states "
            "(planner=osdp or manual/zero), set trainer.micro_batches, recompute "
            "(compile.passes.recompute), or take more ranks",
        )


def peak_text(rank: RankMemory) -> str:
    """Return the position of a rank's peak, and the kinds alive there, the largest first.

    Kinds with a small share of the peak are summed up, as `other`.
    """
    kinds = sorted(rank.kinds.items(), key=lambda entry: -entry[1])
    parts = [(kind.value, size) for kind, size in kinds if size >= _LEAST_SHARE * rank.peak]
    if rest := rank.peak - sum(size for _, size in parts):
        parts.append(("other", rest))
    held = ", ".join(f"{format_bytes(size)} {name}" for name, size in parts)
    if not rank.actor:
        return f"rank {rank.rank} at its peak, before the step begins: {held}"
    node = f", at {rank.node}" if rank.node not in ("", rank.actor) else ""
    return f"rank {rank.rank} at its peak, in firing {rank.firing} of {rank.actor}{node}: {held}"


def report(
    found: Mapping[int, RankLifetimes],
    buffers: Mapping[int, Mapping[str, int]] | None = None,
    early: Mapping[int, Sequence[EarlyReceive]] | None = None,
) -> MemoryReport:
    """Return the peaks of all ranks.

    Args:
        found: Lifetimes by rank.
        buffers: By rank and boxing actor, the bytes of a transport's buffers while it fires.
        early: By rank, the receives that are started before their firings.
    """
    buffers, early = buffers or {}, early or {}
    ranks: dict[int, RankMemory] = {}
    known: dict[Hashable, RankMemory] = {}  # by the lifetimes, which ranks of a class share
    for name, rank in found.items():
        beside = frozenset(buffers.get(name, {}).items()), tuple(early.get(name, ()))
        what = id(rank.buffers), id(rank.host_buffers), id(rank.ticks), beside
        if what not in known:
            known[what] = rank_memory(rank, buffers.get(name), early.get(name, ()))
        ranks[name] = replace(known[what], rank=name)
    return MemoryReport(ranks=ranks)


def rank_memory(
    lifetimes: RankLifetimes,
    buffers: Mapping[str, int] | None = None,
    early: Sequence[EarlyReceive] = (),
) -> RankMemory:
    """Return the peak of one rank.

    Args:
        lifetimes: The storages of the rank.
        buffers: By boxing actor, the bytes of its transport's buffers.
        early: The receives that are started before their firings.
    """
    if buffers or early:
        lifetimes = _with_buffers(lifetimes, buffers or {}, early)
    alive = alive_bytes(lifetimes.buffers, len(lifetimes.ticks))
    tick = max(range(len(alive)), key=alive.__getitem__)
    kinds: Counter[MemoryKind] = Counter()
    modules: Counter[str] = Counter()
    for buffer in lifetimes.buffers:
        if buffer.start <= tick <= buffer.end:
            kinds[buffer.kind] += buffer.size_bytes
            modules[buffer.module] += buffer.size_bytes
    actor, firing, node = lifetimes.ticks[tick]
    rests = (MemoryKind.PARAMETERS, MemoryKind.STATES, MemoryKind.BUFFERS)
    return RankMemory(
        rank=lifetimes.rank,
        peak=alive[tick],
        resting=sum(b.size_bytes for b in lifetimes.buffers if not b.start and b.kind in rests),
        kinds={kind: kinds[kind] for kind in MemoryKind if kinds[kind]},
        modules={name: size for name, size in modules.items() if size},
        actor=actor,
        firing=firing,
        node=node,
        host_peak=max(alive_bytes(lifetimes.host_buffers, len(alive))),
    )


def _with_buffers(
    lifetimes: RankLifetimes, sizes: Mapping[str, int], early: Sequence[EarlyReceive]
) -> RankLifetimes:
    """Add a buffer for each firing of a boxing actor, and for each receive started ahead."""
    added = [
        Buffer(f"buffers of {actor}", "", size, tick, MemoryKind.COMMUNICATION, tick)
        for tick, (actor, _, _) in enumerate(lifetimes.ticks)
        if (size := sizes.get(actor, 0))
    ]
    ticks: dict[tuple[str, int], list[int]] = {}
    for tick, (actor, index, _) in enumerate(lifetimes.ticks):
        ticks.setdefault((actor, index), []).append(tick)
    for one in early:
        # A firing with only host numbers takes no time.
        held = [tick for firing in one.firings for tick in ticks.get(firing, ())]
        if held:
            name = "buffers of early receives"
            start, end = min(held), max(held)
            added.append(Buffer(name, "", one.size_bytes, start, MemoryKind.COMMUNICATION, end))
    return replace(lifetimes, buffers=(*lifetimes.buffers, *added))


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryProfile:
    """The memory of one rank over a step: bytes of each kind that are alive at each moment.

        ticks         0   1   2   3   4
        parameters    4   4   4   4   4
        activations   0   2   5   2   0
        temporaries   0   3   0   1   0

    Ticks are those of `lifetime`: one for each instruction or boxing step of the rank.

    Args:
        rank: The rank.
        ticks: For each tick, the actor, the index of its firing, and the node it is in; empty for
            the first tick, before anything fires.
        kinds: For each kind that the rank ever holds, its bytes at each tick.
    """

    rank: int
    ticks: Sequence[tuple[str, int, str]]
    kinds: Mapping[MemoryKind, Sequence[int]]

    @property
    def total(self) -> list[int]:
        """Bytes alive at each tick."""
        return [sum(sizes) for sizes in zip(*self.kinds.values(), strict=True)]


def memory_profile(lifetimes: RankLifetimes) -> MemoryProfile:
    """Return the bytes that a rank holds at each tick, by kind.

    Args:
        lifetimes: The storages of the rank.
    """
    buffers: dict[MemoryKind, list[Buffer]] = defaultdict(list)
    for buffer in lifetimes.buffers:
        buffers[buffer.kind].append(buffer)
    return MemoryProfile(
        rank=lifetimes.rank,
        ticks=lifetimes.ticks,
        kinds={
            kind: alive_bytes(buffers[kind], len(lifetimes.ticks))
            for kind in MemoryKind
            if kind in buffers
        },
    )

"""The named pipeline schedules (1F1B, zero bubble, DualPipeV, ...): the order of each rank.

Most policies warm up, then do a forward and a backward in turn, then drain. They are rows of a
table: the number of forwards that a rank does ahead (`warm_up`), and the number of weight gradients
that it holds back (`held`). For p ranks, v chunks a rank, m micro-batches, g a round, on rank r:

    policy        warm_up                  held   alive on rank r, in parts of a rank
    gpipe         m                        -      m
    1f1b          p-1-r                    -      p-r
    interleaved   (v-1)g + 2(p-1-r)        -      p + (p-1)/v on rank 0, if g = p
    zero_bubble   (v-1)g + (p-1-r)         r      p, if v = 1
    zb_h1         p-1-r                    r      p
    zb_h2         2(p-1-r)                 2r     2p-1

F is a forward, B a backward; a split backward is I (input gradient) and W (weight gradient). In the
alternation each F precedes its B, so `warm_up` + 1 micro-batches are alive. Micro-batches with held
weight gradients stay alive: in ZB-H1 all ranks keep as many as the first, in ZB-H2 twice as many.

Source: GPipe (arXiv 1811.06965); PipeDream (SOSP 2019) §3.2; Megatron-LM (arXiv 2104.04473) §2.2;
Zero Bubble (arXiv 2401.10241) §2-3; torch.distributed.pipelining/schedules.py, v2.13.

Two policies have two chunks a rank in the shape of a V: rank r holds the stages r and 2p-1-r. So
the first rank has both the first and the last stage, the second half of the forward passes the
ranks in reverse, and the last rank's second chunk follows its first without a transfer:

    stage   0   1   2   3   4   5   6   7      (p = 4)
    rank    0   1   2   3   3   2   1   0

Their code calls the chunk with stage r `down`, and the chunk with stage 2p-1-r `up`.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from types import MappingProxyType

from sbp_core.errors import ConfigError
from sbp_core.pipeline.schedule import Action, ActionKind, PipelineSchedule


def _alternation(
    warm_up: Callable[[int, int, int, int], int],
    held: Callable[[int], int] | None = None,
    *,
    rounds: bool = False,
) -> Callable[[int, int, int, int], Iterator[Action]]:
    """Return the order of a policy: some forwards, then F and B in turn, then the rest.

    With `held`, a backward is an I, and each of them except the first `held` is followed by the W
    that has waited longest; at last come the remaining Ws.

    Args:
        warm_up: From ranks p, rank r, g and micro-batches of all chunks but one to forwards ahead.
        held: From rank r to weight gradients that it holds back.
        rounds: Whether micro-batches pass depth first, g of them through one chunk of all ranks,
            then through the next one; else g is m.
    """

    def order(p: int, m: int, v: int, r: int) -> Iterator[Action]:
        g = m // max(1, m // p) if rounds else m
        forwards, backwards = (
            [
                (chunk * p + r, k)
                for first in range(0, m, g)
                for chunk in chunks
                for k in range(first, first + g)
            ]
            for chunks in (range(v), range(v - 1, -1, -1))
        )
        ahead = warm_up(p, r, g, (v - 1) * g)
        waits = len(backwards) if held is None else held(r)
        whole = ActionKind.BACKWARD if held is None else ActionKind.INPUT_GRADIENT
        in_turn = iter(forwards[ahead:])
        for stage, k in forwards[:ahead]:
            yield Action(stage, ActionKind.FORWARD, k)
        for number, (stage, k) in enumerate(backwards):
            for forward, other in islice(in_turn, 1):
                yield Action(forward, ActionKind.FORWARD, other)
            yield Action(stage, whole, k)
            if number >= waits:
                waited, other = backwards[number - waits]
                yield Action(waited, ActionKind.WEIGHT_GRADIENT, other)
        if held is not None:
            for stage, k in backwards[max(0, len(backwards) - waits) :]:
                yield Action(stage, ActionKind.WEIGHT_GRADIENT, k)

    return order


#: As many forwards ahead as there are later ranks; then a backward for each forward.
_ONE_FORWARD_ONE_BACKWARD = _alternation(lambda p, r, g, others: p - 1 - r)


def _looped_bfs(p: int, m: int, v: int, r: int) -> Iterator[Action]:
    """Yield a breadth-first order: all micro-batches through one chunk, then the next.

    Backward is in reverse.

    Source: Breadth-First Pipeline Parallelism (arXiv 2211.05953).
    """
    forwards = [(chunk * p + r, k) for chunk in range(v) for k in range(m)]
    for stage, k in forwards:
        yield Action(stage, ActionKind.FORWARD, k)
    for stage, k in reversed(forwards):
        yield Action(stage, ActionKind.BACKWARD, k)


class _Chunk:
    """A chunk that counts, so that its n-th F, I (or B) or W belongs to micro-batch n."""

    def __init__(self, stage: int) -> None:
        self.stage = stage
        self.done: Counter[ActionKind] = Counter()

    def __call__(self, letters: str) -> Iterator[Action]:
        for letter in letters:
            kind = ActionKind(letter)
            counted = ActionKind.INPUT_GRADIENT if kind is ActionKind.BACKWARD else kind
            yield Action(self.stage, kind, self.done[counted])
            self.done[counted] += 1


def _zbv(p: int, m: int, v: int, r: int) -> Iterator[Action]:
    """Yield ZB-V: like ZB-H2, with the memory of 1F1B; idle only at the ends, if F = I = W.

    A pipeline of fewer than 2p-1 micro-batches uses the order of 2p-1, without the missing ones.

    Source: Zero Bubble (arXiv 2401.10241) §6; torch's `ScheduleZBVZeroBubble`.
    """
    return (action for action in _filled_zbv(p, max(m, 2 * p - 1), r) if action.micro_batch < m)


def _filled_zbv(p: int, m: int, r: int) -> Iterator[Action]:
    down, up = _Chunk(r), _Chunk(2 * p - 1 - r)
    yield from down("F" * (2 * (p - r) - 1))
    for _ in range(r):
        yield from up("F")
        yield from down("F")
    for _ in range(p - r):
        yield from up("FIW")
    # The stable phase: each rank does all of its work on one micro-batch of each chunk.
    while up.done[ActionKind.FORWARD] < m:
        if down.done[ActionKind.FORWARD] < m:
            yield from down("F")
        yield from down("IW")
        yield from up("FIW")
    for _ in range(r):
        yield from down("I")
        yield from up("I")
    yield from down("IW" * (p - r))
    yield from up("W" * r)
    yield from down("W" * r)


def _dualpipev(p: int, m: int, v: int, r: int) -> Iterator[Action]:
    """Yield DualPipe cut in half: a forward of one chunk together with a backward of the other.

    The F is directly before the B here; `Policy.overlapped` returns which of them run at once, so
    that one computes while the other communicates.

    Source: DeepSeek-V3 (arXiv 2412.19437) §3.2; github.com/deepseek-ai/DualPipe, dualpipev.py;
    torch's `ScheduleDualPipeV`.
    """
    down, up = _Chunk(r), _Chunk(2 * p - 1 - r)
    after = p - 1 - r
    waiting: deque[Action] = deque()
    yield from down("F" * (2 * after))
    for _ in range(r + 1):
        yield from down("F")
        yield from up("F")
    for _ in range(after):
        yield from up("IWF")
    for _ in range(m - 2 * p + r + 1):
        yield from down("F")
        yield from up("BF")
        yield from down("B")
    for _ in range(after):
        yield from up("BF")
        yield from down("B")
    # In the last alternating backwards, the second half is split, to fill the drain with W.
    for number in range(2 * (r + 1)):
        backward = list((down if number % 2 else up)("I" if number > r else "B"))
        waiting += backward if number > r else ()
        yield from backward
    for _ in range(after):
        yield waiting.popleft().halves[1]
        waiting += (backward := list(down("I")))
        yield from backward
    yield from (backward.halves[1] for backward in waiting)


def _overlapped(p: int, orders: Iterable[Sequence[Action]]) -> frozenset[Action]:
    """Return the forwards of DualPipeV that run at once with the backward after them.

    The very first backward, on the last rank, runs alone: others wait for it.
    """
    first = Action(p, ActionKind.BACKWARD, 0)
    return frozenset(
        forward
        for order in orders
        for forward, backward in pairwise(order)
        if forward.kind is ActionKind.FORWARD
        and backward.kind is ActionKind.BACKWARD
        and backward != first
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """A rule for the order of each rank.

    Args:
        order: From ranks p, micro-batches m, chunks v and rank r to the actions of the rank.
        fewest_chunks: The fewest chunks a rank.
        most_chunks: The most chunks a rank; `None` if there is no limit.
        usual_chunks: The default number of chunks a rank.
        v_shaped: Whether rank r holds the stages r and 2p-1-r, instead of r, p+r, 2p+r, ...
        even_rounds: Whether m has to be a multiple of the number of rounds, max(1, m // p).
        micro_batches_per_rank: The fewest micro-batches, for each rank of the pipeline.
        overlapped: From p and all orders to the forwards that run at once with the next backward.
        flushes: Whether a step ends on all ranks before the next begins.
        update_each_micro_batch: Whether each micro-batch is an update of its own.
    """

    order: Callable[[int, int, int, int], Iterator[Action]]
    fewest_chunks: int = 1
    most_chunks: int | None = 1
    usual_chunks: int = 1
    v_shaped: bool = False
    even_rounds: bool = False
    micro_batches_per_rank: int = 0
    overlapped: Callable[[int, Iterable[Sequence[Action]]], frozenset[Action]] | None = None
    flushes: bool = True
    update_each_micro_batch: bool = False


#: Policies by name.
POLICIES: Mapping[str, Policy] = MappingProxyType(
    {
        # All forwards, then all backwards, the first micro-batch first.
        "gpipe": Policy(order=_alternation(lambda p, r, g, others: g)),
        # A backward as soon as possible: fewer activations.
        "1f1b": Policy(order=_ONE_FORWARD_ONE_BACKWARD),
        # 1F1B over several chunks a rank, depth first.
        "interleaved": Policy(
            order=_alternation(lambda p, r, g, others: others + 2 * (p - 1 - r), rounds=True),
            most_chunks=None,
            usual_chunks=2,
            even_rounds=True,
        ),
        # GPipe over several chunks a rank, breadth first.
        "looped_bfs": Policy(order=_looped_bfs, most_chunks=None, usual_chunks=2),
        # ZB1P: weight gradients wait, so that ranks have work while they wait for others.
        "zero_bubble": Policy(
            order=_alternation(
                lambda p, r, g, others: others + p - 1 - r, lambda r: r, rounds=True
            ),
            most_chunks=None,
            even_rounds=True,
        ),
        # Zero bubble with the warm-up of 1F1B, and as many activations on all ranks as 1F1B has on
        # the first rank.
        "zb_h1": Policy(order=_alternation(lambda p, r, g, others: p - 1 - r, lambda r: r)),
        # Twice the forwards ahead, and twice the weight gradients held back.
        "zb_h2": Policy(
            order=_alternation(lambda p, r, g, others: 2 * (p - 1 - r), lambda r: 2 * r)
        ),
        # Zero bubble over two chunks a rank, in the shape of a V.
        "zbv": Policy(order=_zbv, fewest_chunks=2, most_chunks=2, usual_chunks=2, v_shaped=True),
        # A forward of one chunk together with a backward of the other, in a V.
        "dualpipev": Policy(
            order=_dualpipev,
            fewest_chunks=2,
            most_chunks=2,
            usual_chunks=2,
            v_shaped=True,
            micro_batches_per_rank=2,
            overlapped=_overlapped,
        ),
        # 1F1B that never drains: each micro-batch is an update.
        "pipedream": Policy(
            order=_ONE_FORWARD_ONE_BACKWARD, flushes=False, update_each_micro_batch=True
        ),
        # 1F1B that never drains: an update a step, one step late.
        "2bw": Policy(order=_ONE_FORWARD_ONE_BACKWARD, flushes=False, micro_batches_per_rank=1),
    }
)


def named_schedule(
    name: str, num_ranks: int, num_micro_batches: int, num_chunks: int | None
) -> PipelineSchedule:
    """Return the schedule of a policy; see `pipeline_schedule`."""
    policy = POLICIES[name]
    p, m, v = num_ranks, num_micro_batches, num_chunks or policy.usual_chunks
    _check(name, policy, p, m, v)
    orders = tuple(tuple(policy.order(p, m, v, r)) for r in range(p))
    return PipelineSchedule(
        name=name,
        num_micro_batches=m,
        placement=v_placement(p) if policy.v_shaped else loop_placement(p, v),
        orders=orders,
        overlapped=policy.overlapped(p, orders) if policy.overlapped else frozenset(),
        flushes=policy.flushes,
        micro_batches_per_update=1 if policy.update_each_micro_batch else m,
    )


def loop_placement(p: int, v: int) -> tuple[tuple[int, ...], ...]:
    """Return the stages of each rank if the forward passes all ranks v times."""
    return tuple(tuple(range(r, p * v, p)) for r in range(p))


def v_placement(p: int) -> tuple[tuple[int, ...], ...]:
    """Return the stages of each rank if the forward goes to the last rank and back."""
    return tuple((r, 2 * p - 1 - r) for r in range(p))


def _check(name: str, policy: Policy, p: int, m: int, v: int) -> None:
    where = f"a pipeline of {p} ranks, {v} chunks a rank, {m} micro-batches"
    if v < policy.fewest_chunks or (policy.most_chunks is not None and v > policy.most_chunks):
        looped = [other for other, one in POLICIES.items() if one.most_chunks is None]
        raise ConfigError(
            f"the schedule {name!r} is not defined for {v} chunks a rank",
            where=where,
            accepted=f"{policy.usual_chunks} of them",
            todo="leave the number of chunks out, or take a schedule for any number: "
            + ", ".join(looped),
        )
    rounds = max(1, m // p)
    if policy.even_rounds and m % rounds:
        even = [one for one in range(1, 2 * m + p) if not one % max(1, one // p)]
        lower, upper = max(n for n in even if n < m), min(n for n in even if n > m)
        raise ConfigError(
            f"the schedule {name!r} takes its micro-batches in rounds of equal size, and {m} are "
            f"not a multiple of {rounds} rounds",
            where=where,
            accepted=f"numbers m of micro-batches that max(1, m // {p}) divides; the nearest are "
            f"{lower} and {upper}",
            todo=f"take a multiple of {p} micro-batches",
        )
    if m < policy.micro_batches_per_rank * p:
        raise ConfigError(
            f"the schedule {name!r} is not defined for {m} micro-batches on {p} ranks",
            where=where,
            accepted=f"at least {policy.micro_batches_per_rank * p} micro-batches",
            todo="take more micro-batches, or '1f1b', which is defined for any number",
        )

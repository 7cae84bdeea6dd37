"""The schedules by their names, and what each of them asks of a pipeline.

Stability: internal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from sbp_core.errors import ConfigError
from sbp_core.pipeline import alternation, v_shape
from sbp_core.pipeline.action import Action
from sbp_core.pipeline.schedule import PipelineSchedule


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """A rule for the order of each rank.

    Args:
        summary: What it does, in one line.
        order: From ranks p, micro-batches m, chunks v and rank r to the actions of the rank.
        fewest_chunks: The fewest chunks a rank.
        most_chunks: The most chunks a rank; `None` if there is no limit.
        usual_chunks: Chunks a rank where nobody says how many.
        v_shaped: Whether rank r holds the stages r and 2p-1-r, instead of r, p+r, 2p+r, ...
        even_rounds: Whether m has to be a multiple of the number of rounds, max(1, m // p).
        micro_batches_per_rank: So many micro-batches for each rank are the fewest.
        overlapped: From p and all orders to the forwards that run at once with the backward behind.
        flushes: Whether a step ends on all ranks before the next begins.
        update_each_micro_batch: Whether each micro-batch is an update of its own.
    """

    summary: str
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


POLICIES: Mapping[str, Policy] = MappingProxyType(
    {
        "gpipe": Policy(
            summary="all forwards, then all backwards",
            order=alternation.gpipe,
        ),
        "1f1b": Policy(
            summary="a backward as soon as there is one: fewer activations",
            order=alternation.one_forward_one_backward,
        ),
        "interleaved": Policy(
            summary="1F1B over several chunks a rank, depth first",
            order=alternation.interleaved,
            most_chunks=None,
            usual_chunks=2,
            even_rounds=True,
        ),
        "looped_bfs": Policy(
            summary="GPipe over several chunks a rank, breadth first",
            order=alternation.looped_bfs,
            most_chunks=None,
            usual_chunks=2,
        ),
        "zero_bubble": Policy(
            summary="ZB1P: weight gradients fill gaps; also over several chunks",
            order=alternation.zero_bubble,
            most_chunks=None,
            even_rounds=True,
        ),
        "zb_h1": Policy(
            summary="zero bubble with the memory of 1F1B",
            order=alternation.zb_h1,
        ),
        "zb_h2": Policy(
            summary="zero bubble with twice that memory",
            order=alternation.zb_h2,
        ),
        "zbv": Policy(
            summary="zero bubble over two chunks a rank, in the shape of a V",
            order=v_shape.zbv,
            fewest_chunks=2,
            most_chunks=2,
            usual_chunks=2,
            v_shaped=True,
        ),
        "dualpipev": Policy(
            summary="a forward of one chunk beside a backward of the other, in a V",
            order=v_shape.dualpipev,
            fewest_chunks=2,
            most_chunks=2,
            usual_chunks=2,
            v_shaped=True,
            micro_batches_per_rank=2,
            overlapped=v_shape.overlapped,
        ),
        "pipedream": Policy(
            summary="1F1B that never drains: each micro-batch is an update",
            order=alternation.one_forward_one_backward,
            flushes=False,
            update_each_micro_batch=True,
        ),
        "2bw": Policy(
            summary="1F1B that never drains: an update a step, one step late",
            order=alternation.one_forward_one_backward,
            flushes=False,
            micro_batches_per_rank=1,
        ),
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
    """Return the stages of each rank where the forward passes all ranks v times."""
    return tuple(tuple(range(r, p * v, p)) for r in range(p))


def v_placement(p: int) -> tuple[tuple[int, ...], ...]:
    """Return the stages of each rank where the forward goes to the last rank and back."""
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
        lower, upper = (_even_neighbour(p, m, step) for step in (-1, 1))
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


def _even_neighbour(p: int, m: int, step: int) -> int:
    while m % max(1, m // p):
        m += step
    return m

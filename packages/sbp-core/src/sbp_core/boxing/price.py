"""Predict the time of a boxing step (a collective, transfer or local step) on a machine.

Planners and the simulator price conversions of tensors by it, through `cost`.

S is the number of bytes that the ranks of one group share: the size of the piece that each of them
holds before an all-reduce or reduce-scatter and after an all-gather, or of all pieces together
before an all-to-all. The groups of one step work at the same time; the slowest one counts, and
groups that share a link divide its bandwidth.

The time of a step is

* the prediction of `Cluster.calibration`, if there is one that covers such calls. It measured whole
  calls, so it includes the start of the call and the writing of its result;
* else the time of the fastest of `algorithms` on the links;
* for a transfer, the time of its busiest rank or shared link. A rank sends one message after the
  other, and receives them likewise; all pieces from one rank to another are one message;
* for a local step, nothing here (see `cost` for the bytes that it reads and writes).

The steps themselves have their bytes.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from sbp_core.boxing.algorithms import LinkRates, Membership, RankGroup, timed_algorithms
from sbp_core.boxing.routing.layout import Ints, Sizes, encode, positions, shared_places
from sbp_core.boxing.routing.transfers import End, messages
from sbp_core.boxing.slices import bounds_of, itemsize, uniform_bytes, volume
from sbp_core.boxing.step import BoxingStep, StepKind
from sbp_core.sbp import local_bounds
from sbp_core.units import format_seconds

if TYPE_CHECKING:
    from sbp_core.calibration import Calibration
    from sbp_core.cluster import Cluster

_CACHED = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """The time of one step, and where it comes from.

    Args:
        step: The step.
        time_s: In seconds.
        algorithm: The algorithm that is assumed, such as `ring`; `measured` or the like if a
            calibration gives the time.
        reason: Why this algorithm, in a few words.
        is_whole_call: Whether the time includes starting the call and writing its result.
    """

    step: BoxingStep
    time_s: float
    algorithm: str
    reason: str
    is_whole_call: bool = False


def step_time_s(step: BoxingStep, cluster: Cluster) -> float:
    """Return the time of one step in seconds; see the module."""
    return step_time(step, cluster).time_s


def step_time(step: BoxingStep, cluster: Cluster) -> StepTime:
    """Return the time of one step, with its algorithm and the reason for it."""
    if step.kind is StepKind.LOCAL:
        return StepTime(step=step, time_s=0.0, algorithm="-", reason="moves nothing")
    if step.kind is StepKind.TRANSFER:
        return _transfer_time(step, cluster)
    calls = _calls(step, cluster.group_sizes)
    if not calls:
        return StepTime(step=step, time_s=0.0, algorithm="-", reason="nothing to do")
    calibration = cluster.calibration
    if calibration is not None:
        measured = _calibrated(step, calls, calibration, cluster.node_level)
        if measured is not None:
            return measured
    links = LinkRates.of(cluster)
    # The fastest algorithm of the slowest group: tuples of times compare by their first entry.
    slowest = max((timed_algorithms(step.kind, group, size, links) for group, size in calls))
    best, *others = slowest
    reason = "the only way"
    if others:
        after = f"{others[0].name}, {format_seconds(others[0].time_s)}"
        reason = f"fastest of {len(slowest)}; next {after}"
    return StepTime(step=step, time_s=best.time_s, algorithm=best.name, reason=reason)


def _calibrated(
    step: BoxingStep,
    calls: tuple[tuple[RankGroup, int], ...],
    calibration: Calibration,
    node_level: int,
) -> StepTime | None:
    """Return a calibration's time of a collective; None if it does not cover such calls."""
    slowest_s, origin = -1.0, None
    for group, size in calls:
        at = group.memberships[node_level]
        of = step.kind.value, group.size, at.neighbours
        time_s = calibration.time_s(*of, size, num_nodes=at.num_groups)
        # A mixture of measured and modelled groups would compare unlike numbers.
        if time_s is None:
            return None
        if time_s > slowest_s:
            slowest_s, origin = time_s, calibration.origin(*of, num_nodes=at.num_groups)
    return StepTime(
        step=step,
        time_s=slowest_s,
        algorithm="measured" if origin == "measured" else "calibrated",
        reason=f"{calibration.backend!r} calls: {origin}",
        is_whole_call=True,
    )


@lru_cache(maxsize=_CACHED)
def _calls(step: BoxingStep, group_sizes: tuple[int, ...]) -> tuple[tuple[RankGroup, int], ...]:
    """Return the distinct (group, S in bytes) of a collective; groups of one rank are left out.

    Args:
        step: A collective.
        group_sizes: See `Cluster`.
    """
    groups = step.source[0].groups(*step.axes)
    if len(groups[0]) < 2:
        return ()
    placement, sbp = step.target if step.kind is StepKind.ALL_GATHER else step.source
    # In an all-to-all, S is the sum over all ranks.
    num_counted = len(groups[0]) if step.kind is StepKind.ALL_TO_ALL else 1
    if uniform_bytes(step) is not None:
        # Every rank of every group has as much as rank 0: no need to examine each of them, which
        # may be thousands.
        first = local_bounds(step.shape, sbp, placement.mesh_shape, (0,) * placement.num_axes)
        shared = [volume(first) * num_counted] * len(groups)
    else:
        bounds = bounds_of(step.shape, placement, sbp)
        shared = [sum(volume(bounds[one]) for one in ranks[:num_counted]) for ranks in groups]
    sizes = [itemsize(step.dtype) * elements for elements in shared]
    return tuple(dict.fromkeys(zip(rank_groups(groups, group_sizes), sizes, strict=True)))


@lru_cache(maxsize=_CACHED)
def rank_groups(
    groups: tuple[tuple[int, ...], ...], group_sizes: tuple[int, ...]
) -> tuple[RankGroup, ...]:
    """Return how groups that do a collective at the same time are placed on a machine.

    Tensors of all shapes use the same few groups, so results are cached.

    Args:
        groups: The ranks of each group.
        group_sizes: See `Cluster`.
    """
    # Counted: the groups of the step with a rank on a node, which share its links at once; and
    # likewise at each other level.
    #
    #     mesh 2 x 4, nodes of 4    step on axis 0: groups {0 4} {1 5} {2 6} {3 7}, 4 on a node
    #                               step on axis 1: groups {0 1 2 3} {4 5 6 7}, 1 on a node
    neighbours = [
        Counter(number for ranks in groups for number in {rank // size for rank in ranks})
        for size in group_sizes
    ]
    found = []
    for ranks in groups:
        memberships = []
        for num_ranks, at_once in zip(group_sizes, neighbours, strict=True):
            at = [rank // num_ranks for rank in ranks]
            # Nodes are numbered by appearance: the time of a group depends on which of its ranks
            # are together, not on which nodes they are on. So groups placed alike are priced once.
            numbers = {node: number for number, node in enumerate(dict.fromkeys(at))}
            memberships.append(
                Membership(
                    tuple(numbers[node] for node in at), max(at_once[node] for node in numbers)
                )
            )
        found.append(RankGroup(tuple(memberships)))
    return tuple(found)


def transfer_messages(step: BoxingStep) -> Ints:
    """Return the bytes of the message from each rank to each other one in a `TRANSFER`.

    Returns:
        By position in the source placement (row) and the target placement (column); 0 without a
        message, such as from a rank to itself.
    """
    ranks = [placement.rank_list for placement, _ in (step.source, step.target)]
    ends = [
        End(placement.mesh_shape, tuple(map(encode, sbp)))
        for placement, sbp in (step.source, step.target)
    ]
    sizes = Sizes(step.shape or (1,), 0)
    elements = messages(sizes, ends[0], ends[1], positions(shared_places(ranks[0], ranks[1])))
    return elements * itemsize(step.dtype)


class _Load(NamedTuple):
    """Messages of one rank or one group of ranks, and their bytes, by the level that they go to."""

    messages: tuple[int, ...]
    size_bytes: tuple[int, ...]

    def within(self, levels: slice) -> tuple[int, int]:
        """Return messages and bytes of some of the levels."""
        return sum(self.messages[levels]), sum(self.size_bytes[levels])


class _Traffic(NamedTuple):
    """The messages and bytes of a transfer on ranks and groups of ranks.

    `ports` has each distinct load of a rank that sends or receives. `groups` has, by level, the
    load of a group whose ranks would share a link there (see `LinkLevel`), in one direction, only
    of messages that pass that link. `senders` is the most ranks of one node that send inside it,
    `far_senders` the most ranks that send to other nodes or receive from them.
    """

    ports: tuple[_Load, ...]
    groups: tuple[tuple[_Load, ...], ...]
    senders: int
    far_senders: int


@lru_cache(maxsize=_CACHED)
def _traffic(step: BoxingStep, group_sizes: tuple[int, ...], node_level: int) -> _Traffic:
    sizes = transfer_messages(step)
    there, here = (np.array(placement.rank_list) for placement, _ in (step.source, step.target))
    # The level that a message goes to: the number of kinds of groups that its ranks do not share.
    levels = sum((there[:, None] // size != here // size).astype(np.int8) for size in group_sizes)
    numbers = np.arange(len(group_sizes) + 1)
    by_level = np.stack([sizes * (levels == level) for level in numbers])
    ports: list[Ints] = []
    groups: list[list[Ints]] = [[] for _ in numbers]
    senders = []
    for moved, ranks in ((by_level, there), (by_level.transpose(0, 2, 1), here)):
        # By rank: the messages of each level, then their bytes.
        load = np.concatenate([(moved > 0).sum(axis=2), moved.sum(axis=2)]).T
        ports.append(load)
        for level, of_level in enumerate(groups):
            # A message that goes farther leaves the group below, too; level 0 has inner messages.
            passes = np.tile(numbers >= level if level else numbers == 0, 2)
            of_level.append(_by_group(load * passes, ranks // group_sizes[max(level - 1, 0)]))
        near, far = np.split(load[:, : len(numbers)], [node_level + 1], axis=1)
        busy = np.stack([near.any(axis=1), far.any(axis=1)], axis=1).astype(np.int64)
        senders.append(_by_group(busy, ranks // group_sizes[node_level]).max(axis=0))
    out, into = senders
    return _Traffic(
        ports=_distinct(ports),
        groups=tuple(map(_distinct, groups)),
        senders=max(1, int(out[0])),
        far_senders=max(1, int(out[1]), int(into[1])),
    )


def _by_group(rows: Ints, groups: Ints) -> Ints:
    """Return the sum of the rows of each group.

    Args:
        rows: One row for each rank.
        groups: The group of each rank.
    """
    _, number = np.unique(groups, return_inverse=True)
    found = np.zeros((number.max() + 1, rows.shape[1]), dtype=np.int64)
    np.add.at(found, number, rows)
    return found


def _distinct(loads: list[Ints]) -> tuple[_Load, ...]:
    num_levels = loads[0].shape[1] // 2
    found = (
        _Load(tuple(load[:num_levels]), tuple(load[num_levels:]))
        for load in np.concatenate(loads).tolist()
        if any(load)
    )
    return tuple(dict.fromkeys(found))


def _transfer_time(step: BoxingStep, cluster: Cluster) -> StepTime:
    node_level = cluster.node_level
    traffic = _traffic(step, cluster.group_sizes, node_level)
    if not traffic.ports:
        return StepTime(step=step, time_s=0.0, algorithm="-", reason="moves nothing")
    calibration = cluster.calibration
    if calibration is not None:
        time_s = _calibrated_transfer_s(traffic, calibration, node_level)
        if time_s is not None:
            return StepTime(
                step=step,
                time_s=time_s,
                algorithm="calibrated",
                reason=f"{calibration.backend!r} calls: messages of the busiest rank",
                is_whole_call=True,
            )
    links = LinkRates.of(cluster)
    paths = links.paths
    # A rank handles its messages one after the other, near and far through one port. A link that
    # ranks of a group share carries their bytes together, but their latencies overlap. Sending and
    # receiving do not disturb each other, so each direction is a separate load.
    port_s = 0.0
    for load in traffic.ports:
        rank_s = 0.0
        for count, size, path in zip(*load, paths, strict=True):
            rank_s = rank_s + count * path.latency_s + size / path.bytes_per_s
        port_s = max(port_s, rank_s)
    shared_s = 0.0
    for (link, is_shared), loads in zip(links.levels, traffic.groups, strict=True):
        for load in loads if is_shared else ():
            taken = zip(paths, load.messages, strict=True)
            latency_s = max(path.latency_s for path, count in taken if count)
            shared_s = max(shared_s, latency_s + sum(load.size_bytes) / link.bytes_per_s)
    return StepTime(
        step=step,
        time_s=max(port_s, shared_s),
        algorithm="direct",
        reason="the busiest rank" if port_s >= shared_s else "the busiest shared link",
    )


def _calibrated_transfer_s(
    traffic: _Traffic, calibration: Calibration, node_level: int
) -> float | None:
    """Return the time of the busiest rank, for equal messages; None if not measured."""
    busiest_s = 0.0
    for load in traffic.ports:
        total_s = 0.0
        for levels, senders, num_nodes in (
            (slice(0, node_level + 1), traffic.senders, 1),
            (slice(node_level + 1, None), traffic.far_senders, 2),
        ):
            count, size = load.within(levels)
            if count:
                one_s = calibration.time_s(
                    StepKind.TRANSFER.value, 2, senders, size / count, num_nodes=num_nodes
                )
                if one_s is None:
                    return None
                total_s += count * one_s
        busiest_s = max(busiest_s, total_s)
    return busiest_s

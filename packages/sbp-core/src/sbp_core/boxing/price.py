"""What a route costs in time on a machine.

S is what the ranks of one group share: the bytes of the tensor piece that each holds before an
all-reduce or reduce-scatter and after an all-gather, and of all that they hold together before an
all-to-all. The groups of one step work at the same time; the slowest one counts, and those that
share a link divide its bandwidth.

A step takes

* what `Cluster.calibration` predicts, if there is one that knows such calls: it measured whole
  calls, so the start of the call and the writing of its result are in it;
* else what the fastest of `algorithms` takes on the links;
* a transfer: as long as its busiest rank or shared link. A rank sends one message after the other,
  all pieces from one rank to another being one; likewise it receives;
* a local step: nothing here (see `cost` for what it reads and writes).

Bytes are in the steps themselves.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from sbp_core.boxing.algorithms import LinkRates, RankGroup, timed_algorithms
from sbp_core.boxing.routing.layout import Ints, encode
from sbp_core.boxing.routing.messages import End, messages
from sbp_core.boxing.routing.sizes import Sizes, positions, shared_places
from sbp_core.boxing.slices import (
    bounds_of,
    itemsize,
    uniform_bytes,
    volume,
)
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
        step: Which.
        time_s: In seconds.
        algorithm: How the step is taken to be done, such as `ring`; `measured` or the like where a
            calibration says the time.
        reason: Why that, in a few words.
        is_whole_call: Whether starting the call and writing its result are in the time.
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
    calls = _calls(step, cluster.devices_per_node)
    if not calls:
        return StepTime(step=step, time_s=0.0, algorithm="-", reason="nothing to do")
    calibration = cluster.calibration
    if calibration is not None:
        measured = _calibrated(step, calls, calibration)
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
    step: BoxingStep, calls: tuple[tuple[RankGroup, int], ...], calibration: Calibration
) -> StepTime | None:
    """Return what a calibration says of a collective; None if it does not know such calls."""
    slowest: tuple[float, RankGroup] | None = None
    for group, size in calls:
        time_s = calibration.time_s(
            step.kind.value, group.size, group.neighbours, size, num_nodes=group.num_nodes
        )
        # A mixture of measured and modelled groups would compare unlike numbers.
        if time_s is None:
            return None
        if slowest is None or time_s > slowest[0]:
            slowest = time_s, group
    assert slowest is not None, "a collective has a group"
    time_s, group = slowest
    origin = calibration.origin(
        step.kind.value, group.size, group.neighbours, num_nodes=group.num_nodes
    )
    return StepTime(
        step=step,
        time_s=time_s,
        algorithm="measured" if origin == "measured" else "calibrated",
        reason=f"{calibration.backend!r} calls: {origin}",
        is_whole_call=True,
    )


@lru_cache(maxsize=_CACHED)
def _calls(step: BoxingStep, devices_per_node: int) -> tuple[tuple[RankGroup, int], ...]:
    """Return the distinct (group, S) of a collective; groups of one rank are left out."""
    groups = step.source[0].groups(*step.axes)
    if len(groups[0]) < 2:
        return ()
    # How many groups of the step have a rank on a node: so many share its links at once.
    #
    #     mesh 2 x 4, nodes of 4    step on axis 0: groups {0 4} {1 5} {2 6} {3 7}, 4 on a node
    #                               step on axis 1: groups {0 1 2 3} {4 5 6 7}, 1 on a node
    on_node = Counter(
        node for ranks in groups for node in {rank // devices_per_node for rank in ranks}
    )
    sizes = _sizes(step, groups)
    found: dict[tuple[RankGroup, int], None] = {}
    for ranks, size in zip(groups, sizes, strict=True):
        at = [rank // devices_per_node for rank in ranks]
        # Nodes are numbered by appearance: what a group takes depends on which of its ranks are
        # together, not on which nodes they are on. So groups that lie alike are priced once.
        numbers = {node: number for number, node in enumerate(dict.fromkeys(at))}
        group = RankGroup(
            nodes=tuple(numbers[node] for node in at),
            neighbours=max(on_node[node] for node in numbers),
        )
        found[group, size] = None
    return tuple(found)


def _sizes(step: BoxingStep, groups: tuple[tuple[int, ...], ...]) -> list[int]:
    """Return S of each group, in bytes."""
    held_first = step.kind is not StepKind.ALL_GATHER
    placement, sbp = step.source if held_first else step.target
    size = itemsize(step.dtype)
    sums = step.kind is StepKind.ALL_TO_ALL
    # Every rank of every group has as much as rank 0: no need to look at each, of which there may
    # be thousands.
    if uniform_bytes(step) is not None:
        first = local_bounds(step.shape, sbp, placement.mesh_shape, (0,) * placement.num_axes)
        shared = volume(first) * size * (len(groups[0]) if sums else 1)
        return [shared] * len(groups)
    bounds = bounds_of(step.shape, placement, sbp)
    return [
        size * sum(volume(bounds[rank]) for rank in (ranks if sums else ranks[:1]))
        for ranks in groups
    ]


def transfer_messages(step: BoxingStep) -> Ints:
    """Return the bytes of the message from each rank to each other one in a `TRANSFER`.

    Returns:
        By position in the source placement (row) and the target placement (column); 0 where there
        is no message, so from a rank to itself.
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
    """Messages and bytes, inside a node and between nodes, of one rank or one node."""

    near: int
    near_bytes: int
    far: int
    far_bytes: int


class _Traffic(NamedTuple):
    """What a transfer asks of ranks and nodes.

    `ports` has each distinct load of a rank that sends or receives, `nodes` of a node, in one
    direction; `senders` is the most ranks of one node that send inside it, `far_senders` the most
    that send to other nodes or receive from them.
    """

    ports: tuple[_Load, ...]
    nodes: tuple[_Load, ...]
    senders: int
    far_senders: int


@lru_cache(maxsize=_CACHED)
def _traffic(step: BoxingStep, devices_per_node: int) -> _Traffic:
    sizes = transfer_messages(step)
    there, here = (
        np.array(placement.rank_list) // devices_per_node
        for placement, _ in (step.source, step.target)
    )
    is_far = there[:, None] != here
    near, far = sizes * ~is_far, sizes * is_far
    out, into = _loads(near, far, there), _loads(near.T, far.T, here)
    return _Traffic(
        ports=_distinct(out[0], into[0]),
        nodes=_distinct(out[1], into[1]),
        senders=max(1, int(out[2][:, 0].max())),
        far_senders=max(1, int(out[2][:, 1].max()), int(into[2][:, 1].max())),
    )


def _loads(near: Ints, far: Ints, node: Ints) -> tuple[Ints, Ints, Ints]:
    """Return the load of each rank and of each node, and how many ranks of it have near, far ones.

    Args:
        near: Bytes of the messages of each rank (row) inside its node.
        far: Bytes of those to or from other nodes.
        node: The node of each rank.
    """
    # By rank: near messages, near bytes, far messages, far bytes. By node the sums of these, and
    # behind them how many of its ranks have near messages, and far ones.
    columns = [of for way in (near, far) for of in ((way > 0).sum(axis=1), way.sum(axis=1))]
    by_rank = np.stack(columns, axis=1)
    _, number = np.unique(node, return_inverse=True)
    by_node = np.zeros((number.max() + 1, 6), dtype=np.int64)
    np.add.at(by_node, number, np.concatenate([by_rank, by_rank[:, ::2] > 0], axis=1))
    return by_rank, by_node[:, :4], by_node[:, 4:]


def _distinct(*loads: Ints) -> tuple[_Load, ...]:
    found = (_Load(*load) for load in np.concatenate(loads).tolist() if any(load))
    return tuple(dict.fromkeys(found))


def _transfer_time(step: BoxingStep, cluster: Cluster) -> StepTime:
    traffic = _traffic(step, cluster.devices_per_node)
    if not traffic.ports:
        return StepTime(step=step, time_s=0.0, algorithm="-", reason="moves nothing")
    calibration = cluster.calibration
    if calibration is not None:
        time_s = _calibrated_transfer_s(traffic, calibration)
        if time_s is not None:
            return StepTime(
                step=step,
                time_s=time_s,
                algorithm="calibrated",
                reason=f"{calibration.backend!r} calls: messages of the busiest rank",
                is_whole_call=True,
            )
    links = LinkRates.of(cluster)
    near, far = links.intra, links.inter
    # A rank works off its messages one after the other, near and far through one port; a link that
    # ranks of a node share carries their bytes together, but their latencies overlap. Sending and
    # receiving do not disturb each other, so each direction is a load of its own.
    port_s = max(
        load.near * near.latency_s
        + load.near_bytes / near.bytes_per_s
        + load.far * far.latency_s
        + load.far_bytes / far.bytes_per_s
        for load in traffic.ports
    )
    shared_s = 0.0
    for load in traffic.nodes:
        if load.near and links.intra_shared:
            shared_s = max(shared_s, near.latency_s + load.near_bytes / near.bytes_per_s)
        if load.far and links.inter_shared:
            shared_s = max(shared_s, far.latency_s + load.far_bytes / far.bytes_per_s)
    return StepTime(
        step=step,
        time_s=max(port_s, shared_s),
        algorithm="direct",
        reason="the busiest rank" if port_s >= shared_s else "the busiest shared link",
    )


def _calibrated_transfer_s(traffic: _Traffic, calibration: Calibration) -> float | None:
    """Return the time of the busiest rank, its messages being equal; None if not measured."""
    busiest_s = 0.0
    for load in traffic.ports:
        total_s = 0.0
        for count, size, senders, num_nodes in (
            (load.near, load.near_bytes, traffic.senders, 1),
            (load.far, load.far_bytes, traffic.far_senders, 2),
        ):
            if count:
                one_s = calibration.time_s(
                    StepKind.TRANSFER.value, 2, senders, size / count, num_nodes=num_nodes
                )
                if one_s is None:
                    return None
                total_s += count * one_s
        busiest_s = max(busiest_s, total_s)
    return busiest_s

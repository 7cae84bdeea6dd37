"""The cluster: devices, links and measured times of a machine, and the file that stores them.

    {"format": "sbp-cluster", "version": 2, "name": ..., "device": {...}, "intra_node": {...},
     "calibrations": {"torch": {"samples": [...], "curves": [...], ...}}, "machine": {...}, ...}

`sbp-calibrate` writes such files; they may be edited by hand. Planners and the simulator predict
times with them. Numbers are in SI base units, as in the classes that they are read into.

Links form a tree of groups of ranks. Nodes are the groups that every machine has; `Cluster.groups`
adds smaller ones inside nodes and larger ones around them, at any depth:

    level 3  cluster                 (all)              inter_node
    level 2  rack            (0 ... 7)    (8 ... 15)    groups[1].link
    level 1  node        (0 1 2 3)(4 5 6 7) ...         intra_node
    level 0  socket     (0 1)(2 3)(4 5)(6 7) ...        groups[0].link

A message has the latency of the smallest group that contains both its ranks. It passes the links of
all levels up to that group, and the narrowest one limits its rate. But a message that leaves a
group of level 0 does not pass its link: GPUs reach their network cards next to NVLink.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

from sbp_core.calibration import Calibration
from sbp_core.errors import ConfigError, SbpValueError
from sbp_core.operators import MeasuredOperator, OperatorTable
from sbp_core.placement import MOST_RANKS, Placement
from sbp_core.serialize import Document

__all__ = ["Cluster", "Device", "Link", "LinkLevel"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """The cost of a message: `latency_s` + bytes / `bytes_per_s` (the α-β model)."""

    latency_s: float
    bytes_per_s: float

    def __post_init__(self) -> None:
        if not self.latency_s >= 0 or not self.bytes_per_s > 0:
            raise SbpValueError(
                f"a link needs latency >= 0 and bandwidth > 0, not {self}",
                accepted="latency_s in seconds, bytes_per_s above 0",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkLevel:
    """One level of the tree of links: groups of consecutive ranks, and the link inside a group.

    Args:
        name: The name of one group, such as `socket`, `node` or `rack`.
        num_ranks: Ranks of one group: 0 .. num_ranks - 1 are the first group.
        link: The link between two ranks of one group that share no smaller group.
        shared: Whether all ranks of one group of the next smaller level divide one link to the rest
            of this group, in each direction; otherwise each rank has its own. At the innermost
            level, whether all messages in a group share one link, as CPUs share a memory bus.
    """

    name: str
    num_ranks: int
    link: Link
    shared: bool = False

    def __post_init__(self) -> None:
        if not self.name or not 1 <= self.num_ranks <= MOST_RANKS:
            raise SbpValueError(
                f"a level {self.name!r} of groups of {self.num_ranks} ranks",
                accepted=f"a name, and groups of 1 to {MOST_RANKS} ranks",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """The device of one rank.

    Args:
        kind: `cpu` or `cuda`.
        memory_bytes: Memory that a plan may use.
        flop_per_s: Matrix-multiplication rate by dtype name.
        memory_bytes_per_s: Memory bandwidth.
        launch_s: Time to start one operator.
        boxing_launch_s: Time of a runtime to start one boxing step, in addition to the transport's
            time: for the firings of its actor and of the segments that it separates.
        boxing_busy: The part of the time of a boxing step in which its rank cannot compute, in [0,
            1]: the transport works on the core that the rank computes with, or moves data only
            while it is called. Overlap can hide the rest.
        operators: Measured times of operator calls; all other calls are predicted from the rates.
        host_memory_bytes: This rank's share of its host's memory, to which states can be offloaded;
            None if it is unknown. For a CPU it is a second part of the same memory: enough to try
            out a plan for devices that have their own.
        host_link: The link between the device and that memory, in each direction.
    """

    kind: str = "cpu"
    memory_bytes: int
    flop_per_s: Mapping[str, float]
    memory_bytes_per_s: float
    launch_s: float = 0.0
    boxing_launch_s: float = 0.0
    boxing_busy: float = 0.0
    operators: tuple[MeasuredOperator, ...] = field(default=(), repr=False)
    host_memory_bytes: int | None = None
    host_link: Link | None = None
    #: The table of `operators` as the only entry, made when it is needed.
    _table: list[OperatorTable] = field(init=False, repr=False, compare=False, default_factory=list)

    def __post_init__(self) -> None:
        rates = [self.memory_bytes, self.memory_bytes_per_s, *self.flop_per_s.values()]
        # NaN is not above 0.
        is_fast = bool(self.flop_per_s) and all(rate > 0 for rate in rates)
        if not is_fast or not (self.launch_s >= 0 and self.boxing_launch_s >= 0):
            raise SbpValueError(
                f"a device needs positive memory and rates, not {self}",
                accepted="memory_bytes, flop_per_s by dtype and memory_bytes_per_s above 0; "
                "launch_s and boxing_launch_s from 0 on",
            )
        if not 0 <= self.boxing_busy <= 1:
            raise SbpValueError(f"boxing_busy={self.boxing_busy}", accepted="from 0 to 1")
        self._check_host()

    def _check_host(self) -> None:
        size_bytes, link = self.host_memory_bytes, self.host_link
        if (size_bytes is None) != (link is None):
            raise SbpValueError(
                f"host_memory_bytes={size_bytes} and host_link={link}", accepted="both, or neither"
            )
        if size_bytes is not None and not size_bytes > 0:
            raise SbpValueError(
                f"host_memory_bytes={size_bytes}",
                accepted="more than 0 bytes, besides the memory of the device",
            )

    def roofline_s(self, flop: float, num_bytes: float, dtype: str) -> float:
        """Return the time of an operator by the rates, in seconds, with its launch.

        Args:
            flop: Its work.
            num_bytes: The bytes that it reads and writes.
            dtype: The dtype whose rate applies; an unlisted dtype has the slowest listed rate.

        Source: Williams, Waterman, Patterson, "Roofline", CACM 52 (2009).
        """
        rate = self.flop_per_s.get(dtype, min(self.flop_per_s.values()))
        return max(flop / rate, num_bytes / self.memory_bytes_per_s) + self.launch_s

    @property
    def operator_table(self) -> OperatorTable:
        """The times of all calls, by `operators`."""
        if not self._table:
            rooflines_s = [
                self.roofline_s(one.flop, one.num_bytes, one.dtype) if one.flop else 0.0
                for one in self.operators
            ]
            self._table.append(OperatorTable(self.operators, rooflines_s))
        return self._table[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """A machine: equal devices in nodes of equal size, the links, and measured times.

    The links are a tree; see the module. Without `groups` it has two levels: inside a node, and
    between nodes.

    Args:
        name: The name in reports.
        machine: A description of the measured machine, such as its processor and the versions used.
        num_devices: Ranks 0 .. num_devices - 1; consecutive ranks share a node.
        devices_per_node: Ranks of one node.
        device: The device of one rank while all other ranks of its node compute, too: ranks that
            share cores, memory bandwidth or an interpreter get their share here.
        intra_node: Link between two ranks of one node.
        inter_node: Link between two ranks of different nodes.
        intra_node_shared: Whether all simultaneous messages inside a node divide one link's
            bandwidth, as on CPUs that share a memory bus; otherwise each pair of ranks has its own.
        inter_node_shared: Whether all ranks of a node divide one link to the other nodes, in each
            direction; otherwise each rank has its own.
        groups: Further levels with a link of their own, innermost first: groups inside nodes, such
            as sockets, and groups of nodes, such as racks. A group contains whole groups of the
            next smaller level. Then `intra_node` and `inter_node` link ranks that share no smaller
            group than the node, and no group at all; see `LinkLevel` for shared links.
        backend: The boxing backend whose calibration predicts boxing steps; empty: the only one
            that there is. Without a calibration, steps are predicted from the links.
        calibrations: Measured times of transports, by the name of their boxing backend.
    """

    name: str
    machine: Mapping[str, str] = field(default_factory=dict)
    num_devices: int
    devices_per_node: int
    device: Device
    intra_node: Link
    inter_node: Link = field(default=Link(latency_s=2e-5, bytes_per_s=1.25e9))
    intra_node_shared: bool = False
    inter_node_shared: bool = True
    groups: tuple[LinkLevel, ...] = ()
    backend: str = ""
    calibrations: Mapping[str, Calibration] = field(default_factory=dict)

    def __post_init__(self) -> None:
        counts = (self.num_devices, self.devices_per_node)
        if not all(1 <= count <= MOST_RANKS for count in counts):
            raise SbpValueError(
                f"a cluster of {self.num_devices} devices in nodes of {self.devices_per_node}",
                accepted=f"at least one device, in nodes of at least one; at most {MOST_RANKS}",
            )
        self._check_groups()
        wrong = [name for name, of in self.calibrations.items() if of.backend != name]
        if wrong:
            raise SbpValueError(
                f"the calibration {wrong[0]!r} is of backend "
                f"{self.calibrations[wrong[0]].backend!r}",
                accepted="calibrations by the name of their backend",
            )

    def _check_groups(self) -> None:
        if not self.groups:
            return
        names = [level.name for level in self.levels]
        if len({*names}) < len(names):
            raise SbpValueError(
                f"groups={names[:-1]} repeat a name",
                accepted="distinct names, other than 'node' and 'cluster', which always exist",
            )
        sizes = [level.num_ranks for level in self.groups]
        nested = self.group_sizes
        is_nested = all(small < large and large % small == 0 for small, large in pairwise(nested))
        if sizes != sorted(sizes) or not is_nested:
            raise SbpValueError(
                f"groups of {', '.join(map(str, sizes))} ranks, and nodes of "
                f"{self.devices_per_node}, are not nested",
                accepted="innermost first, each of several times as many ranks as the one before, "
                "the node among them",
            )

    @property
    def group_sizes(self) -> tuple[int, ...]:
        """Ranks of one group of each level, innermost first, without the whole cluster."""
        if not self.groups:
            return (self.devices_per_node,)
        return tuple(sorted([self.devices_per_node, *(of.num_ranks for of in self.groups)]))

    @property
    def node_level(self) -> int:
        """The level of nodes, counted from 0."""
        return self.group_sizes.index(self.devices_per_node)

    @property
    def levels(self) -> tuple[LinkLevel, ...]:
        """The tree of links, innermost level first: at least `node` and, last, `cluster`."""
        size = self.devices_per_node
        node = LinkLevel(
            name="node", num_ranks=size, link=self.intra_node, shared=self.intra_node_shared
        )
        inside = tuple(level for level in self.groups if level.num_ranks < size)
        around = self.groups[len(inside) :]
        whole = LinkLevel(
            name="cluster",
            num_ranks=max(self.num_devices, *self.group_sizes),
            link=self.inter_node,
            shared=self.inter_node_shared,
        )
        return (*inside, node, *around, whole)

    @property
    def calibration(self) -> Calibration | None:
        """The calibration for predictions: that of `backend`, or the only one if empty."""
        if self.backend:
            return self.calibrations.get(self.backend)
        return next(iter(self.calibrations.values())) if len(self.calibrations) == 1 else None

    def priced_by(self, backend: str) -> Cluster:
        """Return the machine with the times of one backend: its calls, and overheads.

        Args:
            backend: One of `calibrations`.
        """
        of = self.calibrations[backend]
        device = self.device
        if of.launch_s is not None:
            device = replace(device, launch_s=of.launch_s)
        if of.boxing_launch_s is not None:
            device = replace(device, boxing_launch_s=of.boxing_launch_s)
        if of.busy is not None:
            device = replace(device, boxing_busy=of.busy)
        if of.operators:
            device = replace(device, operators=of.operators)
        return replace(self, backend=backend, device=device)

    def node(self, rank: int) -> int:
        """Return the number of the node that a rank is on."""
        return rank // self.devices_per_node

    def link(self, ranks: Sequence[int]) -> Link:
        """Return the link of the slowest message among `ranks`: latency, and narrowest link."""
        levels = self.levels
        outermost = sum(len({rank // size for rank in ranks}) > 1 for size in self.group_sizes)
        return path_link(tuple(level.link for level in levels), outermost)

    def check_ranks(self, mesh: Placement) -> None:
        """Check that all ranks of a mesh are devices of the cluster.

        Raises:
            ConfigError: one is not.
        """
        if (last := max(mesh.rank_list)) >= self.num_devices:
            last_device = self.num_devices - 1
            raise ConfigError(
                f"the mesh has rank {last}: {mesh}; the cluster {self.name!r} has "
                f"{self.num_devices} device{'s' * (self.num_devices > 1)}",
                accepted=f"ranks 0 to {last_device}" if last_device else "rank 0",
                todo="make the mesh smaller, or plan for a cluster with a device for each rank",
            )

    @classmethod
    def nominal(cls, num_devices: int) -> Cluster:
        """Return a machine with round numbers, for plans for no particular machine.

        Args:
            num_devices: The devices, which are in one node.
        """
        return cls(
            name="nominal",
            num_devices=num_devices,
            devices_per_node=num_devices,
            device=Device(
                memory_bytes=1 << 40,
                flop_per_s={"float32": 1e11},
                memory_bytes_per_s=1e10,
                launch_s=5e-6,
            ),
            intra_node=Link(latency_s=1e-4, bytes_per_s=1e10),
        )

    def save(self, path: Path) -> None:
        """Write a cluster file, one line for each sample and curve, so that people can edit it."""
        CLUSTER.write(self, path)

    @classmethod
    def load(cls, path: Path) -> Cluster:
        """Read a cluster file.

        Raises:
            ConfigError: there is no such file, or it is not a cluster file of this version.
        """
        return CLUSTER.read(path)


def path_link(links: tuple[Link, ...], level: int) -> Link:
    """Return the link between ranks whose smallest common group is of this level.

    Args:
        links: The link of each level, innermost first.
        level: The level, counted from 0.
    """
    own = links[level]
    passed = min((link.bytes_per_s for link in links[1:level]), default=own.bytes_per_s)
    return own if own.bytes_per_s <= passed else replace(own, bytes_per_s=passed)


#: The file of a cluster.
CLUSTER: Document[Cluster] = Document(
    kind=Cluster,
    format="sbp-cluster",
    version=2,
    todo="correct that place, or measure again with sbp-calibrate",
    error=ConfigError,
)

"""The machine: its devices, its links, what was measured of them, and the file that says all this.

    {"format": "sbp-cluster", "version": 2, "name": ..., "device": {...}, "intra_node": {...},
     "calibrations": {"torch": {"samples": [...], "curves": [...], ...}}, "machine": {...}, ...}

`sbp-calibrate` writes such files; they may be edited by hand. Numbers are in SI base units, as in
the classes that they are read into.

Stability: stable.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from sbp_core.calibration import Calibration
from sbp_core.errors import ConfigError, SbpValueError
from sbp_core.operators import MeasuredOperator, OperatorTable
from sbp_core.placement import MOST_RANKS, Placement
from sbp_core.serialize import Document

__all__ = ["Cluster", "Device", "Link"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """What one rank computes with.

    Args:
        kind: `cpu` or `cuda`.
        memory_bytes: Memory that a plan may use.
        flop_per_s: Matrix-multiplication rate by dtype name.
        memory_bytes_per_s: Memory bandwidth.
        launch_s: Time to start one operator.
        boxing_launch_s: Time that a runtime takes to start one boxing step, beside what its
            transport takes: an actor fires, and so do those of the segments that it parts.
        operators: What calls of operators were measured to take; the rates say it of all others.
    """

    kind: str = "cpu"
    memory_bytes: int
    flop_per_s: Mapping[str, float]
    memory_bytes_per_s: float
    launch_s: float = 0.0
    boxing_launch_s: float = 0.0
    operators: tuple[MeasuredOperator, ...] = field(default=(), repr=False)
    #: The one table of `operators`, made when it is needed.
    _table: list[OperatorTable] = field(init=False, repr=False, compare=False, default_factory=list)

    def __post_init__(self) -> None:
        rates = [self.memory_bytes, self.memory_bytes_per_s, *self.flop_per_s.values()]
        # NaN is neither above nor below.
        is_fast = bool(self.flop_per_s) and all(rate > 0 for rate in rates)
        if not is_fast or not (self.launch_s >= 0 and self.boxing_launch_s >= 0):
            raise SbpValueError(
                f"a device needs positive memory and rates, not {self}",
                accepted="memory_bytes, flop_per_s by dtype and memory_bytes_per_s above 0; "
                "launch_s and boxing_launch_s from 0 on",
            )

    def roofline_s(self, flop: float, num_bytes: float, dtype: str) -> float:
        """Return the time of an operator by the rates, in seconds, with its launch.

        Args:
            flop: Its work.
            num_bytes: What it reads and writes.
            dtype: Whose rate it computes with; one that is not listed has the slowest listed rate.

        Source: Williams, Waterman, Patterson, "Roofline", CACM 52 (2009).
        """
        rate = self.flop_per_s.get(dtype, min(self.flop_per_s.values()))
        return max(flop / rate, num_bytes / self.memory_bytes_per_s) + self.launch_s

    @property
    def operator_table(self) -> OperatorTable:
        """What `operators` say of all calls."""
        if not self._table:
            rooflines_s = [
                self.roofline_s(one.flop, one.num_bytes, one.dtype) if one.flop else 0.0
                for one in self.operators
            ]
            self._table.append(OperatorTable(self.operators, rooflines_s))
        return self._table[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """What a message costs: `latency_s` + bytes / `bytes_per_s` (the α-β model)."""

    latency_s: float
    bytes_per_s: float

    def __post_init__(self) -> None:
        if not self.latency_s >= 0 or not self.bytes_per_s > 0:
            raise SbpValueError(
                f"a link needs latency >= 0 and bandwidth > 0, not {self}",
                accepted="latency_s in seconds, bytes_per_s above 0",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """The machine: equal devices in nodes of equal size, the links, and what was measured of them.

    Args:
        name: How reports call it.
        machine: What was measured, in words, such as its processor and the versions used.
        num_devices: Ranks 0 .. num_devices - 1; consecutive ranks share a node.
        devices_per_node: Ranks of one node.
        device: What one rank computes with while all others of its node do, too: ranks that share
            cores, memory bandwidth or an interpreter get their share here.
        intra_node: Link between two ranks of one node.
        inter_node: Link between two ranks of different nodes.
        intra_node_shared: Whether all messages inside a node that are under way at the same time
            divide one link's bandwidth, as on CPUs that share a memory bus; otherwise each pair
            of ranks has its own.
        inter_node_shared: Whether all ranks of a node divide one link to the other nodes, in each
            direction; otherwise each rank has its own.
        backend: The boxing backend whose calibration says what steps take; empty: the only one
            that there is. Without a calibration the links say it.
        calibrations: What was measured of transports, by the name of their boxing backend.
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
    backend: str = ""
    calibrations: Mapping[str, Calibration] = field(default_factory=dict)

    def __post_init__(self) -> None:
        counts = (self.num_devices, self.devices_per_node)
        if not all(1 <= count <= MOST_RANKS for count in counts):
            raise SbpValueError(
                f"a cluster of {self.num_devices} devices in nodes of {self.devices_per_node}",
                accepted=f"at least one device, in nodes of at least one; at most {MOST_RANKS}",
            )
        wrong = [name for name, of in self.calibrations.items() if of.backend != name]
        if wrong:
            raise SbpValueError(
                f"the calibration {wrong[0]!r} is of backend "
                f"{self.calibrations[wrong[0]].backend!r}",
                accepted="calibrations by the name of their backend",
            )

    @property
    def calibration(self) -> Calibration | None:
        """The calibration that prices: that of `backend`, or the only one if that is empty."""
        if self.backend:
            return self.calibrations.get(self.backend)
        return next(iter(self.calibrations.values())) if len(self.calibrations) == 1 else None

    def priced_by(self, backend: str) -> Cluster:
        """Return the machine with the times of one backend: its calls, and launches beside them.

        Args:
            backend: One of `calibrations`.
        """
        of = self.calibrations[backend]
        device = self.device
        if of.launch_s is not None:
            device = replace(device, launch_s=of.launch_s)
        if of.boxing_launch_s is not None:
            device = replace(device, boxing_launch_s=of.boxing_launch_s)
        if of.operators:
            device = replace(device, operators=of.operators)
        return replace(self, backend=backend, device=device)

    def node(self, rank: int) -> int:
        """Return the number of the node that a rank is on."""
        return rank // self.devices_per_node

    def link(self, ranks: Sequence[int]) -> Link:
        """Return the slowest link that a message among `ranks` may take."""
        nodes = {rank // self.devices_per_node for rank in ranks}
        return self.intra_node if len(nodes) <= 1 else self.inter_node

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
        """Return a machine of round numbers, for what is planned for no machine in particular.

        Args:
            num_devices: Of one node.
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
        """Write a cluster file: one line a sample and a curve, so that people read and edit it."""
        CLUSTER.write(self, path)

    @classmethod
    def load(cls, path: Path) -> Cluster:
        """Read a cluster file.

        Raises:
            ConfigError: there is no such file, or it is no cluster file of this version.
        """
        return CLUSTER.read(path)


#: The file of a cluster.
CLUSTER: Document[Cluster] = Document(
    kind=Cluster,
    format="sbp-cluster",
    version=2,
    todo="correct that place, or measure again with sbp-calibrate",
    error=ConfigError,
)

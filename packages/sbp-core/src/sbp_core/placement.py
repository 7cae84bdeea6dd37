"""Where things are: meshes of ranks (`Placement`), and the machine they stand on (`Cluster`).

Holds no tensors and no policy. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import product
from math import prod
from typing import TYPE_CHECKING, Any, cast

from sbp_core.errors import SbpValueError
from sbp_core.serialize import Form

if TYPE_CHECKING:
    from pathlib import Path

    from sbp_core.calibration import Calibration

Nested = int | Sequence["Nested"]


def _flatten(nested: Nested) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return (mesh shape, ranks in row-major order) of a nested list of ranks."""
    if type(nested) is int:
        return (), (nested,)
    # A text is a sequence of texts, without end.
    nests = isinstance(nested, Sequence) and not isinstance(nested, str | bytes)
    parts = [_flatten(part) for part in cast("Sequence[Nested]", nested)] if nests else []
    if not parts or any(shape != parts[0][0] for shape, _ in parts):
        raise SbpValueError(
            f"the ranks {str(nested)[:60]} are no rectangular mesh",
            accepted="nested lists of equal length, such as [[0, 1], [2, 3]]",
        )
    return (len(parts), *parts[0][0]), tuple(rank for _, ranks in parts for rank in ranks)


@dataclass(frozen=True, slots=True, init=False)
class Placement:
    """A mesh of distinct ranks with named axes.

    Args:
        ranks: Nested lists of ranks, one level for each axis.
        axes: One name for each axis; `axis0`, `axis1`, ... if omitted.
        device: Kind of device behind every rank: `cpu` or `cuda`.

    Raises:
        SbpValueError: the lists are not rectangular, a rank repeats, or axes do not match.
    """

    mesh_shape: tuple[int, ...]
    rank_list: tuple[int, ...]
    axes: tuple[str, ...]
    device: str

    def __init__(
        self, ranks: Sequence[Nested], axes: Sequence[str] | None = None, device: str = "cpu"
    ) -> None:
        # A rank alone, as a file may have it, is no mesh.
        shape, flat = _flatten(ranks if isinstance(ranks, Sequence) else [])
        names = tuple(axes) if axes is not None else tuple(f"axis{i}" for i in range(len(shape)))
        if len(set(flat)) != len(flat) or any(rank < 0 for rank in flat):
            raise SbpValueError(
                f"ranks {list(flat)} repeat or are negative", accepted="distinct ranks >= 0"
            )
        if len(names) != len(shape) or len(set(names)) != len(names):
            raise SbpValueError(
                f"axes {names} do not name the {len(shape)} axes of a mesh of shape {shape}",
                accepted="one distinct name for each axis",
            )
        object.__setattr__(self, "mesh_shape", shape)
        object.__setattr__(self, "rank_list", flat)
        object.__setattr__(self, "axes", names)
        object.__setattr__(self, "device", device)

    @classmethod
    def grid(
        cls, mesh_shape: Sequence[int], axes: Sequence[str] | None = None, device: str = "cpu"
    ) -> Placement:
        """Return the mesh of `mesh_shape` over ranks 0, 1, 2, ... in row-major order."""
        ranks = iter(range(prod(mesh_shape)))

        def build(shape: Sequence[int]) -> Nested:
            return next(ranks) if not shape else [build(shape[1:]) for _ in range(shape[0])]

        nested = build(mesh_shape)
        assert not isinstance(nested, int), "a mesh has at least one axis"
        return cls(nested, axes, device)

    @property
    def ranks(self) -> Nested:
        """The ranks as nested lists."""
        flat = iter(self.rank_list)

        def build(shape: Sequence[int]) -> Nested:
            return next(flat) if not shape else [build(shape[1:]) for _ in range(shape[0])]

        return build(self.mesh_shape)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.rank_list)

    @property
    def num_axes(self) -> int:
        """Number of mesh axes."""
        return len(self.mesh_shape)

    def __contains__(self, rank: object) -> bool:
        return rank in self.rank_list

    def coordinates(self) -> Iterator[tuple[int, tuple[int, ...]]]:
        """Yield (rank, mesh coordinate) in row-major order."""
        grid = product(*(range(extent) for extent in self.mesh_shape))
        yield from zip(self.rank_list, grid, strict=True)

    def coordinate(self, rank: int) -> tuple[int, ...]:
        """Return the mesh coordinate of a rank.

        Raises:
            SbpValueError: the rank is not in this mesh.
        """
        if rank not in self.rank_list:
            raise SbpValueError(
                f"rank {rank} is not in the mesh {self.ranks}",
                accepted=", ".join(map(str, self.rank_list)),
            )
        rest = self.rank_list.index(rank)
        coordinate: list[int] = []
        for extent in reversed(self.mesh_shape):
            rest, index = divmod(rest, extent)
            coordinate.append(index)
        return tuple(reversed(coordinate))

    def rank_at(self, coordinate: Sequence[int]) -> int:
        """Return the rank at a mesh coordinate."""
        index = 0
        for extent, part in zip(self.mesh_shape, coordinate, strict=True):
            index = index * extent + part
        return self.rank_list[index]

    def group(self, rank: int, *axes: int) -> tuple[int, ...]:
        """Return the ranks that differ from `rank` along `axes` only, in mesh order."""
        at = self.coordinate(rank)
        return tuple(
            self.rank_at(other)
            for other in product(
                *(
                    range(extent) if axis in axes else (at[axis],)
                    for axis, extent in enumerate(self.mesh_shape)
                )
            )
        )

    def groups(self, *axes: int) -> tuple[tuple[int, ...], ...]:
        """Return the distinct groups of ranks along some axes, in row-major order."""
        return _groups(self, axes)

    def submesh(self, axis: int, index: int) -> Placement:
        """Return the mesh at one index of an axis, without that axis.

        A mesh of one axis leaves a mesh of one rank and one axis, named `rank`.
        """
        ranks = tuple(rank for rank, at in self.coordinates() if at[axis] == index)
        shape = self.mesh_shape[:axis] + self.mesh_shape[axis + 1 :]
        names = self.axes[:axis] + self.axes[axis + 1 :]
        flat = iter(ranks)

        def build(extents: Sequence[int]) -> Nested:
            return next(flat) if not extents else [build(extents[1:]) for _ in range(extents[0])]

        nested = build(shape or (1,))
        assert not isinstance(nested, int), "a mesh has at least one axis"
        return Placement(nested, names or ("rank",), self.device)

    @classmethod
    def json_form(cls) -> Form:
        """Return what is written of it: what it is made of."""
        return Form(
            _MadeOf,
            lambda self: _MadeOf(ranks=self.ranks, axes=self.axes, device=self.device),
            lambda parts: cls(parts.ranks, parts.axes, parts.device),
        )

    def __repr__(self) -> str:
        return f"Placement(ranks={self.ranks!r}, axes={self.axes!r}, device={self.device!r})"


@dataclass(frozen=True, slots=True, kw_only=True)
class _MadeOf:
    """What files say of a placement."""

    ranks: Any
    axes: tuple[str, ...]
    device: str


@lru_cache(maxsize=1024)
def _groups(placement: Placement, axes: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Return what `Placement.groups` returns, without a look at every rank's group."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank, at in placement.coordinates():
        rest = tuple(part for axis, part in enumerate(at) if axis not in axes)
        groups.setdefault(rest, []).append(rank)
    return tuple(map(tuple, groups.values()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """What one rank computes with.

    Args:
        kind: `cpu` or `cuda`.
        memory_bytes: Memory that a plan may use.
        flop_per_s: Matrix-multiplication rate by dtype name.
        memory_bytes_per_s: Memory bandwidth.
        launch_s: Time to start one operator.
    """

    kind: str = "cpu"
    memory_bytes: int
    flop_per_s: Mapping[str, float]
    memory_bytes_per_s: float
    launch_s: float = 0.0

    def __post_init__(self) -> None:
        rates = [self.memory_bytes, self.memory_bytes_per_s, *self.flop_per_s.values()]
        if not self.flop_per_s or any(rate <= 0 for rate in rates) or self.launch_s < 0:
            raise SbpValueError(
                f"a device needs positive memory and rates, not {self}",
                accepted="memory_bytes, flop_per_s by dtype and memory_bytes_per_s above 0",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """What a message costs: `latency_s` + bytes / `bytes_per_s` (the α-β model)."""

    latency_s: float
    bytes_per_s: float

    def __post_init__(self) -> None:
        if self.latency_s < 0 or self.bytes_per_s <= 0:
            raise SbpValueError(
                f"a link needs latency >= 0 and bandwidth > 0, not {self}",
                accepted="latency_s in seconds, bytes_per_s above 0",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """The machine: equal devices in nodes of equal size, the links, and what was measured of them.

    Args:
        name: How reports call it.
        num_devices: Ranks 0 .. num_devices - 1; consecutive ranks share a node.
        devices_per_node: Ranks of one node.
        device: What one rank computes with.
        intra_node: Link between two ranks of one node.
        inter_node: Link between two ranks of different nodes.
        intra_node_shared: Whether all messages inside a node that are under way at the same time
            divide one link's bandwidth, as on CPUs that share a memory bus; otherwise each pair
            of ranks has its own.
        inter_node_shared: Whether all ranks of a node divide one link to the other nodes, in each
            direction; otherwise each rank has its own.
        calibrations: What was measured of transports, by the name of their boxing backend.
        backend: The boxing backend whose calibration says what steps take; empty: the only one
            that there is. Without a calibration the links say it.
        machine: What was measured, in words, such as its processor and the versions used.
    """

    name: str
    num_devices: int
    devices_per_node: int
    device: Device
    intra_node: Link
    inter_node: Link = field(default=Link(latency_s=2e-5, bytes_per_s=1.25e9))
    intra_node_shared: bool = False
    inter_node_shared: bool = True
    calibrations: Mapping[str, Calibration] = field(default_factory=dict)
    backend: str = ""
    machine: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.num_devices < 1 or self.devices_per_node < 1:
            raise SbpValueError(
                f"a cluster of {self.num_devices} devices in nodes of {self.devices_per_node}",
                accepted="at least one device, in nodes of at least one",
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

    def node(self, rank: int) -> int:
        """Return the number of the node that a rank is on."""
        return rank // self.devices_per_node

    def link(self, ranks: Sequence[int]) -> Link:
        """Return the slowest link that a message among `ranks` may take."""
        nodes = {rank // self.devices_per_node for rank in ranks}
        return self.intra_node if len(nodes) <= 1 else self.inter_node

    def save(self, path: Path) -> None:
        """Write a cluster file; see `cluster_file`."""
        from sbp_core.cluster_file import save_cluster

        save_cluster(self, path)

    @classmethod
    def load(cls, path: Path) -> Cluster:
        """Read a cluster file; see `cluster_file`.

        Raises:
            ConfigError: there is no such file, or it is no cluster file of this version.
        """
        from sbp_core.cluster_file import load_cluster

        return load_cluster(path)

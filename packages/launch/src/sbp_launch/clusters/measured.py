"""The cluster profile `measured`: a mesh on a machine that `sbp-calibrate` has measured."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from sbp_core.errors import ConfigError
from sbp_core.plugins import INSTEAD
from sbp_launch.clusters.local import MESH_TODO, named_axes

if TYPE_CHECKING:
    from sbp_core.cluster import Cluster
    from sbp_core.plugins import ClusterFactory


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredConfig:
    """A mesh of ranks, and the file that says what they and the links between them can do.

    Args:
        file: Cluster file that `sbp-calibrate` wrote.
        mesh: Ranks along each axis, >= 1; of one axis -1, as many as the launcher has started.
        axes: Distinct name of each axis; None, once made, is those of
            `sbp_launch.clusters.local.AXES`.
        world_size: Ranks in all; None takes what the mesh has.
        backend: Boxing backend whose times are used; empty for the one that the file names.
        extrapolate: Whether the mesh may have more ranks than were measured. They are taken to be
            as fast, and groups of them are predicted from smaller ones.

    Raises:
        ConfigError: the mesh cannot be meant, or the file cannot be read or says too little.
    """

    file: str = "cluster.json"
    mesh: tuple[int, ...] = field(default=(2,), metadata={INSTEAD: MESH_TODO})
    axes: tuple[str, ...] | None = None
    world_size: int | None = None
    backend: str = ""
    extrapolate: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "axes", named_axes(self.mesh, self.axes, self.world_size))
        load(self, prod(self.mesh))


def load(config: MeasuredConfig, num_devices: int) -> Cluster:
    """Return the measured machine, with as many ranks as a mesh has.

    Raises:
        ConfigError: the file cannot be read, knows no such backend, or has too few ranks.
    """
    # Here and not above: hook modules are imported for every command, and this one takes a while.
    from sbp_core.cluster import Cluster

    cluster = Cluster.load(Path(config.file))
    if config.backend and config.backend not in cluster.calibrations:
        raise ConfigError(
            f"backend={config.backend!r} is not in file={config.file!r}",
            accepted=", ".join(cluster.calibrations) or "none: only one rank was measured",
            todo=f"sbp-calibrate boxing={config.backend} ranks={cluster.num_devices} "
            f"out={config.file}",
        )
    if num_devices > cluster.num_devices and not config.extrapolate:
        raise ConfigError(
            f"mesh={list(config.mesh)} has {_ranks(num_devices)}, and file={config.file!r} was "
            f"measured with {cluster.num_devices}: more ranks share cores, memory and links, and "
            "nobody knows how",
            accepted=f"a mesh of at most {_ranks(cluster.num_devices)}, or extrapolate=true",
            todo=f"sbp-calibrate boxing={cluster.backend or 'local'} ranks={num_devices} "
            "out=FILE with another file and cluster.file=FILE, or cluster.extrapolate=true for a "
            "guess",
        )
    per_node = cluster.devices_per_node
    if cluster.num_devices <= per_node == cluster.group_sizes[-1]:
        # Only one node was measured, and nothing is said of others: all ranks are on one, which
        # still has a whole number of what may be inside it.
        per_node *= -(-num_devices // per_node)
    backend = config.backend or cluster.backend
    if backend in cluster.calibrations:
        cluster = cluster.priced_by(backend)
    return replace(cluster, num_devices=num_devices, devices_per_node=per_node)


def _ranks(number: int) -> str:
    return "1 rank" if number == 1 else f"{number} ranks"


def build_measured(config: MeasuredConfig) -> ClusterFactory:
    """Return a maker of the measured cluster."""

    def make(num_devices: int) -> Cluster:
        return load(config, num_devices)

    return make

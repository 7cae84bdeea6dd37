"""A mesh of which one axis is left open: as long as the processes that were started make it.

    cluster.mesh=[-1]      of 4 processes: [4]
    cluster.mesh=[-1,2]    of 6 processes: [3,2]

So a run that a launcher starts again, with fewer or more processes, is planned for those.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

from sbp_core.errors import ConfigError
from sbp_launch.settings.config import ComposedConfig
from sbp_launch.world import World

#: In the place of the length of an axis.
OPEN = -1


def close_mesh(composed: ComposedConfig, world: World) -> ComposedConfig:
    """Return a config whose mesh has as many ranks as there are processes, if it is left open.

    Where no launcher has started this process, nobody says how many there are: it stays open, and
    its cluster refuses it.

    Raises:
        ConfigError: the other axes do not divide the number of processes.
    """
    cluster: Any = composed.values.get("cluster")
    mesh = cluster.get("mesh") if isinstance(cluster, dict) else None
    if not isinstance(mesh, list) or not all(type(length) is int for length in mesh):
        return composed  # which is refused as what it is
    if mesh.count(OPEN) != 1 or world.is_alone:
        return composed
    others = prod(length for length in mesh if length != OPEN)
    if others < 1 or world.size % others:
        raise ConfigError(
            f"cluster.mesh={mesh}: {world.launcher} has started {world.size} processes",
            where=composed.overrides_of("cluster"),
            accepted=f"processes of which there are a multiple of {others}, for its other axes",
            todo="start more of them, or fewer; or give another mesh",
        )
    whole = [world.size // others if length == OPEN else length for length in mesh]
    return replace(composed, values={**composed.values, "cluster": {**cluster, "mesh": whole}})

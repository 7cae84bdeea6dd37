"""List the parts of a machine (submeshes) on which a pipeline stage may run, and their mesh shapes.

For the planners `alpa` and `galvatron`, which try stages on them.

    machine          nodes of 4: 0 1 2 3 | 4 5 6 7
    sizes            1, 2, 4 inside a node; 8: whole nodes
    shapes of 4      4 x 1, 2 x 2        the ranks in order, the last axis of neighbours

Ranges of ranks at equivalent places in the tree of links cost the same (`link_class`): two
neighbours of one socket differ from two neighbours of different sockets.

Source: Zheng et al., "Alpa", OSDI 2022, section 5.1 (submeshes (1, 2^k) and (n, whole node)) and
section 4.1 (logical shapes).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from math import prod

from sbp_core.cluster import Cluster
from sbp_core.infer import PIPE_AXIS
from sbp_core.placement import Placement
from sbp_planner.meshes import DATA, TENSOR, reshaped


def submesh_sizes(cluster: Cluster, num_ranks: int) -> tuple[int, ...]:
    """Return how many ranks a stage may have, ascending: powers of two in a node, whole nodes, all.

    Args:
        cluster: The machine.
        num_ranks: Number of ranks that are used, from the first one on.
    """
    node = min(cluster.devices_per_node, num_ranks)
    powers = {1 << k for k in range(node.bit_length()) if 1 << k <= node}
    return tuple(sorted(powers | set(range(node, num_ranks + 1, node)) | {num_ranks}))


def is_submesh(cluster: Cluster, ranks: tuple[int, ...]) -> bool:
    """Return whether successive ranks are in one node, or fill whole nodes."""
    size = cluster.devices_per_node
    if ranks[0] // size == ranks[-1] // size:
        return True
    return ranks[0] % size == 0 and len(ranks) % size == 0


def link_class(cluster: Cluster, ranks: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Return a value that is equal for ranks at equivalent places in the tree of links.

    Args:
        cluster: The machine.
        ranks: Ranks of a submesh, in order.
    """
    found = []
    for size in cluster.group_sizes:
        number: dict[int, int] = {}
        groups = [number.setdefault(rank // size, len(number)) for rank in ranks]
        # The number of successive ranks in each group is enough, because groups are ranges.
        found.append(tuple(groups.count(group) for group in number.values()))
    return tuple(found)


def logical_shapes(num_ranks: int) -> Iterator[tuple[int, int]]:
    """Yield the meshes of two axes for some ranks, the one with a single long axis first.

    >>> list(logical_shapes(8))
    [(8, 1), (4, 2), (2, 4)]
    """
    yield num_ranks, 1
    for inner in range(2, num_ranks):
        if num_ranks % inner == 0:
            yield num_ranks // inner, inner


def submesh(
    mesh: Placement, start: int, shape: tuple[int, ...], axes: tuple[str, ...]
) -> Placement:
    """Return successive ranks of a mesh as a mesh.

    Args:
        mesh: The mesh of all ranks.
        start: Number of ranks before the part.
        shape: Mesh shape of the part.
        axes: Axis names of the part.
    """
    ranks = list(mesh.rank_list[start : start + prod(shape)])
    return reshaped(Placement([ranks], ("part", "rank"), mesh.device), shape, axes)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRanks:
    """The ranks of a stage, and ranks that represent the stages before and after it.

    Args:
        own: The mesh of the stage.
        before, after: Meshes of as many ranks as the stage has, if there are so many next to it;
            else None.
    """

    own: Placement
    before: Placement | None
    after: Placement | None

    def link_class(self, cluster: Cluster) -> Hashable:
        """Return a value that is equal if all three are at equivalent places in the tree."""
        before = self.before.rank_list if self.before else ()
        after = self.after.rank_list if self.after else ()
        ranks = (*before, *self.own.rank_list, *after)
        return len(before), self.own.mesh_shape, len(after), link_class(cluster, ranks)


def stage_ranks(
    mesh: Placement, start: int, shape: tuple[int, ...], axes: tuple[str, ...]
) -> StageRanks:
    """Return the ranks of a stage and of its neighbours.

    Args:
        mesh: The mesh of all ranks.
        start: Number of ranks before the stage.
        shape: Mesh shape of the stage.
        axes: Axis names of every stage.
    """
    devices = prod(shape)
    before, after = start, mesh.size - start - devices

    def neighbour(count: int, at_end: int | None = None) -> Placement | None:
        if not count:
            return None
        own = shape if count >= devices else (count, *(1,) * (len(shape) - 1))
        first = start - prod(own) if at_end is None else at_end
        return submesh(mesh, first, own, axes)

    return StageRanks(
        own=submesh(mesh, start, shape, axes),
        before=neighbour(before),
        after=neighbour(after, start + devices),
    )


def pipe_first(mesh: Placement) -> Placement:
    """Return a mesh with the axis `pipe`, if it has one, as its first."""
    if PIPE_AXIS not in mesh.axes[1:]:
        return mesh
    axis = mesh.axes.index(PIPE_AXIS)
    parts = [mesh.submesh(axis, at) for at in range(mesh.mesh_shape[axis])]
    return Placement([part.ranks for part in parts], (PIPE_AXIS, *parts[0].axes), mesh.device)


def stage_axes(mesh: Placement) -> tuple[str, ...]:
    """Return the mesh axes of every stage: all but `pipe`, or two axes over its ranks."""
    if PIPE_AXIS in mesh.axes:
        return tuple(axis for axis in mesh.axes if axis != PIPE_AXIS) or ("rank",)
    first = mesh.axes[0]
    return first, TENSOR if first != TENSOR else DATA

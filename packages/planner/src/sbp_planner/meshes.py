"""Reshape a device mesh: other meshes of the same ranks, among which the planner `auto` chooses.

Ranks keep their order, so the last axis is over neighbours, on the fastest links.

    8 ranks     8;   4 x 2, 2 x 4;   stages of a pipeline: 2 x 4, 4 x 2, 2 x 2 x 2, ...
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod

from sbp_core.infer import PIPE_AXIS, PinValue
from sbp_core.placement import Placement

#: Axis names of meshes that the user did not name.
DATA, TENSOR = "data", "tensor"


def reshaped(mesh: Placement, sizes: Sequence[int], axes: Sequence[str]) -> Placement:
    """Return a mesh of the same ranks in the same order.

    Args:
        mesh: The mesh to reshape.
        sizes: Sizes of the new axes; their product is the number of ranks.
        axes: Names of the new axes.
    """
    assert prod(sizes) == mesh.size, "the same ranks"
    ranks = iter(mesh.rank_list)

    def nested(shape: Sequence[int]) -> list[object] | int:
        return [nested(shape[1:]) for _ in range(shape[0])] if shape else next(ranks)

    found = nested(sizes)
    assert isinstance(found, list), "a mesh has an axis"
    return Placement(found, axes, mesh.device)  # type: ignore[arg-type]  # nested lists of ranks


def is_bound(pins: Mapping[str, PinValue], mesh: Placement) -> bool:
    """Return whether pins name single axes of a mesh, so that they hold on no other mesh."""
    return any(
        isinstance(value, Mapping) or (len(mesh.axes) > 1 and "," in value)
        for value in pins.values()
    )


def other_meshes(mesh: Placement, *, num_blocks: int, pipelines: bool) -> Iterator[Placement]:
    """Yield other meshes of the same ranks.

    Args:
        mesh: The given mesh, which is not yielded.
        num_blocks: Number of blocks of the model: a pipeline has no more stages.
        pipelines: Whether to yield meshes with stages of a pipeline, too.
    """
    size = mesh.size
    splits = [n for n in range(2, size) if size % n == 0]
    shapes: list[tuple[tuple[int, ...], tuple[str, ...]]] = [((size,), (DATA,))]
    # The most even mesh first: it differs most from one axis.
    for inner in sorted(splits, key=lambda n: (abs(n - size // n), n)):
        shapes.append(((size // inner, inner), (DATA, TENSOR)))
    if pipelines:
        for stages in [n for n in (*splits, size) if n <= num_blocks]:
            rest = size // stages
            shapes.append(((stages, rest), (PIPE_AXIS, DATA)))
            for inner in (n for n in splits if rest % n == 0 and n < rest):
                shapes.append(((stages, rest // inner, inner), (PIPE_AXIS, DATA, TENSOR)))
    for sizes, axes in shapes:
        same_stages = (PIPE_AXIS in axes) == (PIPE_AXIS in mesh.axes)
        if not (sizes == mesh.mesh_shape and same_stages):
            yield reshaped(mesh, sizes, axes)

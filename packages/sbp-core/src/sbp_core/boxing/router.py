"""Find the collectives and transfers that take a tensor from one (placement, nd-SBP) to another.

Planners and the compiler call `route` for each conversion. A route is a shortest path over the
nd-SBPs of the source placement and the target placement. An edge is one `BoxingStep`: a collective
on one mesh axis or on several merged ones, a local step on one axis, or a `TRANSFER`, which does
anything at once, point to point. Routes are compared by

1. exact bytes over all ranks;
2. if asked for, the bytes between the two placements;
3. transient memory (`boxing.memory`);
4. effort: as few transfers as possible, then collectives, then local steps;
5. the order of enumeration, which is the same in every process.

From a whole tensor on one stage of a pipeline to a whole one on the next, a single transfer sends
as many bytes as a transfer of parts and an all-gather on the other side:

    (B) on 0-7 -> (B) on 8-15      transfer 8 T
    with the fewest between them   slice 0, transfer T, all-gather 7 T

The second route is faster where links between the stages are slow and links inside them fast;
`cost.fastest_route` compares both on a machine (source: Narayanan et al. 2021, section 4.1, the
scatter/gather optimisation).

This module has the entry points, and makes the steps of the answer. In `boxing.routing`,
`canonical_problem` reduces a conversion to what its route depends on, `layout` has the states,
`step_tables` what each step moves, `shortest_path` the search. Prices in seconds are in
`boxing.price`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from sbp_core.boxing.routes import Route
from sbp_core.boxing.routing.canonical_problem import Codes, RoutingProblem, State, pose_problem
from sbp_core.boxing.routing.shortest_path import Edge, shortest_path
from sbp_core.boxing.routing.step_tables import clear_tables, tables
from sbp_core.boxing.slices import itemsize
from sbp_core.boxing.step import BoxingStep
from sbp_core.boxing.step_spec import check_reductions
from sbp_core.placement import Placement
from sbp_core.sbp import NdSbp, check_sbp


def route(
    shape: Sequence[int], dtype: str, source: State, target: State, *, fewest_between: bool = False
) -> Route:
    """Find the best route of a logical tensor: the fewest bytes, then the least memory and effort.

    All nd-SBPs of both placements are searched if they are few enough: up to 700 of each, such as
    5 dims and two reductions on 3 mesh axes. Beyond that, intermediate states split the tensor only
    along dims that an end splits and one more, and are `P` only on axes on which an end is.

    Args:
        shape: Shape of the logical tensor.
        dtype: Its dtype name, such as `float32`.
        source: (placement, nd-SBP) before.
        target: (placement, nd-SBP) after; the placements may share all, some or no ranks.
        fewest_between: Whether, among routes with the fewest bytes, to prefer the ones that move
            the fewest from one placement to the other, and the rest inside of the two.

    Returns:
        The route; without steps if source and target are the same. Cached.

    Raises:
        SbpValueError: no such dtype, an nd-SBP does not fit the shape or mesh, or the dtype has no
            such partial values.
    """
    return _route(tuple(shape), dtype, source, target, fewest_between)


def conversion_bytes(
    shape: Sequence[int], dtype: str, placement: Placement, source: NdSbp, target: NdSbp
) -> int:
    """Return the bytes of the route between two nd-SBPs on one placement, summed over ranks."""
    if source == target:
        return 0
    return route(shape, dtype, (placement, source), (placement, target)).bytes


@lru_cache(maxsize=65536)
def _route(
    shape: tuple[int, ...], dtype: str, source: State, target: State, fewest_between: bool
) -> Route:
    for placement, sbp in (source, target):
        check_sbp(shape, sbp, placement.mesh_shape)
        check_reductions(dtype, sbp)
    if source == target:
        return Route(shape=shape, dtype=dtype, source=source, target=target, steps=())
    problem, naming = pose_problem(shape, source, target)
    steps: list[BoxingStep] = []
    state = source
    for edge, codes in _solve(problem, fewest_between):
        placement = target[0] if edge.crosses else state[0]
        after = (placement, naming.sbp(codes))
        steps.append(
            BoxingStep(
                kind=edge.kind,
                shape=shape,
                dtype=dtype,
                source=state,
                target=after,
                axes=tuple(axis for axis in range(placement.num_axes) if edge.axes >> axis & 1),
                size_bytes=naming.size(edge.elements) * itemsize(dtype),
            )
        )
        state = after
    return Route(shape=shape, dtype=dtype, source=source, target=target, steps=tuple(steps))


@lru_cache(maxsize=65536)
def _solve(problem: RoutingProblem, fewest_between: bool) -> tuple[tuple[Edge, Codes], ...]:
    """Return the best path: each step, and the state after it."""
    steps = tables(*problem.meshes, problem.shared, problem.sizes)
    start, end = steps.numbers(problem.source, problem.target)
    path = shortest_path(steps, start, end, fewest_between=fewest_between)
    return tuple((edge, steps.codes(edge.target)) for edge in path)


def clear_routes(*, meshes: bool = False) -> None:
    """Drop all cached routes, and optionally their meshes; for measurements."""
    _route.cache_clear()
    _solve.cache_clear()
    if meshes:
        clear_tables()

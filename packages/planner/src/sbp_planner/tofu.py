"""The planner `tofu`: ranks are divided again and again, and each part is planned like the whole.

    mesh 8 x 2    factors 2 x 2 x 2 x 2

    for each prime factor f of the ranks, the outermost first:
        split every tensor along one dim over f groups of ranks, or not at all, so that the step
        costs least, given what the factors before have split                                   [s]

Each factor is a separate mesh axis, and each is solved exactly if the tables of the graph are small
enough (`sbp_core.infer`). So a tensor may be split along several dims, each by a product of
factors, which is impossible on the axes of the given mesh. The recursion is fast, but gives up the
optimum: an early factor does not foresee a later one. The paper counts bytes; this planner counts
the time of boxing and operators, by the cluster's links.

Complexity: prime factors x the complexity of one mesh axis.

Source: Wang, Huang, Li, "Supporting very large models using automatic dataflow graph partitioning",
EuroSys 2019, section 5 (recursive search).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from sbp_core.errors import ConfigError
from sbp_core.infer import PIPE_AXIS, PinValue, infer_strategy
from sbp_core.placement import Placement
from sbp_core.planning import PlanContext, SearchedPlanner
from sbp_core.strategy import Strategy
from sbp_planner.meshes import reshaped
from sbp_planner.search_configs import TofuConfig


@dataclass(frozen=True, slots=True)
class TofuPlanner(SearchedPlanner):
    """Plans factor by factor."""

    config: TofuConfig

    def propose(self, context: PlanContext) -> Strategy:
        """Return the strategy that the recursion of the module's docstring gives.

        Raises:
            ConfigError: the mesh has pipeline stages, or a pin is invalid.
            PlanError: the pins cannot be satisfied.
        """
        request = context.request
        mesh = request.mesh
        if PIPE_AXIS in mesh.axes:
            raise ConfigError(
                f"tofu splits tensors over all ranks and has no stages: the mesh has the axis "
                f"{PIPE_AXIS!r}",
                accepted="a mesh without it",
                todo="choose planner=propagate or planner=manual/pipeline, or other cluster.axes",
            )
        factored = by_factors(mesh)
        axes = {name: [one for one in factored.axes if _axis(one) == name] for name in mesh.axes}
        pins = {pattern: _spread(value, axes, mesh) for pattern, value in self.config.pins.items()}
        users = {pattern: _spread(value, axes, mesh) for pattern, value in request.pins.items()}
        sizes = " x ".join(map(str, factored.mesh_shape))
        return infer_strategy(
            replace(request, mesh=factored, pins=users),
            planner="tofu",
            pins=pins,
            report={"explanation": [f"tofu: decided factor by factor, {sizes} groups of ranks"]},
        )


def by_factors(mesh: Placement) -> Placement:
    """Return a mesh whose axes are the prime factors of the axes of another, ranks in order.

    >>> by_factors(Placement.grid((12,), ("data",))).axes
    ('data.0', 'data.1', 'data.2')
    """
    sizes: list[int] = []
    names: list[str] = []
    for size, name in zip(mesh.mesh_shape, mesh.axes, strict=True):
        for at, factor in enumerate(prime_factors(size)):
            sizes.append(factor)
            names.append(f"{name}.{at}")
    return reshaped(mesh, sizes, names)


def prime_factors(size: int) -> Iterator[int]:
    """Yield the prime factors of a size, the largest first; 1 of 1."""
    found: list[int] = []
    factor = 2
    while size > 1:
        while size % factor == 0:
            found.append(factor)
            size //= factor
        factor += 1
    yield from reversed(found or [1])


def _axis(factor: str) -> str:
    return factor.rpartition(".")[0]


def _spread(value: PinValue, axes: Mapping[str, list[str]], mesh: Placement) -> PinValue:
    """Return a pin for the factors of mesh axes, from one for the axes themselves."""
    if isinstance(value, Mapping):
        return {one: of for axis, of in value.items() for one in axes.get(axis, [axis])}
    parts = value.strip().strip("[]").split(",")
    if len(parts) == 1:
        return value
    if len(parts) != len(mesh.axes):
        raise ConfigError(
            f"the pin {value!r} has {len(parts)} entries for a mesh of {len(mesh.axes)} axes",
            accepted=f"one entry for all axes, or one for each of {', '.join(mesh.axes)}",
        )
    named = zip(mesh.axes, parts, strict=True)
    return {one: part.strip() for axis, part in named for one in axes[axis]}

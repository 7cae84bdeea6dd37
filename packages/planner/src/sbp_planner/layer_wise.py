"""Choose how to parallelise each layer of a stage within memory, for the planner `galvatron`.

    minimise    sum_l c_l(w_l) + x_l(w_l, w_l+1)              layers l of the stage             [s]
    such that   sum_l u_l(w_l, n) + max_l v_l(w_l, n) <= the limit                              [B]

c is the time of a layer under a way (`layer_search`), x the time to convert crossing values to the
way of the next layer, u the memory that a layer holds all the time with n micro-batches in flight,
and v the memory that it holds in addition while it works. With a bound on v this is a chain under a
limit, which `sbp_planner.choice.solve_chain` solves exactly over granules of the limit; each bound
is tried. A value from another stage costs only what exceeds a transfer in parts: the cut of the
model already prices the transfer.

Source: Miao et al., "Galvatron", VLDB 2022, section 3.3 (the dynamic program over layers, memory
and ways).
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, pairwise
from math import inf, prod
from typing import NamedTuple

import numpy as np

from sbp_core.cost import boxing_time_s, fastest_route
from sbp_core.errors import SbpError
from sbp_core.graph import TensorType
from sbp_core.infer import FixedDecisions, PinValue, resolve_pins
from sbp_core.placement import Placement
from sbp_core.sbp import NdSbp, S
from sbp_planner.choice import solve_chain
from sbp_planner.choice.problem import Floats
from sbp_planner.layer_search import AXES, LayerParallelism, layer_program, pins_of, ways_of
from sbp_planner.segment_search import SegmentProgram
from sbp_planner.segments import StepSegments
from sbp_planner.stage_search import StageAsked, StageMeshes, StageProgram, on_axes
from sbp_planner.submeshes import link_class, stage_axes, submesh
from sbp_planner.tofu import prime_factors

#: Into how many granules the memory of a rank is divided.
_GRANULES = 2048


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayersProgram(StageProgram):
    """The program of a stage.

    Args:
        layers: For each layer, its number, its way and its program.
    """

    layers: tuple[tuple[int, LayerParallelism, SegmentProgram], ...] = ()


class _Crossing(NamedTuple):
    """A value that crosses between two layers.

    Args:
        name: Name of the value.
        tensor: Its type.
        first, last: The layers between which it is needed.
        is_forward: Whether the first layer makes it.
        times: How often it crosses in a step.
    """

    name: str
    tensor: TensorType
    first: int
    last: int
    is_forward: bool
    times: int


@dataclass(slots=True, kw_only=True, eq=False)
class LayerWise:
    """Chooses a way for each layer of a stage.

    Args:
        segments: The segments of the step, one for each layer.
        mesh: All ranks.
        devices: Number of ranks of every stage.
        pins: The pins of the user.
    """

    segments: StepSegments
    mesh: Placement
    devices: int
    pins: Mapping[str, PinValue]
    factors: tuple[int, ...] = field(init=False)
    ways: tuple[LayerParallelism, ...] = field(init=False)
    _programs: dict[Hashable, SegmentProgram | None] = field(default_factory=dict)
    _found: dict[StageAsked, LayersProgram] = field(default_factory=dict)
    _crossing: dict[int, list[_Crossing]] = field(default_factory=dict)
    _prices: dict[Hashable, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.factors = tuple(prime_factors(self.devices))
        # The outer axis of a way is a product of the first factors.
        self.ways = tuple(way for way in ways_of(self.devices) if self._position(way) is not None)

    def least_s(self, blocks: frozenset[int], devices: int) -> float:
        """Return the work of layers, divided equally among devices, in seconds of a step."""
        return sum(self.segments.least_s(block, devices) for block in blocks)

    def free_s(self, stage: StageAsked) -> float:
        """Return the time of the fastest ways, in seconds of a step; infinite if there are none."""
        return self.program(replace(stage, limit_bytes=inf)).cost_s

    def program(self, stage: StageAsked) -> LayersProgram:
        """Return the fastest ways of the layers of a stage that hold no more than the limit."""
        if stage not in self._found:
            found = None
            if stage.limit_bytes < inf:
                # Without the limit nothing is rounded to granules, and the best often fits.
                found = self.program(replace(stage, limit_bytes=inf))
            if found is None or found.memory_bytes > stage.limit_bytes:
                found = self._solved(stage)
            self._found[stage] = found
        return self._found[stage]

    def _solved(self, stage: StageAsked) -> LayersProgram:
        layers = sorted(stage.blocks)
        programs = [[self._program(stage, layer, way) for way in self.ways] for layer in layers]
        costs = [np.array([inf if p is None else p.cost_s for p in of]) for of in programs]
        costs[0] = costs[0] + self._arrivals(stage, layers[0], before=True)
        costs[-1] = costs[-1] + self._arrivals(stage, layers[-1], before=False)
        edges = [self._switches(stage, one, other) for one, other in pairwise(layers)]
        held = [[_held(p, stage.in_flight) for p in of] for of in programs]
        transients = np.array([[transient for _, transient in of] for of in held])
        steady = [np.array([size for size, _ in of], dtype=np.int64) for of in held]
        best: tuple[float, tuple[int, ...]] | None = None
        # The largest transient is one of these. With each as the upper bound, the rest of the limit
        # is for the memory that all layers hold.
        unlimited = stage.limit_bytes == inf
        for most in [inf] if unlimited else sorted({*transients.ravel().tolist()}, reverse=True):
            room = inf if unlimited else stage.limit_bytes - most
            if room < 0:
                continue
            granule = max(room / _GRANULES, 1.0) if room < inf else 1.0
            chain = solve_chain(
                [np.where(t <= most, c, inf) for c, t in zip(costs, transients, strict=True)],
                [np.ceil(size / granule).astype(np.int64) for size in steady],
                edges,
                None if unlimited else room / granule,
            )
            if chain is not None and (best is None or chain.cost < best[0]):
                best = chain.cost, chain.assignment
        if best is None:
            return LayersProgram(cost_s=inf)
        chosen = tuple(
            (layer, self.ways[at], program)
            for layer, at, of in zip(layers, best[1], programs, strict=True)
            if (program := of[at]) is not None
        )
        usages = [_held(program, stage.in_flight) for _, _, program in chosen]
        return LayersProgram(
            cost_s=best[0],
            memory_bytes=sum(size for size, _ in usages) + max(t for _, t in usages),
            mesh_shape=(self.devices,),
            words=self._words(chosen),
            layers=chosen,
        )

    def _program(
        self, stage: StageAsked, layer: int, way: LayerParallelism
    ) -> SegmentProgram | None:
        segment = self.segments.segment(frozenset((layer,)))
        placement = submesh(self.mesh, stage.start, way.sizes, AXES)
        key = segment.key, way, link_class(self.segments.cluster, placement.rank_list)
        if key not in self._programs:
            graph = self.segments.graph
            pins = resolve_pins(graph, AXES, pins_of(way), on_each(self.pins, AXES))
            self._programs[key] = layer_program(self.segments, segment, placement, way, pins)
        return self._programs[key]

    def _switches(self, stage: StageAsked, one: int, other: int) -> Floats:
        """Return the time to convert the values between two layers, from each way to each way."""
        placement = submesh(self.mesh, stage.start, self.factors, _names(len(self.factors)))
        table = np.zeros((len(self.ways), len(self.ways)))
        for value in self._crossing_at(other):
            if value.first not in stage.blocks or value.last not in stage.blocks:
                continue
            for at, left in enumerate(self.ways):
                for beside, right in enumerate(self.ways):
                    ways = (left, right) if value.is_forward else (right, left)
                    ends = [(placement, self._boundary(way, value.name)) for way in ways]
                    table[at, beside] += value.times * self._price(value.tensor, *ends)
        return table

    def _arrivals(self, stage: StageAsked, layer: int, *, before: bool) -> Floats:
        """Return, by way, the time that values from another stage take beyond their transfer."""
        extra = np.zeros(len(self.ways))
        at = stage.start - self.devices if before else stage.start + self.devices
        if not 0 <= at < self.mesh.size:
            return extra
        axes = _names(len(self.factors))
        here = submesh(self.mesh, stage.start, self.factors, axes)
        there = submesh(self.mesh, at, self.factors, axes)
        for value in self._crossing_at(layer if before else layer + 1):
            if value.is_forward is not before or not value.tensor.shape:
                continue
            parts = NdSbp(*(S(0) for _ in axes))
            base = self._price(value.tensor, (there, parts), (here, parts))
            for number, way in enumerate(self.ways):
                end = here, self._boundary(way, value.name)
                seconds = self._price(value.tensor, (there, parts), end)
                extra[number] += value.times * max(seconds - base, 0.0)
        return extra

    def _crossing_at(self, layer: int) -> list[_Crossing]:
        """Return the values that cross the boundary before a layer, in either direction."""
        if layer in self._crossing:
            return self._crossing[layer]
        graph, blocks = self.segments.graph, self.segments.blocks
        found = self._crossing[layer] = []
        for node in (node for node in graph.nodes if not node.is_host):
            home = blocks.nodes[node.name]
            for value in node.outputs:
                users = [blocks.nodes[user.name] for user in graph.users[value] if not user.is_host]
                first, last = min([home, *users]), max([home, *users])
                if graph.is_tensor(value) and first < layer <= last:
                    times = graph.repetitions[graph.rate_of(value)]
                    tensor, is_forward = graph.tensor(value), home < layer
                    found.append(_Crossing(value, tensor, first, last, is_forward, times))
        return found

    def _boundary(self, way: LayerParallelism, value: str) -> NdSbp:
        outer, inner = way.boundary(self.segments.graph, value)
        position = self._position(way) or 0
        return NdSbp(*(outer if at < position else inner for at in range(len(self.factors))))

    def _position(self, way: LayerParallelism) -> int | None:
        """Return how many of the factors form the outer axis of a way; None if none do."""
        sizes = [prod(self.factors[:at]) for at in range(len(self.factors) + 1)]
        return sizes.index(way.sizes[0]) if way.sizes[0] in sizes else None

    def _price(
        self, tensor: TensorType, source: tuple[Placement, NdSbp], target: tuple[Placement, NdSbp]
    ) -> float:
        if source == target:
            return 0.0
        key = tensor, source, target
        if key not in self._prices:
            try:
                found = fastest_route(
                    tensor.shape, tensor.dtype, source, target, self.segments.cluster
                )
                self._prices[key] = boxing_time_s(found, self.segments.cluster)
            except SbpError:
                self._prices[key] = inf
        return self._prices[key]

    def _words(self, layers: Sequence[tuple[int, LayerParallelism, SegmentProgram]]) -> str:
        """Return the runs of layers of one way: `blocks.0 ... blocks.3 as DP 4, head as TP 4`."""
        words = []
        for way, run in groupby(layers, key=lambda one: one[1]):
            names = [name for layer, _, _ in run for name in self.segments.groups[layer]]
            more = f" ... {names[-1]}" if len(names) > 1 else ""
            words.append(f"{names[0]}{more} {way}")
        if len(words) == 1:
            return "" if self.devices == 1 else str(layers[0][1])
        return ", ".join(words)

    def meshes(self, programs: Sequence[StageProgram]) -> StageMeshes:
        """Return the programs on meshes with as few axes as their ways allow.

        DP 4, TP 4                      one axis of 4
        DP 4, DP 2 x TP 2               2 x 2: DP 4 splits samples on both axes
        """
        ways = [way for program in programs for _, way, _ in _layers(program)]
        cuts = {at for way in ways if (at := self._position(way)) is not None}
        bounds = sorted({0, len(self.factors), *cuts})
        shape = tuple(prod(self.factors[a:b]) for a, b in pairwise(bounds)) or (1,)
        names = stage_axes(self.mesh)
        if len(shape) > len(names):
            names = _names(len(shape))
        parts = []
        for program in programs:
            part = FixedDecisions(nodes={}, storage={})
            for layer, way, solved in _layers(program):
                position = self._position(way) or 0
                axes = [0 if at < position else 1 for at in bounds[:-1]] or [0]
                found = on_axes(solved.kept(self.segments.segment(frozenset((layer,)))), axes)
                part = FixedDecisions(
                    nodes={**part.nodes, **found.nodes}, storage={**part.storage, **found.storage}
                )
            parts.append(part)
        return StageMeshes(
            axes=names[: len(shape)], shapes=(shape,) * len(programs), parts=tuple(parts)
        )


def _layers(program: StageProgram) -> tuple[tuple[int, LayerParallelism, SegmentProgram], ...]:
    assert isinstance(program, LayersProgram), "made here"
    return program.layers


def _names(count: int) -> tuple[str, ...]:
    return tuple(f"ranks.{at}" for at in range(count))


def _held(program: SegmentProgram | None, in_flight: int) -> tuple[int, int]:
    """Return the bytes that a layer holds all the time, and in addition at its peak."""
    if program is None:
        return 0, 0
    steady = int(program.fixed_bytes.min()) + in_flight * int(program.waiting_bytes.max())
    return steady, max(program.memory_bytes(in_flight) - steady, 0)


def on_each(
    pins: Mapping[str, PinValue], axes: Sequence[str]
) -> dict[str, str | Mapping[str, str]]:
    """Return the pins for the one axis of a mesh as pins for each axis into which it is divided."""
    return {
        pattern: value
        if isinstance(value, str)
        else dict.fromkeys(axes, next(iter(value.values()), "free"))
        for pattern, value in pins.items()
    }

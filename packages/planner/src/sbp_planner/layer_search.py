"""Price the ways to parallelise a layer (DP, ZDP, TP, products), for the planner `galvatron`.

It also prices the conversion of activations between two ways. On q ranks, t of which split tensors,
and q / t samples:

    DP 4            samples over all ranks; parameters whole
    ZDP 4           the same; parameters, gradients and optimizer states in shards, gathered on use
    TP 4            every matrix split over all ranks; samples whole
    DP 2 x TP 2     matrices over neighbours, samples over pairs of them; TP 2 x DP 2 the other way

The joint search decides whether a matrix is split by columns or rows, and what follows for the
operators of the layer; no operator may take a matrix whole on a `TP` axis. Where a layer begins and
ends, samples are split on the axes of `DP` and `ZDP` and whole on those of `TP`. So layers fit
together, however each is split inside.

Source: Miao et al., "Galvatron: Efficient Transformer Training over Multiple GPUs Using Automatic
Parallelism", VLDB 2022, section 3.1 (the ways, and their orders); Shoeybi et al., "Megatron-LM",
2019 (the split that the search finds for `TP`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import inf

import numpy as np

from sbp_core.errors import PlanError
from sbp_core.graph import InputKind, LogicalGraph, Phase, Rate
from sbp_core.infer import FORBIDDEN_S, Pins, PinValue
from sbp_core.placement import Placement
from sbp_core.sbp import B, S, Sbp, Split
from sbp_core.signatures import is_view
from sbp_planner.joint.layers import tie
from sbp_planner.segment_search import SegmentProgram, SegmentSearch
from sbp_planner.segments import Segment, StepSegments
from sbp_planner.submeshes import StageRanks

#: The mesh axes of a layer: first over distant ranks, then over neighbours.
AXES = ("outer", "inner")


class Kind(StrEnum):
    """The kind of parallelism along an axis of ranks."""

    DP = "DP"
    ZDP = "ZDP"
    TP = "TP"


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerParallelism:
    """A way to parallelise a layer.

    Args:
        kinds: The kind of each axis, the outer one first; one or two axes.
        sizes: Ranks along each axis.
    """

    kinds: tuple[Kind, Kind]
    sizes: tuple[int, int]

    def __str__(self) -> str:
        parts = [
            f"{kind} {size}" for kind, size in zip(self.kinds, self.sizes, strict=True) if size > 1
        ]
        return " x ".join(parts) or "whole"

    def boundary(self, graph: LogicalGraph, value: str) -> tuple[Sbp, ...]:
        """Return the nd-SBP of a value between layers: samples split on all axes but `TP`."""
        has_samples = bool(graph.tensor(value).shape) and graph.rate_of(value) is Rate.MICRO
        return tuple(B if kind is Kind.TP or not has_samples else S(0) for kind in self.kinds)


def ways_of(num_ranks: int) -> Iterator[LayerParallelism]:
    """Yield the ways on some ranks; their sizes divide the number of ranks.

    >>> [str(way) for way in ways_of(4)]
    ['DP 4', 'ZDP 4', 'TP 4', 'DP 2 x TP 2', 'TP 2 x DP 2', 'ZDP 2 x TP 2', 'TP 2 x ZDP 2']
    """
    if num_ranks == 1:
        yield LayerParallelism(kinds=(Kind.DP, Kind.DP), sizes=(1, 1))
        return
    for kind in Kind:
        yield LayerParallelism(kinds=(kind, kind), sizes=(num_ranks, 1))
    for kind in (Kind.DP, Kind.ZDP):
        for tensor in (n for n in range(2, num_ranks) if num_ranks % n == 0):
            rest = num_ranks // tensor
            yield LayerParallelism(kinds=(kind, Kind.TP), sizes=(rest, tensor))
            yield LayerParallelism(kinds=(Kind.TP, kind), sizes=(tensor, rest))


def pins_of(way: LayerParallelism) -> Mapping[str, PinValue]:
    """Return the pins of a way: the split of samples, and whether states are whole or sharded."""
    data = [a for a, kind in zip(AXES, way.kinds, strict=True) if kind is not Kind.TP]
    sharded = [a for a, kind in zip(AXES, way.kinds, strict=True) if kind is Kind.ZDP]
    split = dict.fromkeys(data, "S(0)")
    whole = dict.fromkeys(data, "B")
    shards = dict.fromkeys(sharded, "S(0)")
    pins: dict[str, PinValue] = {}
    if data:
        pins |= dict.fromkeys(("batch", "use:batch", "activations"), split)
        pins |= {"parameters": shards or whole, "use:parameters": whole}
        pins["optimizer_states"] = shards or whole
    if shards:
        pins |= dict.fromkeys(("gradients", "updates"), shards)
    if tensor := [a for a in AXES if a not in data]:
        pins["batch"] = {**split, **dict.fromkeys(tensor, "B")}
    return pins


class LayerSearch(SegmentSearch):
    """A layer under one way.

    Args:
        segments: The segments of the step.
        segment: The layer.
        placement: Its ranks, with the axes of the way.
        way: The way.
        pins: The resolved pins of the way and the user.

    Raises:
        PlanError: the pins cannot be satisfied.
    """

    #: A way may need signatures that are far from the result of inference for a single layer.
    max_prices = inf

    def __init__(
        self,
        segments: StepSegments,
        segment: Segment,
        placement: Placement,
        way: LayerParallelism,
        pins: Pins,
    ) -> None:
        ranks = StageRanks(own=placement, before=None, after=None)
        super().__init__(segments, segment, ranks, pins)
        self.way = way
        for name in segment.elsewhere:
            # At the boundary its layout is the common one of this way, or the nearest to it.
            entries = self.problem.storage_entries[name]
            wanted = way.boundary(segment.graph, segment.value_of(name))
            alike = [sum(a == b for a, b in zip(of, wanted, strict=True)) for of in entries]
            self._allow(self.problem.storage_variable[name], [n == max(alike) for n in alike])
        tensor_axes = [
            at
            for at, (kind, size) in enumerate(zip(way.kinds, way.sizes, strict=True))
            if kind is Kind.TP and size > 1
        ]
        if tensor_axes:
            self._split_matrices(tensor_axes)
        for variable, table in enumerate(self.problem.unary):
            if table[self.problem.start[variable]] >= FORBIDDEN_S:
                self.problem.start[variable] = int(table.argmin())
        self.step = tie(self.problem)

    def _split_matrices(self, axes: Sequence[int]) -> None:
        """Forbid operators to take a matrix, or a view of one, whole on some axes.

        An operator that can take it in no other way is left alone.
        """
        graph, problem = self.segment.graph, self.problem
        matrices = {
            entry.name
            for entry in graph.inputs
            if entry.kind is InputKind.PARAMETER and len(graph.tensor(entry.name).shape) > 1
        }
        for name in matrices:
            entries = problem.storage_entries[name]
            self._allow(
                problem.storage_variable[name],
                [all(isinstance(of[axis], Split) for axis in axes) for of in entries],
            )
        for node in problem.work.nodes:
            names = problem.work.calls[node.name].tensor_names
            places = [at for at, name in enumerate(names) if name in matrices]
            if not places or node.phase is Phase.OPTIMIZER:
                continue
            if is_view(node.op):
                matrices.update(node.outputs)
            options = problem.parts[node.name]
            self._allow(
                problem.node_variable[node.name],
                [
                    all(isinstance(of[axis].inputs[at], Split) for axis in axes for at in places)
                    for of in options
                ],
            )

    def _allow(self, variable: int, allowed: Sequence[bool]) -> None:
        """Forbid all other values of a variable, unless none would be left."""
        table = self.problem.unary[variable]
        if any(ok and seconds < FORBIDDEN_S for ok, seconds in zip(allowed, table, strict=True)):
            self.problem.unary[variable] = np.where(allowed, table, FORBIDDEN_S)


def layer_program(
    segments: StepSegments,
    segment: Segment,
    placement: Placement,
    way: LayerParallelism,
    pins: Pins,
) -> SegmentProgram | None:
    """Return the fastest program of a layer under a way; None if there is none.

    Args:
        segments: The segments of the step.
        segment: The layer.
        placement: Its ranks, with the axes of the way.
        way: The way.
        pins: The resolved pins of the way and the user.
    """
    try:
        return LayerSearch(segments, segment, placement, way, pins).free()[0]
    except PlanError:
        return None

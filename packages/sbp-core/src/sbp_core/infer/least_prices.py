"""Bound the times of conversions between layouts of a tensor from below, very many at once.

    on 8 x 4 x 2 H100                           price    from below
    (P, P, S(0))       -> (B, B, S(0))          1.94 ms  1.94 ms     float32[14336, 4096]
    (S(2), S(2), S(2)) -> (S(0), S(0), S(0))    2.34 ms  2.32 ms     float32[64, 4096, 4096]
    (B, S(1), B)       -> (B, B, S(1))          5.99 ms  0.39 ms     float32[4096, 14336]

The last bound is loose because it does not model which of several copies is sent.

`Prices` looks for a route for each pair of SBPs. If one more axis makes hundreds of thousands of
pairs, a search that skips most of them (`sbp_planner.joint.near`) only needs a lower bound of each.
The bound comes from `boxing.least_times`: shortest paths between all states at once, found once for
all tensors whose dims are split alike. Bytes are exact.

The bound is 0 s between two placements, for tensors without dims or elements, where a machine's
calibration gives the times, and where the router does not search all states; see
`boxing.routing.canonical_problem`.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from sbp_core.boxing.least_times import LeastTimes
from sbp_core.boxing.routing.canonical_problem import are_searched
from sbp_core.boxing.routing.layout import BROADCAST, MAX, MIN, SUM, encode
from sbp_core.cluster import Cluster
from sbp_core.compile.bucket_price import Companions
from sbp_core.graph.ir import ITEMSIZE
from sbp_core.placement import Placement
from sbp_core.sbp import Sbp

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

#: The SBP of a tensor on the axes.
Entries = tuple[Sbp, ...]

#: The codes of the partial values of states, by the mask of their reductions.
_PARTIALS = {
    0b000: (),
    0b001: (SUM,),
    0b010: (MAX,),
    0b100: (MIN,),
    0b011: (SUM, MAX),
    0b101: (SUM, MIN),
    0b110: (MAX, MIN),
}

#: Number of states with two kinds of partial values above which no table of them is made: few
#: tensors have any, and these tables would take longer than all others.
_MOST_STATES = 216


class PriceTable(Protocol):
    """The source of prices of a search: `Prices`, or `LeastPrices`."""

    def table(
        self,
        shape: tuple[int, ...],
        dtype: str,
        sources: Sequence[tuple[int, Entries]],
        targets: Sequence[tuple[int, Entries]],
        companions: Companions | None = None,
    ) -> Sequence[Sequence[Sequence[float]]]:
        """Return (seconds, bytes) from each source (stage, SBP) to each target (stage, SBP)."""
        ...


class LeastPrices:
    """Lower bounds of prices on all mesh axes of the stages.

    Args:
        stages: Placement of each stage.
        cluster: Rates and links.
    """

    def __init__(self, stages: Sequence[Placement], cluster: Cluster) -> None:
        self._stages, self._cluster = stages, cluster
        self._times: dict[object, LeastTimes] = {}

    def table(
        self,
        shape: tuple[int, ...],
        dtype: str,
        sources: Sequence[tuple[int, Entries]],
        targets: Sequence[tuple[int, Entries]],
        companions: Companions | None = None,
    ) -> Sequence[Sequence[Sequence[float]]]:
        """Return lower bounds of the prices of conversions; see `Prices.table`.

        Args:
            shape: Shape of the tensor.
            dtype: Its dtype name.
            sources: (stage, SBP) of each source.
            targets: (stage, SBP) of each target.
            companions: The tensors that could travel with it; they share its launches.

        Returns:
            By source (rows), target (columns) and, last, seconds and bytes.
        """
        found = np.zeros((len(sources), len(targets), 2))
        if shape and 0 not in shape and self._cluster.calibration is None:
            for stage in {stage for stage, _ in sources}:
                rows = [at for at, (of, _) in enumerate(sources) if of == stage]
                columns = [at for at, (of, _) in enumerate(targets) if of == stage]
                if rows and columns:
                    found[np.ix_(rows, columns)] = self._within(
                        self._stages[stage],
                        (shape, ITEMSIZE[dtype]),
                        _codes([sources[at][1] for at in rows]),
                        _codes([targets[at][1] for at in columns]),
                        is_alone=companions is None,
                    )
        return found  # type: ignore[return-value]  # an array can be indexed like lists

    def _within(
        self,
        mesh: Placement,
        tensor: tuple[tuple[int, ...], int],
        sources: Ints,
        targets: Ints,
        *,
        is_alone: bool,
    ) -> Floats:
        """Return seconds and bytes between states of one placement."""
        shape, itemsize = tensor
        device = self._cluster.device
        seconds, size = np.zeros((2, len(sources), len(targets)))
        before, after = _reductions(sources), _reductions(targets)
        scale = prod(shape) * itemsize
        for kind in np.unique(before).tolist():
            # Partial values that become other partial values are reduced on the way.
            times, names = self._between(mesh, shape, kind), _named(mesh, shape, kind)
            rows, columns = np.flatnonzero(before == kind), np.flatnonzero(after & kind == 0)
            if times is not None and kind:
                least_s = times.reduced_s[_numbers(times, names, sources[rows])]
                seconds[np.ix_(rows, columns)] = scale / times.num_elements * least_s[:, None]
        both = before[:, None] | after
        for kind in np.unique(both).tolist():
            times, at = self._between(mesh, shape, kind), both == kind
            if times is not None:
                rows, columns = np.flatnonzero(at.any(axis=1)), np.flatnonzero(at.any(axis=0))
                part, at = np.ix_(rows, columns), at[np.ix_(rows, columns)]
                names = _named(mesh, shape, kind)
                states = np.ix_(
                    _numbers(times, names, sources[rows]), _numbers(times, names, targets[columns])
                )
                of = scale / times.num_elements
                least_s = times.alone_s(scale) if is_alone else of * times.seconds
                seconds[part] = np.where(at, least_s[states], seconds[part])
                size[part] = np.where(at, of * times.elements[states], size[part])
        differs = (sources[:, None] != targets).any(axis=2)
        if is_alone:
            np.maximum(seconds, np.where(differs, device.launch_s, 0.0), out=seconds)
        if len(shape) > mesh.num_axes and _is_even(mesh, shape):
            # Of equal dims the router tries only the dims that an end splits, and one more for each
            # axis.
            split = np.zeros(seconds.shape, dtype=np.int64)
            for dim in range(len(shape)):
                split += (sources == dim).any(axis=1)[:, None] | (targets == dim).any(axis=1)
            unknown = split + mesh.num_axes < len(shape)
            seconds[unknown], size[unknown] = 0.0, 0.0
        return np.stack([seconds, size], axis=2)

    def _between(self, mesh: Placement, shape: tuple[int, ...], kind: int) -> LeastTimes | None:
        """Return the least times of tensors of a shape; None if they are not known.

        Args:
            mesh: The placement.
            shape: Shape of the tensor.
            kind: Mask of the reductions of the partial values that states may have.
        """
        partial = _PARTIALS.get(kind)
        if partial is None or not are_searched(mesh, len(shape), len(partial)):
            return None
        if len(partial) > 1 and (len(shape) + 1 + len(partial)) ** mesh.num_axes > _MOST_STATES:
            return None
        # Max and min behave alike.
        partial = (SUM, MAX)[: len(partial)] if SUM in partial else (MAX, MIN)[: len(partial)]
        extents = tuple(sorted(_parts(mesh, extent) for extent in shape))
        key = (mesh, extents, partial)
        if key not in self._times:
            self._times[key] = LeastTimes(mesh, self._cluster, extents, partial)
        return self._times[key]


def _parts(mesh: Placement, extent: int) -> int:
    """Return one extent for all extents that every split divides evenly; else the extent itself."""
    return mesh.size if extent and extent % mesh.size == 0 else extent


def _is_even(mesh: Placement, shape: tuple[int, ...]) -> bool:
    return all(_parts(mesh, extent) == mesh.size for extent in shape)


def _codes(ends: Sequence[Entries]) -> Ints:
    """Return the entries as codes, (ends, axes)."""
    return np.array([[encode(entry) for entry in end] for end in ends], dtype=np.int64)


def _reductions(codes: Ints) -> Ints:
    """Return the mask of reductions of each end."""
    masks: Ints = sum(
        ((codes == code).any(axis=1).astype(np.int64) << bit)
        for bit, code in enumerate((SUM, MAX, MIN))
    ) + np.zeros(len(codes), dtype=np.int64)
    return masks


def _named(mesh: Placement, shape: tuple[int, ...], kind: int) -> dict[int, int]:
    """Return the place of each code among the entries of an axis: dims, `B`, partial values.

    Dims are in the order of their representative extents, as in the tables.
    """
    ordered = sorted(range(len(shape)), key=lambda dim: _parts(mesh, shape[dim]))
    names = {dim: place for place, dim in enumerate(ordered)}
    names[BROADCAST] = len(shape)
    partials = _PARTIALS.get(kind, ())
    return names | {code: len(shape) + 1 + at for at, code in enumerate(partials)}


def _numbers(times: LeastTimes, names: dict[int, int], codes: Ints) -> Ints:
    """Return the numbers of states, (ends, axes), in a table; arbitrary for unknown states."""
    base = len(times.layout.entries[0])
    found = np.zeros(len(codes), dtype=np.int64)
    for axis in range(codes.shape[1]):
        places = np.zeros(len(codes), dtype=np.int64)
        for code, place in names.items():
            places[codes[:, axis] == code] = place
        found = found * base + places
    return found

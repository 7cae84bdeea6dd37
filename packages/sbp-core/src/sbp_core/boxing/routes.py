"""`Route`: the steps that convert a tensor between two layouts, with their bytes and times.

The router makes routes; planners price them, and `Route.explain` shows one as a table. Bytes are
from `slices`, what ranks hold from `memory`, times from `price`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from sbp_core.boxing.memory import held_at_once, step_memory_bytes
from sbp_core.boxing.price import step_time, step_time_s
from sbp_core.boxing.slices import itemsize, sent_bytes, uniform_bytes, volume
from sbp_core.boxing.step import BoxingStep, StepKind
from sbp_core.cluster import Cluster
from sbp_core.placement import Placement
from sbp_core.sbp import NdSbp, local_bounds
from sbp_core.units import format_bytes, format_ranges, format_seconds

#: Most ranks whose bytes are listed one by one.
_MOST_LISTED = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """The steps by which a logical tensor gets from one (placement, nd-SBP) to another."""

    shape: tuple[int, ...]
    dtype: str
    source: tuple[Placement, NdSbp]
    target: tuple[Placement, NdSbp]
    steps: tuple[BoxingStep, ...]

    @property
    def bytes(self) -> int:
        """Bytes moved between ranks, summed over ranks and steps."""
        return sum(step.size_bytes for step in self.steps)

    def time_s(self, cluster: Cluster) -> float:
        """Return the predicted time on a machine, in seconds: its steps one after the other."""
        return sum(step_time_s(step, cluster) for step in self.steps)

    def explain(self, cluster: Cluster | None = None) -> str:
        """Return a table: each step, the most that a rank sends and holds in it, and its time.

        Args:
            cluster: The machine that determines the times and algorithms; without, no times.

        Example:
            >>> from sbp_core import NdSbp, Placement, boxing
            >>> mesh = Placement(ranks=[0, 1, 2, 3], axes=("tensor",))
            >>> rows, columns = NdSbp.parse("S(0)"), NdSbp.parse("S(1)")
            >>> route = boxing.route((4096, 1024), "float32", (mesh, rows), (mesh, columns))
            >>> print(route)
            float32[4096, 1024] (S(0)) -> (S(1)): 12.6 MB
              all-to-all on axis 'tensor': (S(0)) -> (S(1)), 12.6 MB
            >>> print(route.explain())
            float32[4096, 1024] (S(0)) -> (S(1)) on tensor=4 (ranks 0-3)
              12.6 MB between ranks
              step  kind        where   from -> to    bytes    a rank sends  and holds
              1     all-to-all  tensor  S(0) -> S(1)  12.6 MB  3.1 MB        14.7 MB
        """
        times = [] if cluster is None else [step_time(step, cluster) for step in self.steps]
        (before, source), (after, target) = self.source, self.target
        headline = f"{self.dtype}{list(self.shape)} ({source})"
        headline += f" on {_mesh(before)}" if before != after else ""
        headline += f" -> ({target}) on {_mesh(after)}"
        if not self.steps:
            return f"{headline}\n  nothing to do"
        total = f"  {format_bytes(self.bytes)} between ranks"
        if cluster is not None:
            total_s = sum(entry.time_s for entry in times)
            total += f", {format_seconds(total_s)} on the links of cluster {cluster.name!r}"
        rows = [["step", "kind", "where", "from -> to", "bytes", "a rank sends", "and holds"]]
        for number, step in enumerate(self.steps, start=1):
            change = f"{step.source[1]} -> {step.target[1]}"
            row = [str(number), step.kind.value, _where(step), change]
            row += [format_bytes(step.size_bytes), sent_by_rank(step)]
            rows.append([*row, format_bytes(held_bytes(step))])
        if times:
            rows[0] += ["time", "how"]
        for row, entry in zip(rows[1:], times, strict=False):
            named = entry.algorithm != "-" and not entry.is_whole_call
            row += [format_seconds(entry.time_s) if entry.time_s else "-"]
            row += [f"{entry.algorithm}, {entry.reason}" if named else entry.reason]
        return "\n".join([headline, total, *_aligned(rows)])

    def __str__(self) -> str:
        """One line for the whole route, then one for each step."""
        what = f"{self.dtype}{list(self.shape)} ({self.source[1]}) -> ({self.target[1]})"
        if not self.steps:
            return f"{what}: nothing to do"
        lines = [f"{what}: {format_bytes(self.bytes)}"]
        return "\n".join([*lines, *(f"  {step}" for step in self.steps)])


def sent_by_rank(step: BoxingStep) -> str:
    """Return the bytes that each rank sends, in one phrase.

    `1.5 MB` if all ranks send the same; a list if they are few; else the least and the most.
    """
    ranks = step.source[0].rank_list
    if step.size_bytes == 0:
        return "-"
    if step.kind is not StepKind.TRANSFER and uniform_bytes(step) is not None:
        n = prod(step.source[0].mesh_shape[axis] for axis in step.axes)
        # Each part of an all-reduce moves 2 (n - 1) times; with even parts of whole elements all
        # ranks send the same: no need to examine every rank.
        if step.size_bytes % (2 * len(ranks) * n) == 0:
            return format_bytes(step.size_bytes / len(ranks))
    sizes = {rank: sent_bytes(step, rank) for rank in ranks}
    shown = {rank: format_bytes(size) for rank, size in sizes.items()}
    if len(set(shown.values())) == 1:
        return shown[ranks[0]]
    if len(ranks) <= _MOST_LISTED:
        return ", ".join(f"{rank}: {size}" for rank, size in shown.items())
    return f"{format_bytes(min(sizes.values()))} to {format_bytes(max(sizes.values()))}"


def held_bytes(step: BoxingStep) -> int:
    """Return the most that any rank holds of the tensor while the step runs, in bytes."""
    if step.kind is StepKind.TRANSFER or uniform_bytes(step) is None:
        return max(step_memory_bytes(step).values())
    placement, _ = step.source
    before, after = (
        volume(local_bounds(step.shape, sbp, placement.mesh_shape, (0,) * placement.num_axes))
        * itemsize(step.dtype)
        for _, sbp in (step.source, step.target)
    )
    moved = step.size_bytes // placement.size
    if step.kind is StepKind.LOCAL:  # data that is dropped, or filled up with zeros
        return held_at_once(
            step.kind, before, after, max(0, before - after), max(0, after - before)
        )
    return held_at_once(step.kind, before, after, moved, moved)


def _where(step: BoxingStep) -> str:
    """Return the mesh axes of a collective, or the ranks of a transfer."""
    (before, _), (after, _) = step.source, step.target
    if step.kind is not StepKind.TRANSFER:
        return ", ".join(before.axes[axis] for axis in step.axes)
    if before.rank_list == after.rank_list:
        return f"ranks {format_ranges(before.rank_list)}"
    return f"ranks {format_ranges(before.rank_list)} -> {format_ranges(after.rank_list)}"


def _mesh(placement: Placement) -> str:
    """Return a mesh in words: `data=2 x tensor=4 (ranks 0-7)`."""
    axes = zip(placement.axes, placement.mesh_shape, strict=True)
    return (
        " x ".join(f"{name}={extent}" for name, extent in axes)
        + f" (ranks {format_ranges(placement.rank_list)})"
    )


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the rows as lines with aligned columns; numbers are aligned to the left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  "
        + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]

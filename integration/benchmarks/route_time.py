"""Time the router: the time to find a route, and how often a greedy route would cost more.

`nox -s benchmarks`, or `python integration/benchmarks/route_time.py [PAIRS]`. For each mesh and
tensor, over PAIRS random pairs of nd-SBPs (4000 by default; 0 for all pairs): S(0), S(1), S(2), B,
P, P(max), P(min) on each axis.

    first    without any cache: the first route in a process for this mesh and these reductions,
             including the time to make tables; over some of the pairs
    cold     with the tables of the mesh, without a cached pair
    cached   the same route again

The lines below the table show first routes on a mesh of 1024 ranks, and the time to price a
transfer between 256 and 256 ranks.

Times are in milliseconds of CPU time of this thread. `greedy` is the fraction of pairs for which
changing one mesh axis after the other (from the last to the first; through `B` if there is no
direct step) moves more bytes, or does not reach the target. Nothing is asserted: machines differ.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from itertools import permutations

from sbp_core.boxing import (
    BoxingStep,
    StepKind,
    clear_routes,
    collective_bytes,
    is_realisable,
    route,
)
from sbp_core.cluster import Cluster, Device, Link
from sbp_core.placement import Placement
from sbp_core.sbp import B, Broadcast, NdSbp, P, Partial, Sbp, all_nd_sbps

REDUCTIONS = ("sum", "max", "min")
DTYPE = "float32"
EVEN, UNEVEN, SHORT = (64, 96, 32), (50, 7, 33), (5, 3, 1)

#: Source mesh, target mesh (None: the same), shape.
CASES: list[tuple[str, Placement, Placement | None, tuple[int, ...]]] = [
    ("1-D 4", Placement.grid((4,)), None, EVEN),
    ("1-D 4, uneven", Placement.grid((4,)), None, UNEVEN),
    ("2-D 2x4", Placement.grid((2, 4)), None, EVEN),
    ("2-D 2x4, uneven", Placement.grid((2, 4)), None, UNEVEN),
    ("3-axis 2x2x2", Placement.grid((2, 2, 2)), None, EVEN),
    ("3-axis 2x2x2, uneven", Placement.grid((2, 2, 2)), None, UNEVEN),
    ("3-axis 2x2x2, short", Placement.grid((2, 2, 2)), None, SHORT),
    ("3-axis 2x2x2, 2 dims", Placement.grid((2, 2, 2)), None, UNEVEN[:2]),
    ("3-axis 2x2x3, uneven", Placement.grid((2, 2, 3)), None, UNEVEN),
    ("3-axis 4x2x2, uneven", Placement.grid((4, 2, 2)), None, UNEVEN),
    ("3-axis 2x4x4", Placement.grid((2, 4, 4)), None, EVEN),
    ("3-axis 2x4x4, uneven", Placement.grid((2, 4, 4)), None, UNEVEN),
    ("2x4 to 4x2", Placement.grid((2, 4)), Placement.grid((4, 2)), EVEN),
    ("2x2 to others", Placement.grid((2, 2)), Placement([[4, 5], [6, 7]]), EVEN),
]

#: Number of pairs for first routes, and number of pairs on the large mesh.
NUM_FIRST, NUM_LARGE = 100, 20

LARGE = Placement.grid((8, 8, 16))
HERE, THERE = (
    Placement([list(range(first + row, first + row + 16)) for row in range(0, 256, 16)])
    for first in (0, 256)
)
CROSSINGS = [("S(0), S(1)", "S(1), S(0)"), ("S(0), S(0)", "S(1), S(1)"), ("P, S(0)", "S(1), B")]

MACHINE = Cluster(
    name="any",
    num_devices=512,
    devices_per_node=8,
    device=Device(memory_bytes=1, flop_per_s={DTYPE: 1.0}, memory_bytes_per_s=1.0, launch_s=0.0),
    intra_node=Link(latency_s=1e-6, bytes_per_s=1e11),
    inter_node=Link(latency_s=1e-5, bytes_per_s=1e10),
)

State = tuple[Placement, NdSbp]


def find_ms(shape: tuple[int, ...], source: State, target: State) -> float:
    """Return the time of one call, in milliseconds."""
    start = time.thread_time()
    route(shape, DTYPE, source, target)
    return (time.thread_time() - start) * 1e3


def first_ms(shape: tuple[int, ...], pairs: list[tuple[State, State]]) -> list[float]:
    """Return the times of routes with empty caches of pairs and meshes."""
    times: list[float] = []
    for source, target in pairs:
        clear_routes(meshes=True)
        times.append(find_ms(shape, source, target))
    return times


def single_step(
    shape: tuple[int, ...], placement: Placement, sbp: NdSbp, axis: int, entry: Sbp
) -> int | None:
    """Return the bytes of the step that changes one mesh axis, or None if there is none."""
    before = sbp[axis]
    if isinstance(before, Partial):
        inner = {other for other in sbp[axis:] if isinstance(other, Partial)}
        kind = StepKind.ALL_REDUCE if isinstance(entry, Broadcast) else StepKind.REDUCE_SCATTER
        if isinstance(entry, Partial) or inner != {before}:
            return None
    elif isinstance(before, Broadcast) or entry == P:
        kind = StepKind.LOCAL
    elif isinstance(entry, Partial):
        return None
    else:
        kind = StepKind.ALL_GATHER if isinstance(entry, Broadcast) else StepKind.ALL_TO_ALL
    step = BoxingStep(
        kind=kind,
        shape=shape,
        dtype=DTYPE,
        source=(placement, sbp),
        target=(placement, sbp.replace(axis, entry)),
        axes=(axis,),
        size_bytes=0,
    )
    return collective_bytes(step) if is_realisable(step) else None


def greedy_bytes(
    shape: tuple[int, ...], placement: Placement, source: NdSbp, target: NdSbp
) -> int | None:
    """Return the bytes of changing axis after axis, or None if the target is not reached."""
    total, sbp = 0, source
    for direct in (True, False):
        axes = range(placement.num_axes)
        for axis in reversed(axes) if direct else axes:
            for entry in (target[axis], B) if direct else (target[axis],):
                if sbp[axis] == target[axis]:
                    break
                moved = single_step(shape, placement, sbp, axis, entry)
                if moved is not None:
                    total, sbp = total + moved, sbp.replace(axis, entry)
                    break
    return total if sbp == target else None


def measure(
    name: str, before: Placement, after: Placement | None, shape: tuple[int, ...], most: int
) -> None:
    """Print one line of the table."""
    draw = random.Random(0)
    sources = [(before, sbp) for sbp in all_nd_sbps(len(shape), before.num_axes, REDUCTIONS)]
    if after is None:
        pairs = list(permutations(sources, 2))
    else:
        targets = [(after, sbp) for sbp in all_nd_sbps(len(shape), after.num_axes, REDUCTIONS)]
        pairs = [(source, target) for source in sources for target in targets]
    if most and len(pairs) > most:
        pairs = draw.sample(pairs, most)
    first = first_ms(shape, draw.sample(pairs, min(NUM_FIRST, len(pairs))))
    for source, target in pairs:
        route(shape, DTYPE, source, target)
    cold: list[float] = []
    cached: list[float] = []
    for source, target in pairs:
        clear_routes()
        cold.append(find_ms(shape, source, target))
        cached.append(find_ms(shape, source, target))
    cold.sort()
    worse = "-"
    if after is None:
        greedy = [
            greedy_bytes(shape, before, source[1], target[1]) for source, target in pairs[:1000]
        ]
        best = [route(shape, DTYPE, *pair).bytes for pair in pairs[:1000]]
        lost = sum(one is None or one > two for one, two in zip(greedy, best, strict=True))
        worse = f"{lost / len(greedy):.0%}"
    print(
        f"{name:22}{len(pairs):8}{statistics.median(first):9.2f}{max(first):9.2f}"
        f"{statistics.median(cold):9.3f}{cold[int(0.99 * len(cold))]:9.3f}{cold[-1]:9.3f}"
        f"{statistics.median(cached):9.4f}{worse:>9}",
        flush=True,
    )


def measure_large() -> None:
    """Print times of first routes on a large mesh, and of pricing large transfers."""
    draw = random.Random(0)
    for name, shape in (("even", (4096, 4096)), ("uneven", UNEVEN), ("short", SHORT)):
        states = [(LARGE, sbp) for sbp in all_nd_sbps(len(shape), LARGE.num_axes, REDUCTIONS)]
        times = first_ms(
            shape, [(draw.choice(states), draw.choice(states)) for _ in range(NUM_LARGE)]
        )
        median, worst = statistics.median(times), max(times)
        print(f"first on 8x8x16, {name:12}{median:9.2f}{worst:9.2f}", flush=True)
    for shape in ((4096, 4096), (1000, 77)):
        for before, after in CROSSINGS:
            found = route(shape, DTYPE, (HERE, NdSbp.parse(before)), (THERE, NdSbp.parse(after)))
            start = time.thread_time()
            found.time_s(MACHINE)
            took = (time.thread_time() - start) * 1e3
            what = f"({before}) -> ({after}) of {shape}"
            print(f"price of 256 -> 256, {what:42}{took:9.2f}", flush=True)


def main() -> None:
    most = int(sys.argv[1]) if len(sys.argv) > 1 else 4000
    print(
        f"{'milliseconds':22}{'pairs':>8}{'first':>9}{'worst':>9}"
        f"{'cold':>9}{'p99':>9}{'worst':>9}{'cached':>9}{'greedy':>9}"
    )
    for name, before, after, shape in CASES:
        measure(name, before, after, shape, most)
    measure_large()


if __name__ == "__main__":
    main()

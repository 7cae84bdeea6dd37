"""Compare predicted and measured time of a step, in cells of the matrix of models and layouts.

    python integration/benchmarks/prediction_error.py [ROUNDS] [--all] [--cluster FILE ...]

All layouts of a model are compiled for one machine, started on the actor runtime with ranks as
threads, and stepped in turns, so that what else runs on the machine slows all of them. Measured is
the median of ROUNDS steps after a warm-up; predicted is what `simulate` says of the plan, as the
trainer prints it. The machine is the cluster profile `local`, with declared rates, or what
`sbp-calibrate` has measured: of several files, the one with the fewest ranks that suffice.

Prints for each cell both times and the error, predicted / measured - 1, so that -50 % is half of
what was measured; then the median of the errors' absolute values; and for each model how far the
order of its layouts by prediction is that by measurement, as Kendall's rank correlation: of all
pairs of layouts the part in the right order less the part in the wrong one, ties counting as
neither. 1 is the same order, 0 says nothing, -1 is the reverse. Nothing is asserted.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import combinations
from math import prod
from pathlib import Path
from statistics import median, quantiles
from typing import Any

# The matrix is a package of `integration`.
sys.path.insert(0, str(Path(__file__).parent.parent))

from models.layouts import LAYOUTS, Layout
from models.programs import PROGRAMS
from models.trial import LEARNING_RATE, TOLERANCES, batches, compiled, make, storage_dtype
from sbp_core import Cluster
from sbp_core.compile import PhysicalPlan
from sbp_core.plugins import PluginRegistry, discover
from sbp_core.simulate import simulate
from sbp_core.units import format_seconds
from sbp_torch.capture import initial_states

#: The models that run unless all are asked for: of each kind one.
FEW_PROGRAMS = ("gpt2", "vit", "resnet18", "dlrm", "moe")

WARM_UP_STEPS = 3


@dataclass(frozen=True, kw_only=True)
class Cell:
    """Times of one program under one layout, in seconds.

    Args:
        layout: Its name.
        predicted_s: Of a step.
        step_s: Measured, of each step after the warm-up.
    """

    layout: str
    predicted_s: float
    step_s: Sequence[float]

    @property
    def measured_s(self) -> float:
        return median(self.step_s)

    @property
    def error(self) -> float:
        return self.predicted_s / self.measured_s - 1

    @property
    def spread(self) -> float:
        """The middle half of the measured times, relative to their median."""
        first, _, third = quantiles(self.step_s, n=4)
        return (third - first) / self.measured_s


def machine(registry: PluginRegistry, layout: Layout, files: Sequence[Path]) -> Cluster:
    """Return what a layout is planned for.

    Args:
        registry: Knows the cluster profiles.
        layout: Has the mesh.
        files: Cluster files; without any, the rates are declared.
    """
    settings: dict[str, Any] = {"mesh": layout.mesh, "axes": layout.axes}
    ranks = prod(layout.mesh)
    if files:
        sizes = {file: Cluster.load(file).num_devices for file in files}
        # If none suffices, the profile itself says what to do.
        settings["file"] = str(min(files, key=lambda file: (sizes[file] < ranks, sizes[file])))
    profile = "measured" if files else "local"
    return registry.make("cluster", profile, settings)(ranks)  # type: ignore[operator]


def measure(
    registry: Any, name: str, plans: Mapping[str, PhysicalPlan], dtype_name: str, rounds: int
) -> Mapping[str, Sequence[float]]:
    """Return the times of the steps of each layout of a program, stepped in turns."""
    program, dtype = PROGRAMS[name], storage_dtype(dtype_name)
    step_s: dict[str, list[float]] = {layout: [] for layout in plans}
    with ExitStack() as stack:
        sessions = {}
        for layout, plan in plans.items():
            states = initial_states(*make(program, dtype))
            runtime, backend = registry.make("runtime", "actor"), registry.make("boxing", "local")
            sessions[layout] = stack.enter_context(runtime.start(plan, states, backend))
        for index, batch in enumerate(batches(program, WARM_UP_STEPS + rounds, dtype)):
            scalars = {"lr": LEARNING_RATE, "seed": 0, "step": index}
            for layout, session in sessions.items():
                began = time.perf_counter()
                session.step(batch, scalars).loss.item()
                step_s[layout].append(time.perf_counter() - began)
    return {layout: times[WARM_UP_STEPS:] for layout, times in step_s.items()}


def kendall(cells: Sequence[Cell]) -> float:
    """Return the rank correlation of predicted and measured times: Kendall's tau a."""
    products = [
        (one.predicted_s - other.predicted_s) * (one.measured_s - other.measured_s)
        for one, other in combinations(cells, 2)
    ]
    return sum((product > 0) - (product < 0) for product in products) / len(products)


def order_line(name: str, cells: Sequence[Cell]) -> str:
    """Return what came of the order of a model's layouts."""
    tau = kendall(cells)
    chosen = min(cells, key=lambda cell: cell.predicted_s)
    fastest = min(cells, key=lambda cell: cell.measured_s)
    return (
        f"{name:12} {tau:+.2f} over {len(cells)} layouts: {'the same' if tau == 1 else 'another'} "
        f"order; predicted fastest {chosen.layout}, which takes "
        f"{chosen.measured_s / fastest.measured_s:.2f} of the fastest, {fastest.layout}"
    )


def main() -> None:
    options = _options()
    registry = discover(strict=True)
    names = list(PROGRAMS) if options.all else FEW_PROGRAMS
    found: dict[str, Sequence[Cell]] = {}
    began = time.perf_counter()
    _print_machine(options.cluster)
    heads = ("predicted", "measured", "spread", "error")
    print("model        layout     {:>10} {:>10} {:>7} {:>7}".format(*heads))
    for name in names:
        plans = {
            layout: compiled(name, way, options.dtype, machine(registry, way, options.cluster))
            for layout, way in LAYOUTS.items()
            if not way.fits(PROGRAMS[name])
        }
        times = measure(registry, name, plans, options.dtype, options.rounds)
        found[name] = [
            Cell(layout=layout, predicted_s=simulate(plan).step_s, step_s=times[layout])
            for layout, plan in plans.items()
        ]
        for cell in found[name]:
            print(
                f"{name:12} {cell.layout:10} {format_seconds(cell.predicted_s):>10} "
                f"{format_seconds(cell.measured_s):>10} {cell.spread:7.0%} {cell.error:+7.0%}",
                flush=True,
            )
    cells = [cell for of in found.values() for cell in of]
    error = median(abs(cell.error) for cell in cells)
    print("order of layouts, Kendall's rank correlation:")
    for name, of in found.items():
        print(order_line(name, of))
    _print_machine(options.cluster)
    print(
        f"median error {error:.0%} of {len(cells)} cells, median correlation "
        f"{median(map(kendall, found.values())):+.2f} of {len(found)} models, "
        f"in {time.perf_counter() - began:.0f} s"
    )


def _print_machine(files: Sequence[Path]) -> None:
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    rates = ", ".join(map(str, files)) or "declared, cluster=local"
    print(f"rates: {rates}; {os.cpu_count()} cores, load of the last 1, 5 and 15 minutes: {load}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rounds", type=int, nargs="?", default=30, help="steps of each cell, >= 2")
    parser.add_argument("--all", action="store_true", help="all models, not five of them")
    parser.add_argument("--cluster", type=Path, nargs="+", default=[], help="of sbp-calibrate")
    parser.add_argument("--dtype", choices=TOLERANCES, default="float32")
    options = parser.parse_args()
    if options.rounds < 2:
        parser.error(f"{options.rounds} rounds have no spread: at least 2")
    return options


if __name__ == "__main__":
    main()

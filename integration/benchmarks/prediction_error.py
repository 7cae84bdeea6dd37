"""Compare predicted and measured time of a step, in cells of the matrix of models and layouts.

    python integration/benchmarks/prediction_error.py [ROUNDS] [--all] [--cluster FILE ...]
        [--operators own | others]

All layouts of a model are compiled for one machine, started on the actor runtime with ranks as
threads, and stepped in turns, so that what else runs on the machine slows all of them. Measured is
the median of ROUNDS steps after a warm-up; predicted is what `simulate` says of the plan, as the
trainer prints it. The machine is the cluster profile `local`, with declared rates, or what
`sbp-calibrate` has measured: of several files, the one with the fewest ranks that suffice. With
`--operators` the times of operators are added to it that were measured before, in traced steps of
the same plan, or of the other layouts with as many ranks, which leave a rank some of the same
calls.

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
from dataclasses import dataclass, replace
from itertools import combinations
from math import prod
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch

# The matrix is a package of `integration`.
sys.path.insert(0, str(Path(__file__).parent.parent))

from models.layouts import LAYOUTS, Layout
from models.programs import PROGRAMS, Program
from models.trial import LEARNING_RATE, TOLERANCES, batches, make, planned, storage_dtype
from sbp_core import Cluster
from sbp_core.compile import CompileOptions, PhysicalPlan, compile_plan
from sbp_core.graph import LogicalGraph
from sbp_core.operators import MeasuredOperator
from sbp_core.plugins import PluginRegistry, discover
from sbp_core.runtime import Session, Trace, measured_operators
from sbp_core.simulate import simulate
from sbp_core.strategy import Strategy
from sbp_core.units import format_seconds
from sbp_torch.capture import initial_states

#: The models that run unless all are asked for: of each kind one.
FEW_PROGRAMS = ("gpt2", "vit", "resnet18", "dlrm", "moe")

WARM_UP_STEPS = 3

#: Steps in which operators are measured.
TRACED_STEPS = 10


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """One program under one layout: captured, planned for a machine, and compiled."""

    graph: LogicalGraph
    strategy: Strategy
    machine: Cluster
    plan: PhysicalPlan

    @classmethod
    def of(cls, name: str, layout: Layout, dtype_name: str, machine: Cluster) -> Prepared:
        """Prepare a layout of a program."""
        graph, strategy = planned(name, layout, dtype_name, machine)
        plan = compile_plan(graph, strategy, CompileOptions(cluster=machine))
        return cls(graph=graph, strategy=strategy, machine=machine, plan=plan)

    def predicted_s(self, operators: Sequence[MeasuredOperator]) -> float:
        """Return the predicted time of a step, with these times of operators."""
        device = replace(self.machine.device, operators=tuple(operators))
        options = CompileOptions(cluster=replace(self.machine, device=device))
        return simulate(compile_plan(self.graph, self.strategy, options)).step_s


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
        sessions = {
            layout: stack.enter_context(started(registry, program, plan, dtype))
            for layout, plan in plans.items()
        }
        for index, batch in enumerate(batches(program, WARM_UP_STEPS + rounds, dtype)):
            scalars = {"lr": LEARNING_RATE, "seed": 0, "step": index}
            for layout, session in sessions.items():
                began = time.perf_counter()
                session.step(batch, scalars).loss.item()
                step_s[layout].append(time.perf_counter() - began)
    return {layout: times[WARM_UP_STEPS:] for layout, times in step_s.items()}


def started(registry: Any, program: Program, plan: PhysicalPlan, dtype: torch.dtype) -> Session:
    """Return a session of a plan, whose ranks are threads."""
    runtime, backend = registry.make("runtime", "actor"), registry.make("boxing", "local")
    session: Session = runtime.start(plan, initial_states(*make(program, dtype)), backend)
    return session


def operators_of(
    registry: Any, name: str, prepared: Prepared, dtype_name: str
) -> tuple[MeasuredOperator, ...]:
    """Return what the operators take in traced steps of a layout of a program."""
    program, dtype = PROGRAMS[name], storage_dtype(dtype_name)
    trace = Trace(operators=True)
    with started(registry, program, prepared.plan, dtype) as session:
        for index, batch in enumerate(batches(program, WARM_UP_STEPS + TRACED_STEPS, dtype)):
            session.trace = trace if index >= WARM_UP_STEPS else None
            session.step(batch, {"lr": LEARNING_RATE, "seed": 0, "step": index}).loss.item()
    return measured_operators(prepared.graph, prepared.strategy, trace.spans)


def known_operators(
    which: str, layout: str, found: Mapping[str, Sequence[MeasuredOperator]]
) -> Sequence[MeasuredOperator]:
    """Return the operators that are known when a layout is predicted: its own, or of others."""
    if which == "own":
        return found[layout]
    ranks = prod(LAYOUTS[layout].mesh)
    others = [
        one
        for other, of in found.items()
        if other != layout and prod(LAYOUTS[other].mesh) == ranks
        for one in of
    ]
    return list({one.call: one for one in others}.values())


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
    _print_machine(options)
    heads = ("predicted", "measured", "spread", "error")
    print("model        layout     {:>10} {:>10} {:>7} {:>7}".format(*heads))
    for name in names:
        prepared = {
            layout: Prepared.of(name, way, options.dtype, machine(registry, way, options.cluster))
            for layout, way in LAYOUTS.items()
            if not way.fits(PROGRAMS[name])
        }
        predicted_s = {layout: simulate(one.plan).step_s for layout, one in prepared.items()}
        if options.operators:
            operators = {
                layout: operators_of(registry, name, one, options.dtype)
                for layout, one in prepared.items()
            }
            for layout, one in prepared.items():
                known = known_operators(options.operators, layout, operators)
                predicted_s[layout] = one.predicted_s(known)
        plans = {layout: one.plan for layout, one in prepared.items()}
        times = measure(registry, name, plans, options.dtype, options.rounds)
        found[name] = [
            Cell(layout=layout, predicted_s=predicted_s[layout], step_s=times[layout])
            for layout in plans
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
    _print_machine(options)
    print(
        f"median error {error:.0%} of {len(cells)} cells, median correlation "
        f"{median(map(kendall, found.values())):+.2f} of {len(found)} models, "
        f"in {time.perf_counter() - began:.0f} s"
    )


def _print_machine(options: argparse.Namespace) -> None:
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    rates = ", ".join(map(str, options.cluster)) or "declared, cluster=local"
    if options.operators:
        which = "the same plan" if options.operators == "own" else "other layouts"
        rates += f"; operators measured in steps of {which}"
    print(f"rates: {rates}; {os.cpu_count()} cores, load of the last 1, 5 and 15 minutes: {load}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rounds", type=int, nargs="?", default=30, help="steps of each cell, >= 2")
    parser.add_argument("--all", action="store_true", help="all models, not five of them")
    parser.add_argument("--cluster", type=Path, nargs="+", default=[], help="of sbp-calibrate")
    parser.add_argument("--operators", choices=("own", "others"), default="")
    parser.add_argument("--dtype", choices=TOLERANCES, default="float32")
    options = parser.parse_args()
    if options.rounds < 2:
        parser.error(f"{options.rounds} rounds have no spread: at least 2")
    return options


if __name__ == "__main__":
    main()

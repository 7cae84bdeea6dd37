"""Cells of the matrix of models and layouts: compiled, run in turns, with predicted times."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from statistics import median, quantiles
from typing import Any, Protocol

import torch

# The matrix is a package of `integration`.
sys.path.insert(0, str(Path(__file__).parent.parent))

from models.layouts import LAYOUTS, Layout
from models.programs import PROGRAMS, Program
from models.trial import LEARNING_RATE, batches, make, planned, storage_dtype
from sbp_core import Cluster
from sbp_core.boxing import BoxingBackend
from sbp_core.compile import CompileOptions, PhysicalPlan, compile_plan
from sbp_core.graph import LogicalGraph
from sbp_core.operators import MeasuredOperator
from sbp_core.plugins import PluginRegistry
from sbp_core.runtime import Session, Trace, measured_operators
from sbp_core.simulation import simulate
from sbp_core.strategy import Strategy
from sbp_torch.graph_capture import initial_states

WARM_UP_STEPS = 3

#: Steps in which operators are measured.
TRACED_STEPS = 10


class Ranks(Protocol):
    """All ranks, of which this process has one, or all as threads."""

    #: The ranks of this process; the first of all ranks reports.
    rank: int

    def backend(self, name: str) -> BoxingBackend:
        """Return a backend that is not yet open, for a session of this name."""

    def barrier(self) -> None:
        """Wait for all."""

    def gathered(self, value: Any) -> Sequence[Any]:
        """Return the value of each process, in rank order."""


@dataclass(frozen=True, kw_only=True)
class Threads:
    """All ranks in this process."""

    registry: Any
    rank: int = 0

    def backend(self, name: str) -> BoxingBackend:
        made: BoxingBackend = self.registry.make("boxing", "local")
        return made

    def barrier(self) -> None:
        """Do nothing: there is no other process."""

    def gathered(self, value: Any) -> Sequence[Any]:
        return [value]


@dataclass(frozen=True, kw_only=True)
class Trial:
    """The settings of a program's cells.

    Args:
        rounds: Steps of each cell, at least 2.
        dtype: A dtype of the matrix.
        clusters: Files of sbp-calibrate; without any, rates are declared.
        operators: The measured operators that a prediction uses: `own` of the plan, those of
            `others`, or none.
        num_ranks: Only layouts with this number of ranks; None for all.
        boxing: The boxing backend, which a file of sbp-calibrate has to contain.
    """

    rounds: int
    dtype: str
    clusters: Sequence[str] = ()
    operators: str = ""
    num_ranks: int | None = None
    boxing: str = "local"

    def layouts(self, name: str) -> Mapping[str, Layout]:
        """Return the layouts that a program runs in."""
        return {
            layout: way
            for layout, way in LAYOUTS.items()
            if not way.fits(PROGRAMS[name]) and self.num_ranks in (None, prod(way.mesh))
        }


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
        predicted_s: Predicted time of a step.
        step_s: Measured time of each step after the warm-up.
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


def machine(registry: PluginRegistry, layout: Layout, trial: Trial) -> Cluster:
    """Return the cluster for which a layout is planned.

    Args:
        registry: Has the cluster profiles.
        layout: Has the mesh.
        trial: Has the cluster files; without any, rates are declared.
    """
    files = trial.clusters
    settings: dict[str, Any] = {"mesh": layout.mesh, "axes": layout.axes}
    ranks = prod(layout.mesh)
    if files:
        sizes = {file: Cluster.load(Path(file)).num_devices for file in files}
        # If no file has enough ranks, the error of the profile names the remedy.
        settings["file"] = min(files, key=lambda file: (sizes[file] < ranks, sizes[file]))
        settings["backend"] = trial.boxing
    profile = "measured" if files else "local"
    return registry.make("cluster", profile, settings)(ranks)  # type: ignore[operator]


def cells_of(registry: Any, ranks: Ranks, name: str, trial: Trial) -> list[Cell]:
    """Return the cells of a program, equal in all processes."""
    prepared = {
        layout: Prepared.of(name, way, trial.dtype, machine(registry, way, trial))
        for layout, way in trial.layouts(name).items()
    }
    predicted_s = {layout: simulate(one.plan).step_s for layout, one in prepared.items()}
    if trial.operators:
        operators = {
            layout: operators_of(registry, ranks, name, layout, one, trial.dtype)
            for layout, one in prepared.items()
        }
        for layout, one in prepared.items():
            predicted_s[layout] = one.predicted_s(
                known_operators(trial.operators, layout, operators)
            )
    plans = {layout: one.plan for layout, one in prepared.items()}
    times = measure(registry, ranks, name, plans, trial)
    return [
        Cell(layout=layout, predicted_s=predicted_s[layout], step_s=times[layout])
        for layout in plans
    ]


def measure(
    registry: Any, ranks: Ranks, name: str, plans: Mapping[str, PhysicalPlan], trial: Trial
) -> Mapping[str, Sequence[float]]:
    """Return the times of the steps of each layout of a program, run in turns.

    The time of a step on processes is that of the slowest one; all begin together.
    """
    program, dtype = PROGRAMS[name], storage_dtype(trial.dtype)
    step_s: dict[str, list[float]] = {layout: [] for layout in plans}
    with ExitStack() as stack:
        sessions = {
            layout: stack.enter_context(
                started(registry, ranks.backend(layout), program, plan, dtype)
            )
            for layout, plan in plans.items()
        }
        for index, batch in enumerate(batches(program, WARM_UP_STEPS + trial.rounds, dtype)):
            scalars = {"lr": LEARNING_RATE, "seed": 0, "step": index}
            for layout, session in sessions.items():
                ranks.barrier()
                began = time.perf_counter()
                session.step(batch, scalars).loss.item()
                step_s[layout].append(time.perf_counter() - began)
    slowest = {
        layout: [max(times) for times in zip(*ranks.gathered(own), strict=True)]
        for layout, own in step_s.items()
    }
    return {layout: times[WARM_UP_STEPS:] for layout, times in slowest.items()}


def started(
    registry: Any,
    backend: BoxingBackend,
    program: Program,
    plan: PhysicalPlan,
    dtype: torch.dtype,
) -> Session:
    """Return a session of a plan."""
    runtime = registry.make("runtime", "actor")
    session: Session = runtime.start(plan, initial_states(*make(program, dtype)), backend)
    return session


def operators_of(
    registry: Any, ranks: Ranks, name: str, layout: str, prepared: Prepared, dtype_name: str
) -> tuple[MeasuredOperator, ...]:
    """Return the times of operators in traced steps of a layout of a program."""
    program, dtype = PROGRAMS[name], storage_dtype(dtype_name)
    trace = Trace(operators=True)
    backend = ranks.backend(f"{layout} traced")
    with started(registry, backend, program, prepared.plan, dtype) as session:
        for index, batch in enumerate(batches(program, WARM_UP_STEPS + TRACED_STEPS, dtype)):
            session.trace = trace if index >= WARM_UP_STEPS else None
            session.step(batch, {"lr": LEARNING_RATE, "seed": 0, "step": index}).loss.item()
    spans = [span for found in ranks.gathered(list(trace.spans)) for span in found]
    return measured_operators(prepared.graph, prepared.strategy, spans)


def known_operators(
    which: str, layout: str, found: Mapping[str, Sequence[MeasuredOperator]]
) -> Sequence[MeasuredOperator]:
    """Return the measured operators for the prediction of a layout: its own, or of others."""
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

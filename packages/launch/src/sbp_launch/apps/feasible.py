"""Search for settings with which a step fits into memory, after its plan did not fit.

    trainer.micro_batches=4           18.2 MB, 310 ms a step
    planner=manual/zero               not enough: 49.7 MB
    planner=manual/zero compile.passes.recompute.memory_bytes=21.0MB
                                      19.7 MB, 350 ms a step

Changes of one setting are listed before changes of two. For each, the step is planned and compiled,
and its exact memory is compared with the limit, so the listed settings do fit. Overrides are added
to the command line and composed again, so they can be typed as listed. A budget of recomputation is
derived from the plan that did not fit: with R bytes at the peak that are not activations, L - R of
the limit L are left on each of N ranks; the pass counts whole tensors, so its budget is N (L - R).

A setting is tried only if that is likely to end in time, judged by the planning time of the plan
that did not fit. For large steps, which take long to plan, nothing is tried, and the message names
planners that respect the memory limit themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from rich.console import Console

from sbp_core.errors import ConfigError, MemoryLimitError, SbpError
from sbp_core.infer import PIPE_AXIS
from sbp_core.memory import MemoryKind, MemoryReport
from sbp_core.passes import least_recompute_budget
from sbp_core.plugins import PluginRegistry
from sbp_core.units import format_bytes, format_seconds
from sbp_launch.explaining.plan_figures import fullest
from sbp_launch.planning.flow import Planned
from sbp_launch.settings.catalog import make_catalog
from sbp_launch.settings.compose import compose, read
from sbp_launch.settings.config import Application, ComposedConfig, RunConfig, key_of
from sbp_launch.step.step_planner import StepPlanner
from sbp_launch.trainer.planned import plan_choice, planner_of
from sbp_launch.trainer.planning_only import PlanningOnly
from sbp_launch.trainer.run_program import make_program

#: The search ends after this number of results, or before an attempt that would exceed the time.
MOST_FOUND, MOST_S = 3, 15.0

#: Numbers of micro-batches that are tried, from the next larger one.
_MOST_COUNTS = 3

#: Most settings that are listed although they do not fit, the nearest first.
_MOST_SHORT = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """The settings of a run that may be changed, and its limits.

    Args:
        limit_bytes: Memory of a rank.
        batch_size: Samples of a step.
        micro_batches: Number of micro-batches; 0 if it must not be changed.
        sharding: Overrides that shard states, such as `planner=osdp`; empty if there are none.
        more_ranks: Overrides for twice as many ranks; empty if the run cannot choose them.
        attempt_s: Time to plan and compile the step, in seconds.
        searching: Overrides for planners that search within a memory limit.
        offloading: Overrides that put states into host memory; empty if there are none.
        host_limit_bytes: Host memory of a rank.
        buckets: Overrides that leave the size of buckets to the planner; empty if it is.
    """

    limit_bytes: float
    batch_size: int
    micro_batches: int
    sharding: tuple[str, ...]
    more_ranks: tuple[str, ...] = ()
    attempt_s: float = 0.0
    searching: tuple[str, ...] = ()
    offloading: tuple[str, ...] = ()
    host_limit_bytes: float = 0
    buckets: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """The result of trying some settings.

    Args:
        overrides: The settings, as on the command line.
        peak_bytes: Peak of the fullest rank; 0 if there is no plan, or its memory is unknown.
        step_s: Predicted time of a step, in seconds.
        fits: Whether it is within the limit.
        planned: The plan, if it did not fit.
    """

    overrides: tuple[str, ...]
    peak_bytes: int = 0
    step_s: float = 0.0
    fits: bool = False
    planned: Planned | None = None


#: Function that plans with additional overrides.
Plan = Callable[[Sequence[str]], Planned]


class FeasibilitySearch:
    """Searches for settings that fit.

    Args:
        setup: The settings that may be changed.
        plan: Plans with overrides; raises `SbpError` if there is no plan.
        failed: The plan that does not fit; None if the planner found none.
    """

    def __init__(self, setup: Setup, plan: Plan, failed: Planned | None) -> None:
        self.setup, self.plan, self.failed = setup, plan, failed
        self.attempts: list[Attempt] = []
        #: Whether settings were skipped for lack of time.
        self.is_cut_short = False
        self._begun_s = perf_counter()
        self._attempt_s = setup.attempt_s

    @property
    def found(self) -> list[Attempt]:
        """The settings that fit: fewest changes first, then the fastest."""
        fits = [one for one in self.attempts if one.fits]

        def cost(one: Attempt) -> tuple[int, float]:
            # A planner and its settings count as one change.
            groups = {text.partition("=")[0].partition(".")[0] for text in one.overrides}
            return len(groups), one.step_s

        return sorted(fits, key=cost)

    @property
    def is_over(self) -> bool:
        """Whether there are enough results, or too little time for another attempt."""
        return len(self.found) >= MOST_FOUND or self._is_late()

    def _is_late(self) -> bool:
        return perf_counter() - self._begun_s + self._attempt_s > MOST_S

    def run(self) -> None:
        """Try one change after the other, then two at once."""
        setup = self.setup
        self._try(setup.buckets)
        recomputing = self._try_budget((), self.failed)
        self._try(setup.offloading)
        counts = self._counts(())
        sharding = self._try(setup.sharding) if setup.sharding else None
        if sharding is not None and not sharding.fits:
            self._try_budget(sharding.overrides, sharding.planned)
            counts += self._counts(setup.sharding)
        if recomputing is None or not recomputing.fits:
            for one in counts:
                if not one.fits:
                    self._try_budget(one.overrides, one.planned)
        if not self.found and setup.more_ranks:
            self._try(setup.more_ranks)
            self._try((*setup.sharding, *setup.more_ranks) if setup.sharding else ())

    def _counts(self, also: tuple[str, ...]) -> list[Attempt]:
        """Try more micro-batches until one number of them fits."""
        made: list[Attempt] = []
        for count in _more_micro_batches(self.setup):
            one = self._try((*also, f"trainer.micro_batches={count}"))
            made += [one] if one is not None else []
            if one is not None and one.fits:
                break
        return made

    def _try_budget(self, also: tuple[str, ...], planned: Planned | None) -> Attempt | None:
        """Try recomputation in addition to settings that did not fit."""
        rank = fullest(planned.memory) if planned is not None else None
        if planned is None or rank is None:
            return None
        active = rank.kinds.get(MemoryKind.ACTIVATIONS, 0)
        room = self.setup.limit_bytes - (rank.peak - active)
        budget_bytes = len(planned.plan.ranks) * room
        if not 0 < room < active or budget_bytes < least_recompute_budget(planned.graph):
            return None  # no budget would make it fit
        # Tenths of a megabyte, rounded down.
        budget = f"{int(budget_bytes / 1e5) / 10:.1f}MB"
        return self._try((*also, f"compile.passes.recompute.memory_bytes={budget}"))

    def _try(self, overrides: tuple[str, ...]) -> Attempt | None:
        if not overrides:
            return None
        if self.is_over:
            self.is_cut_short = self.is_cut_short or self._is_late()
            return None
        begun_s, made = perf_counter(), Attempt(overrides=overrides)
        with suppress(SbpError):
            planned = self.plan(overrides)
            memory, limit_bytes = planned.memory, self.setup.limit_bytes
            if (rank := fullest(memory)) is not None:
                on_host = memory.host_peak if isinstance(memory, MemoryReport) else 0
                fits = rank.peak <= limit_bytes and on_host <= self.setup.host_limit_bytes
                made = Attempt(
                    overrides=overrides,
                    peak_bytes=rank.peak,
                    step_s=planned.simulation.step_s,
                    fits=fits,
                    planned=None if fits else planned,
                )
        self._attempt_s = max(self._attempt_s, perf_counter() - begun_s)
        self.attempts.append(made)
        return made


def _more_micro_batches(setup: Setup) -> list[int]:
    if not setup.micro_batches:
        return []
    counts = (n for n in range(setup.micro_batches + 1, setup.batch_size + 1))
    divisors = [n for n in counts if setup.batch_size % n == 0 and n % setup.micro_batches == 0]
    return divisors[:_MOST_COUNTS]


def feasible_lines(search: FeasibilitySearch) -> Iterator[str]:
    """Yield lines with the settings that fit, and the nearest that do not."""
    found = search.found
    if found:
        yield "these settings fit, the smallest change first:"
        for one in found:
            cost = f"{format_bytes(one.peak_bytes)} on the fullest rank"
            settings = " ".join(one.overrides)
            yield f"  {settings}: {cost}, {format_seconds(one.step_s)} a step"
    short = [one for one in search.attempts if not one.fits and one.peak_bytes > 0]
    short.sort(key=lambda one: one.peak_bytes)
    told = ", ".join(
        f"{' '.join(one.overrides)} ({format_bytes(one.peak_bytes)})" for one in short[:_MOST_SHORT]
    )
    if short and (found or len(search.attempts) == 1):
        yield f"not enough: {told}"
    elif short:
        yield f"none of {len(search.attempts)} settings that were tried fits; the nearest: {told}"
    searching = search.setup.searching
    if search.is_cut_short and not found and searching:
        look = "look" if len(searching) > 1 else "looks"
        counts = search.setup.micro_batches and _more_micro_batches(search.setup)
        also = ", and with trainer.micro_batches=auto for a number of micro-batches" * bool(counts)
        others = "others" if search.attempts else "other settings"
        yield (
            f"{others} were not tried, because each takes long to try; {' and '.join(searching)} "
            f"{look} for a plan that fits{also}"
        )


#: Function that composes the run for a command line with additional overrides.
Recompose = Callable[[Sequence[str]], RunConfig]


def with_overrides(overrides: Sequence[str], more: Sequence[str]) -> list[str]:
    """Return a command line with more overrides, which replace those of the same keys.

    If the planner is replaced, the settings of the former planner are dropped.
    """
    keys = {key_of(text) for text in more}
    kept = []
    for text in overrides:
        key = key_of(text)
        is_of_planner = "planner" in keys and key.partition(".")[0] == "planner"
        if key not in keys and not is_of_planner:
            kept.append(text)
    return [*kept, *more]


def recomposing(
    app: Application[Any],
    check: Callable[[ComposedConfig, PluginRegistry], RunConfig],
    registry: PluginRegistry,
    overrides: Sequence[str],
) -> Recompose:
    """Return a function that composes the command line again; called inside a job of Hydra."""
    sources = HydraConfig.get().runtime.config_sources
    own = next((one.path for one in sources if one.provider == "command-line"), None)
    catalog = make_catalog(registry, own)

    def recompose(more: Sequence[str]) -> RunConfig:
        with outside_of_hydra():
            config = compose(catalog, app, with_overrides(overrides, more))
        return check(read(config, catalog), registry)

    return recompose


@contextmanager
def outside_of_hydra() -> Iterator[None]:
    """Allow composing a config inside a job of Hydra, which otherwise allows one at a time."""
    state = GlobalHydra.instance()
    running = state.hydra
    state.clear()
    try:
        yield
    finally:
        state = GlobalHydra.instance()
        state.clear()
        if running is not None:
            state.initialize(running)


def told_what_fits(error: SbpError, desk: PlanningOnly, recompose: Recompose) -> ConfigError:
    """Return the error of a plan that does not fit, with settings that would make it fit.

    Args:
        error: The error with which the plan was refused.
        desk: The planning session; it has no plan if the planner found none.
        recompose: Returns the run with other settings.
    """
    run, program = desk.run, desk.program
    config, device, trainer = run.config, program.cluster.device, run.config.trainer
    planner = config.planner
    limit = planner.settings.get("memory_bytes")
    changes_count = trainer.micro_batches != "auto" and trainer.loss == "whole_batch"
    # Only if the planner leaves offloading to its settings.
    can_offload = device.host_memory_bytes is not None and "offload" in planner.settings
    offloads = can_offload and not planner.settings.get("offload")
    # Twice as many ranks along the axis over which data are split.
    at = config.axes.index("data") if "data" in config.axes else len(config.axes) - 1
    sizes = [size * (1 + (axis == at)) for axis, size in enumerate(config.mesh)]
    # Planners that search within a memory limit.
    searching = [name for name in ("ilp", "auto") if name in run.registry.names("planner")]
    setup = Setup(
        limit_bytes=limit if isinstance(limit, int | float) else device.memory_bytes,
        batch_size=trainer.batch_size,
        micro_batches=trainer.num_micro_batches if changes_count else 0,
        sharding=_sharding(config, run.registry),
        more_ranks=(f"cluster.mesh=[{','.join(map(str, sizes))}]",),
        attempt_s=desk.planning_s,
        searching=tuple(f"planner={name}" for name in searching if name != planner.name),
        offloading=("planner.offload=[optimizer_states]",) if offloads else (),
        host_limit_bytes=device.host_memory_bytes or 0,
        buckets=("compile.bucket_bytes=null",) if config.compile.bucket_bytes else (),
    )
    known: dict[object, StepPlanner] = {}

    def plan(overrides: Sequence[str]) -> Planned:
        config = recompose(overrides)
        quiet = replace(run, config=config, console=Console(quiet=True))
        # Capture the step only once for equal settings.
        key = config.trainer.micro_batches, config.compile, config.mesh
        if key not in known:
            same = config.mesh == run.config.mesh
            known[key] = planner_of(quiet, program if same else make_program(quiet))
        return replace(known[key], choice=plan_choice(quiet)).plan()

    search = FeasibilitySearch(setup, plan, desk.planned)
    with run.stage(f"looking for what fits {format_bytes(setup.limit_bytes)}"):
        search.run()
    lines = list(feasible_lines(search))
    todo = "\n    ".join([*lines, *([] if search.found else [error.todo])])
    return error.replaced(MemoryLimitError, todo=todo)


def _sharding(config: RunConfig, registry: PluginRegistry) -> tuple[str, ...]:
    """Return the overrides that shard the states of a run; empty if they are sharded already."""
    axes = [axis for axis, size in zip(config.axes, config.mesh, strict=True) if size > 1]
    planners = registry.names("planner")
    if not axes or PIPE_AXIS in axes or "manual/zero" in config.planner.file:
        return ()
    if config.planner.name != "osdp" and len(axes) == 1 and "osdp" in planners:
        return ("planner=osdp", *([f"planner.axis={axes[0]}"] if axes[0] != "data" else []))
    return ("planner=manual/zero",) if config.planner.name != "osdp" else ()

"""Say of a plan that does not fit its memory which settings would make it fit.

Overrides are added to the command line and composed again, so what is said can be typed as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from rich.console import Console

from sbp_core.cluster import Device
from sbp_core.errors import ConfigError, SbpError
from sbp_core.infer import PIPE_AXIS
from sbp_core.plugins import PluginRegistry
from sbp_core.units import format_bytes
from sbp_launch.explaining.feasible import Plan, Search, Setup, feasible_lines
from sbp_launch.planning.flow import Planned
from sbp_launch.run.run import Run
from sbp_launch.settings.catalog import make_catalog
from sbp_launch.settings.compose import compose, read
from sbp_launch.settings.config import Application, ComposedConfig, RunConfig, key_of
from sbp_launch.step.planning import StepPlanner
from sbp_launch.trainer.planned import plan_choice, planner_of
from sbp_launch.trainer.program import Program, make_program

#: Settings whose value is the memory that a rank has.
_LIMITS = ("cluster.memory_bytes", "planner.memory_bytes")

#: Returns the run that a command line with more overrides asks for.
Recompose = Callable[[Sequence[str]], RunConfig]


def is_of_memory(error: SbpError) -> bool:
    """Whether a plan was refused for the memory that its ranks need."""
    told = " ".join((*error.where, error.accepted))
    return any(key in told for key in _LIMITS)


def with_overrides(overrides: Sequence[str], more: Sequence[str]) -> list[str]:
    """Return a command line with more overrides, which replace those of the same keys.

    Another planner goes without the settings of the one before.
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
    """Return what composes the command line anew; called inside a job of Hydra.

    Args:
        app: The command.
        check: Returns the run of a composed config.
        registry: The plugins.
        overrides: What the command line said.
    """
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
    """Let a config be composed inside a job of Hydra, which else allows one at a time."""
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


def told_what_fits(
    error: SbpError,
    run: Run,
    program: Program,
    failed: Planned | None,
    recompose: Recompose,
    planning_s: float = 0.0,
) -> ConfigError:
    """Return the error of a plan that does not fit, with what would make it fit.

    Args:
        error: That the plan was refused with.
        run: What was planned.
        program: The one-device program.
        failed: The plan; None if the planner found none.
        recompose: Returns the run with other settings.
        planning_s: How long it took to plan, in seconds.
    """
    setup = replace(_setup(run.config, program, run.registry), attempt_s=planning_s)
    search = Search(setup, _planning(run, program, recompose), failed)
    with run.stage(f"looking for what fits {format_bytes(setup.limit_bytes)}"):
        search.run()
    lines = list(feasible_lines(search))
    todo = "\n    ".join([*lines, *([] if search.found else [error.todo])])
    return error.replaced(ConfigError, todo=todo)


def _setup(config: RunConfig, program: Program, registry: PluginRegistry) -> Setup:
    limit = config.planner.settings.get("memory_bytes")
    trainer = config.trainer
    changes_count = trainer.micro_batches != "auto" and trainer.loss == "whole_batch"
    return Setup(
        limit_bytes=limit
        if isinstance(limit, int | float)
        else program.cluster.device.memory_bytes,
        batch_size=trainer.batch_size,
        micro_batches=trainer.num_micro_batches if changes_count else 0,
        sharding=_sharding(config, registry),
        more_ranks=_more_ranks(config),
        searching=_searching(config, registry),
        offloading=_offloading(config, program.cluster.device),
        host_limit_bytes=program.cluster.device.host_memory_bytes or 0,
    )


def _offloading(config: RunConfig, device: Device) -> tuple[str, ...]:
    """Return the override that offloads states, of a planner that leaves it to its settings."""
    can = device.host_memory_bytes is not None and "offload" in config.planner.settings
    is_asked = bool(config.planner.settings.get("offload"))
    return ("planner.offload=[optimizer_states]",) if can and not is_asked else ()


def _more_ranks(config: RunConfig) -> tuple[str, ...]:
    """Return the override that doubles the axis over which data are split."""
    at = config.axes.index("data") if "data" in config.axes else len(config.axes) - 1
    sizes = [size * (1 + (axis == at)) for axis, size in enumerate(config.mesh)]
    return (f"cluster.mesh=[{','.join(map(str, sizes))}]",)


def _sharding(config: RunConfig, registry: PluginRegistry) -> tuple[str, ...]:
    """Return the overrides that shard the states of a run; nothing if it shards them already."""
    axes = [axis for axis, size in zip(config.axes, config.mesh, strict=True) if size > 1]
    planners = {entry.name for entry in registry.entries if entry.kind == "planner"}
    if not axes or PIPE_AXIS in axes or "manual/zero" in config.planner.file:
        return ()
    if config.planner.name != "osdp" and len(axes) == 1 and "osdp" in planners:
        return ("planner=osdp", *([f"planner.axis={axes[0]}"] if axes[0] != "data" else []))
    return ("planner=manual/zero",) if config.planner.name != "osdp" else ()


def _searching(config: RunConfig, registry: PluginRegistry) -> tuple[str, ...]:
    """Return the overrides of planners that search within a limit of memory, and are not used."""
    planners = {entry.name for entry in registry.entries if entry.kind == "planner"}
    found = [name for name in ("ilp", "auto") if name in planners and name != config.planner.name]
    return tuple(f"planner={name}" for name in found)


def _planning(run: Run, program: Program, recompose: Recompose) -> Plan:
    """Return what plans a run with other settings; a step that is captured already is taken."""
    known: dict[object, StepPlanner] = {}

    def plan(overrides: Sequence[str]) -> Planned:
        config = recompose(overrides)
        quiet = replace(run, config=config, console=Console(quiet=True))
        key = config.trainer.micro_batches, config.compile, config.mesh
        if key not in known:
            same = config.mesh == run.config.mesh
            known[key] = planner_of(quiet, program if same else make_program(quiet))
        return replace(known[key], choice=plan_choice(quiet)).plan()

    return plan

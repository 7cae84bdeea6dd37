"""Which launcher a run means, checked against boxing, the mesh, and who started this process.

| boxing connects | nobody started this process | torchrun, mpiexec or srun did |
|---|---|---|
| threads of one process | `threads` | refused, if they started several |
| processes | `spawn` | that one |

What the user chose has to fit; only `auto` is replaced.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

from sbp_core.errors import ConfigError
from sbp_core.plugins import PluginRegistry
from sbp_launch.settings.config import ComposedConfig, PluginChoice, RunConfig
from sbp_launch.world import MPIEXEC, SLURM, THREADS, TORCHRUN, World

#: The option that leaves the choice to `choose_launcher`, and what it takes on this machine.
AUTO, SPAWN = "auto", "spawn"

#: How each launcher starts a command, for N ranks.
_COMMANDS = {
    TORCHRUN: "torchrun --nproc-per-node={} $(which sbp-train) ...",
    MPIEXEC: "mpiexec -n {} sbp-train ...",
    SLURM: "srun --ntasks={} sbp-train ...",
}


def choose_launcher(
    config: RunConfig, composed: ComposedConfig, registry: PluginRegistry, world: World
) -> RunConfig:
    """Return a run with the launcher that it means.

    Args:
        config: Checked, group by group.
        composed: What it was made of.
        registry: The plugins.
        world: Who started this process.

    Raises:
        ConfigError: the launcher does not fit boxing, the mesh, or who started this process.
    """
    boxing, asked = config.boxing.name, config.launcher.name
    is_between = _spans_processes(registry, "boxing", config.boxing)
    started = f"{world.launcher} has started {world.size} processes"
    name = asked
    if asked == AUTO and world.size == 1:
        fits = not world.is_alone and prod(config.mesh) == 1
        name = (world.launcher if fits else SPAWN) if is_between else THREADS
    elif asked == AUTO:
        name = world.launcher
    elif world.size > 1 and asked != world.launcher:
        raise _refusal(
            composed,
            f"launcher={asked} starts the ranks itself, and {started} already",
            accepted=f"launcher={world.launcher}, or none",
            todo=f"leave out launcher={asked}, or start sbp-train without {world.launcher}",
        )
    choice = config.launcher if name == asked else PluginChoice(name=name)
    has_processes = _spans_processes(registry, "launcher", choice)
    if has_processes != is_between:
        raise _unlike(composed, boxing, name, started if world.size > 1 else "")
    # One process of Slurm may well submit a job of many.
    may_start = name == SLURM and world.size == 1
    if name == world.launcher != THREADS and world.size != prod(config.mesh) and not may_start:
        raise _wrong_size(composed, config, world)
    return replace(config, launcher=choice)


def is_started(config: RunConfig, world: World) -> bool:
    """Say whether the ranks of a run, whose launcher is chosen, have been started already."""
    return config.launcher.name == world.launcher != THREADS and world.size == prod(config.mesh)


def has_threads(config: RunConfig, registry: PluginRegistry) -> bool:
    """Say whether the ranks of a run, whose launcher is chosen, are threads of this process."""
    return not _spans_processes(registry, "launcher", config.launcher)


def _spans_processes(registry: PluginRegistry, kind: str, choice: PluginChoice) -> bool:
    config = registry.configure(kind, choice.name, choice.settings)
    return bool(getattr(config, "spans_processes", False))


def _unlike(composed: ComposedConfig, boxing: str, launcher: str, started: str) -> ConfigError:
    """Make the error of a launcher and a boxing of which one has processes, the other threads."""
    if started or launcher != THREADS:
        other = "mpi" if launcher == MPIEXEC else "torch"
        return _refusal(
            composed,
            f"{started or f'launcher={launcher} starts one process a rank'}, and boxing={boxing} "
            "connects the threads of one",
            accepted="boxing=torch or boxing=mpi, between processes",
            todo=f"add boxing={other}, or start one process: sbp-train ..."
            if started
            else f"add boxing={other}, or leave out launcher={launcher}",
        )
    return _refusal(
        composed,
        f"boxing={boxing} connects one process a rank, and launcher={launcher} runs all ranks in "
        "one process",
        accepted="launcher=spawn, torchrun, mpiexec or slurm beside it; or boxing=local",
        todo=f"leave out launcher={launcher}, or say launcher=spawn",
    )


def _wrong_size(composed: ComposedConfig, config: RunConfig, world: World) -> ConfigError:
    """Make the error of a number of processes that is not that of ranks."""
    shape = ", ".join(map(str, config.mesh))
    ranks = prod(config.mesh)
    example = f'"cluster.mesh=[{world.size}]" "cluster.axes=[data]"'
    return _refusal(
        composed,
        f"{world.launcher} has started {world.size} "
        f"{'process' if world.size == 1 else 'processes'}, and cluster.mesh=[{shape}] has {ranks} "
        f"{'rank' if ranks == 1 else 'ranks'}",
        accepted="one process a rank",
        todo=f"{_COMMANDS[world.launcher].format(ranks)}, or a mesh of {world.size}, such as "
        f"{example}",
    )


def _refusal(composed: ComposedConfig, what: str, *, accepted: str, todo: str) -> ConfigError:
    groups = ("launcher", "boxing", "cluster")
    said = [line for group in groups for line in composed.overrides_of(group)]
    return ConfigError(what, where=said, accepted=accepted, todo=todo)

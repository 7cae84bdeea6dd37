"""Check every setting of a config composed by Hydra, before torch is imported: a `RunConfig`.

This builds nothing; the plugins' config dataclasses decide which values are legal. The length of
one axis of the mesh may be left open: it follows from the number of processes.

    cluster.mesh=[-1]      with 4 processes: [4]
    cluster.mesh=[-1,2]    with 6 processes: [3,2]

So a run that a launcher restarts with fewer or more processes is planned for their new number.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from math import prod
from typing import Any, TypeVar

from sbp_core.errors import ConfigError, SbpError, SbpLookupError, nearest
from sbp_core.plugins import PluginEntry, PluginRegistry, blame, combination_check, merge_settings
from sbp_launch.compile_config import CompileConfig
from sbp_launch.secret_settings import refuse_secrets
from sbp_launch.settings.config import (
    GROUPS,
    PLUGIN_GROUPS,
    ComposedConfig,
    PluginChoice,
    RunConfig,
    TrainerConfig,
    key_of,
)
from sbp_launch.settings.known_keys import known_settings, meant, ours_of
from sbp_launch.world import World

T = TypeVar("T")


def check(composed: ComposedConfig, registry: PluginRegistry, own: Iterable[str] = ()) -> RunConfig:
    """Return the run that a composed config describes.

    Args:
        composed: The config.
        registry: The plugins.
        own: Settings of the command itself, outside all groups; they are not checked here.

    Raises:
        ConfigError: a group, a plugin or a setting is unknown, missing or refused, or has a secret;
            names the key, its file and the overrides of the command line.
    """
    refuse_unknown(composed, (*GROUPS, *own), registry)
    refuse_secrets(composed.values)
    choices: dict[str, PluginChoice] = {}
    configs: dict[str, object] = {}
    for group in PLUGIN_GROUPS:
        choices[group], configs[group] = choose(composed, registry, group)
    mesh, axes = (getattr(configs["cluster"], name, None) for name in ("mesh", "axes"))
    if not isinstance(mesh, tuple) or not isinstance(axes, tuple):
        raise ConfigError(
            "the cluster's config has no mesh and axes",
            where=composed.files.get("cluster", ""),
            accepted="a cluster whose config has mesh: tuple[int, ...] and axes: tuple[str, ...]",
        )
    _check_together(composed, registry, configs, configs)
    with _seeking_elsewhere(composed, registry):
        trainer = _core_config(composed, "trainer", TrainerConfig)
        compile_config = _core_config(composed, "compile", CompileConfig)
    for name in compile_config.plugins:
        with _naming_overrides(composed, "compile", f"compile.plugins={name}"):
            registry.factory("pass", name)
    callbacks: dict[str, object] = {}
    file = composed.files.get("trainer", "")
    with _naming_overrides(composed, "trainer"):
        try:
            named = trainer.callback_choices
        except ConfigError as error:
            what = f"trainer.{error.what}"
            raise error.replaced(ConfigError, what=what, where=(file,)) from None
    for index, choice in enumerate(named):
        key = f"trainer.callbacks[{index}]"
        with _naming_overrides(composed, "trainer", f"{key} is {choice.name!r}"):
            callbacks[key] = registry.configure(
                "callback", choice.name, choice.settings, key=key, where=file
            )
    _check_together(composed, registry, callbacks, {**configs, "trainer": trainer})
    return RunConfig(**choices, trainer=trainer, compile=compile_config, mesh=mesh, axes=axes)


def _check_together(
    composed: ComposedConfig,
    registry: PluginRegistry,
    asked: Mapping[str, object],
    configs: Mapping[str, object],
) -> None:
    """Let configs check whether the configs of the other groups fit them.

    Args:
        composed: The composed config.
        registry: The plugins.
        asked: The configs that check, by group; configs of callbacks by their keys.
        configs: The configs of all groups that are known so far.

    Raises:
        ConfigError: one does not fit; names the files of both, and the overrides.
        PluginError: the code of a plugin fails.
    """
    for group, config in asked.items():
        try:
            with blaming(composed, registry):
                combination_check(config)(
                    {kind: one for kind, one in configs.items() if kind != group}
                )
        except ConfigError as error:
            told = f"{error.what} {error.accepted} {error.todo}"
            asking = group.partition(".")[0]
            about = [one for one in configs if one == asking or re.search(rf"\b{one}[.=]", told)]
            files = [composed.files.get(one, "") for one in about]
            said = [line for one in about for line in composed.overrides_of(one)]
            where = (*error.where, *files, *said)
            raise error.replaced(ConfigError, where=where) from error


def refuse_unknown(
    composed: ComposedConfig, known: Iterable[str], registry: PluginRegistry
) -> None:
    """Check that a config has only known groups and known settings of the command.

    Raises:
        ConfigError: it has an unknown one; names the nearest of all settings.
    """
    names = sorted(known)
    for name in composed.values:
        if name not in names:
            said = (text for text in composed.overrides if key_of(text).split(".")[0] == name)
            text = next(said, name)
            key, value = key_of(text), text.partition("=")[2]
            near = nearest(name, names)
            todo = f"did you mean {near + key.removeprefix(name)!r}?" if near else ""
            if not near or "." not in key:
                # A name similar to one of this app is rarely a setting of another option.
                settings = known_settings(composed, registry)
                like = [one for one in settings if not (near and one.options)]
                todo = meant(key, like, value) or todo
            if not todo and text.startswith("+") and "." not in key:
                todo = "if it is a group of your own, name its folder: --config-dir FOLDER"
            raise ConfigError(
                f"no group or setting is called {key!r}",
                where=composed.overrides_of(name),
                accepted=", ".join(names),
                todo=todo or "choose one of these",
            )


def choose(
    composed: ComposedConfig, registry: PluginRegistry, group: str
) -> tuple[PluginChoice, object]:
    """Return the plugin that a group names, and its checked config.

    Raises:
        ConfigError: the group is missing, or the plugin or a setting is unknown or refused.
    """
    file = composed.files.get(group, "")
    settings = _settings(composed, group)
    name = settings.pop("name", None)
    if not isinstance(name, str):
        names = ", ".join(registry.names(group))
        what = f"{group}.name is {'not set' if name is None else repr(name)}"
        raise ConfigError(
            what,
            where=file,
            accepted=names,
            todo=_of_a_folder(composed, registry, group)
            or "add the plugin that the file is for: name: NAME",
        )
    name = registry.current_name(group, name)
    with (
        _naming_overrides(composed, group, f"{group}.name is {name!r}"),
        _seeking_elsewhere(composed, registry),
    ):
        config = registry.configure(group, name, settings, where=file)
    return PluginChoice(name=name, settings=settings, file=file), config


def _of_a_folder(
    composed: ComposedConfig, registry: PluginRegistry, group: str, name: str = ""
) -> str:
    """Return a hint on how a file sets an option in a folder of its group, or `""`.

    With `defaults: [manual/zero]`, Hydra puts the settings of `zero` into `planner.manual`.
    """
    value = composed.values.get(group)
    for key, below in value.items() if isinstance(value, Mapping) else ():
        if not isinstance(below, Mapping) or (name and key != name):
            continue
        if below.get("name") in registry.names(group):
            return (
                f"its settings are in {group}.{key}, as the option in its defaults is in the "
                f"folder {key}: write {key}/OPTION@_here_ there"
            )
    return ""


def _core_config(composed: ComposedConfig, group: str, config: type[T]) -> T:
    """Return the checked config of a group that names no plugin.

    Raises:
        ConfigError: the group is missing, or a setting is unknown or refused.
    """
    settings = _settings(composed, group)
    with _naming_overrides(composed, group):
        return merge_settings(config, settings, key=group, where=composed.files.get(group, ""))


def _settings(composed: ComposedConfig, group: str) -> dict[str, object]:
    """Return the settings of a group.

    Raises:
        ConfigError: the group is missing, or not a mapping.
    """
    value = composed.values.get(group)
    if not isinstance(value, Mapping):
        raise ConfigError(
            f"{group} is {value!r}",
            where=[composed.files.get(group, ""), *composed.overrides_of(group)],
            accepted=f"an option of the group {group!r}: {group}=OPTION",
        )
    return {str(name): setting for name, setting in value.items()}


@contextmanager
def _naming_overrides(composed: ComposedConfig, group: str, asked: str = "") -> Iterator[None]:
    """Add to an error in the `with` block the overrides that it is about."""
    try:
        yield
    except (ConfigError, SbpLookupError) as error:
        what, where = error.what, error.where
        if isinstance(error, SbpLookupError):
            what, where = f"{asked}: {what}", (composed.files.get(group, ""), *where)
        where = (*where, *composed.overrides_of(group, what))
        todo = error.todo
        for key, text in composed.variables.items():
            if what.startswith(f"{key} is '"):
                # Quoted, because Hydra's command line does not accept nested braces.
                decoded = f'"${{oc.decode:{text}}}"'
                todo = f"{text} is a text; write {decoded}, with these quotes, to have its value"
        raise error.replaced(ConfigError, what=what, where=where, todo=todo) from error


@contextmanager
def _seeking_elsewhere(composed: ComposedConfig, registry: PluginRegistry) -> Iterator[None]:
    """Add to the error of an unknown setting the group or option that has such a setting."""
    try:
        yield
    except ConfigError as error:
        unknown = re.match(r"no setting is called '([\w.]+)'", error.what)
        if unknown is None:
            raise
        settings = known_settings(composed, registry)
        leaf = unknown[1].rpartition(".")[2]
        same = [one for one in settings if one.leaf == leaf and one.key == unknown[1]] or [
            one for one in settings if one.leaf == leaf and not one.options
        ]
        group, _, name = unknown[1].partition(".")
        folder = _of_a_folder(composed, registry, group, name)
        if not same and not ours_of(leaf) and not folder:
            raise
        said = [text for text in composed.overrides if key_of(text) == unknown[1]]
        value = said[0].partition("=")[2] if said else ""
        todo = folder or meant(unknown[1], same or settings, value) or error.todo
        raise error.replaced(ConfigError, todo=todo) from error


@contextmanager
def blaming(
    composed: ComposedConfig, registry: PluginRegistry, first: Callable[[], object] = lambda: None
) -> Iterator[None]:
    """Turn an error of a plugin's code in the `with` block into one that names the plugin.

    Args:
        composed: Names the plugins in use.
        registry: The plugins.
        first: Called before the new error is raised, while the plugin's error is handled.

    Raises:
        PluginError: a plugin has raised an error other than `SbpError`.
    """
    try:
        yield
    except SbpError:
        raise
    except Exception as error:
        guilty = blame(error, in_use(composed, registry))
        if guilty is None:
            raise
        first()
        raise guilty from error


def in_use(composed: ComposedConfig, registry: PluginRegistry) -> list[PluginEntry]:
    """Return the plugins whose code a run may call: chosen ones, passes and signatures."""
    trainer = composed.values.get("trainer")
    callbacks = trainer.get("callbacks") if isinstance(trainer, Mapping) else ()
    named = {
        ("callback", one.get("name") if isinstance(one, Mapping) else one)
        for one in (callbacks if isinstance(callbacks, list | tuple) else ())
    }
    named |= {
        (group, value.get("name"))
        for group, value in composed.values.items()
        if isinstance(value, Mapping)
    }
    return [
        entry
        for entry in registry.entries
        if (entry.kind, entry.name) in named or entry.kind in ("pass", "signature")
    ]


#: Stands for the length of an axis that is left open.
OPEN = -1


def close_mesh(composed: ComposedConfig, world: World) -> ComposedConfig:
    """Return a config whose mesh has as many ranks as there are processes, if an axis is open.

    If no launcher has started this process, the number is not known: the axis stays open, and the
    cluster refuses it.

    Raises:
        ConfigError: the other axes do not divide the number of processes.
    """
    cluster: Any = composed.values.get("cluster")
    mesh = cluster.get("mesh") if isinstance(cluster, dict) else None
    if not isinstance(mesh, list) or not all(type(length) is int for length in mesh):
        return composed  # the check of the cluster refuses it
    if mesh.count(OPEN) != 1 or world.is_alone:
        return composed
    others = prod(length for length in mesh if length != OPEN)
    if others < 1 or world.size % others:
        raise ConfigError(
            f"cluster.mesh={mesh}: {world.launcher} has started {world.size} processes",
            where=composed.overrides_of("cluster"),
            accepted=f"a multiple of {others} processes: the other axes have {others} ranks",
            todo="start another number of processes, or give another mesh",
        )
    whole = [world.size // others if length == OPEN else length for length in mesh]
    return replace(composed, values={**composed.values, "cluster": {**cluster, "mesh": whole}})

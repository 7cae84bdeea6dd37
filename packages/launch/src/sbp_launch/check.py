"""From a composed config to a checked `RunConfig`: every setting of every group, before torch.

Builds nothing; the plugins' own config dataclasses say what is legal. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from sbp_core.errors import ConfigError, SbpError, SbpLookupError
from sbp_core.plugins import Registry, merge_settings, unknown_key
from sbp_launch.compile_config import CompileConfig
from sbp_launch.config import (
    GROUPS,
    PLUGIN_GROUPS,
    Choice,
    Composed,
    RunConfig,
    TrainerConfig,
)

T = TypeVar("T")


def check(composed: Composed, registry: Registry) -> RunConfig:
    """Return the run that a composed config describes.

    Raises:
        ConfigError: a group, a plugin or a setting is unknown, missing or refused; names the key,
            its file and what the command line said about it.
    """
    for group in composed.values:
        if group not in GROUPS:
            raise unknown_key(group, GROUPS, where=_overrides_of(composed, group))
    choices: dict[str, Choice] = {}
    configs: dict[str, object] = {}
    for group in PLUGIN_GROUPS:
        choices[group], configs[group] = choose(composed, registry, group)
    mesh, axes = _mesh(composed, configs["cluster"])
    trainer = _own(composed, "trainer", TrainerConfig)
    compile_config = _own(composed, "compile", CompileConfig)
    for name in compile_config.plugins:
        _check_pass(composed, registry, name)
    return RunConfig(**choices, trainer=trainer, compile=compile_config, mesh=mesh, axes=axes)


def choose(composed: Composed, registry: Registry, group: str) -> tuple[Choice, object]:
    """Return the plugin that a group names, and its checked config.

    Raises:
        ConfigError: the group is missing, or the plugin or a setting is not known or refused.
    """
    settings = _settings(composed, group)
    name = settings.pop("name", None)
    if not isinstance(name, str):
        raise ConfigError(
            f"{group}.name is {name!r}",
            where=composed.files.get(group, ""),
            accepted=", ".join(registry.names(group)),
        )
    choice = Choice(name=name, settings=settings)
    return choice, _configure(composed, registry, group, choice)


def _settings(composed: Composed, group: str) -> dict[str, object]:
    """Return the settings of a group.

    Raises:
        ConfigError: the group is missing or no mapping, or two distributions bring its option.
    """
    value = composed.values.get(group)
    if not isinstance(value, Mapping):
        raise ConfigError(
            f"{group} is {value!r}",
            where=[composed.files.get(group, ""), *_overrides_of(composed, group)],
            accepted=f"an option of the group {group!r}: {group}=OPTION",
        )
    owners = composed.owners.get(group, ())
    if len(owners) > 1:
        raise ConfigError(
            f"the option file {composed.files[group]} comes from {' and '.join(owners)}",
            accepted="one distribution for each option",
            todo="uninstall one of them, or ask its author for another name",
        )
    return {str(name): setting for name, setting in value.items()}


def _configure(composed: Composed, registry: Registry, group: str, choice: Choice) -> object:
    """Check one plugin's settings against its config.

    Raises:
        ConfigError: the plugin or a setting is not known, or a value is refused.
    """
    file = composed.files.get(group, "")
    try:
        return registry.configure(group, choice.name, choice.settings, where=file)
    except ConfigError as error:
        raise _blame(composed, group, error) from error
    except SbpLookupError as error:
        refused = ConfigError(
            f"{group}.name is {choice.name!r}: {error.what}",
            where=[file, *error.where],
            accepted=error.accepted,
            todo=error.todo,
        )
        raise _blame(composed, group, refused) from error


def _own(composed: Composed, group: str, config: type[T]) -> T:
    """Return the checked config of a group that names no plugin.

    Raises:
        ConfigError: the group is missing, or a setting is not known or refused.
    """
    settings = _settings(composed, group)
    file = composed.files.get(group, "")
    try:
        return merge_settings(config, settings, key=group, where=file)
    except ConfigError as error:
        raise _blame(composed, group, error) from error


def _check_pass(composed: Composed, registry: Registry, name: str) -> None:
    """Check that a graph pass is installed.

    Raises:
        ConfigError: it is not.
    """
    try:
        registry.factory("pass", name)
    except SbpLookupError as error:
        refused = ConfigError(
            f"compile.plugins={name}: {error.what}",
            where=[composed.files.get("compile", ""), *error.where],
            accepted=error.accepted,
            todo=error.todo,
        )
        raise _blame(composed, "compile", refused) from error


def _mesh(composed: Composed, cluster: object) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Return the mesh and its axes, which every cluster config has.

    Raises:
        ConfigError: this one has not.
    """
    mesh, axes = getattr(cluster, "mesh", None), getattr(cluster, "axes", None)
    if not isinstance(mesh, tuple) or not isinstance(axes, tuple):
        raise ConfigError(
            "the cluster's config has no mesh and axes",
            where=composed.files.get("cluster", ""),
            accepted="a cluster whose config has mesh: tuple[int, ...] and axes: tuple[str, ...]",
        )
    return mesh, axes


def _blame(composed: Composed, group: str, error: SbpError) -> ConfigError:
    """Add what the command line said about the settings that an error names."""
    said = [
        place
        for place in _overrides_of(composed, group)
        if place.partition("=")[0].rpartition(".")[2] in error.what
    ]
    return ConfigError(
        error.what, where=[*error.where, *said], accepted=error.accepted, todo=error.todo
    )


def _overrides_of(composed: Composed, group: str) -> list[str]:
    """Return what the command line said about a group and its settings."""
    return [
        f"the command line: {override}"
        for override in composed.overrides
        if override.lstrip("+~").partition("=")[0].partition(".")[0] == group
    ]

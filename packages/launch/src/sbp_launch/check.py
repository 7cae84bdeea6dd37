"""From a composed config to a checked `RunConfig`: every setting of every group, before torch.

Builds nothing; the plugins' own config dataclasses say what is legal.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

from sbp_core.errors import ConfigError, SbpLookupError, nearest
from sbp_core.plugins import PluginRegistry, merge_settings
from sbp_launch.compile_config import CompileConfig
from sbp_launch.config import (
    GROUPS,
    PLUGIN_GROUPS,
    ComposedConfig,
    PluginChoice,
    RunConfig,
    TrainerConfig,
    key_of,
)

T = TypeVar("T")


def check(composed: ComposedConfig, registry: PluginRegistry) -> RunConfig:
    """Return the run that a composed config describes.

    Raises:
        ConfigError: a group, a plugin or a setting is unknown, missing or refused; names the key,
            its file and what the command line said about it.
    """
    refuse_unknown(composed, GROUPS)
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
    trainer = _core_config(composed, "trainer", TrainerConfig)
    compile_config = _core_config(composed, "compile", CompileConfig)
    for name in compile_config.plugins:
        with _naming_overrides(composed, "compile", f"compile.plugins={name}"):
            registry.factory("pass", name)
    return RunConfig(**choices, trainer=trainer, compile=compile_config, mesh=mesh, axes=axes)


def refuse_unknown(composed: ComposedConfig, known: Iterable[str]) -> None:
    """Check that a config has no groups and settings of its own but those that are known.

    Raises:
        ConfigError: it has; says which is nearest.
    """
    names = sorted(known)
    for name in composed.values:
        if name not in names:
            keys = (key_of(text) for text in composed.overrides)
            key = next((key for key in keys if key.startswith(name)), name)
            near = nearest(name, names)
            meant = f"did you mean {near + key.removeprefix(name)!r}?"
            raise ConfigError(
                f"no group or setting is called {key!r}",
                where=composed.overrides_of(name),
                accepted=", ".join(names),
                todo=meant if near else "choose one of these",
            )


def choose(
    composed: ComposedConfig, registry: PluginRegistry, group: str
) -> tuple[PluginChoice, object]:
    """Return the plugin that a group names, and its checked config.

    Raises:
        ConfigError: the group is missing, or the plugin or a setting is not known or refused.
    """
    file = composed.files.get(group, "")
    settings = _settings(composed, group)
    name = settings.pop("name", None)
    if not isinstance(name, str):
        names = ", ".join(registry.names(group))
        raise ConfigError(f"{group}.name is {name!r}", where=file, accepted=names)
    with _naming_overrides(composed, group, f"{group}.name is {name!r}"):
        config = registry.configure(group, name, settings, where=file)
    return PluginChoice(name=name, settings=settings), config


def _core_config(composed: ComposedConfig, group: str, config: type[T]) -> T:
    """Return the checked config of a group that names no plugin.

    Raises:
        ConfigError: the group is missing, or a setting is not known or refused.
    """
    settings = _settings(composed, group)
    with _naming_overrides(composed, group):
        return merge_settings(config, settings, key=group, where=composed.files.get(group, ""))


def _settings(composed: ComposedConfig, group: str) -> dict[str, object]:
    """Return the settings of a group.

    Raises:
        ConfigError: the group is missing or no mapping.
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
    """Name the overrides that an error in the `with` block is about.

    Args:
        composed: The config.
        group: Whose settings are checked.
        asked: What asks for a plugin that may not be known.
    """
    try:
        yield
    except (ConfigError, SbpLookupError) as error:
        what, where = error.what, error.where
        if isinstance(error, SbpLookupError):
            what, where = f"{asked}: {what}", (composed.files.get(group, ""), *where)
        where = (*where, *composed.overrides_of(group, what))
        raise ConfigError(what, where=where, accepted=error.accepted, todo=error.todo) from error

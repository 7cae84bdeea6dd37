"""Why Hydra refused a command line, in the words of the house: key, file, nearest valid name.

Hydra says what it could not do; a user wants to know which word to change. Imports no torch.
"""

from __future__ import annotations

import importlib.metadata
import itertools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields

from hydra.errors import HydraException, MissingConfigException, OverrideParseException

from sbp_core.errors import ConfigError, SbpError
from sbp_core.plugins import Registry, nearest, unknown_key
from sbp_launch.catalog import Catalog
from sbp_launch.compile_config import CompileConfig
from sbp_launch.config import GROUPS, PLUGIN_GROUPS, Composed, TrainerConfig

#: Distributions of the house that bring options of a group, beside sbp-core and sbp-launch.
HOMES: Mapping[str, tuple[str, ...]] = {
    "model": ("sbp-models",),
    "data": ("sbp-models",),
    "runtime": ("sbp-actor-runtime",),
    "planner": ("sbp-planner",),
    "boxing": ("sbp-boxing-torch", "sbp-boxing-nccl"),
}

#: Lines of Hydra's messages that only repeat the override, or lead elsewhere.
_NO_NEWS = ("Error parsing override", "See http")

#: An SBP value outside quotes.
_SBP_CALL = re.compile(r"""(?<![\w"'])[SP]\([^()]*\)(?!["'])""")

#: A name in braces within quotes, which the command line does not take, and files may need.
_QUOTED_NAME = re.compile(r"""(?<=[{,])(\s*)(["'])([^"'{},:]*)\2(?=\s*:)""")

_KEY = re.compile(r"[+~]*(?P<key>[^=@]*)")
_COULD_NOT = re.compile(r"(?:Could not override|Could not delete\D*?) '(?P<key>[^'@]+)[^']*'")


def key_of(override: str) -> str:
    """Return the key of an override: `trainer.steps` of `+trainer.steps=5`."""
    match = _KEY.match(override)
    return match["key"].strip() if match else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """An error of Hydra, and what is needed to say what it means.

    Args:
        error: What was raised.
        config_name: Name of the primary config.
        overrides: The command line.
        catalog: Groups and options.
        registry: Plugins.
        compose_groups_only: Composes without the overrides of single settings.
    """

    error: Exception
    config_name: str
    overrides: tuple[str, ...]
    catalog: Catalog
    registry: Registry
    compose_groups_only: Callable[[], Composed]

    def translate(self) -> ConfigError:
        """Return the error in our words."""
        if isinstance(self.error, OverrideParseException):
            return self._unreadable(self.error)
        if isinstance(self.error, MissingConfigException) and self.error.missing_cfg_file:
            return self._missing_option(self.error.missing_cfg_file)
        key = self._guilty_key()
        if not key or key.startswith("hydra."):
            return self._as_hydra_says()
        if "." not in key and "/" in key:
            return self._folder_as_group(key)
        return self._unknown_key(key)

    def _unreadable(self, error: OverrideParseException) -> ConfigError:
        """Say what Hydra's grammar does not take; it reads `S(0)` as the call of a function."""
        told = [line for line in error.message.splitlines() if not line.startswith(_NO_NEWS)]
        call = _SBP_CALL.search(error.override or "")
        todo = f'quote values with brackets: "{call[0]}"' if call else "; ".join(told)
        if _QUOTED_NAME.search(error.override or ""):
            unquoted = _QUOTED_NAME.sub(r"\1\3", error.override or "")
            todo = f"names before a colon stand without quotes here: '{unquoted}'"
        return ConfigError(
            f"the override {error.override!r} cannot be read",
            where="the command line",
            accepted='key=value, group=option, key=[1,2], key={name: "S(0)"}',
            todo=todo,
        )

    def _as_hydra_says(self) -> ConfigError:
        """Return what Hydra says, without the search path that it lists at the end."""
        lines = [line.strip() for line in str(self.error).splitlines() if line.strip()]
        cause = self.error.__cause__
        if cause is not None and not isinstance(cause, HydraException):
            lines.append(str(cause).partition("\n")[0])
        kept = list(itertools.takewhile(lambda line: "earch path:" not in line, lines))
        what = kept[0].rstrip(".") if kept else type(self.error).__name__
        return ConfigError(what, where="the command line", todo="; ".join(kept[1:]))

    def _guilty_key(self) -> str:
        match = _COULD_NOT.search(str(self.error))
        return match["key"] if match else ""

    def _command_line(self, key: str) -> str:
        """Return where on the command line a key is set, or `""`."""
        for override in self.overrides:
            if key_of(override) == key:
                return f"the command line: {override}"
        return ""

    def _missing_option(self, config: str) -> ConfigError:
        """Say which option of which group does not exist, and which package may bring it."""
        first, _, rest = config.partition("/")
        if not rest:
            return self._as_hydra_says()
        group = first if first in GROUPS else config.rpartition("/")[0]
        option = config.removeprefix(f"{group}/")
        options = self.catalog.options(group)
        near = nearest(option, options)
        homes = [home for home in HOMES.get(group, ()) if not _is_installed(home)]
        if near:
            todo = f"did you mean {group}={near}?"
        elif homes:
            brings = "bring" if len(homes) > 1 else "brings"
            todo = f"pip install {' '.join(homes)}, which {brings} options of the group {group!r}"
        else:
            todo = f"choose one of these, or install a package that brings {group}={option}"
        place = self._command_line(group) or self.catalog.file(self.config_name)
        # With a near match it is a slip of the pen; without one, a broken plugin may bring it.
        broken = () if near else self.registry.problems
        problems = [f"a plugin with a problem: {problem}" for problem in broken]
        return ConfigError(
            f"{group}={option}: no such option of the group {group!r}",
            where=[place, *problems],
            accepted=", ".join(options) or f"none: no installed package brings a {group}",
            todo=todo,
        )

    def _folder_as_group(self, key: str) -> ConfigError:
        """Answer `planner/manual=zero`, where `planner=manual/zero` is meant."""
        group, _, folder = key.partition("/")
        option = next((text for text in self.overrides if key_of(text) == key), "")
        meant = f"{folder}/{option.partition('=')[2]}"
        options = self.catalog.options(group) if group in self.catalog.groups() else ()
        near = nearest(meant, options)
        return ConfigError(
            f"{key!r} is no group",
            where=self._command_line(key),
            accepted=", ".join(options) if options else ", ".join(self.catalog.groups()),
            todo=f"did you mean {group}={near}?" if near else "choose one of these",
        )

    def _unknown_key(self, key: str) -> ConfigError:
        """Say which setting does not exist, in which file, and what is known beside it."""
        place = self._command_line(key)
        group, _, path = key.partition(".")
        known = self._top_level()
        if group not in known:
            near = nearest(group, known)
            hint = f"did you mean {'.'.join(filter(None, (near, path)))}?" if near else ""
            return ConfigError(
                f"no group or setting is called {key!r}",
                where=place,
                accepted=", ".join(known),
                todo=hint,
            )
        try:
            base = self.compose_groups_only()
        except (SbpError, HydraException):
            return self._as_hydra_says()
        node: object = base.values.get(group)
        settable = self._settable(group, node) if path.count(".") == 0 else frozenset()
        places = [base.files.get(group, ""), place]
        names = path.split(".")
        for depth, name in enumerate(names[:-1], start=1):
            if not isinstance(node, Mapping) or name not in node:
                # What is wrong is not the last name, but one on the way to it.
                key, path = ".".join((group, *names[:depth])), ".".join(names[:depth])
                break
            node = node[name]
            if not isinstance(node, Mapping):
                return _no_mapping(group, names[:depth], node, names[depth:], places)
        if path in settable:
            override = next(text for text in self.overrides if key_of(text) == key)
            lacking = "does not have these names in" if path in _names(node) else "is not in"
            return ConfigError(
                f"{key} {lacking} the file, though {group} takes it",
                where=places,
                todo=f"add it: +{override.lstrip('+~')}",
            )
        error = unknown_key(key, _names(node) | settable, where=places)
        if "." not in path or group not in PLUGIN_GROUPS:
            return error
        # Inside a setting that is a mapping, such as pins, names are the user's own.
        todo = f"{error.todo}; or add it: +{key}=VALUE"
        return ConfigError(error.what, where=places, accepted=error.accepted, todo=todo)

    def _top_level(self) -> tuple[str, ...]:
        """Return the groups and settings that the primary config has."""
        try:
            values = self.compose_groups_only().values
        except (SbpError, HydraException):
            return GROUPS
        groups = tuple(group for group in GROUPS if group in values)
        return (*groups, *(name for name in values if name not in groups))

    def _settable(self, group: str, values: object) -> frozenset[str]:
        """Return the settings that a group takes, whether its file lists them or not."""
        config: type = CompileConfig if group == "compile" else TrainerConfig
        if group not in GROUPS:
            return frozenset()
        if group in PLUGIN_GROUPS:
            name = values.get("name") if isinstance(values, Mapping) else None
            try:
                config = self.registry.factory(group, str(name)).config
            except SbpError:
                return frozenset()
        return frozenset(field.name for field in fields(config))


def _no_mapping(
    group: str, names: list[str], value: object, rest: list[str], places: list[str]
) -> ConfigError:
    """Say that a setting whose parts are to be set is a single value."""
    key = ".".join((group, *names))
    text = {None: "null", True: "true", False: "false"}.get(value, value)  # type: ignore[call-overload]
    whole = "VALUE"
    for name in reversed(rest):
        whole = f"{{{name}: {whole}}}"
    return ConfigError(
        f"{key} is {text}, and has no setting {'.'.join(rest)!r}",
        where=places,
        todo=f"set it as a whole, if it takes settings: '{key}={whole}'",
    )


def _names(node: object) -> frozenset[str]:
    return frozenset(map(str, node)) if isinstance(node, Mapping) else frozenset()


def _is_installed(distribution: str) -> bool:
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True

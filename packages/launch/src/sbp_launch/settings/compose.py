"""Compose the config of a command line with Hydra, whose errors become `ConfigError`."""

from __future__ import annotations

import itertools
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from typing import Any

import hydra
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, Override
from hydra.core.plugins import Plugins
from hydra.errors import MissingConfigException, OverrideParseException
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from sbp_core.errors import ConfigError, SbpError
from sbp_core.plugins import KINDS, ConfigFolder, former_fields
from sbp_core.serialize import read_bytes, read_text
from sbp_launch.secret_settings import leaves
from sbp_launch.settings.catalog import (
    CORE_CONFIGS,
    OWN_FOLDER,
    PRIMARY,
    Catalog,
    refuse_expansion,
    refuse_faults,
)
from sbp_launch.settings.config import GROUPS, PLUGIN_GROUPS, Application, ComposedConfig, key_of
from sbp_launch.settings.known_keys import nested_configs
from sbp_launch.settings.refusals import (
    as_hydra_says,
    faulty_file,
    force_override,
    missing_option,
    not_in_the_file,
    option_of,
    unreadable,
    unresolved_error,
)
from sbp_launch.settings.resumed import place_of

#: The version of Hydra's behaviour for which the configs are written.
VERSION_BASE = "1.3"

#: The largest number of jobs of a sweep that are checked before the first one starts.
MOST_JOBS_CHECKED = 256

_FOLDERS: ContextVar[tuple[ConfigFolder, ...]] = ContextVar("config_folders", default=())


class PluginFolders(SearchPathPlugin):
    """Adds the config folders of the enclosing `searching` to Hydra's search path."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Append the folders; the primary folder is there already."""
        for folder in _FOLDERS.get():
            if folder.path != PRIMARY.path:
                search_path.append(provider=folder.distribution, path=folder.path)


@contextmanager
def searching(folders: Sequence[ConfigFolder]) -> Iterator[None]:
    """Make Hydra find the options in `folders` inside the `with` block.

    The plugin is registered by hand, because a module in `hydra_plugins` would affect every Hydra
    app in the environment.
    """
    Plugins.instance().register(PluginFolders)
    token = _FOLDERS.set(tuple(folders))
    try:
        yield
    finally:
        _FOLDERS.reset(token)


def compose(catalog: Catalog, app: Application[Any], overrides: Sequence[str]) -> DictConfig:
    """Compose a config, including Hydra's own node.

    Args:
        catalog: The groups and options.
        app: The app whose primary config is composed. Its check gives better messages than Hydra,
            because it knows the settings of plugins.
        overrides: The overrides of the command line.

    Raises:
        ConfigError: Hydra refuses it; names the key, its file and the nearest valid name.
    """
    for folder in catalog.folders:
        # Hydra could use up all memory to read a malicious file of the user's folder.
        root = Path(folder.path.removeprefix("file://"))
        depths = ("*.yaml", "*/*.yaml", "*/*/*.yaml") if folder.distribution == OWN_FOLDER else ()
        # Options of groups, and options in a folder of a group.
        for path in (path for depth in depths for path in root.glob(depth)):
            try:
                text = read_text(path)
            except SbpError:
                continue  # Hydra reports it if it is chosen
            refuse_expansion(text, str(path))
    try:
        return _compose(catalog, app.config_name, overrides)
    except OverrideParseException as error:
        raise unreadable(error) from error
    except Exception as error:  # some are not Hydra's own: ValueError, TypeError
        raise _explain(error, catalog, app, overrides) from error


def _compose(catalog: Catalog, config_name: str, overrides: Sequence[str]) -> DictConfig:
    module = PRIMARY.path.removeprefix("pkg://")
    with (
        searching(catalog.folders),
        hydra.initialize_config_module(module, job_name="sbp", version_base=VERSION_BASE),
        warnings.catch_warnings(),
    ):
        # Hydra only warns about a search path that does not exist.
        warnings.filterwarnings("error", message="provider=.* is not available")
        return hydra.compose(config_name, list(overrides), return_hydra_config=True)


def _explain(
    error: Exception, catalog: Catalog, app: Application[Any], overrides: Sequence[str]
) -> ConfigError:
    """Return the error for overrides that Hydra refused.

    Hydra knows only the keys of settings that are in the files. So the config is composed again
    with every key allowed, and `check` raises the better error.
    """
    groups = catalog.groups()
    try:
        if file := faulty_file(error):
            text = read_bytes(Path(file), error=ConfigError).decode("utf-8", "replace")
            refuse_faults(text, file)
        for text in overrides:
            refuse_faults(catalog.text(option_of(text)), catalog.file(option_of(text)))
    except ConfigError as fault:
        return fault
    missing = error.missing_cfg_file if isinstance(error, MissingConfigException) else ""
    for text in overrides:
        if "/" in (key := key_of(text)) and f"'{key}'" in str(error):
            missing = option_of(text)  # planner/manual=zero means planner=manual/zero
    if missing and missing.partition("/")[0] in (*GROUPS, *groups):
        asking = re.match("In '([^']+)'", str(error))
        file = catalog.file(asking[1]) if asking else ""
        return missing_option(missing, overrides, file or catalog.file(app.config_name), catalog)
    try:
        keys_allowed = [force_override(text, groups, error) for text in overrides]
        composed = read(_compose(catalog, app.config_name, keys_allowed), catalog)
        composed = replace(composed, overrides=tuple(overrides))
        app.check(composed, catalog.registry)
    except ConfigError as refused:
        return refused
    except Exception:
        return as_hydra_says(error)
    return not_in_the_file(error, composed)


def refuse_conflicts(overrides: Sequence[str]) -> None:
    """Check that no key is set twice to different values: Hydra would silently use the last.

    Raises:
        ConfigError: a key is; names both overrides.
    """
    seen: dict[str, str] = {}
    for text in overrides:
        if text.startswith("~") or "=" not in text:
            continue
        key = option_of(text) if "/" in key_of(text) else key_of(text)
        first = seen.setdefault(key, text)
        if first.partition("=")[2] != text.partition("=")[2]:
            raise ConfigError(
                f"{key} is set twice: {first} and {text}",
                where="the command line",
                accepted="one value; several with -m: " + f"{key}=A,B",
                todo=f"leave out {first} or {text}",
            )


def read(config: DictConfig, catalog: Catalog) -> ComposedConfig:
    """Return a composed config, including Hydra's own node, as plain values.

    Raises:
        ConfigError: a mandatory value is not set, an interpolation has no target, or two
            distributions provide the option of a group.
    """
    files = {}
    for group, option in config.hydra.runtime.choices.items():
        if group in GROUPS and option is not None:
            if group in PLUGIN_GROUPS:
                option = catalog.registry.current_name(group, option)
            file = catalog.file(f"{group}/{option}") or place_of(group, option)
            files[group] = file
            owners = catalog.owners(f"{group}/{option}")
            if len(owners) > 1:
                raise ConfigError(
                    f"the option file {file} comes from {' and '.join(owners)}",
                    accepted="one distribution for each option",
                    todo="uninstall one of them, or ask its author for another name",
                )
            value = config[group]
            if not OmegaConf.is_dict(value) or (group in PLUGIN_GROUPS and "name" not in value):
                refuse_faults(catalog.text(f"{group}/{option}"), file)
    names = [name for name in map(str, config) if name != "hydra"]
    return ComposedConfig(
        values={name: _plain(config, name, files.get(name, ""), catalog) for name in names},
        files=files,
        overrides=tuple(map(str, config.hydra.overrides.task)),
        variables={
            key: value
            for key, value in leaves(OmegaConf.to_container(config))
            if isinstance(value, str)
            and re.match(r"\$\{oc\.env:[^{}]*\}$", value)
            and not key.startswith("hydra.")
        },
    )


def _plain(config: DictConfig, group: str, file: str, catalog: Catalog) -> object:
    """Return one group or setting of a config as plain values.

    Raises:
        ConfigError: see `read`.
    """
    try:
        value: object = config[group]
        if OmegaConf.is_config(value):
            value = OmegaConf.to_container(value, resolve=True, throw_on_missing=True)
        return value
    except MissingMandatoryValue as error:
        key = error.full_key or group
        option = config.hydra.runtime.choices.get(group, "")
        # From its comment in the option file.
        comment = catalog.comments(f"{group}/{option}").get(key.removeprefix(f"{group}."), "")
        shown = re.search(rf"\b{re.escape(key)}=\S+", comment)
        # Options below this one set it.
        below = [f"{group}={one}" for one in catalog.options(group) if one.startswith(f"{option}/")]
        others = f", or choose {', '.join(below)}" if below else ""
        raise ConfigError(
            f"{key} is not set",
            where=file,
            accepted="" if shown else comment,
            todo=f"set {shown[0] if shown else f'{key}=VALUE'}{others}",
        ) from error
    except OmegaConfBaseException as error:
        raise unresolved_error(error, group, file) from error


def renamed_overrides(overrides: Sequence[str], catalog: Catalog) -> dict[str, str]:
    """Return the overrides that use a former name of an option or a setting: old text -> new."""
    found = {}
    for text in overrides:
        group, dot, name = key_of(text).partition(".")
        head, equals, value = text.partition("=")
        configs = [CORE_CONFIGS[group]] if group in CORE_CONFIGS else catalog.configs(group)
        if dot and not any(name in nested_configs(config) for config in configs):
            former = {old: new for config in configs for old, new in former_fields(config).items()}
            head = head.replace(f"{group}.{name}", f"{group}.{former.get(name, name)}", 1)
        elif not dot and group in KINDS:
            for old, new in catalog.registry.former_names(group).items():
                value = re.sub(rf"(?<![\w/]){re.escape(old)}(?![\w/])", new, value)
        if (new := head + equals + value) != text:
            found[text] = new
    return found


def expand_globs(overrides: Sequence[str], catalog: Catalog) -> list[str]:
    """Return overrides in which `planner=glob(manual/*)` is replaced by the options that match.

    As in a shell, `*` matches options in a folder only if the pattern has a slash, too.

    Raises:
        ConfigError: an override cannot be read, or matches no option.
    """
    found = []
    for text in overrides:
        group = key_of(text)
        value: object = None
        if "=glob(" in text and not group.startswith("hydra/"):
            value = _parse([text])[0].value()
        if isinstance(value, Glob):
            deep = any("/" in pattern for pattern in value.include)
            options = catalog.options(group)
            names = value.filter([one for one in options if deep or "/" not in one])
            if not names:
                raise ConfigError(
                    f"{text} matches no option of the group {group!r}",
                    where=f"the command line: {text}",
                    accepted=", ".join(options) or f"a group: {', '.join(catalog.groups())}",
                )
            text = f"{text.partition('=')[0]}={','.join(names)}"
        found.append(text)
    return found


def _parse(overrides: Sequence[str]) -> list[Override]:
    try:
        return OverridesParser.create().parse_overrides(list(overrides))
    except OverrideParseException as error:
        raise unreadable(error) from error


def sweep_jobs(overrides: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    """Return the overrides of each job of a sweep, as far as they are known in advance.

    A sweep that another sweeper interprets, such as an interval, is omitted. At most
    `MOST_JOBS_CHECKED` jobs are returned.

    Raises:
        ConfigError: an override cannot be read, or has no value, so that there is no job.
    """
    choices = []
    for override in _parse(overrides):
        text = str(override.input_line)
        if not override.is_sweep_override():
            choices.append([text])
        elif override.is_discrete_sweep() and not isinstance(override.value(), Glob):
            key = override.get_key_element()
            values = [f"{key}={value}" for value in override.sweep_string_iterator()]
            if not values:
                what = f"{text} has no values"
                raise ConfigError(what, where="the command line", accepted="one value or more")
            choices.append(values)
    return tuple(itertools.islice(itertools.product(*choices), MOST_JOBS_CHECKED))

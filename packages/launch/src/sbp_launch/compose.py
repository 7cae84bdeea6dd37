"""From a command line to a composed config, with Hydra; what Hydra refuses becomes `ConfigError`.

Checks no setting (that is `check`) and runs nothing. Imports no torch.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException
from yaml import YAMLError  # type: ignore[import-untyped]  # its stubs are a package of their own

from sbp_core.errors import ConfigError
from sbp_core.plugins import ConfigFolder, Registry
from sbp_launch.catalog import PRIMARY, Catalog, config_folders
from sbp_launch.config import GROUPS, Composed
from sbp_launch.refusals import Refusal, key_of

#: Version of Hydra's behaviour that the configs are written for.
VERSION_BASE = "1.3"

#: Most jobs of a sweep that are checked before the first one starts.
MOST_JOBS_CHECKED = 256

#: Provider of the folder of `--config-dir`, which may shadow an option on purpose.
COMMAND_LINE = "command-line"


@contextmanager
def session(
    registry: Registry, config_dir: str | None = None, *, primary: str = PRIMARY
) -> Iterator[Catalog]:
    """Start Hydra's compose API on the plugins' folders; yield what can be asked for.

    Args:
        registry: Plugins, whose config folders are searched.
        config_dir: The user's own folder (`--config-dir`), searched before all others.
        primary: Where the primary config is.

    Raises:
        ConfigError: a folder does not exist.
    """
    if config_dir is not None and not Path(config_dir).is_dir():
        raise ConfigError(f"--config-dir {config_dir!r} is no folder", where="the command line")
    folders = registry.config_folders()
    if config_dir is not None:
        own = f"file://{Path(config_dir).absolute()}"
        folders = (ConfigFolder(path=own, distribution=COMMAND_LINE), *folders)
    module = primary.removeprefix("pkg://")
    with (
        config_folders(folders),
        hydra.initialize_config_module(module, job_name="sbp", version_base=VERSION_BASE),
    ):
        yield Catalog(GlobalHydra.instance().config_loader())


def compose(
    catalog: Catalog, registry: Registry, config_name: str, overrides: Sequence[str]
) -> DictConfig:
    """Compose a config, Hydra's own node included, inside a `session`.

    Raises:
        ConfigError: Hydra cannot; names the key, its file and the nearest valid name.
    """
    try:
        return _compose(config_name, overrides)
    except (HydraException, OmegaConfBaseException, YAMLError, UserWarning) as error:

        def compose_groups_only() -> Composed:
            kept = [text for text in overrides if key_of(text) in catalog.groups()]
            return read(_compose(config_name, kept), catalog)

        refusal = Refusal(
            error=error,
            config_name=config_name,
            overrides=tuple(overrides),
            catalog=catalog,
            registry=registry,
            compose_groups_only=compose_groups_only,
        )
        raise refusal.translate() from error


def _compose(config_name: str, overrides: Sequence[str]) -> DictConfig:
    with warnings.catch_warnings():
        # Hydra only warns of a search path that does not exist.
        warnings.filterwarnings("error", message="provider=.* is not available")
        return hydra.compose(config_name, list(overrides), return_hydra_config=True)


def read(config: DictConfig, catalog: Catalog) -> Composed:
    """Return a composed config, Hydra's own node included, as plain values.

    Raises:
        ConfigError: a mandatory value is not set, or an interpolation leads nowhere.
    """
    node = config.hydra
    choices = {str(group): choice for group, choice in node.runtime.choices.items()}
    options = {
        group: f"{group}/{choice}"
        for group, choice in choices.items()
        if group in GROUPS and choice is not None
    }
    files = {group: catalog.file(option) for group, option in options.items()}
    values: dict[str, object] = {}
    for name in config:
        group = str(name)
        if group == "hydra":
            continue
        try:
            child = config[group]
            values[group] = (
                OmegaConf.to_container(child, resolve=True, throw_on_missing=True)
                if OmegaConf.is_config(child)
                else child
            )
        except OmegaConfBaseException as error:
            raise _unresolved(error, files.get(group, "")) from error
    return Composed(
        values=values,
        files=files,
        owners={group: catalog.owners(option) for group, option in options.items()},
        overrides=tuple(str(text) for text in node.overrides.task),
    )


def _unresolved(error: OmegaConfBaseException, file: str) -> ConfigError:
    key = str(error.full_key or "")
    if isinstance(error, MissingMandatoryValue):
        return ConfigError(f"{key} is not set", where=file, todo=f"set {key}=VALUE")
    first = str(error).partition("\n")[0]
    return ConfigError(f"{key}: {first}" if key else first, where=file)


def sweep_jobs(overrides: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    """Return the overrides of each job of a sweep, as far as they are known beforehand.

    A sweep that another sweeper interprets (an interval, a glob) is left out. At most
    `MOST_JOBS_CHECKED` jobs are returned.

    Raises:
        ConfigError: an override cannot be read.
    """
    try:
        parsed = OverridesParser.create().parse_overrides(list(overrides))
    except HydraException as error:
        raise ConfigError(str(error).partition("\n")[0], where="the command line") from error
    choices = [choice for choice in map(_choices_of, parsed) if choice]
    jobs = itertools.islice(itertools.product(*choices), MOST_JOBS_CHECKED)
    return tuple(jobs)


def _choices_of(override: Override) -> list[str]:
    if not override.is_sweep_override():
        return [str(override.input_line)]
    if not override.is_discrete_sweep() or isinstance(override.value(), Glob):
        return []
    key = override.get_key_element()
    return [f"{key}={value}" for value in override.sweep_string_iterator()]

"""The config folders: their groups, the options of a group, and the file of an option.

Hydra searches the same folders in the same order; here they are read without it, so that a message,
the help or a completion need no composed config.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.resources.abc import Traversable
from itertools import takewhile
from pathlib import Path

from sbp_core.errors import ConfigError
from sbp_core.plugins import ConfigFolder, PluginEntry, PluginRegistry
from sbp_core.serialize import read_bytes
from sbp_launch.compile_config import CompileConfig
from sbp_launch.settings.config import TrainerConfig
from sbp_launch.settings.option_file import comments, headline

#: Where the primary configs are; Hydra searches it first.
PRIMARY = ConfigFolder(path="pkg://sbp_launch.conf", distribution="sbp-launch")

#: Stands for the distribution of the user's own folder.
OWN_FOLDER = "--config-dir"

#: The settings of the groups that name no plugin.
CORE_CONFIGS: Mapping[str, type] = {"trainer": TrainerConfig, "compile": CompileConfig}

#: Stands for a plugin that is not there.
_NOBODY = PluginEntry(kind="", name="", distribution="", version="", api_version=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Catalog:
    """What one can choose from.

    Args:
        registry: The plugins.
        folders: Config folders, in the order in which Hydra searches them.
    """

    registry: PluginRegistry
    folders: tuple[ConfigFolder, ...]

    def groups(self) -> tuple[str, ...]:
        """Return the names of all groups but Hydra's own, sorted."""
        names = {
            child.name
            for folder in self.folders
            for child in folder.root().iterdir()
            if child.is_dir() and any(_options(child))
        }
        return tuple(sorted(names - {"hydra"}))

    def options(self, group: str) -> tuple[str, ...]:
        """Return the options of a group as one writes them: `osdp`, `manual/pipeline`."""
        found = (_options(folder.root().joinpath(group)) for folder in self.folders)
        return tuple(sorted({option for options in found for option in options}))

    def owners(self, config: str) -> tuple[str, ...]:
        """Return the distributions that bring a config such as `planner/osdp`."""
        return tuple(folder.distribution for folder in self._holding(config))

    def file(self, config: str) -> str:
        """Return the file of a config, such as `sbp_launch/conf/trainer/default.yaml`, or `""`."""
        for folder in self._holding(config):
            scheme, _, place = folder.path.rpartition("://")
            return f"{place.replace('.', '/') if scheme == 'pkg' else place}/{config}.yaml"
        return ""

    def about(self, config: str) -> tuple[str, ...]:
        """Return the lines of the comment that a config begins with."""
        lines = takewhile(lambda line: line.startswith("#"), self.text(config).splitlines())
        return tuple(line.removeprefix("#").removeprefix(" ") for line in lines)

    def summary(self, group: str, option: str) -> str:
        """Return what an option is in a sentence: of its file, or else of its plugin, or `""`."""
        entries = (one for one in self.registry.entries if (one.kind, one.name) == (group, option))
        return headline(self.text(f"{group}/{option}")) or next(entries, _NOBODY).summary

    def comments(self, config: str) -> dict[str, str]:
        """Return what a config says of its settings, by key; see `option_file`."""
        return comments(self.text(config))

    def config(self, group: str, name: object) -> type | None:
        """Return the dataclass of a group's settings, or None if it is not known.

        Args:
            group: Its name.
            name: Name of the plugin that its option is for.
        """
        if group in CORE_CONFIGS:
            return CORE_CONFIGS[group]
        found = (one for one in self.registry.entries if (one.kind, one.name) == (group, name))
        factory = next(found, _NOBODY).factory
        return factory.config if factory else None

    def complete(self, line: str) -> tuple[str, ...] | None:
        """Return the completions of the last word of a command line: `planner=manual/zero`.

        Hydra completes no option inside a folder of a group.

        Returns:
            Whole words; None if the word is no choice of an option, so that Hydra should answer.
        """
        group, equals, start = line.rpartition(" ")[2].partition("=")
        if not equals or group not in self.groups():
            return None
        return tuple(f"{group}={one}" for one in self.options(group) if one.startswith(start))

    def _holding(self, config: str) -> list[ConfigFolder]:
        return [one for one in self.folders if one.root().joinpath(f"{config}.yaml").is_file()]

    def text(self, config: str) -> str:
        """Return the text of a config, or `""`."""
        for folder in self._holding(config):
            # What is no UTF-8 is refused when it is chosen; in a listing it is only shown so.
            file = folder.root().joinpath(f"{config}.yaml")
            # Only those of a package may be in an archive.
            own = read_bytes(file, error=ConfigError) if isinstance(file, Path) else None
            return (file.read_bytes() if own is None else own).decode("utf-8", "replace")
        return ""

    def misplaced(self, config: str) -> str:
        """Say where a file of the user's lies that was to be an option, and is none, or `""`."""
        group, _, option = config.partition("/")
        for folder in (one for one in self.folders if one.distribution == OWN_FOLDER):
            place = folder.path.rpartition("://")[2]
            if folder.root().joinpath(f"{config}.yml").is_file():
                return f"rename {place}/{config}.yml: options end in .yaml"
            if folder.root().joinpath(f"{option}.yaml").is_file():
                return f"move {place}/{option}.yaml to {place}/{group}/{option}.yaml"
        return ""


def make_catalog(registry: PluginRegistry, config_dir: str | None = None) -> Catalog:
    """Return the catalog of the plugins' folders, and of the user's own one (`--config-dir`).

    Raises:
        ConfigError: the user's folder does not exist.
    """
    folders = [PRIMARY, *(one for one in registry.config_folders() if one.path != PRIMARY.path)]
    if config_dir is not None:
        path = Path(config_dir).absolute()
        if not path.is_dir():
            raise ConfigError(
                f"--config-dir {config_dir!r} is {'no folder' if path.exists() else 'not there'}",
                where="the command line",
                accepted="a folder with options of yours, as GROUP/NAME.yaml",
            )
        folders.append(ConfigFolder(path=f"file://{path}", distribution=OWN_FOLDER))
    return Catalog(registry=registry, folders=tuple(folders))


def _options(folder: Traversable, prefix: str = "") -> Iterator[str]:
    """Yield the configs in a folder and in the folders in it: `osdp`, `manual/pipeline`."""
    for child in folder.iterdir() if folder.is_dir() else ():
        if child.is_dir():
            yield from _options(child, f"{prefix}{child.name}/")
        elif child.name.endswith(".yaml"):
            yield prefix + child.name.removesuffix(".yaml")

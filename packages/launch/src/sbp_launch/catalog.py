"""What Hydra can be asked for: the config folders of the plugins, groups, options and their files.

Composes nothing and checks no setting. Imports no torch.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from importlib.resources import files
from itertools import takewhile
from pathlib import Path

from hydra.core.config_loader import ConfigLoader
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin

from sbp_core.errors import ConfigError
from sbp_core.plugins import ConfigFolder

#: Where the primary configs are.
PRIMARY = "pkg://sbp_launch.conf"

#: Most characters of a headline.
_HEADLINE = 76

_FOLDERS: ContextVar[tuple[ConfigFolder, ...]] = ContextVar("config_folders", default=())


class PluginFolders(SearchPathPlugin):
    """Add the config folders of the enclosing `config_folders` to Hydra's search path."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Append the folders; the primary folder is there already."""
        for folder in _FOLDERS.get():
            if folder.path != PRIMARY:
                search_path.append(provider=folder.distribution, path=folder.path)


@contextmanager
def config_folders(folders: Sequence[ConfigFolder]) -> Iterator[None]:
    """Let Hydra find the options in `folders` inside the `with` block.

    The plugin is registered by hand: a module in `hydra_plugins` would burden every Hydra app of
    the environment.

    Raises:
        ConfigError: a folder does not exist; names the distribution that brings it.
    """
    for folder in folders:
        if not _exists(folder.path):
            raise ConfigError(
                f"the config folder {folder.path} does not exist",
                where=f"distribution {folder.distribution}",
                accepted="pkg://package.folder or file:///absolute/folder",
                todo=f"reinstall {folder.distribution}, or uninstall it",
            )
    Plugins.instance().register(PluginFolders)
    token = _FOLDERS.set(tuple(folders))
    try:
        yield
    finally:
        _FOLDERS.reset(token)


def _exists(path: str) -> bool:
    scheme, _, rest = path.rpartition("://")
    if scheme != "pkg":
        return Path(rest).is_dir()
    try:
        spec = importlib.util.find_spec(rest.replace("/", "."))
    except ModuleNotFoundError:
        return False
    return spec is not None and spec.submodule_search_locations is not None


@dataclass(frozen=True, slots=True)
class Catalog:
    """The groups and options that Hydra sees."""

    loader: ConfigLoader

    def groups(self) -> tuple[str, ...]:
        """Return the names of all groups but Hydra's own, sorted."""
        return tuple(sorted(set(self.loader.list_groups("")) - {"hydra"}))

    def options(self, group: str) -> tuple[str, ...]:
        """Return the options of a group as one writes them: `osdp`, `manual/pipeline`."""
        found = list(self.loader.get_group_options(group, ObjectType.CONFIG))
        for folder in self.loader.get_group_options(group, ObjectType.GROUP):
            found += [f"{folder}/{option}" for option in self.options(f"{group}/{folder}")]
        return tuple(sorted(found))

    def owners(self, config: str) -> tuple[str, ...]:
        """Return the providers of a config such as `planner/osdp`; Hydra takes the first."""
        return tuple(source.provider for source in self._sources(config))

    def file(self, config: str) -> str:
        """Return the file of a config, such as `sbp_launch/conf/trainer/default.yaml`, or `""`."""
        for source in self._sources(config):
            folder = source.path.replace(".", "/") if source.scheme() == "pkg" else source.path
            return f"{folder}/{config}.yaml"
        return ""

    def headline(self, config: str) -> str:
        """Return the first sentence of the comment that a config begins with, or `""`."""
        comment = takewhile(lambda line: line.startswith("#"), self._text(config).splitlines())
        first = " ".join(line.lstrip("# ") for line in comment).partition(". ")[0].rstrip(".")
        return first if len(first) <= _HEADLINE else f"{first[: _HEADLINE - 3].rstrip()}..."

    def comments(self, config: str) -> dict[str, str]:
        """Return what a config says behind its own settings: `key: value  # this`."""
        lines = (re.match(r"(\w+): .*\S  # (.+)", line) for line in self._text(config).splitlines())
        return {line[1]: line[2] for line in lines if line}

    def _text(self, config: str) -> str:
        """Return the text of a config, or `""`."""
        for source in self._sources(config):
            if source.scheme() == "pkg":
                package, _, rest = f"{source.path.replace('.', '/')}/{config}.yaml".partition("/")
                return files(package).joinpath(rest).read_text("utf-8")
            if source.scheme() == "file":
                return Path(source.path, f"{config}.yaml").read_text("utf-8")
        return ""

    def _sources(self, config: str) -> Iterable[ConfigSource]:
        return [
            source
            for source in self.loader.get_sources()
            if source.scheme() != "structured" and source.is_config(config)
        ]

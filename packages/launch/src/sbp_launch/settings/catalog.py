"""List the groups, options and comments in the YAML config folders of plugins, without Hydra.

Hydra searches the same folders in the same order. Messages, help and completion use this list, so
they need no composed config. In addition to its values, which Hydra reads, an option file has a
first comment, and a comment for each setting:

    # Adam with decoupled weight decay.       the comment of the file
    name: adamw
    lr: 0.001  # learning rate                the comment of `lr`, which may continue
      # in lines that are indented further

A comment may also be above its setting.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.resources.abc import Traversable
from itertools import takewhile
from math import inf
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped] # its stubs are a package of their own

from sbp_core.errors import ConfigError
from sbp_core.plugins import KINDS, ConfigFolder, PluginEntry, PluginRegistry
from sbp_core.serialize import read_bytes
from sbp_launch.compile_config import CompileConfig
from sbp_launch.settings.config import TrainerConfig

#: The largest number of values of an option file, counting every reference to a value.
MOST_VALUES = 100_000

#: Errors other than its own that PyYAML raises for invalid values.
_OF_YAML = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError)


def headline(text: str) -> str:
    """Return the first sentence of the first comment of a file, or `""`."""
    comment = takewhile(lambda line: line.startswith("#"), text.splitlines())
    return " ".join(line.lstrip("# ") for line in comment).partition(". ")[0].rstrip(".")


def comments(text: str) -> dict[str, str]:
    r"""Return the comment of each setting by its key, `schedule.decay`; none if it is not YAML.

    >>> comments("a: 1  # one\nb:  # more\n  # above c\n  c: [2]\n  d: x  # long\n    # text")
    {'a': 'one', 'b': 'more', 'b.c': 'above c', 'b.d': 'long text'}
    """
    found: dict[str, str] = {}
    lines = text.splitlines()
    first = len(list(takewhile(lambda line: line.startswith("#"), lines)))
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except (yaml.YAMLError, *_OF_YAML):
        return {}  # `refuse_faults` says what is wrong
    if num_values(root) > MOST_VALUES:
        return {}
    todo = [("", root)] if isinstance(root, yaml.MappingNode) else []
    while todo:
        prefix, node = todo.pop(0)
        for name, value in node.value:
            key = f"{prefix}{name.value}"
            if comment := _comment(lines, name, value, first):
                found[key] = comment
            if isinstance(value, yaml.MappingNode):
                todo.append((f"{key}.", value))
    return found


def _comment(lines: list[str], name: yaml.Node, value: yaml.Node, first: int) -> str:
    """Return the comment after or above a setting.

    Args:
        lines: The lines of the file.
        name: The node of the setting's name.
        value: The node of its value.
        first: Number of the first line after the file's own comment.
    """
    is_block = isinstance(value, yaml.CollectionNode) and not value.flow_style
    end = name.end_mark if is_block else value.end_mark
    behind = lines[end.line][end.column :].lstrip(": ")
    if behind.startswith("#"):
        parts = [behind]
        indent = name.start_mark.column
        if not is_block:
            parts += takewhile(lambda line: _is_comment(line, indent + 1), lines[end.line + 1 :])
        return " ".join(part.lstrip("# ").rstrip() for part in parts)
    above = lines[first : name.start_mark.line][::-1]
    parts = list(takewhile(lambda line: _is_comment(line, name.start_mark.column), above))
    return " ".join(part.lstrip("# ").rstrip() for part in parts[::-1])


def _is_comment(line: str, indent: int) -> bool:
    """Return whether a line is a comment with at least this indentation."""
    return line.lstrip().startswith("#") and len(line) - len(line.lstrip()) >= indent


class _OnceLoader(yaml.SafeLoader):  # type: ignore[misc] # yaml has no types
    """A loader that refuses a name that occurs twice in a mapping."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[object, object]:
        """Return a mapping.

        Raises:
            MarkedYAMLError: a name occurs twice.
        """
        seen: dict[object, int] = {}
        for name, _ in node.value:
            if name.value in seen:
                first = seen[name.value]
                raise yaml.MarkedYAMLError(
                    problem=f"{name.value!r} occurs twice, the first time in line {first}",
                    problem_mark=name.start_mark,
                )
            seen[name.value] = name.start_mark.line + 1
        made: dict[object, object] = super().construct_mapping(node, deep=deep)
        return made


def num_values(node: yaml.Node | None, known: dict[int, float] | None = None) -> float:
    """Return the number of values that a node expands to; infinity if it contains itself.

    Args:
        node: The node.
        known: The results for visited nodes, by identity, because references share nodes.
    """
    known = {} if known is None else known
    if node is None:
        return 0
    if id(node) not in known:
        known[id(node)] = inf
        parts = list(node.value) if isinstance(node, yaml.CollectionNode) else []
        if isinstance(node, yaml.MappingNode):
            parts = [one for pair in parts for one in pair]
        known[id(node)] = 1 + sum(num_values(part, known) for part in parts)
    return known[id(node)]


def refuse_expansion(text: str, file: str) -> None:
    """Check that the references of an option file do not expand to more values than memory holds.

    A few lines of nested references can do that: `a: &a [1, 1]`, `b: &b [*a, *a]`, ...

    Raises:
        ConfigError: they do.
    """
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader) if "*" in text else None
    except (yaml.YAMLError, *_OF_YAML):
        return  # `refuse_faults` says what is wrong
    if num_values(root) > MOST_VALUES:
        raise ConfigError(
            "the references of the option file expand to a value of extreme size",
            where=file,
            accepted=f"at most {MOST_VALUES:,} values",
            todo="write the values without references",
        )


def refuse_faults(text: str, file: str) -> None:
    """Check that an option file is a mapping in YAML.

    Raises:
        ConfigError: it is not; names the file, the line and the fault.
    """
    if "\ufffd" in text:
        raise ConfigError("the option file is no UTF-8", where=file, todo="save it as UTF-8")
    try:
        refuse_expansion(text, file)
        value = yaml.load(text, Loader=_OnceLoader)  # a SafeLoader
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else 0
        what = error.problem or error.context or "it cannot be read"
        shown = text.splitlines()[line - 1] if 0 < line <= len(text.splitlines()) else ""
        if "\t" in shown[: len(shown) - len(shown.lstrip())]:
            what = "a tab where YAML takes spaces only"
        raise ConfigError(
            f"the option file is no YAML: {what}",
            where=f"{file}, line {line}{f': {shown.strip()}' if shown.strip() else ''}",
            accepted="name: value, one a line; nested settings indented by spaces",
            todo="correct that line, or the text before it",
        ) from error
    except ConfigError:
        raise
    except (yaml.YAMLError, *_OF_YAML) as error:
        what = " ".join(str(error).split())
        raise ConfigError(f"the option file is no YAML: {what}", where=file) from error
    if value is not None and not isinstance(value, dict):
        raise ConfigError(
            f"the option file is a {type(value).__name__}, not a mapping",
            where=f"{file}, line 1",
            accepted="name: value, one a line",
        )


#: The folder of the primary configs, which Hydra searches first.
PRIMARY = ConfigFolder(path="pkg://sbp_launch.conf", distribution="sbp-launch")

#: The name used as the distribution of the user's own folder.
OWN_FOLDER = "--config-dir"

#: The configs of the groups that name no plugin.
CORE_CONFIGS: Mapping[str, type] = {"trainer": TrainerConfig, "compile": CompileConfig}

#: Used in place of a missing plugin.
_NOBODY = PluginEntry(kind="", name="", distribution="", version="", api_version=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Catalog:
    """The groups, options and settings that a user can choose from.

    Args:
        registry: The plugins.
        folders: Config folders, in the order in which Hydra searches them.
    """

    registry: PluginRegistry
    folders: tuple[ConfigFolder, ...]

    def groups(self) -> tuple[str, ...]:
        """Return the sorted names of all groups except Hydra's own."""
        names = {
            child.name
            for folder in self.folders
            for child in folder.root().iterdir()
            if child.is_dir() and any(_options(child))
        }
        return tuple(sorted(names - {"hydra"}))

    def options(self, group: str) -> tuple[str, ...]:
        """Return the options of a group as users write them: `osdp`, `manual/pipeline`."""
        found = (_options(folder.root().joinpath(group)) for folder in self.folders)
        former = self.registry.former_names(group) if group in KINDS else {}
        return tuple(sorted({option for options in found for option in options} - former.keys()))

    def owners(self, config: str) -> tuple[str, ...]:
        """Return the distributions that provide a config such as `planner/osdp`."""
        return tuple(folder.distribution for folder in self._holding(config))

    def file(self, config: str) -> str:
        """Return the file of a config, such as `sbp_launch/conf/trainer/default.yaml`, or `""`."""
        for folder in self._holding(config):
            scheme, _, place = folder.path.rpartition("://")
            return f"{place.replace('.', '/') if scheme == 'pkg' else place}/{config}.yaml"
        return ""

    def comment_lines(self, config: str) -> tuple[str, ...]:
        """Return the lines of the first comment of a config."""
        lines = takewhile(lambda line: line.startswith("#"), self.text(config).splitlines())
        return tuple(line.removeprefix("#").removeprefix(" ") for line in lines)

    def summary(self, group: str, option: str) -> str:
        """Return a sentence about an option, from its file or else its plugin, or `""`."""
        entries = (one for one in self.registry.entries if (one.kind, one.name) == (group, option))
        return headline(self.text(f"{group}/{option}")) or next(entries, _NOBODY).summary

    def comments(self, config: str) -> dict[str, str]:
        """Return the comments of the settings in a config, by key; see the function `comments`."""
        return comments(self.text(config))

    def configs(self, group: str) -> list[type]:
        """Return the dataclasses of the settings of all plugins of a group."""
        entries = (one for one in self.registry.entries if one.kind == group)
        return [one.factory.config for one in entries if one.factory is not None]

    def config(self, group: str, name: object) -> type | None:
        """Return the dataclass of a group's settings, or None if it is not known."""
        if group in CORE_CONFIGS:
            return CORE_CONFIGS[group]
        found = (one for one in self.registry.entries if (one.kind, one.name) == (group, name))
        factory = next(found, _NOBODY).factory
        return factory.config if factory else None

    def complete(self, line: str) -> tuple[str, ...] | None:
        """Return the completions of the last word of a command line: `planner=manual/zero`.

        Hydra does not complete options inside a folder of a group.

        Returns:
            Whole words; None if the word does not choose an option, so that Hydra should complete.
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
            # A file that is not UTF-8 is refused when it is chosen; a listing shows it as it is.
            file = folder.root().joinpath(f"{config}.yaml")
            # Only files of a package may be in an archive.
            own = read_bytes(file, error=ConfigError) if isinstance(file, Path) else None
            return (file.read_bytes() if own is None else own).decode("utf-8", "replace")
        return ""

    def base(self, config: str) -> str:
        """Return the option of which an option is another name, `manual/zero`; `""` if of none."""
        found = (yaml.safe_load(self.text(config)) or {}).get("defaults", ())
        # The package that makes Hydra merge one option into another.
        bases = [str(one) for one in found if str(one).endswith("@_here_")]
        return bases[0].removesuffix("@_here_") if bases else ""

    def values(self, config: str) -> dict[str, Any]:
        """Return the settings of an option, on top of those of its base, as Hydra merges them."""
        own = dict(yaml.safe_load(self.text(config)) or {})
        if base := self.base(config):
            own.pop("defaults")
            return _merged(self.values(f"{config.partition('/')[0]}/{base}"), own)
        return own

    def misplaced_text(self, config: str) -> str:
        """Return a hint on an option file of the user with the wrong folder or suffix, or `""`."""
        group, _, option = config.partition("/")
        for folder in (one for one in self.folders if one.distribution == OWN_FOLDER):
            place = folder.path.rpartition("://")[2]
            if folder.root().joinpath(f"{config}.yml").is_file():
                return f"rename {place}/{config}.yml: options end in .yaml"
            if folder.root().joinpath(f"{option}.yaml").is_file():
                return f"move {place}/{option}.yaml to {place}/{group}/{option}.yaml"
        return ""


def _merged(first: Mapping[str, Any], then: Mapping[str, Any]) -> dict[str, Any]:
    return {**first} | {
        key: _merged(first[key], value)
        if isinstance(value, Mapping) and isinstance(first.get(key), Mapping)
        else value
        for key, value in then.items()
    }


def make_catalog(registry: PluginRegistry, config_dir: str | None = None) -> Catalog:
    """Return the catalog of the plugins' folders and of the user's own folder (`--config-dir`).

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
                accepted="a folder with options of yours: GROUP/NAME.yaml",
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

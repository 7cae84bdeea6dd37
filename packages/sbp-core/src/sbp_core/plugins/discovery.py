"""Discovery of plugins: read entry points of group `sbp`, import their hook modules, check them.

A plugin that fails is set aside with the reason and its distribution; all other plugins work. Only
hook modules are imported here, not the objects that they build. The result is a
`registry.PluginRegistry`.

pluggy silently keeps one of two equal entry-point names, accepts hooks that do not exist, and lets
one raising hook stop the rest. So the distributions are read here, every plugin gets a plugin
manager of its own, and names are compared with the hook specifications.
"""

from __future__ import annotations

import importlib.metadata
import os
import types
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pluggy

from sbp_core.errors import SbpError, SbpLookupError, nearest, suggestion
from sbp_core.plugins.hooks import API_VERSION, KINDS, PROJECT, Factory, HookSpecs
from sbp_core.plugins.registry import (
    BROKEN,
    CONFLICT,
    DISABLED,
    FAULTY,
    NO_KIND,
    OK,
    ConfigFolder,
    PluginEntry,
    PluginRegistry,
    Problem,
)
from sbp_core.plugins.tracebacks import place, reason

#: The oldest version of the hooks that still works.
OLDEST_API_VERSION = 1

#: The attribute in which a plugin states the API version it was written for.
VERSION_ATTRIBUTE = "SBP_API_VERSION"

#: Plugins to leave out: names of entry points or distributions, with commas between them.
DISABLE_VARIABLE = "SBP_DISABLE_PLUGINS"

#: Stands for the name of a distribution whose metadata are lost.
_UNNAMED = "(no name)"

HOOKS = frozenset(name for name in vars(HookSpecs) if name.startswith("sbp_"))


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginSource:
    """One entry point, with the distribution that contains it.

    Args:
        name: Name of the entry point.
        value: Its target: a module, or `module:object`.
        distribution: Name of the distribution.
        version: Version of the distribution.
    """

    name: str
    value: str
    distribution: str
    version: str = ""

    def load(self) -> object:
        """Import the plugin.

        Raises:
            ImportError: its value is not `module` or `module:object`.
            Exception: raised by the import.
        """
        point = importlib.metadata.EntryPoint(self.name, self.value, PROJECT)
        if point.pattern.match(self.value) is None:
            raise ImportError("it names no module")
        return point.load()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """The result of importing and checking one plugin."""

    source: PluginSource
    api_version: int | None = None
    offers: tuple[tuple[str, str, Factory], ...] = ()
    folders: tuple[str, ...] = ()
    faults: tuple[str, ...] = ()
    health: str = OK

    def problem(self, what: str) -> Problem:
        """Return a problem of this plugin."""
        return Problem(
            plugin=self.source.name,
            distributions=(self.source.distribution,),
            what=what,
            version=self.source.version,
            module=self.source.value.partition(":")[0],
        )


def discover(
    entry_points: Iterable[PluginSource] | None = None, *, strict: bool = False
) -> PluginRegistry:
    """Find, import and check all plugins, except those named in `SBP_DISABLE_PLUGINS`.

    Args:
        entry_points: Entry points to read instead of the installed distributions'.
        strict: Whether any problem is an error.

    Raises:
        SbpError: `strict`, and some plugin has a problem.
    """
    sources = installed_sources() if entry_points is None else tuple(entry_points)
    asked = _names(os.environ.get(DISABLE_VARIABLE, ""))
    found = [
        _Found(source=source, health=DISABLED) if asked & _names_of(source) else _read(source)
        for source in sources
    ]
    offers = [
        PluginEntry(
            kind=kind,
            name=name,
            distribution=plugin.source.distribution,
            version=plugin.source.version,
            api_version=plugin.api_version,
            health=plugin.health,
            summary=factory.summary,
            factory=factory,
        )
        for plugin in found
        for kind, name, factory in plugin.offers
    ]
    problems = [plugin.problem(fault) for plugin in found for fault in plugin.faults]
    problems += _equal_entry_points(sources)
    problems += _unknown_disabled(asked, sources)
    entries, conflicts = _mark_conflicts(offers)
    entries += [_line_of(plugin) for plugin in found if not plugin.offers]
    registry = PluginRegistry(
        entries=tuple(sorted(entries, key=lambda one: (one.kind, one.name, one.distribution))),
        folders=tuple(
            ConfigFolder(path=path, distribution=plugin.source.distribution)
            for plugin in found
            for path in plugin.folders
        ),
        problems=tuple(problems + conflicts),
        disabled=tuple(
            replace(
                plugin.problem(f"is left out by {DISABLE_VARIABLE}"),
                remedy=f"take it out of {DISABLE_VARIABLE}",
            )
            for plugin in found
            if plugin.health == DISABLED
        ),
    )
    if strict and registry.problems:
        raise SbpError(
            f"{len(registry.problems)} problem(s) with plugins",
            where=[str(problem) for problem in registry.problems],
            todo="correct or uninstall them, or leave out strict",
        )
    return registry


def _names(text: str) -> set[str]:
    """Return the names in a text, normalised like distributions': `My_Plugin` is `my-plugin`."""
    return {name.strip().lower().replace("_", "-") for name in text.split(",") if name.strip()}


def _names_of(source: PluginSource) -> set[str]:
    return _names(f"{source.name},{source.distribution}")


def _unknown_disabled(asked: Iterable[str], sources: Sequence[PluginSource]) -> list[Problem]:
    """Return a problem for each name that is to be disabled but belongs to no plugin."""
    known = {name for source in sources for name in _names_of(source)}
    near = {name: nearest(name, known) for name in sorted(set(asked) - known)}
    return [
        Problem(
            plugin=DISABLE_VARIABLE,
            distributions=("the environment",),
            what=f"{name!r} is no plugin{f'; did you mean {other}?' if other else ''}",
        )
        for name, other in near.items()
    ]


def sources_of(name: str) -> list[PluginSource]:
    """Return the entry points of one distribution.

    Args:
        name: The name of the distribution or of an entry point.

    Raises:
        SbpLookupError: there are none. The message mentions an uninstalled folder of that name.
    """
    sources = installed_sources()
    if found := [one for one in sources if _names(name) & _names_of(one)]:
        return found
    others = sorted({one.distribution for one in sources})
    todo = suggestion(name, others, "install it, or choose one of these")
    raise SbpLookupError(
        f"no installed distribution {name!r} has an entry point of group {PROJECT!r}, and no entry "
        "point has that name",
        accepted=", ".join(others) or "none: no plugin is installed",
        todo=f"pip install -e {name}" if Path(name).is_dir() else todo,
    )


def installed_sources() -> tuple[PluginSource, ...]:
    """Return the entry points of group `sbp` of all installed distributions, sorted.

    A distribution that occurs twice on `sys.path` counts once, as it does for imports.
    """
    sources: dict[str, list[PluginSource]] = {}
    for distribution in importlib.metadata.distributions():
        try:
            points = distribution.entry_points.select(group=PROJECT)
        except Exception:  # broken metadata of any project
            continue
        if not points:
            continue
        told = distribution.metadata.json
        name = str(told.get("name", _UNNAMED))
        sources.setdefault(
            name.lower().replace("_", "-"),
            [
                PluginSource(
                    name=point.name,
                    value=point.value,
                    distribution=name,
                    version=str(told.get("version", "")),
                )
                for point in points
            ],
        )
    everything = (source for group in sources.values() for source in group)
    return tuple(sorted(everything, key=lambda one: (one.distribution, one.name)))


def _read(source: PluginSource) -> _Found:
    """Import one plugin and call its hooks; any error becomes a fault."""
    try:
        plugin = source.load()
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        # Not only Exception: a module that calls sys.exit() must not stop every command.
        return _Found(source=source, faults=(_import_fault(source, error),), health=BROKEN)
    try:
        return _inspect(source, plugin)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # raised by its attributes, or by the result of a hook
        fault = f"cannot be inspected: {reason(error)}"
        return _Found(source=source, faults=(fault,), health=BROKEN)


def _inspect(source: PluginSource, plugin: object) -> _Found:
    """Call the hooks of a plugin that has been imported, and check what they return."""
    version = getattr(plugin, VERSION_ATTRIBUTE, None)
    fault = _version_fault(version)
    if fault:
        known = version if isinstance(version, int) else None
        return _Found(source=source, api_version=known, faults=(fault,), health=BROKEN)
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(HookSpecs)
    try:
        manager.register(plugin, source.name)
    except Exception as error:  # a hook with arguments, or whatever its attributes raise
        fault = f"its hooks are refused: {reason(error)}"
        return _Found(source=source, api_version=version, faults=(fault,), health=BROKEN)
    faults = _misspelt_hooks(plugin)
    offers: list[tuple[str, str, Factory]] = []
    for kind, hook in KINDS.items():
        for result in _call(manager, hook, faults):
            offers += _check_factories(kind, hook, result, faults)
    folders: list[str] = []
    for result in _call(manager, "sbp_config_folders", faults):
        folders += _check_folders(result, faults)
    return _Found(
        source=source,
        api_version=version,
        offers=tuple(offers),
        folders=tuple(folders),
        faults=tuple(faults),
        health=FAULTY if faults else OK,
    )


def _import_fault(source: PluginSource, error: BaseException) -> str:
    where = place(error, source.value.partition(".")[0])
    return f"{source.value} cannot be imported: {reason(error)}{f' ({where})' if where else ''}"


def _version_fault(version: object) -> str:
    """Return why a stated API version is not supported, or `""`."""
    if version is None:
        return f"states no API version; it needs {VERSION_ATTRIBUTE} = {API_VERSION}"
    if isinstance(version, bool) or not isinstance(version, int):
        return f"states the API version {version!r}, which is no integer"
    if version > API_VERSION:
        return f"is written for API version {version}; this sbp-core has {API_VERSION}: upgrade it"
    if version < OLDEST_API_VERSION:
        return (
            f"is written for API version {version}; the oldest that works is {OLDEST_API_VERSION}"
        )
    return ""


def _misspelt_hooks(plugin: object) -> list[str]:
    """Return faults for hooks that pluggy would silently accept or overlook."""
    faults = []
    for name in dir(plugin):
        value = getattr(plugin, name, None)
        if isinstance(value, types.ModuleType):
            continue
        marked = getattr(value, f"{PROJECT}_impl", None)
        if isinstance(marked, dict):
            hook = str(marked.get("specname") or name)
            if hook not in HOOKS:
                faults.append(_unknown_hook(hook))
        elif name.startswith(f"{PROJECT}_") and _is_own(plugin, value):
            faults.append(
                f"{name} is not marked with @hookimpl" if name in HOOKS else _unknown_hook(name)
            )
    return faults


def _is_own(plugin: object, value: object) -> bool:
    """Return whether a callable was written in the plugin, not imported into it."""
    home = getattr(plugin, "__name__", getattr(plugin, "__module__", None))
    return callable(value) and getattr(value, "__module__", home) == home


def _unknown_hook(name: str) -> str:
    near = nearest(name, HOOKS)
    hint = f"did you mean {near}?" if near else f"known: {', '.join(sorted(HOOKS))}"
    return f"{name} is no hook; {hint}"


def _call(manager: pluggy.PluginManager, hook: str, faults: list[str]) -> list[object]:
    """Call one hook of the one plugin of a manager; an exception becomes a fault."""
    caller = getattr(manager.hook, hook)
    try:
        results = list(caller())
        if caller.get_hookimpls() and not results:  # pluggy drops None
            faults.append(f"{hook} returns nothing")
        return results
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        faults.append(f"{hook} raises {reason(error)}")
        return []


def _check_factories(
    kind: str, hook: str, result: object, faults: list[str]
) -> list[tuple[str, str, Factory]]:
    """Return the entries that are name -> Factory; all other entries become faults."""
    if not isinstance(result, Mapping):
        faults.append(f"{hook} returns {type(result).__name__}, not name -> Factory")
        return []
    kept = []
    for name, factory in result.items():
        if not isinstance(name, str) or not name:
            faults.append(f"{hook} offers the name {name!r}, which is no text")
        elif not isinstance(factory, Factory):
            faults.append(f"{hook} offers {name!r} as {type(factory).__name__}, not as Factory")
        else:
            kept.append((kind, name, factory))
    return kept


def _check_folders(result: object, faults: list[str]) -> list[str]:
    if isinstance(result, str) or not isinstance(result, Sequence):
        faults.append(f"sbp_config_folders returns {type(result).__name__}, not a list of paths")
        return []
    kept = []
    for path in result:
        if not isinstance(path, str) or not path.startswith(("pkg://", "file:///")):
            accepted = "pkg://package.folder or file:///absolute/folder"
            faults.append(f"sbp_config_folders offers {path!r}, not {accepted}")
        elif fault := _folder_fault(path):
            faults.append(fault)
        else:
            kept.append(path)
    return kept


def _folder_fault(path: str) -> str:
    """Return why a config folder is unusable, or `""`; `pkg://` imports the package of a folder."""
    what = f"the config folder {path}"
    try:
        root = ConfigFolder(path=path, distribution="").root()
        if not root.is_dir():
            return f"{what} does not exist"
        for child in root.iterdir():
            if child.is_dir():
                list(child.iterdir())
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return f"{what} cannot be read: {reason(error)}"
    return ""


def _equal_entry_points(sources: Sequence[PluginSource]) -> list[Problem]:
    """Return a problem for each entry-point name that several distributions use."""
    owners: defaultdict[str, list[str]] = defaultdict(list)
    for source in sources:
        owners[source.name].append(source.distribution)
    return [
        Problem(
            plugin=name,
            distributions=tuple(distributions),
            what=f"several distributions call their entry point {name!r}",
        )
        for name, distributions in owners.items()
        if len(distributions) > 1
    ]


def _mark_conflicts(entries: Sequence[PluginEntry]) -> tuple[list[PluginEntry], list[Problem]]:
    """Mark entries of equal kind and name that come from several plugins."""
    owners: defaultdict[tuple[str, str], list[PluginEntry]] = defaultdict(list)
    for entry in entries:
        owners[entry.kind, entry.name].append(entry)
    marked = [
        replace(entry, health=CONFLICT) if len(owners[entry.kind, entry.name]) > 1 else entry
        for entry in entries
    ]
    problems = [
        Problem(
            plugin=f"{kind}={name}",
            distributions=tuple(claim.distribution for claim in claims),
            what=f"several plugins claim {kind} {name!r}",
        )
        for (kind, name), claims in owners.items()
        if len(claims) > 1
    ]
    return marked, problems


def _line_of(plugin: _Found) -> PluginEntry:
    """Return the listing line of a plugin that offers nothing."""
    return PluginEntry(
        kind=NO_KIND,
        name=plugin.source.name,
        distribution=plugin.source.distribution,
        version=plugin.source.version,
        api_version=plugin.api_version,
        health=plugin.health,
    )

"""The registry of discovered plugins: factories by kind and name, health, and building objects.

A `PluginRegistry` is immutable; plugins do not register themselves in it. It imports the modules of
an object only when `make` is called. `plugins.discovery` finds the plugins.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.resources
import importlib.util
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import cast

from sbp_core.errors import PluginError, SbpError, SbpLookupError, unknown_name
from sbp_core.plugins.hooks import KINDS, METHODS, Factory
from sbp_core.plugins.settings import merge_settings, warn_renamed
from sbp_core.plugins.tracebacks import CALLERS, MEND, lines_of, own_lines, reason

#: Healths of an entry: usable; usable, but its plugin has a problem; name used by two plugins;
#: unusable and set aside; disabled by the user.
OK, FAULTY, CONFLICT, BROKEN, DISABLED = "ok", "faulty", "conflict", "broken", "disabled"

#: Kind of a plugin without entries, in listings.
NO_KIND = "-"


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A problem of a plugin.

    Args:
        plugin: Name of its entry point.
        distributions: The distributions to blame, one or two.
        what: The problem, in one line.
        version: Version of the distribution, if it is one.
        module: Hook module of the plugin; empty if it is about several.
        remedy: The advice when a user requests something of the plugin.
    """

    plugin: str
    distributions: tuple[str, ...]
    what: str
    version: str = ""
    module: str = ""
    remedy: str = "correct that plugin"

    def __str__(self) -> str:
        return f"{self.plugin} ({' and '.join(self.distributions)}): {self.what}"

    def brings(self, option: str) -> bool:
        """Return whether the plugin's package has an option file, such as `planner/mine`."""
        try:
            spec = importlib.util.find_spec(self.module.partition(".")[0])
        except (ImportError, ValueError):
            return False
        folders = (spec.submodule_search_locations or ()) if spec else ()
        return any(
            path.is_file() for one in folders for path in Path(one).glob(f"**/{option}.yaml")
        )

    def denies(self, asked: str, *, certain: bool) -> str:
        """Return why a requested object is not available: plugin, distribution and error.

        Args:
            asked: The request, such as `planner=mine`.
            certain: Whether the plugin is known to offer it.
        """
        by = " ".join(filter(None, (" and ".join(self.distributions), self.version)))
        named = "" if self.plugin in self.distributions else f"{self.plugin!r} of "
        what = f"it {self.what}" if self.what.startswith(("is ", "states ")) else self.what
        brings = "provides" if certain else "may provide"
        return f"{asked}: the plugin {named}{by} that {brings} it cannot be used: {what}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginEntry:
    """One object that a plugin offers, or one plugin that offers nothing (`kind` is `-`).

    Args:
        kind: A key of `hooks.KINDS`.
        name: Name by which users request it.
        distribution: Distribution that contains it.
        version: Version of that distribution.
        api_version: Version of the hooks that its plugin states; None if unknown.
        health: `ok`, `faulty`, `conflict`, `broken` or `disabled`.
        summary: One line of its author.
        factory: How to make it; None for a plugin that offers nothing.
    """

    kind: str
    name: str
    distribution: str
    version: str
    api_version: int | None
    health: str = OK
    summary: str = ""
    factory: Factory | None = None

    @property
    def build(self) -> str:
        """The callable that builds it, `package.module:callable`; empty if it offers nothing."""
        return self.factory.build if self.factory else ""

    @property
    def module(self) -> str:
        """The module of that callable; empty for a plugin that offers nothing."""
        return self.build.partition(":")[0]

    @property
    def package(self) -> str:
        """The top package of `module`."""
        return self.module.partition(".")[0]

    @property
    def title(self) -> str:
        """Its name with its distribution, for messages."""
        return f"{self.kind} {self.name!r} of {self.distribution} {self.version}"

    @contextmanager
    def called(self, by: str = "") -> Iterator[None]:
        """Call the plugin in the `with` block; errors of sbp pass.

        Args:
            by: Name of the called method; the function that builds it if empty.

        Raises:
            PluginError: it raises any other error.
        """
        try:
            yield
        except SbpError:
            raise
        except Exception as error:
            raise self.raised(error, by) from error

    def raised(self, error: Exception, by: str = "") -> PluginError:
        """Make the error for a plugin that raises an error that is not of sbp; see `called`."""
        return PluginError(
            f"{self.title} raised {reason(error)}",
            # Without a line of its own, it was called with wrong arguments, or is written in C.
            where=(self.package not in CALLERS and own_lines(error, self.package))
            or self._place(by),
            todo=MEND,
        )

    def _place(self, by: str) -> str:
        return f"{self.build}{f', method {by}' if by else ''}"

    def returned(self, found: object, accepted: str, by: str = "") -> PluginError:
        """Make the error for a plugin that returns an object of a wrong type.

        Args:
            found: What it returned.
            accepted: What it has to return.
            by: Name of its method; the function that builds it if empty.
        """
        if isinstance(found, type):
            what = f"the class {found.__name__}"
        else:
            what = "None" if found is None else type(found).__name__
        return PluginError(
            f"{self.title} returned {what}, not {accepted}",
            where=self._place(by),
            accepted=accepted,
            todo="correct the plugin",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigFolder:
    """A Hydra search path, and the distribution that contains it."""

    path: str
    distribution: str

    def root(self) -> Traversable:
        """Return the folder; `pkg://` imports the package.

        Raises:
            ImportError: there is no such package.
        """
        scheme, _, place = self.path.rpartition("://")
        if scheme == "pkg":
            return importlib.resources.files(place.replace("/", "."))
        return Path(place)


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginRegistry:
    """All plugins of this environment.

    Args:
        entries: All entries, sorted by kind and name; faulty and broken ones too.
        folders: Config folders, in the order of the distributions' names.
        problems: The problems, each with the plugin that causes it.
        disabled: The plugins that the user has disabled.
    """

    entries: tuple[PluginEntry, ...] = ()
    folders: tuple[ConfigFolder, ...] = ()
    problems: tuple[Problem, ...] = ()
    disabled: tuple[Problem, ...] = ()

    def names(self, kind: str) -> tuple[str, ...]:
        """Return the names offered for a kind, sorted.

        Raises:
            SbpLookupError: no such kind.
        """
        return tuple(sorted({entry.name for entry in self._of_kind(kind)}))

    def former_names(self, kind: str) -> dict[str, str]:
        """Return the names of an earlier release, each with the name that replaces it."""
        made = [(entry.name, entry.factory) for entry in self._of_kind(kind) if entry.factory]
        return {former: name for name, factory in made for former in factory.former_names}

    def current_name(self, kind: str, name: str) -> str:
        """Return the current name for a former one, with a warning; any other name unchanged."""
        current = self.former_names(kind).get(name, name)
        if current != name:
            warn_renamed(f"{kind}={name}", f"{kind}={current}")
        return current

    def config_folders(self) -> tuple[ConfigFolder, ...]:
        """Return the Hydra search paths of all healthy plugins."""
        return self.folders

    def entry(self, kind: str, name: str) -> PluginEntry:
        """Return the one entry of that kind and name.

        Raises:
            SbpLookupError: no such kind or name, or two plugins claim the name.
        """
        name = self.current_name(kind, name)
        found = [entry for entry in self._of_kind(kind) if entry.name == name]
        if not found:
            raise self._unknown(kind, name)
        if len(found) > 1:
            owners = " and ".join(f"{entry.distribution} {entry.version}" for entry in found)
            raise SbpLookupError(
                f"{kind} {name!r} is claimed by {owners}",
                accepted="one distribution for each name",
                todo="uninstall one, leave it out with SBP_DISABLE_PLUGINS=NAME, or ask its "
                "author for another name",
            )
        return found[0]

    def factory(self, kind: str, name: str) -> Factory:
        """Return the factory of that kind and name.

        Raises:
            SbpLookupError: no such kind or name, or two plugins claim the name.
        """
        factory = self.entry(kind, name).factory
        assert factory is not None, "only a plugin without a kind has no factory"
        return factory

    def configure(
        self,
        kind: str,
        name: str,
        settings: Mapping[str, object],
        *,
        key: str | None = None,
        where: str | Sequence[str] = (),
    ) -> object:
        """Return the plugin's config with these settings, without importing what it configures.

        Args:
            kind: A key of `hooks.KINDS`.
            name: Name of the plugin object.
            settings: Plain values by field name, without `name`.
            key: Key of the settings for messages; the kind if omitted.
            where: File that the settings come from, for messages.

        Raises:
            SbpLookupError: see `entry`.
            ConfigError: see `settings.merge_settings`.
            PluginError: the config raises an error that refuses no value.
        """
        config = self.factory(kind, name).config
        with self.entry(kind, name).called():
            return merge_settings(config, settings, key=kind if key is None else key, where=where)

    def make(
        self,
        kind: str,
        name: str,
        settings: Mapping[str, object] | None = None,
        *,
        where: str | Sequence[str] = (),
    ) -> object:
        """Build the plugin object: import its target now, and call it with its config.

        Raises:
            SbpLookupError: see `entry`.
            ConfigError: see `settings.merge_settings`.
            SbpError: the target cannot be imported; names the distribution and what to install.
            PluginError: the target raises another error, or returns an object of another kind.
        """
        entry = self.entry(kind, name)
        config = self.configure(kind, name, settings or {}, where=where)
        try:
            with entry.called():
                made = target(entry)(config)
        except PluginError as error:
            if isinstance(error.__cause__, ImportError):
                raise _not_importable(entry, error.__cause__) from error.__cause__
            raise
        method = METHODS.get(kind)
        if made is None or (isinstance(made, type) and method not in (None, "__call__")):
            raise entry.returned(made, f"a {kind}")
        if method and not callable(getattr(made, method, None)):
            has = "that can be called" if method == "__call__" else f"with the method {method}"
            raise entry.returned(made, f"a {kind} {has}")
        return made

    def suspect(self, option: str) -> tuple[Problem | None, bool]:
        """Return the broken plugin that may offer an option, and whether it certainly does.

        Args:
            option: Kind and name, or group and option: `planner/mine`.
        """
        broken = [one for one in (*self.problems, *self.disabled) if one.module]
        sure = next((problem for problem in broken if problem.brings(option)), None)
        return sure or next(iter(broken), None), sure is not None

    def _of_kind(self, kind: str) -> list[PluginEntry]:
        if kind not in KINDS:
            raise unknown_name("plugin kind", kind, KINDS)
        return [entry for entry in self.entries if entry.kind == kind]

    def _unknown(self, kind: str, name: str) -> SbpLookupError:
        error = unknown_name(kind, name, self.names(kind))
        suspect, certain = self.suspect(f"{kind}/{name}")
        if suspect is None or not (certain or error.todo.startswith("choose")):
            broken = [f"a plugin with a problem: {problem}" for problem in self.problems]
            where = (*error.where, *broken)
            return SbpLookupError(error.what, where=where, accepted=error.accepted, todo=error.todo)
        return SbpLookupError(
            suspect.denies(f"{kind}={name}", certain=certain),
            accepted=error.accepted,
            todo=f"{suspect.remedy}, or choose one of these",
        )


def target(entry: PluginEntry) -> Callable[[object], object]:
    """Import the object that `Factory.build` names.

    Raises:
        ImportError: something it needs is not installed.
        SbpError: it does not exist, or is not callable.
    """
    found: object = importlib.import_module(entry.module)
    for part in entry.build.partition(":")[2].split("."):
        found = getattr(found, part, None)
    if not callable(found):
        raise SbpError(
            f"{entry.kind} {entry.name!r} names {entry.build}, which cannot be called",
            where=f"distribution {entry.distribution} {entry.version}",
            todo=f"report it to the authors of {entry.distribution}",
        )
    return cast("Callable[[object], object]", found)


def _not_importable(entry: PluginEntry, error: ImportError) -> SbpError:
    missing = (error.name or "").partition(".")[0]
    todo = f"report it to the authors of {entry.distribution}"
    if missing and missing != entry.package:
        extra = extra_with(entry.distribution, missing)
        todo = f"pip install '{entry.distribution}[{extra}]'" if extra else f"pip install {missing}"
    return SbpError(
        f"{entry.kind} {entry.name!r} cannot be imported: {error}",
        where=f"distribution {entry.distribution} {entry.version}",
        todo=todo,
    )


_EXTRA = re.compile(r"""extra\s*==\s*["'](?P<extra>[^"']+)["']""")


def extra_with(distribution: str, module: str) -> str:
    """Return the extra of a distribution that installs a module, or `""`.

    A wheel may be named after its module and a variant: `cupy-cuda12x` contains `cupy`.
    """
    try:
        requirements = importlib.metadata.requires(distribution) or []
    except importlib.metadata.PackageNotFoundError:
        return ""
    wanted = module.lower().replace("_", "-")
    extras: list[str] = []
    for requirement in requirements:
        name = re.match(r"[\w.-]+", requirement)
        extra = _EXTRA.search(requirement)
        if name is None or extra is None:
            continue
        project = name[0].lower().replace("_", "-")
        if project == wanted or project.startswith(f"{wanted}-"):
            extras.append(extra["extra"])
    # The extra for tests repeats the content of other extras; a user wants the smallest one.
    return min(extras, key=lambda extra: (extra == "test", extra), default="")


def blame(error: BaseException, entries: Iterable[PluginEntry]) -> PluginError | None:
    """Return the error of the plugin that caused an exception; None if no plugin code ran.

    Args:
        error: The exception, with its traceback.
        entries: The plugins that were in use. The plugin whose code ran last is to blame; if that
            code may belong to several plugins of one package, the message names them all.
    """
    known = [entry for entry in entries if entry.package and entry.package not in CALLERS]
    packages = {entry.package for entry in known}
    frames = [module for module, _ in lines_of(error) if module.partition(".")[0] in packages]
    if not frames:
        return None
    guilty = [entry for entry in known if entry.package == frames[-1].partition(".")[0]]
    for module in reversed(frames):
        if found := [entry for entry in guilty if entry.module == module]:
            guilty = found
            break
    first = guilty[0]
    named = sorted({f"{entry.kind} {entry.name!r}" for entry in guilty})
    who = f"{' or '.join(named)} of {first.distribution} {first.version}"
    return PluginError(
        f"{who} raised {reason(error)}", where=own_lines(error, first.package), todo=MEND
    )

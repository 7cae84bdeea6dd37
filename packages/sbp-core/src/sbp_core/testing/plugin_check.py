"""Checks of an installed plugin package: hooks, imports, option files, rules and callbacks.

Each check yields one line for each problem. `testing.suites` runs them, and the conformance suites
of its kinds, as tests of pytest: `sbp-plugins check NAME`.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import pkgutil
import re
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, fields
from importlib.resources.abc import Traversable
from typing import Any

from sbp_core.errors import SbpError, SbpLookupError, nearest
from sbp_core.plugins import (
    KINDS,
    Callback,
    ConfigFolder,
    PluginEntry,
    PluginRegistry,
    discover,
    merge_settings,
)
from sbp_core.plugins.discovery import sources_of
from sbp_core.plugins.registry import extra_with, target
from sbp_core.plugins.tracebacks import place, reason
from sbp_core.serialize import read_yaml
from sbp_core.signatures import Rule, RuleSet, parse_notation

__all__ = ["PluginCheck"]

#: Kinds that are not chosen by an option of Hydra.
_WITHOUT_OPTION = frozenset({"callback", "pass", "signature", "tensor_library"})

#: Option groups that belong to no kind of plugin.
_OTHER_GROUPS = frozenset({"compile", "experiment", "hydra", "trainer"})

#: A setting that is copied from another group, if that has it.
_SELECTED = re.compile(r"\$\{oc\.select:\s*[\w.]+\s*,(?P<fallback>.*)\}")

#: A setting that is computed, or has to be given on the command line: nothing to compare.
_OPEN = object()


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginCheck:
    """The checks of one distribution.

    Args:
        distribution: Its name.
        packages: Top packages of its hook modules.
        registry: All plugins.
    """

    distribution: str
    packages: tuple[str, ...]
    registry: PluginRegistry

    @classmethod
    def of(cls, name: str) -> PluginCheck:
        """Return the checks of an installed plugin.

        Args:
            name: The name of its distribution or entry point.

        Raises:
            SbpLookupError: there is none of that name.
        """
        found = sources_of(name)
        return cls(
            distribution=found[0].distribution,
            packages=tuple(sorted({re.split("[.:]", one.value)[0] for one in found})),
            registry=discover(),
        )

    @property
    def entries(self) -> list[PluginEntry]:
        """Its entries in the registry."""
        return [
            entry
            for entry in self.registry.entries
            if entry.distribution == self.distribution and entry.factory is not None
        ]

    def settings(self, entry: PluginEntry) -> dict[str, object]:
        """Return the settings in the option file of a plugin; empty without one."""
        for folder in self._folders():
            group = folder.root().joinpath(entry.kind)
            file = group.joinpath(f"{entry.name}.yaml")
            if file.is_file():
                known = _settings(file, group).items()
                return {k: value for k, value in known if k != "name" and value is not _OPEN}
        return {}

    def check_hooks(self) -> Iterator[str]:
        """Its module can be imported, and its hooks return valid values."""
        for problem in self.registry.problems:
            if self.distribution in problem.distributions:
                yield str(problem)
        if not self.entries and not self._folders():
            yield "it offers nothing"

    def check_imports(self) -> Iterator[str]:
        """All modules can be imported; modules that need an optional package are skipped."""
        for name in self._modules():
            try:
                importlib.import_module(name)
            except KeyboardInterrupt:
                raise
            except BaseException as error:
                if not self._is_optional(error):
                    where = place(error, name.partition(".")[0])
                    yield f"{name} cannot be imported: {reason(error)} ({where})"

    def check_builds(self) -> Iterator[str]:
        """Each `build` names a callable that takes the config, and the config has defaults."""
        for entry in self.entries:
            try:
                inspect.signature(target(entry)).bind(object())
            except KeyboardInterrupt:
                raise
            except ValueError:  # written in C, without a signature
                continue
            except TypeError as error:
                yield f"{_named(entry)}: {entry.build} does not take the config: {error}"
            except BaseException as error:
                if not self._is_optional(error):
                    yield f"{_named(entry)}: {reason(error)}"

    def check_options(self) -> Iterator[str]:
        """Option files belong to a group, name a plugin, and have the defaults of its dataclass."""
        seen = set()
        for folder in self._folders():
            for group in folder.root().iterdir():
                if not group.is_dir() or group.name in {"__pycache__", *_OTHER_GROUPS}:
                    continue
                if group.name not in KINDS:
                    near = nearest(group.name, KINDS)
                    hint = f"; did you mean {near}?" if near else ""
                    yield f"{folder.path}/{group.name} is the folder of no kind{hint}"
                    continue
                for option, file in _files(group):
                    seen.add((group.name, option))
                    for fault in self._option_faults(group, option, file):
                        yield f"{folder.path}/{group.name}/{file.name}: {fault}"
        for entry in self.entries:
            needed = entry.kind not in _WITHOUT_OPTION
            if needed and not any(
                kind == entry.kind and (name == entry.name or name.startswith(f"{entry.name}/"))
                for kind, name in seen
            ):
                lacking = f"{entry.kind}/{entry.name}.yaml"
                yield f"{_named(entry)} cannot be chosen: no config folder has {lacking}"

    def _option_faults(self, group: Traversable, option: str, file: Traversable) -> Iterator[str]:
        kind = group.name
        if not file.name.endswith(".yaml"):
            yield "options end in .yaml"
            return
        if option in self.registry.former_names(kind):
            return  # an alias of the option with the present name
        try:
            settings = _settings(file, group)
            entry = self.registry.entry(kind, str(settings.pop("name", None)))
            config = entry.factory.config if entry.factory else object
            known = {key: value for key, value in settings.items() if value is not _OPEN}
            if any(name in settings and name not in known for name in _required(config)):
                return  # the user of the option has to set them
            made: Any = merge_settings(config, known, key=kind)
            if option == entry.name:
                yield from _differing(made, known)
        except (SbpError, UnicodeDecodeError) as error:
            if not _lacks_file(error):  # a file that users of the option have
                yield " ".join(str(error).split())

    def check_rules(self) -> Iterator[str]:
        """Rules belong to existing operators, and their notation is valid."""
        for entry in self.entries:
            if entry.kind != "signature":
                continue
            try:
                made = self.registry.make(entry.kind, entry.name)
                if "." in entry.name and isinstance(made, RuleSet):
                    yield f"{_named(entry)}: a RuleSet is of a namespace, without dots"
                elif "." not in entry.name and not isinstance(made, RuleSet):
                    kind = type(made).__name__
                    yield f"{_named(entry)}: a {kind} is of one operator, lib.op.default"
                elif not isinstance(made, RuleSet):
                    meaning = made.meaning if isinstance(made, Rule) else made
                    if isinstance(meaning, str):
                        parse_notation(meaning)
                    elif not callable(meaning):
                        yield f"{_named(entry)}: {type(made).__name__} is no rule"
                    yield from self._operator_faults(entry, meaning)
            except SbpError as error:
                yield f"{_named(entry)}: {' '.join(str(error).split())}"

    def _operator_faults(self, entry: PluginEntry, meaning: object) -> Iterator[str]:
        """Yield PyTorch's objections to a rule: to its operator, and to its shards."""
        library = entry.name.partition(".")[0]
        # The operators of an optional package are registered when it is used.
        if extra_with(self.distribution, library) or not importlib.util.find_spec("sbp_torch"):
            return
        for name in self._modules():  # one of which registers the operator
            try:
                importlib.import_module(name)
            except Exception:  # reported by `check_imports`
                continue
        check: Any = importlib.import_module("sbp_torch.testing.signatures").check_notation
        try:
            check(entry.name, meaning if isinstance(meaning, str) else None)
        except AssertionError as error:
            yield f"{_named(entry)}: {error}"

    def check_callbacks(self) -> Iterator[str]:
        """Callbacks have no method whose name is nearly that of a hook method."""
        known = {name for name in vars(Callback) if not name.startswith("_")}
        for entry in self.entries:
            if entry.kind != "callback":
                continue
            try:
                made = self.registry.make(entry.kind, entry.name)
            except SbpError:
                continue  # reported by its suite
            for name in dir(type(made)):
                near = "" if name.startswith("_") or name in known else nearest(name, known)
                if near or (name.startswith("on_") and name not in known):
                    hint = f"did you mean {near}?" if near else f"known: {', '.join(sorted(known))}"
                    yield f"{_named(entry)}: nobody calls the method {name}; {hint}"

    def _folders(self) -> list[ConfigFolder]:
        return [one for one in self.registry.folders if one.distribution == self.distribution]

    def _modules(self) -> Iterator[str]:
        """Yield the modules of its packages, except programs."""
        for package in self.packages:
            spec = importlib.util.find_spec(package)
            yield package
            places = spec.submodule_search_locations if spec else None
            for one in pkgutil.walk_packages(
                places or (), f"{package}.", onerror=lambda name: None
            ):
                if not one.name.endswith(".__main__"):
                    yield one.name

    def _is_optional(self, error: BaseException) -> bool:
        """Whether an import needs a third-party package that is not installed."""
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        return bool(missing) and str(missing).partition(".")[0] not in self.packages


def _named(entry: PluginEntry) -> str:
    return f"{entry.kind} {entry.name!r}"


def _files(folder: Traversable, prefix: str = "") -> Iterator[tuple[str, Traversable]]:
    """Yield the options in a folder and in the folders in it, each with its file."""
    for child in folder.iterdir():
        if child.is_dir():
            if child.name != "__pycache__":
                yield from _files(child, f"{prefix}{child.name}/")
        elif child.name.endswith((".yaml", ".yml")):
            yield prefix + child.name.rpartition(".")[0], child


def _settings(file: Traversable, group: Traversable) -> dict[str, object]:
    """Return the settings of an option file that do not depend on other groups; no defaults list.

    They include those of an option of which it is another name, `manual/zero@_here_`.

    Raises:
        SbpLookupError: these are not settings.
    """
    said, _ = read_yaml(file.read_text("utf-8"), file.name)
    if not isinstance(said, Mapping):
        raise SbpLookupError(f"it is {type(said).__name__}, not settings with a name")
    settings: dict[str, object] = {}
    for base in map(str, said.get("defaults", ())):
        other = group.joinpath(f"{base.removesuffix('@_here_')}.yaml")
        if base.endswith("@_here_") and other.is_file():
            settings |= _settings(other, group)
    return settings | {key: _known(value) for key, value in said.items() if key != "defaults"}


def _known(value: object) -> object:
    """Return a value of an option file as far as it does not depend on other files."""
    if isinstance(value, str):
        selected = _SELECTED.fullmatch(value)
        if selected and "${" not in selected["fallback"]:
            fallback, _ = read_yaml(selected["fallback"], "")
            return fallback
        return _OPEN if "${" in value or value == "???" else value
    if isinstance(value, Mapping):
        parts = {key: _known(part) for key, part in value.items()}
        return _OPEN if any(part is _OPEN for part in parts.values()) else parts
    if isinstance(value, list):
        items = [_known(part) for part in value]
        return _OPEN if any(part is _OPEN for part in items) else items
    return value


def _lacks_file(error: BaseException | None) -> bool:
    """Whether an error comes from a file that does not exist."""
    while error is not None and not isinstance(error, FileNotFoundError):
        error = error.__cause__ or error.__context__
    return error is not None


def _required(config: type) -> set[str]:
    """Return the settings of a config dataclass that have no default."""
    return {
        field.name
        for field in fields(config)
        if field.default is MISSING and field.default_factory is MISSING
    }


def _differing(made: Any, said: Mapping[str, object]) -> Iterator[str]:
    """Yield the settings for which a file has another default than the dataclass.

    `sbp-train` uses the default of the file, Python callers use that of the dataclass.
    """
    config = type(made)
    required = _required(config)
    plain = merge_settings(config, {key: said[key] for key in said if key in required})
    for field in fields(made):
        default, value = getattr(plain, field.name), getattr(made, field.name)
        if field.name in said and value != default:
            yield (
                f"{field.name} is {value!r} here, and {default!r} by default in "
                f"{type(made).__name__}: say the same in both"
            )

"""Make the planner, cluster, runtime or boxing backend that an argument of `parallelize` chooses.

The argument is a name (`"osdp"`), a name with settings (`{"name": "osdp", "memory_bytes": 4e9}`),
or an object. The names are options of `sbp-train`, with the settings of their files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from sbp_core.cluster import Cluster
from sbp_core.errors import ConfigError, SbpTypeError
from sbp_core.planning import PlanRequest
from sbp_core.plugins import PluginRegistry, combination_check, discover
from sbp_core.runtime import Runtime
from sbp_core.strategy import Strategy
from sbp_launch.planning.checked_planner import CheckedPlanner
from sbp_launch.settings.catalog import Catalog, make_catalog
from sbp_launch.settings.option_names import no_option

#: How an object is chosen: by name, by name and settings, or as it is.
Choice = str | Mapping[str, Any]


@runtime_checkable
class _Plans(Protocol):
    def plan(self, request: PlanRequest) -> Strategy: ...


#: The types of objects that may be passed in place of a name, by kind.
_OBJECTS: Mapping[str, tuple[tuple[type, ...], str]] = {
    "cluster": ((Cluster,), "a Cluster"),
    "planner": ((_Plans, Strategy), "a planner, or a Strategy"),
    "runtime": ((Runtime,), "a Runtime"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """A plugin that was chosen by name, and its settings.

    Args:
        kind: A kind of plugins, which is also the name of the argument of `parallelize`.
        chosen: The name that was given: `manual/zero`.
        name: The name of the plugin: `manual`.
        settings: Settings for its config, from the option's file and from the user.
    """

    kind: str
    chosen: str
    name: str
    settings: Mapping[str, Any]

    def __str__(self) -> str:
        return self.chosen


class Choices:
    """Makes the objects that are chosen by name.

    Args:
        registry: The plugins; those that are installed if None.
    """

    def __init__(self, registry: PluginRegistry | None = None) -> None:
        self.registry = registry or discover()
        self._catalog: Catalog = make_catalog(self.registry)
        self._options: dict[str, Option] = {}

    def option(self, kind: str, choice: Choice, **own: Any) -> Option:
        """Return the chosen option.

        Args:
            kind: The kind of the plugin.
            choice: Its name, or a mapping with `name` and settings.
            own: Settings that the caller makes, not the user.

        Raises:
            ConfigError: there is no such option, or the mapping has no name.
        """
        given = {"name": choice} if isinstance(choice, str) else dict(choice)
        chosen = given.pop("name", None)
        if not isinstance(chosen, str):
            raise ConfigError(
                f"{kind}={dict(choice) if isinstance(choice, Mapping) else choice!r} has no name",
                where=f"the argument {kind}",
                accepted="a name, or a mapping: {'name': NAME, SETTING: VALUE}",
            )
        for name in own.keys() & given.keys():
            raise ConfigError(
                f"{kind} has a setting {name!r}, which parallelize takes as its own argument",
                where=f"the argument {kind}",
                todo=f"leave it out, and pass {name}=...",
            )
        chosen = self.registry.current_name(kind, chosen)
        options = sorted({*self._catalog.options(kind), *self.registry.names(kind)})
        if chosen not in options:
            asked, where = f"{kind}={chosen!r}", f"the argument {kind}"
            raise no_option(
                kind, chosen, options, self.registry, asked=asked, where=where, spelled=repr
            )
        said = self._catalog.values(f"{kind}/{chosen}")
        settings = {name: value for name, value in said.items() if name not in own}
        settings |= {**given, **own}
        return Option(
            kind=kind, chosen=chosen, name=str(settings.pop("name", chosen)), settings=settings
        )

    def make(self, option: Option) -> Any:
        """Return the object that the plugin of an option makes.

        Raises:
            ConfigError: a setting is unknown or refused.
        """
        where = f"the argument {option.kind}"
        return self.registry.make(option.kind, option.name, option.settings, where=where)

    def resolve(self, kind: str, choice: Any, **own: Any) -> Any:
        """Return the chosen object; if it was chosen by name, make it.

        Raises:
            ConfigError: see `option` and `make`.
            SbpTypeError: an object of another kind was passed.
        """
        if not isinstance(choice, str | Mapping):
            types, accepted = _OBJECTS[kind]
            if not isinstance(choice, types) or isinstance(choice, type):
                raise SbpTypeError(
                    f"{kind} is {'the class ' if isinstance(choice, type) else 'of type '}"
                    f"{(choice if isinstance(choice, type) else type(choice)).__name__}",
                    where=f"the argument {kind}",
                    accepted=f"a name, a mapping of name and settings, or {accepted}",
                )
            return CheckedPlanner(planner=choice) if isinstance(choice, _Plans) else choice
        self._options[kind] = option = self.option(kind, choice, **own)
        made = self.make(option)
        if kind == "planner":
            return CheckedPlanner(planner=made, entry=self.registry.entry(kind, option.name))
        return made

    def check_combination(self) -> None:
        """Let the config of each choice by name check whether the other choices fit it.

        Raises:
            ConfigError: one of them does not fit.
        """
        configs = {
            kind: self.registry.configure(kind, option.name, option.settings)
            for kind, option in self._options.items()
        }
        for config in configs.values():
            combination_check(config)(configs)

"""What settings callbacks take: from their dataclasses, as no option file tells of them."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, fields

from sbp_core.plugins import PluginEntry, PluginRegistry
from sbp_launch.settings.known_keys import takes_of

#: Where `Args:` of a docstring begins a setting: `patience: Evaluations without ...`.
_ARGUMENT = re.compile(r" {4}(?P<name>\w+): (?P<meaning>.*)")


@dataclass(frozen=True, slots=True, kw_only=True)
class CallbackSetting:
    """One setting of a callback.

    Args:
        name: Of the field.
        default: Its default; `...` if it has to be given.
        takes: What values it takes, in words.
        meaning: What the docstring says of it, or `""`.
    """

    name: str
    default: object
    takes: str
    meaning: str


def callbacks_of(registry: PluginRegistry) -> list[PluginEntry]:
    """Return the callbacks that there are, by name."""
    return [one for one in registry.entries if one.kind == "callback" and one.factory is not None]


def settings_of(entry: PluginEntry) -> Iterator[CallbackSetting]:
    """Yield the settings of a callback, in their order."""
    assert entry.factory is not None, "an entry of a kind has a factory"
    config = entry.factory.config
    takes, meanings = takes_of(config), _meanings(config)
    for field in fields(config):
        default = ... if field.default is MISSING else field.default
        if field.default_factory is not MISSING:
            default = field.default_factory()
        yield CallbackSetting(
            name=field.name,
            default=default,
            takes=takes.get(field.name, ""),
            meaning=meanings.get(field.name, ""),
        )


def _meanings(config: type) -> dict[str, str]:
    """Return what the `Args:` of a docstring say, by name."""
    _, _, told = inspect.cleandoc(config.__doc__ or "").partition("\nArgs:\n")
    found: dict[str, str] = {}
    name = ""
    for line in told.splitlines():
        if start := _ARGUMENT.fullmatch(line):
            name = start["name"]
            found[name] = start["meaning"]
        elif line.startswith(" " * 8) and name:
            found[name] += f" {line.strip()}"
        else:
            name = ""
    return found

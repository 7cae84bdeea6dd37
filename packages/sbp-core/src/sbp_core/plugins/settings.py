"""Convert a user's settings, a plain mapping, to the config dataclass of a plugin; check strictly.

It supports dataclass fields and the usual annotations (numbers, text, `Optional`, unions,
`Literal`, enums, tuples, lists, mappings, paths, nested dataclasses). It knows no file formats.
"""

from __future__ import annotations

import re
import types
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from sbp_core.errors import ConfigError, SbpError, nearest
from sbp_core.units import parse_bytes

T = TypeVar("T")

Where = str | Sequence[str]

#: Key of a field's metadata: the advice for users whose value the field rejects.
INSTEAD = "instead"

_UNIONS = (Union, types.UnionType)
_SEQUENCES = (tuple, list, Sequence)
_MAPPINGS = (dict, Mapping)


def unknown_key(key: str, known: Iterable[str], *, where: Where = ()) -> ConfigError:
    """Make the error for an unknown setting: it names the nearest known one and the whole list.

    Args:
        key: The whole key, such as `trainer.stepz`.
        known: Known names.
        where: File of the setting.
    """
    prefix, _, name = key.rpartition(".")
    names = sorted(known)
    near = nearest(name, names)
    return ConfigError(
        f"no setting is called {key!r}",
        where=where,
        accepted=", ".join(names) or "no settings",
        todo=f"did you mean {_join(prefix, near)!r}?" if near else "choose one of these",
    )


def warn_renamed(former: str, name: str) -> None:
    """Warn that a name of an earlier release was used."""
    said = f"{former} has a new name: {name}. The former name is removed in the next release"
    warnings.warn(said, FutureWarning, stacklevel=3)


def former_fields(config: type) -> Mapping[str, str]:
    """Return the former names of the settings of a config: its class attribute `FORMER_NAMES`."""
    found: Mapping[str, str] = getattr(config, "FORMER_NAMES", {})
    return found


def merge_settings(
    config: type[T], settings: Mapping[str, object], *, key: str = "", where: Where = ()
) -> T:
    """Return the config dataclass with `settings` in place of its defaults.

    Args:
        config: Dataclass; its own `__post_init__` may refuse values with a `ValueError`.
        settings: Plain values by field name: numbers, text, lists, mappings, None.
        key: Key of the whole mapping, for messages: `trainer`.
        where: File that the settings come from, for messages.

    Raises:
        ConfigError: a key is unknown or missing, a value has the wrong type or is refused. Names
            the key and the nearest valid name, or the advice in the field's metadata (`INSTEAD`).
    """
    assert is_dataclass(config), f"{config!r} is no dataclass"
    former = former_fields(config)
    for name in former.keys() & settings.keys():
        warn_renamed(_join(key, name), _join(key, former[name]))
        # A former name is given by the user, and not by the option file.
        settings = {**settings, former[name]: settings[name]}
    settings = {name: value for name, value in settings.items() if name not in former}
    known = {field.name: field for field in fields(config) if field.init}
    for name in settings:
        if name not in known:
            raise unknown_key(_join(key, name), known, where=where)
    for name, field in known.items():
        required = field.default is MISSING and field.default_factory is MISSING
        if required and name not in settings:
            raise ConfigError(f"{_join(key, name)} is not set", where=where, accepted="a value")
    hints = type_hints(config)
    values = {}
    for name, value in settings.items():
        try:
            values[name] = _convert(value, hints[name], _join(key, name), where)
        except ConfigError as error:
            todo = known[name].metadata.get(INSTEAD, error.todo)
            raise ConfigError(
                error.what, where=error.where, accepted=error.accepted, todo=todo
            ) from error
    try:
        return cast("T", config(**values))
    except (SbpError, ValueError, TypeError) as error:
        raise _refused(error, known, key, where) from error


def _refused(error: Exception, known: Iterable[str], key: str, where: Where) -> ConfigError:
    """Return the error for a value that a config refused, with the whole key of the field."""
    told = error if isinstance(error, SbpError) else SbpError(str(error))
    first = re.match(r"\w*", told.what)
    if first and first[0] in known:
        what = _join(key, told.what)
    else:
        what = f"{key}: {told.what}" if key and not told.what.startswith(f"{key}.") else told.what
    places = (where,) if isinstance(where, str) else where
    return ConfigError(what, where=(*places, *told.where), accepted=told.accepted, todo=told.todo)


def type_hints(config: type) -> dict[str, Any]:
    """Return the annotations of a config; annotations that cannot be evaluated count as `Any`."""
    try:
        return get_type_hints(config)
    except Exception:  # evaluating annotations of a plugin may raise any error
        assert is_dataclass(config), f"{config!r} is no dataclass"
        return {field.name: Any for field in fields(config)}


def _join(key: str, name: str) -> str:
    return f"{key}.{name}" if key else str(name)


def _convert(value: object, hint: Any, key: str, where: Where) -> object:
    """Return `value` converted to the annotated type; without an annotation any value is accepted.

    Raises:
        ConfigError: it cannot be converted.
    """
    origin, args = get_origin(hint) or hint, get_args(hint)
    if hint is Any:
        return value
    if hint in (int, float) and isinstance(value, str) and key.endswith("bytes"):
        size = parse_bytes(value)
        value = value if size is None else size
    if origin in _UNIONS:
        real = [choice for choice in args if choice is not types.NoneType]
        if value is not None and len(real) == 1:
            return _convert(value, real[0], key, where)
        # The exact type goes first: `float | int` keeps an integer.
        for choice in sorted(args, key=lambda choice: type(value) is not choice):
            with suppress(ConfigError):
                return _convert(value, choice, key, where)
    elif origin is Literal:
        return _choose(value, args, key, where)
    elif origin in _SEQUENCES:
        each = origin is not tuple or not args or args[-1] is Ellipsis
        if isinstance(value, list | tuple) and (each or len(args) == len(value)):
            hints = (args or (Any,))[:1] * len(value) if each else args
            items = [
                _convert(item, kind, f"{key}[{index}]", where)
                for index, (item, kind) in enumerate(zip(value, hints, strict=True))
            ]
            return items if origin is list else tuple(items)
    elif origin in _MAPPINGS:
        if isinstance(value, Mapping):
            of_key, of_value = args or (Any, Any)
            return {
                _convert(name, of_key, f"{key}: the name {name!r}", where): _convert(
                    item, of_value, _join(key, name), where
                )
                for name, item in value.items()
            }
    elif not isinstance(hint, type):
        return value
    elif issubclass(hint, Enum):
        return _choose(value, tuple(hint), key, where)
    elif is_dataclass(hint) and isinstance(value, Mapping):
        return merge_settings(hint, value, key=key, where=where)
    elif issubclass(hint, Path) and isinstance(value, str):
        return hint(value)
    elif hint is float and type(value) is int:
        return float(value)
    # `90e6` is a float in YAML, but its author means a whole number.
    elif hint is int and type(value) is float and value.is_integer():
        return int(value)
    # True is an int to Python, but `steps: true` does not mean 1.
    elif isinstance(value, hint) and not (isinstance(value, bool) and hint is int):
        return value
    accepted = describe_type(hint)
    if key.endswith("bytes") and hint in (int, float):
        accepted += ", or text with a unit, such as 90MB or 4GiB"
    raise ConfigError(
        f"{key} is {value!r} ({type(value).__name__})", where=where, accepted=accepted
    )


def _choose(value: object, choices: Sequence[Any], key: str, where: Where) -> object:
    """Return the choice that equals `value`; a member of an enum is known by value and by name.

    Raises:
        ConfigError: it is none of them.
    """
    for choice in choices:
        spellings = (choice, choice.value, choice.name) if isinstance(choice, Enum) else (choice,)
        # Compare types, too, because True equals 1.
        if any(value == one and type(value) is type(one) for one in spellings):
            return choice
    names = [str(choice.value if isinstance(choice, Enum) else choice) for choice in choices]
    near = nearest(str(value), names)
    if re.sub(r"\d", "", str(value)) == re.sub(r"\d", "", near):
        near = ""  # no suggestion that differs in a number: float16 is not a typo of float64
    raise ConfigError(
        f"{key} is {value!r}",
        where=where,
        accepted=", ".join(name or "'' (empty)" for name in names),
        todo=f"did you mean {near!r}?" if near else "choose one of these",
    )


_PLAIN = {
    int: "an integer",
    float: "a number",
    str: "text",
    bool: "true or false",
    object: "any value",
    Any: "any value",
    types.NoneType: "null",
}


def describe_type(hint: Any) -> str:
    """Return a description of the values that an annotation allows."""
    origin, args = get_origin(hint) or hint, get_args(hint)
    if origin in _UNIONS:
        return " or ".join(map(describe_type, args))
    if origin is Literal:
        return " or ".join(map(repr, args))
    if origin in _SEQUENCES:
        if origin is tuple and args and args[-1] is not Ellipsis:
            return f"a list of {len(args)}: {', '.join(map(describe_type, args))}"
        return f"a list, each {describe_type(args[0])}" if args else "a list"
    if origin in _MAPPINGS:
        return f"a mapping, each value {describe_type(args[1])}" if args else "a mapping"
    if is_dataclass(hint):
        return f"a mapping with {', '.join(field.name for field in fields(hint))}"
    return _PLAIN.get(hint, getattr(hint, "__name__", str(hint)))

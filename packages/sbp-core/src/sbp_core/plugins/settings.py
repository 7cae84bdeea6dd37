"""Settings into config dataclasses: a plain mapping, checked strictly against a dataclass.

Knows dataclass fields and the usual annotations (numbers, text, `Optional`, unions, `Literal`,
enums, tuples, lists, mappings, paths, nested dataclasses). Knows no file format and no plugin.
"""

from __future__ import annotations

import difflib
import re
import types
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from sbp_core.errors import ConfigError, SbpError

T = TypeVar("T")

Where = str | Sequence[str]


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the known name most like `name`, or `""` if none is near."""
    near = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.5)
    return near[0] if near else ""


def unknown_key(key: str, known: Iterable[str], *, where: Where = ()) -> ConfigError:
    """Make the error for a setting that nobody knows: the nearest one and the whole list.

    Args:
        key: The whole key, such as `trainer.stepz`.
        known: Names that are known beside it.
        where: File of the setting.
    """
    prefix, _, name = key.rpartition(".")
    names = sorted(known)
    near = nearest(name, names)
    hint = f"{prefix}.{near}" if prefix and near else near
    return ConfigError(
        f"no setting is called {key!r}",
        where=where,
        accepted=", ".join(names) or "no settings",
        todo=f"did you mean {hint!r}?" if near else "choose one of these",
    )


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
            the key and the nearest valid name.
    """
    assert is_dataclass(config), f"{config!r} is no dataclass"
    known = {field.name: field for field in fields(config) if field.init}
    for name in settings:
        if name not in known:
            raise unknown_key(_join(key, name), known, where=where)
    for name, field in known.items():
        required = field.default is MISSING and field.default_factory is MISSING
        if required and name not in settings:
            raise ConfigError(f"{_join(key, name)} is not set", where=where, accepted="a value")
    hints = _type_hints(config)
    values = {
        name: _convert(value, hints[name], _join(key, name), where)
        for name, value in settings.items()
    }
    try:
        return cast("T", config(**values))
    except ConfigError as error:
        if not key and not where:
            raise
        raise _refused(error, error.what, known, key, where) from error
    except SbpError as error:
        raise _refused(error, error.what, known, key, where) from error
    except (ValueError, TypeError) as error:
        raise _refused(None, str(error), known, key, where) from error


def _refused(
    error: SbpError | None, what: str, known: Iterable[str], key: str, where: Where
) -> ConfigError:
    """Say what a config dataclass refused; a message that starts with a field gets its key."""
    first = re.match(r"\w+", what)
    named = first is not None and first[0] in set(known)
    if named:
        text = _join(key, what)
    else:
        text = f"{key}: {what}" if key and not what.startswith(f"{key}.") else what
    places = (where,) if isinstance(where, str) else tuple(where)
    if error is None:
        return ConfigError(text, where=places)
    return ConfigError(
        text, where=(*places, *error.where), accepted=error.accepted, todo=error.todo
    )


def _type_hints(config: type) -> dict[str, Any]:
    """Return the annotations of a config; what only a type checker can read counts as `Any`."""
    try:
        return get_type_hints(config)
    except NameError:
        return {field.name: Any for field in fields(config)}


def _join(key: str, name: str) -> str:
    return f"{key}.{name}" if key else str(name)


def _wrong_type(key: str, value: object, wanted: str, where: Where) -> ConfigError:
    return ConfigError(f"{key} is {value!r} ({type(value).__name__})", where=where, accepted=wanted)


def _convert(value: object, hint: Any, key: str, where: Where) -> object:
    """Return `value` as the annotation wants it.

    Raises:
        ConfigError: it cannot be.
    """
    origin = get_origin(hint)
    if hint is Any or hint is object or isinstance(hint, TypeVar):
        return value
    if origin in (Union, types.UnionType):
        return _convert_union(value, get_args(hint), key, where)
    if origin is Literal:
        return _convert_literal(value, get_args(hint), key, where)
    if origin in (tuple, list, Sequence) or hint in (tuple, list):
        return _convert_sequence(value, hint, key, where)
    if origin in (dict, Mapping) or hint is dict:
        return _convert_mapping(value, hint, key, where)
    if isinstance(hint, type):
        return _convert_plain(value, hint, key, where)
    return value


def _convert_union(value: object, choices: tuple[Any, ...], key: str, where: Where) -> object:
    if value is None and types.NoneType in choices:
        return None
    real = [choice for choice in choices if choice is not types.NoneType]
    if len(real) == 1:
        return _convert(value, real[0], key, where)
    for choice in real:
        if type(value) is choice:
            return value
    for choice in real:
        try:
            return _convert(value, choice, key, where)
        except ConfigError:
            continue
    raise _wrong_type(key, value, " or ".join(_describe(choice) for choice in choices), where)


def _convert_literal(value: object, choices: tuple[Any, ...], key: str, where: Where) -> object:
    for choice in choices:
        if value == choice and type(value) is type(choice):
            return choice
    near = nearest(str(value), map(str, choices))
    raise ConfigError(
        f"{key} is {value!r}",
        where=where,
        accepted=", ".join(str(choice) or "'' (empty)" for choice in choices),
        todo=f"did you mean {near!r}?" if near else "choose one of these",
    )


def _convert_sequence(value: object, hint: Any, key: str, where: Where) -> object:
    origin, args = get_origin(hint) or hint, get_args(hint)
    if not isinstance(value, list | tuple):
        raise _wrong_type(key, value, _describe(hint), where)
    if origin is tuple and args and args[-1] is not Ellipsis:
        if len(args) != len(value):
            raise _wrong_type(key, value, _describe(hint), where)
        kinds = list(args)
    else:
        kinds = [args[0] if args else Any] * len(value)
    items = [
        _convert(item, kind, f"{key}[{index}]", where)
        for index, (item, kind) in enumerate(zip(value, kinds, strict=True))
    ]
    return items if origin is list else tuple(items)


def _convert_mapping(value: object, hint: Any, key: str, where: Where) -> object:
    if not isinstance(value, Mapping):
        raise _wrong_type(key, value, _describe(hint), where)
    of_key, of_value = get_args(hint) or (Any, Any)
    return {
        _convert(name, of_key, f"{key}: the name {name!r}", where): _convert(
            item, of_value, _join(key, name), where
        )
        for name, item in value.items()
    }


def _convert_plain(value: object, hint: type, key: str, where: Where) -> object:
    if is_dataclass(hint):
        if isinstance(value, hint):
            return value
        if isinstance(value, Mapping):
            return merge_settings(hint, value, key=key, where=where)
        raise _wrong_type(key, value, _describe(hint), where)
    if issubclass(hint, Enum):
        return _convert_enum(value, hint, key, where)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if issubclass(hint, Path) and isinstance(value, str):
        return hint(value)
    # True is an int to Python, but nobody who writes `steps: true` means 1.
    if not isinstance(value, hint) or (isinstance(value, bool) and hint in (int, float)):
        raise _wrong_type(key, value, _describe(hint), where)
    return value


def _convert_enum(value: object, hint: type[Enum], key: str, where: Where) -> Enum:
    for member in hint:
        if value is member or value == member.value or value == member.name:
            return member
    names = tuple(str(member.value) for member in hint)
    near = nearest(str(value), names)
    raise ConfigError(
        f"{key} is {value!r}",
        where=where,
        accepted=", ".join(names),
        todo=f"did you mean {near!r}?" if near else "choose one of these",
    )


_PLAIN = {
    int: "an integer",
    float: "a number",
    str: "text",
    bool: "true or false",
    types.NoneType: "null",
}


def _describe(hint: Any) -> str:
    """Say what values an annotation takes, in words."""
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(_describe(choice) for choice in args)
    if origin is Literal:
        return " or ".join(map(repr, args))
    if origin is tuple and args and args[-1] is not Ellipsis:
        return f"a list of {len(args)}: {', '.join(map(_describe, args))}"
    if origin in (tuple, list, Sequence) or hint in (tuple, list):
        return f"a list, each {_describe(args[0])}" if args else "a list"
    if origin in (dict, Mapping) or hint is dict:
        return f"a mapping, each value {_describe(args[1])}" if args else "a mapping"
    if is_dataclass(hint):
        return f"a mapping with {', '.join(field.name for field in fields(hint))}"
    return _PLAIN.get(hint, getattr(hint, "__name__", str(hint)))

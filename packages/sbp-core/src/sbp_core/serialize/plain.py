"""Convert numbers, text, true, false, null and any JSON value to JSON and back, for `typed`."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any

from sbp_core.serialize.misfit import MisfitError, at, is_unicode

#: The deepest nesting of lists and objects, if a type does not limit it: reading, and later code
#: that walks the value, may recurse.
MOST_DEPTH = 50

#: Texts for numbers that JSON lacks.
_NOT_FINITE = ("inf", "-inf", "nan")


@dataclass(frozen=True, slots=True, kw_only=True)
class Codec:
    """The functions that write and read values of one type.

    Args:
        dump: Value to JSON value.
        load: The reverse; raises `MisfitError`.
        kinds: Classes of its values, by which a union chooses how to write.
        json: Classes of its JSON values, by which a union chooses how to read.
        accepted: A description of its JSON values.
    """

    dump: Callable[[Any], Any]
    load: Callable[[Any], Any]
    kinds: tuple[type, ...]
    json: tuple[type, ...]
    accepted: str


def _same(value: Any) -> Any:
    return value


def _load_bool(value: Any) -> bool:
    if type(value) is not bool:
        raise MisfitError.found(value, "true or false")
    return value


def _load_int(value: Any) -> int:
    if type(value) is not int:  # True is an int to Python
        raise MisfitError.found(value, "an integer")
    if not -(2**63) <= value < 2**64:
        raise MisfitError.found(value, "an integer of 64 bits")
    return value


def _dump_float(value: float) -> Any:
    return float(value) if isfinite(value) else {"float": str(float(value))}


def _is_not_finite(value: Any) -> bool:
    return isinstance(value, dict) and list(value) == ["float"] and value["float"] in _NOT_FINITE


def _load_float(value: Any) -> float:
    if type(value) is int:
        return float(_load_int(value))
    if _is_not_finite(value):
        return float(value["float"])
    if type(value) is not float or not isfinite(value):
        raise MisfitError.found(value, "a number")
    return value


def _load_str(value: Any) -> str:
    if type(value) is not str:
        # YAML parses `12e3` as a number.
        quoted = "" if isinstance(value, dict | list) else "put it in quotation marks"
        raise MisfitError.found(value, "text", quoted)
    if not value.isascii() and not is_unicode(value):
        raise MisfitError.found(value, "text of whole characters")
    return value


def _load_none(value: Any) -> None:
    if value is not None:
        raise MisfitError.found(value, "null")


def _dump_any(value: Any) -> Any:
    if isinstance(value, float):
        return _dump_float(value)
    if isinstance(value, Mapping):
        return {key: _dump_any(part) for key, part in value.items()}
    return [_dump_any(part) for part in value] if isinstance(value, list | tuple) else value


def _load_any(value: Any, depth: int = 0) -> Any:
    if depth > MOST_DEPTH:
        raise MisfitError(" is too deep", f"{MOST_DEPTH} lists and mappings inside each other")
    if isinstance(value, dict):
        if _is_not_finite(value):
            return float(value["float"])
        for key in value:
            at(str(key), _load_str, key)
        return {key: at(key, _load_any, part, depth + 1) for key, part in value.items()}
    if isinstance(value, list):
        return [at(index, _load_any, part, depth + 1) for index, part in enumerate(value)]
    if type(value) not in PLAIN:
        raise MisfitError.found(value, "a number, text, true, false, null, a list or a mapping")
    return PLAIN[type(value)].load(value)


_NONE = type(None)

#: The codecs of types that JSON has itself.
PLAIN = types.MappingProxyType(
    {
        bool: Codec(
            dump=_same, load=_load_bool, kinds=(bool,), json=(bool,), accepted="true or false"
        ),
        int: Codec(dump=_same, load=_load_int, kinds=(int,), json=(int,), accepted="an integer"),
        float: Codec(
            dump=_dump_float,
            load=_load_float,
            kinds=(float, int),
            json=(float, int, dict),
            accepted="a number",
        ),
        str: Codec(dump=_same, load=_load_str, kinds=(str,), json=(str,), accepted="text"),
        _NONE: Codec(dump=_same, load=_load_none, kinds=(_NONE,), json=(_NONE,), accepted="null"),
        Any: Codec(
            dump=_dump_any, load=_load_any, kinds=(object,), json=(object,), accepted="any value"
        ),
    }
)

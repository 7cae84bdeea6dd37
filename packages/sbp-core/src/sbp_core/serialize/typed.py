"""Dataclasses, containers, unions and enums to JSON values and back, directed by annotations."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from enum import Enum
from functools import lru_cache
from inspect import get_annotations
from typing import Annotated, Any, TypeVar, Union, cast, get_args, get_origin

from sbp_core.errors import SbpError, SbpValueError
from sbp_core.serialize.lines import Lines
from sbp_core.serialize.misfit import MisfitError, at, nearest, shown
from sbp_core.serialize.plain import PLAIN, Codec

T = TypeVar("T")

#: Key that distinguishes dataclasses of one union.
_TAG = "type"


@dataclass(frozen=True, slots=True)
class JsonForm:
    """A JSON representation of a type other than by its fields.

    A class returns it from a class method `json_form`; an alias is `Annotated[X, JsonForm(...)]`.

    Args:
        kind: The type that is written in its place; None for any JSON value.
        dump: Converts a value to `kind`.
        load: Converts back; raises an `SbpError` if the input is invalid.
    """

    kind: Any
    dump: Callable[[Any], Any]
    load: Callable[[Any], Any]


def dump(value: T, kind: type[T]) -> Any:
    """Return a JSON value that `load` reads back equal.

    Args:
        value: The value, which is not checked to be a `kind`.
        kind: A type; see the docstring of the package.
    """
    return _codec(cast("Any", kind)).dump(value)


def load(
    value: object,
    kind: type[T],
    *,
    root: str = "it",
    where: str | Lines = "",
    error: type[SbpError] = SbpValueError,
    todo: str = "",
) -> T:
    """Read the result of `dump`.

    Args:
        value: A JSON value.
        kind: The type that is expected.
        root: The name of the whole value in messages.
        where: The file that it comes from, or its lines, for messages.
        error: The class of errors.
        todo: The advice, if the place in question has none.

    Raises:
        SbpError: `error`: something in it is missing, unknown or invalid. It names the place, what
            was found, and what is accepted.
    """
    try:
        found: T = _codec(cast("Any", kind)).load(value)
    except MisfitError as misfit:
        place = where if isinstance(where, str) else where.where(misfit.keys())
        raise error(
            misfit.message(root),
            where=(place, *misfit.where),
            accepted=misfit.accepted,
            todo=misfit.todo or todo,
        ) from misfit.__cause__
    return found


@lru_cache(maxsize=1024)
def _codec(kind: Any) -> Codec:
    """Return the codec of a type."""
    origin, args = get_origin(kind), get_args(kind)
    # First, because a dataclass may have its own form.
    form = _form(kind)
    if form is not None:
        return _formed(kind, form)
    if kind in PLAIN or kind is object:
        return PLAIN[Any if kind is object else kind]
    if origin in (Union, types.UnionType):
        return _union(args)
    if origin is tuple:
        is_long = len(args) == 2 and args[1] is Ellipsis
        return _long_tuple(_codec(args[0])) if is_long else _tuple(tuple(map(_codec, args)))
    if origin is not None and issubclass(origin, Mapping):
        key, part = map(_codec, args)
        return _mapping(key, part) if key.json == (str,) else _pairs(_tuple((key, part)))
    if isinstance(kind, type) and issubclass(kind, Enum):
        return _enum(kind)
    assert isinstance(kind, type) and is_dataclass(kind), f"{kind!r} has no form in JSON"
    return _fields(kind)


def _form(kind: Any) -> JsonForm | None:
    if get_origin(kind) is Annotated:
        return next(part for part in kind.__metadata__ if isinstance(part, JsonForm))
    describe = getattr(kind, "json_form", None) if isinstance(kind, type) else None
    return describe() if describe is not None else None


def _formed(kind: Any, form: JsonForm) -> Codec:
    inner = PLAIN[Any] if form.kind is None else _codec(form.kind)
    is_raw = form.kind is None

    def dump(value: Any) -> Any:
        return form.dump(value) if is_raw else inner.dump(form.dump(value))

    def load(value: Any) -> Any:
        stands_for_it = value if is_raw else inner.load(value)
        try:
            return form.load(stands_for_it)
        except SbpError as error:
            raise MisfitError.refused(error) from error

    kinds = (kind,) if isinstance(kind, type) else (object,)
    return Codec(dump=dump, load=load, kinds=kinds, json=inner.json, accepted=inner.accepted)


def _union(args: tuple[Any, ...]) -> Codec:
    """Return the codec of `X | Y`; JSON that fits several types is read as the first one."""
    # Dataclasses are all mappings in JSON. A single one needs no tag; several get one, and are one
    # member then. Dataclasses with a `JsonForm` are distinguished by that.
    classes: list[Any] = [kind for kind in args if is_dataclass(kind) and _form(kind) is None]
    members = [_codec(kind) for kind in args if len(classes) < 2 or kind not in classes]
    if len(classes) > 1:
        members.append(_tagged({kind.__name__: _codec(kind) for kind in classes}))
    accepted = " or ".join(member.accepted for member in members)

    def dump(value: Any) -> Any:
        return next(m for m in members if isinstance(value, m.kinds)).dump(value)

    def load(value: Any) -> Any:
        for member in members:
            # The exact type, because True is an int for `isinstance`.
            if type(value) in member.json or member.json == (object,):
                return member.load(value)
        raise MisfitError.found(value, accepted)

    return Codec(
        dump=dump,
        load=load,
        kinds=tuple(kind for member in members for kind in member.kinds),
        json=tuple(kind for member in members for kind in member.json),
        accepted=accepted,
    )


def _tagged(members: Mapping[str, Codec]) -> Codec:
    """Return the codec of one of several dataclasses, by their names.

    before: Circle(radius=1.0)
    after:  {"type": "Circle", "radius": 1.0}
    """
    names = {member.kinds[0]: name for name, member in members.items()}
    accepted = f"a mapping with {_TAG}: {' or '.join(members)}"

    def dump(value: Any) -> Any:
        name = names[type(value)]
        return {_TAG: name, **members[name].dump(value)}

    def load(value: Any) -> Any:
        if not isinstance(value, dict):
            raise MisfitError.found(value, accepted)
        name = value.get(_TAG)
        if not isinstance(name, str) or name not in members:
            misfit = MisfitError.found(name, " or ".join(members), nearest(name, members))
            misfit.path.append(_TAG)
            raise misfit
        return members[name].load({key: part for key, part in value.items() if key != _TAG})

    return Codec(dump=dump, load=load, kinds=tuple(names), json=(dict,), accepted=accepted)


def _tuple(parts: tuple[Codec, ...]) -> Codec:
    accepted = f"a list of {len(parts)}: {', '.join(part.accepted for part in parts)}"

    def dump(value: Any) -> Any:
        return [part.dump(entry) for part, entry in zip(parts, value, strict=True)]

    def load(value: Any) -> Any:
        if not isinstance(value, list) or len(value) != len(parts):
            raise MisfitError.found(value, accepted)
        pairs = zip(parts, value, strict=True)
        return tuple(at(index, part.load, entry) for index, (part, entry) in enumerate(pairs))

    return Codec(dump=dump, load=load, kinds=(tuple,), json=(list,), accepted=accepted)


def _long_tuple(part: Codec) -> Codec:
    load_part, dump_part = part.load, part.dump

    def dump(value: Any) -> Any:
        return [dump_part(entry) for entry in value]

    def load(value: Any) -> Any:
        if not isinstance(value, list):
            raise MisfitError.found(value, "a list")
        # Like `at`, but without a call for each entry, because lists are long.
        found: list[Any] = []
        try:
            for entry in value:
                found.append(load_part(entry))
        except MisfitError as misfit:
            misfit.path.append(len(found))
            raise
        return tuple(found)

    return Codec(dump=dump, load=load, kinds=(tuple,), json=(list,), accepted="a list")


def _mapping(key: Codec, part: Codec) -> Codec:
    def dump(value: Any) -> Any:
        return {key.dump(name): part.dump(entry) for name, entry in value.items()}

    def load(value: Any) -> Any:
        if not isinstance(value, dict):
            raise MisfitError.found(value, "a mapping")
        return {
            at(shown(name), key.load, name): at(name, part.load, entry)
            for name, entry in value.items()
        }

    return Codec(dump=dump, load=load, kinds=(Mapping,), json=(dict,), accepted="a mapping")


def _pairs(pair: Codec) -> Codec:
    """Return the codec of a mapping whose keys are not text."""
    entries = _long_tuple(pair)

    def dump(value: Any) -> Any:
        return entries.dump(value.items())

    def load(value: Any) -> Any:
        # A dict would silently keep one of two equal keys.
        pairs = entries.load(value)
        found = dict(pairs)
        if len(found) < len(pairs):
            raise MisfitError(" has a key twice", "each key once")
        return found

    return Codec(dump=dump, load=load, kinds=(Mapping,), json=(list,), accepted="a list of pairs")


def _enum(kind: type[Enum]) -> Codec:
    members = {member.value: member for member in kind}
    names = [str(value) for value in members]

    def load(value: Any) -> Any:
        found = members.get(value) if isinstance(value, str) else None
        if found is None:
            raise MisfitError.found(value, ", ".join(names), nearest(value, names))
        return found

    return Codec(
        dump=lambda value: value.value,
        load=load,
        kinds=(kind,),
        json=(str,),
        accepted=" or ".join(names),
    )


def _fields(cls: type) -> Codec:
    """Return the codec of a dataclass: the arguments of its `__init__`, by name."""
    own = [field for field in fields(cls) if field.init]
    codecs = {field.name: _codec(_annotation(cls, field)) for field in own}
    defaults = {field.name: _default(field) for field in own}
    required = [name for name, default in defaults.items() if default is MISSING]
    accepted = f"a mapping with {', '.join(required or codecs)}"
    dumps = [(name, codec.dump, defaults[name]) for name, codec in codecs.items()]
    loads = {name: codec.load for name, codec in codecs.items()}
    assert _TAG not in codecs, f"{cls.__name__}.{_TAG}: that name tells classes apart"

    def dump(value: Any) -> Any:
        found = {}
        for name, dump_part, default in dumps:
            part = getattr(value, name)
            # Defaults are left out, so that documents show the chosen values.
            if default is MISSING or part != default:
                found[name] = dump_part(part)
        return found

    def load(value: Any) -> Any:
        if not isinstance(value, dict):
            raise MisfitError.found(value, accepted)
        found: dict[str, Any] = {}
        for name, part in value.items():
            if name not in loads:
                known = ", ".join(loads)
                unknown = f" has no place for {shown(name)}"
                stray = MisfitError(unknown, known, nearest(name, loads))
                stray.key = name
                raise stray
            try:
                found[name] = loads[name](part)
            except MisfitError as misfit:
                misfit.path.append(name)
                raise
        lacking = [name for name in required if name not in found]
        if lacking:
            raise MisfitError(f" has no {lacking[0]!r}", accepted)
        try:
            return cls(**found)
        except SbpError as error:
            refused = MisfitError.refused(error)
            # A message that begins with the name of a field is about it.
            name = error.what.partition("=")[0].partition(" ")[0]
            refused.key = name if name in found else None
            raise refused from error

    return Codec(dump=dump, load=load, kinds=(cls,), json=(dict,), accepted=accepted)


def _annotation(cls: type, field: Field[Any]) -> Any:
    """Return the type of one field.

    `get_type_hints` would resolve all names, also those of fields that are not written.
    """
    if not isinstance(field.type, str):
        return field.type
    owner = next(base for base in cls.__mro__ if field.name in get_annotations(base))
    # Under `from __future__ import annotations`, an annotation is a text with names of the module
    # of the class that declares it, which may be a base class elsewhere.
    return eval(field.type, vars(sys.modules[owner.__module__]))


def _default(field: Field[Any]) -> Any:
    return field.default if field.default_factory is MISSING else field.default_factory()

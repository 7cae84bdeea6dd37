"""The public names: the declaration `public.toml`, by reader, and its check."""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from api.contracts import named_classes
from api.rooms import Packages

#: The file of the declaration.
FILE = Path("integration", "api", "public.toml")

#: The stabilities of public names.
STABILITIES = ("stable", "provisional")

#: The greatest number of public names.
LIMIT = 150


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """A kind of user of the packages, and the public names for them.

    Args:
        key: Name of their page.
        title: Title of their page.
        about: First sentences of their page.
        kinds: Kinds of plugins that they write.
        also: Dotted names that they need and that are listed for other readers.
        names: Stability by dotted name.
    """

    key: str
    title: str
    about: str
    kinds: tuple[str, ...] = ()
    also: tuple[str, ...] = ()
    names: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Public:
    """All public names.

    Args:
        readers: The readers, in the order of their pages.
    """

    readers: tuple[Reader, ...] = field(default=())

    @classmethod
    def below(cls, root: Path) -> Public:
        """Read the declaration of a repository; without one, nothing is public."""
        path = root / FILE
        table = tomllib.loads(path.read_text("utf-8")) if path.exists() else {}
        return cls(tuple(_reader(key, entry) for key, entry in table.items()))

    @cached_property
    def stability(self) -> Mapping[str, str]:
        """The stability of each public name, by dotted name."""
        return {name: word for reader in self.readers for name, word in reader.names}

    @cached_property
    def listed(self) -> tuple[str, ...]:
        """All dotted names, as often as they are listed."""
        return tuple(name for reader in self.readers for name, _ in reader.names)

    def reader_of(self, name: str) -> Reader:
        """Return the reader for whom a dotted name is listed."""
        return next(one for one in self.readers if name in dict(one.names))

    def of_room(self, room: str) -> Mapping[str, str]:
        """Return the stability of each public name of a module."""
        found = ((name.rpartition("."), word) for name, word in self.stability.items())
        return {name: word for (home, _, name), word in found if home == room}


def _reader(key: str, entry: Mapping[str, object]) -> Reader:
    names = [
        (f"{room}.{name}", word)
        for word in STABILITIES
        for room, offered in _table(entry.get(word, {})).items()
        for name in offered
    ]
    return Reader(
        key=key,
        title=str(entry["title"]),
        about=" ".join(str(entry["about"]).split()),
        kinds=_texts(entry.get("kinds", ())),
        also=_texts(entry.get("also", ())),
        names=tuple(names),
    )


def _table(value: object) -> Mapping[str, tuple[str, ...]]:
    assert isinstance(value, dict), "a stability has a table: module -> names"
    return {room: _texts(names) for room, names in value.items()}


def _texts(value: object) -> tuple[str, ...]:
    assert isinstance(value, list | tuple), "names stand in a list"
    return tuple(map(str, value))


def broken_promises(packages: Packages, public: Public) -> Iterator[str]:
    """Yield the errors of the declaration."""
    if len(public.listed) > LIMIT:
        yield f"{len(public.listed)} names are public, and at most {LIMIT} may be"
    for name, count in Counter(public.listed).items():
        if count > 1:
            yield f"{name} is listed {count} times"
    last = Counter(name.rpartition(".")[2] for name in {*public.listed})
    for word in (word for word, count in last.items() if count > 1):
        alike = sorted(name for name in public.stability if name.endswith(f".{word}"))
        yield f"public names are alike: {', '.join(alike)}"
    for name in public.stability:
        where, _, what = name.rpartition(".")
        room = packages.rooms.get(where)
        if room is None or what not in (room.offers or ()):
            yield f"{name} is listed, and no module offers it in its __all__"
    for reader in public.readers:
        for name in reader.also:
            if name not in public.stability:
                yield f"{name} is no public name, and {reader.key}.also lists it"
        for kind in reader.kinds:
            for name in named_classes(packages, kind):
                if name not in public.stability:
                    yield f"{name} is no public name, and a plugin of kind {kind} needs it"


def functions_called_like_modules(packages: Packages) -> Iterator[str]:
    """Yield names in rooms that are also modules: importing the module hides the function."""
    for room, module in packages.rooms.items():
        for name in module.offers or ():
            dotted = f"{room}.{name}"
            if dotted in packages.modules and packages.definition(room, name) is not None:
                yield f"{dotted} is a module, and {room} offers something else of that name"

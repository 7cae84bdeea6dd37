"""Floats that a step takes as inputs: a guard compares their type, and not their value."""

from __future__ import annotations

import operator
from collections.abc import Collection, Hashable, Iterable, Sequence
from functools import partial
from typing import Any

from sbp_torch.capture.numbers import NumberPlace
from sbp_torch.guards.changed import is_same


def place_of(label: str, owner: object, items: Any, key: Hashable) -> NumberPlace:
    """Return the place of a number in a mapping or list.

    Args:
        label: As messages call it.
        owner: Whose attributes the items are; or the items themselves.
        items: What holds it.
        key: Where.
    """
    is_class = isinstance(owner, type)  # whose attributes only `setattr` writes
    return NumberPlace(
        label=label,
        at=(id(owner if is_class else items), key),
        read=partial(operator.getitem, items, key),
        write=partial(setattr, owner, str(key))
        if is_class
        else partial(operator.setitem, items, key),
    )


def is_float(value: object) -> bool:
    """Whether a value can be an input: no bool, and no int, which may be a size.

    The 64-bit floats of NumPy are floats, too.
    """
    return isinstance(value, float)


class Numbers:
    """Says which numbers a guard does not compare.

    Args:
        places: Of these.
    """

    def __init__(self, places: Collection[NumberPlace]) -> None:
        self._by_place = {place.at: place for place in places}
        #: Among what lies in mappings and lists: where such a number is.
        self._among: list[tuple[int, NumberPlace]] = []

    def __contains__(self, at: tuple[int, Hashable]) -> bool:
        return at in self._by_place

    def may_be(self, at: tuple[int, Hashable], value: object) -> bool:
        """Whether a value may be in a place: another number, where numbers are not compared."""
        return at in self._by_place and is_float(value)

    def find_among(self, held: Iterable[tuple[int, Collection[Hashable]]]) -> None:
        """Note where numbers are among what lies in mappings and lists.

        Args:
            held: Of each: its id in places, and its keys.
        """
        self._among = []
        first = 0
        if not self._by_place:
            return
        for number, keys in held:
            for position, key in enumerate(keys, start=first):
                if (number, key) in self._by_place:
                    self._among.append((position, self._by_place[number, key]))
            first += len(keys)

    def follow_in(self, lay: list[Any]) -> bool:
        """Put the floats of now into what lay in mappings and lists; whether all are floats.

        Args:
            lay: Changed, where numbers lie.

        Raises:
            LookupError: a place is empty.
        """
        for position, place in self._among:
            lay[position] = place.read()
        return all(is_float(place.read()) for place in self._by_place.values())


def changed_floats(before: Sequence[object], after: Sequence[object]) -> list[int]:
    """Return which entries of a list have changed; none if it is not only from floats to floats."""
    if len(before) != len(after):
        return []
    pairs = [*zip(before, after, strict=True)]
    found = [at for at, (old, new) in enumerate(pairs) if not is_same(old, new)]
    return found if all(is_float(one) for at in found for one in pairs[at]) else []

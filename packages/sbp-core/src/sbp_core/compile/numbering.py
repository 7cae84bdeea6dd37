"""Numbers for equal values, so that large ones are compared once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

_T = TypeVar("_T")


class Numbering(Generic[_T]):
    """Numbers for values, the same for equal ones; an object is looked at once.

    Args:
        sketch: Makes something hashable of a value that is the same for equal ones.
    """

    def __init__(self, sketch: Callable[[_T], Hashable]) -> None:
        self._sketch = sketch
        self._by_id: dict[int, int] = {}
        self._alike: dict[Hashable, list[tuple[_T, int]]] = defaultdict(list)

    def number(self, value: _T) -> int:
        """Return the number of a value, which somebody keeps alive."""
        number = self._by_id.get(id(value))
        if number is None:
            alike = self._alike[self._sketch(value)]
            number = next((n for other, n in alike if other == value), None)
            if number is None:
                number = len(self._by_id)
                alike.append((value, number))
            self._by_id[id(value)] = number
        return number

"""What is wrong with a value that a type does not accept, and where in the whole it is."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from typing import Any

from sbp_core.errors import SbpError

#: Characters of a value that messages show, at most.
_MOST_CHARACTERS = 60


class MisfitError(Exception):
    """A part of a value is not what its type wants; `typed.load` makes an `SbpError` of it.

    Args:
        what: What it is instead, to be put after the place: " is 'many'".
        accepted, todo, where: As in `SbpError`.
    """

    def __init__(
        self, what: str, accepted: str = "", todo: str = "", where: tuple[str, ...] = ()
    ) -> None:
        super().__init__(what)
        self.what, self.accepted, self.todo, self.where = what, accepted, todo, where
        #: Keys and indices that lead to the part, the innermost first: who passes the error on
        #: adds its own, so that reading what is right keeps no account of where it is.
        self.path: list[str | int] = []
        #: A key of that part that the error is about, if it names one.
        self.key: str | None = None

    @classmethod
    def found(cls, value: object, accepted: str, todo: str = "") -> MisfitError:
        """Return the error for a value of another kind than what is accepted."""
        return cls(f" is {shown(value)}", accepted, todo)

    @classmethod
    def refused(cls, error: SbpError) -> MisfitError:
        """Return the error for a value that its class refused."""
        return cls(f": {error.what}", error.accepted, error.todo, error.where)

    def keys(self) -> list[str | int]:
        """Return the keys and indices that lead to what is wrong, the outermost first."""
        return [*reversed(self.path), *([] if self.key is None else [self.key])]

    def message(self, root: str) -> str:
        """Return the message with the path of the part; `root` names the whole document."""
        place = ""
        for part in reversed(self.path):
            named = isinstance(part, str) and part.isidentifier()
            place += f".{part}" if named else f"[{shown(part)}]"
        return f"{place.removeprefix('.') or root}{self.what}"


def at(place: str | int, load: Callable[..., Any], *args: Any) -> Any:
    """Return `load(*args)`; what is wrong with it is wrong at a place.

    Raises:
        MisfitError: that of `load`, with the place.
    """
    try:
        return load(*args)
    except MisfitError as misfit:
        misfit.path.append(place)
        raise


def shown(value: object) -> str:
    """Return a value in a few words, whatever it is."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    if isinstance(value, dict | list):
        return f"a {'mapping' if isinstance(value, dict) else 'list'} of {len(value)}"
    if isinstance(value, int) and value.bit_length() > 64:
        return f"an integer of {value.bit_length()} bits"  # Python refuses to print large ones
    if isinstance(value, int | float | str):
        text = repr(value) if not isinstance(value, str) or is_unicode(value) else ascii(value)
        return text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]}..."
    return f"a {type(value).__name__}"


def is_unicode(text: str) -> bool:
    r"""Whether a text can be written: JSON may hold halves of characters (`"\ud800"`)."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def nearest(name: object, known: Iterable[str]) -> str:
    """Return what to do about an unknown name."""
    text = name[:_MOST_CHARACTERS] if isinstance(name, str) else ""
    near = difflib.get_close_matches(text, sorted(known), n=1, cutoff=0.5)
    return f"did you mean {near[0]!r}?" if near else ""

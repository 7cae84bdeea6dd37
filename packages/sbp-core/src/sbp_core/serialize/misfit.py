"""`MisfitError`: a value in a JSON file does not match the annotation of its dataclass field.

`typed` and `plain` raise it while they convert a value; it has the path to the wrong part.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from typing import Any

from sbp_core.errors import SbpError

#: The most characters of a value that messages show.
_MOST_CHARACTERS = 60


class MisfitError(Exception):
    """A part of a value does not match its type; `typed.load` turns it into an `SbpError`.

    Args:
        what: The mismatch, to be put after the place: " is 'many'".
        accepted, todo, where: As in `SbpError`.
    """

    def __init__(
        self, what: str, accepted: str = "", todo: str = "", where: tuple[str, ...] = ()
    ) -> None:
        super().__init__(what)
        self.what, self.accepted, self.todo, self.where = what, accepted, todo, where
        #: Keys and indices that lead to the part, the innermost first: each caller that passes the
        #: error on adds its own, so that reading a valid value need not track its position.
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
        """Return the keys and indices that lead to the wrong part, the outermost first."""
        return [*reversed(self.path), *([] if self.key is None else [self.key])]

    def message(self, root: str) -> str:
        """Return the message with the path of the part; `root` names the whole document."""
        place = ""
        for part in reversed(self.path):
            named = isinstance(part, str) and part.isidentifier()
            place += f".{part}" if named else f"[{shown(part)}]"
        return f"{place.removeprefix('.') or root}{self.what}"


def at(place: str | int, load: Callable[..., Any], *args: Any) -> Any:
    """Return `load(*args)`; its errors get the place.

    Raises:
        MisfitError: raised by `load`, with the place added.
    """
    try:
        return load(*args)
    except MisfitError as misfit:
        misfit.path.append(place)
        raise


def shown(value: object) -> str:
    """Return a short text of any value."""
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
    r"""Whether a text can be encoded: JSON may contain halves of characters (`"\ud800"`)."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def nearest(name: object, known: Iterable[str]) -> str:
    """Return the advice for an unknown name."""
    text = name[:_MOST_CHARACTERS] if isinstance(name, str) else ""
    near = difflib.get_close_matches(text, sorted(known), n=1, cutoff=0.5)
    return f"did you mean {near[0]!r}?" if near else ""

"""The errors that users see: one shape of message, and subclasses of the builtins they would catch.

A message says, in this order: what does not hold (with the values), where, what would be accepted,
and what to do. Errors pickle, so that a worker process can hand one to its launcher.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import TypeVar

__all__ = [
    "BoxingError",
    "CaptureError",
    "ConfigError",
    "GraphError",
    "MemoryLimitError",
    "PlanError",
    "PluginError",
    "RunError",
    "SbpAttributeError",
    "SbpError",
    "SbpLookupError",
    "SbpTypeError",
    "SbpValueError",
    "SignatureError",
    "nearest",
    "suggestion",
    "unknown_name",
    "words_of",
]


ErrorT = TypeVar("ErrorT", bound="SbpError")


class SbpError(Exception):
    """Report something a user can mend.

    Args:
        what: What does not hold, with the values.
        where: Op, module path and source line, rank, file or config key; one a line.
        accepted: What would have been accepted.
        todo: What to do about it.
    """

    def __init__(
        self, what: str, *, where: str | Sequence[str] = (), accepted: str = "", todo: str = ""
    ) -> None:
        self.what = what
        self.where: tuple[str, ...] = (where,) if isinstance(where, str) else tuple(where)
        self.accepted = accepted
        self.todo = todo
        super().__init__(self._message())

    def _message(self) -> str:
        lines = [self.what]
        lines += [f"  in {place}" for place in self.where if place]
        if self.accepted:
            lines.append(f"  accepted here: {self.accepted}")
        if self.todo:
            lines.append(f"  to mend it: {self.todo}")
        return "\n".join(lines)

    def replaced(
        self,
        kind: type[ErrorT],
        *,
        what: str | None = None,
        where: str | Sequence[str] | None = None,
        accepted: str | None = None,
        todo: str | None = None,
    ) -> ErrorT:
        """Return an error of some kind that says the same, but for what is given."""
        return kind(
            self.what if what is None else what,
            where=self.where if where is None else where,
            accepted=self.accepted if accepted is None else accepted,
            todo=self.todo if todo is None else todo,
        )

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.what, self.where, self.accepted, self.todo))


def words_of(error: BaseException) -> str:
    """Return what an error says, and where, to be quoted; of other errors also the type."""
    if isinstance(error, SbpError):
        return "\n  in ".join([error.what, *filter(None, error.where)])
    name = type(error).__name__
    return f"{name}: {error}" if str(error) else name


def _rebuild(
    cls: type[SbpError], what: str, where: tuple[str, ...], accepted: str, todo: str
) -> SbpError:
    return cls(what, where=where, accepted=accepted, todo=todo)


class SbpValueError(SbpError, ValueError):
    """A value that cannot be meant."""


class SbpTypeError(SbpError, TypeError):
    """An object of the wrong type."""


class SbpAttributeError(SbpError, AttributeError):
    """An attribute that an object does not have."""


class SbpLookupError(SbpError, LookupError):
    """A name that is not known."""


class ConfigError(SbpError, ValueError):
    """A setting that cannot be meant; the apps answer it with exit code 2."""


class CaptureError(SbpError, RuntimeError):
    """A model that cannot be captured as one graph."""


class GraphError(SbpError, ValueError):
    """A graph that breaks its specification."""


class SignatureError(SbpError, ValueError):
    """An assignment that no signature of the operator allows."""


class PlanError(SbpError, RuntimeError):
    """A plan that would deadlock, overflow or not fit."""


class MemoryLimitError(PlanError, ConfigError):
    """No plan that was found fits the memory of a rank, which is a setting."""


class BoxingError(SbpError, RuntimeError):
    """A boxing step that could not complete."""


class PluginError(SbpError, RuntimeError):
    """Code of a plugin that failed or returned a wrong value."""


class RunError(SbpError, RuntimeError):
    """A run that stopped: which rank, which actor, and why."""


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the known name most like `name`, or `""` if none is near.

    Few slips of the pen change the first letter: such a name must be nearer.

    >>> nearest("gtp", ["gpt", "llama"]), nearest("mine", ["infer", "osdp"])
    ('gpt', '')
    """
    for near in difflib.get_close_matches(name, sorted(known), n=3, cutoff=0.6):
        likeness = difflib.SequenceMatcher(None, name, near).ratio()
        if likeness >= 0.75 or near[:1].lower() == name[:1].lower():
            return near
    return ""


def suggestion(name: str, known: Iterable[str], otherwise: str = "") -> str:
    """Return what to do about an unknown name: take the known one that is nearest.

    Args:
        name: The unknown name.
        known: Names that are known.
        otherwise: What to do if none of them is near.
    """
    near = nearest(name, known)
    return f"did you mean {near!r}?" if near else otherwise


def unknown_name(
    kind: str, name: str, known: Iterable[str], *, where: str | Sequence[str] = ()
) -> SbpLookupError:
    """Make the error for an unknown name: the closest match and the whole list."""
    choices = sorted(known)
    return SbpLookupError(
        f"no {kind} is called {name!r}",
        where=where,
        accepted=", ".join(choices) or f"none ({kind}: nothing is installed)",
        todo=suggestion(name, choices, "choose one of these, or install a plugin"),
    )

"""Errors for users: a common form of messages, and subclasses of the builtins to catch.

A message names, in this order: the violated condition (with the values), the place, the accepted
values, and the advice. Errors can be pickled, so a worker process can send one to its launcher.
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
    """An error that a user can correct.

    Args:
        what: The violated condition, with the values.
        where: Op, module path and source line, rank, file or config key; one a line.
        accepted: The values that would have been accepted.
        todo: The advice.
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
            lines.append(f"  to fix it: {self.todo}")
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
        """Return an error of another class with the same content, except for the given parts."""
        return kind(
            self.what if what is None else what,
            where=self.where if where is None else where,
            accepted=self.accepted if accepted is None else accepted,
            todo=self.todo if todo is None else todo,
        )

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.what, self.where, self.accepted, self.todo))


def words_of(error: BaseException) -> str:
    """Return the message and place of an error, to be quoted; for other errors also the type."""
    if isinstance(error, SbpError):
        return "\n  in ".join([error.what, *filter(None, error.where)])
    name = type(error).__name__
    return f"{name}: {error}" if str(error) else name


def _rebuild(
    cls: type[SbpError], what: str, where: tuple[str, ...], accepted: str, todo: str
) -> SbpError:
    return cls(what, where=where, accepted=accepted, todo=todo)


class SbpValueError(SbpError, ValueError):
    """An invalid value."""


class SbpTypeError(SbpError, TypeError):
    """An object of the wrong type."""


class SbpAttributeError(SbpError, AttributeError):
    """An attribute that an object does not have."""


class SbpLookupError(SbpError, LookupError):
    """An unknown name."""


class ConfigError(SbpError, ValueError):
    """An invalid setting; for it, the apps exit with code 2."""


class CaptureError(SbpError, RuntimeError):
    """A model that cannot be captured as one graph."""


class GraphError(SbpError, ValueError):
    """A graph that breaks its specification."""


class SignatureError(SbpError, ValueError):
    """An assignment that no signature of the operator allows."""


class PlanError(SbpError, RuntimeError):
    """A plan that would deadlock, overflow or not fit."""


class MemoryLimitError(PlanError, ConfigError):
    """No plan that was found fits the memory limit of a rank, which is a setting."""


class BoxingError(SbpError, RuntimeError):
    """A boxing step that could not complete."""


class PluginError(SbpError, RuntimeError):
    """Code of a plugin that failed or returned a wrong value."""


class RunError(SbpError, RuntimeError):
    """A run that stopped: the message names the rank, the actor, and the reason."""


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the known name most similar to `name`, or `""` if none is similar.

    Few typos change the first letter: such a name must be more similar.

    >>> nearest("gtp", ["gpt", "llama"]), nearest("mine", ["infer", "osdp"])
    ('gpt', '')
    """
    for near in difflib.get_close_matches(name, sorted(known), n=3, cutoff=0.6):
        likeness = difflib.SequenceMatcher(None, name, near).ratio()
        if likeness >= 0.75 or near[:1].lower() == name[:1].lower():
            return near
    return ""


def suggestion(name: str, known: Iterable[str], otherwise: str = "") -> str:
    """Return the advice for an unknown name: use the most similar known name.

    Args:
        name: The unknown name.
        known: Names that are known.
        otherwise: The advice if none of them is similar.
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
        accepted=", ".join(choices) or f"none: no {kind} is installed",
        todo=suggestion(name, choices, "choose one of these, or install a plugin"),
    )

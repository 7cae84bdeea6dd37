"""Check that each pattern of names in a config matches something in the model.

A pattern that matches nothing is probably a typing error, and would be silently ignored.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase

from sbp_core.errors import ConfigError, suggestion

#: The largest number of names that a message lists.
_MOST_NAMES = 8


def check_patterns(key: str, patterns: Iterable[str], names: Sequence[str], kind: str) -> None:
    """Check that each pattern matches a name.

    Args:
        key: The setting that has the patterns: `optimizer.groups`.
        patterns: Patterns of `fnmatch`: `*.bias`.
        names: The names that they may match.
        kind: The kind of thing that is named: `parameter`.

    Raises:
        ConfigError: a pattern matches nothing; suggests the nearest one.
    """
    for pattern in patterns:
        if any(fnmatchcase(name, pattern) for name in names):
            continue
        listed = ", ".join(names[:_MOST_NAMES]) + ", ..." * (len(names) > _MOST_NAMES)
        raise ConfigError(
            f"{key}: the pattern {pattern!r} matches no {kind} of the model",
            accepted=f"patterns of names: {listed}" if names else f"none: there is no {kind}",
            todo=suggestion(pattern, set(_patterns_of(names))),
        )


def _patterns_of(names: Iterable[str]) -> Iterator[str]:
    """Yield names, and patterns that match their ends and beginnings."""
    for name in names:
        yield name
        parts = name.split(".")
        for cut in range(1, len(parts)):
            yield f"*.{'.'.join(parts[cut:])}"
            yield f"{'.'.join(parts[:cut])}.*"

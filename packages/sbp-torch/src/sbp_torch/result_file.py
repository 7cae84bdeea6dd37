"""Results of long work, kept between runs: one in a file, with the budget in which it was found."""

from __future__ import annotations

import json
import logging
import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from sbp_core.serialize import parse, read_text

_log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultFile(Generic[T]):
    """The place of one result.

    Args:
        path: The file; its folder is made when something is stored.
        key: What the result depends on.
        budget: What the work may take: a result that it cut short is of use to no larger one.
        what: What log messages call such results.
        dump: Returns a JSON value of a result.
        load: Reads it; raises ValueError, KeyError, TypeError or AttributeError if it is damaged.
        is_whole: Whether the budget has not cut a result short.
    """

    path: Path
    key: str
    budget: float
    what: str
    dump: Callable[[T], dict[str, Any]]
    load: Callable[[Any], T]
    is_whole: Callable[[T], bool]

    def read(self) -> T | None:
        """Return what is stored; None if nothing usable is. Logs what cannot be used."""
        try:
            if not self.path.exists():
                return None
            value = parse(read_text(self.path))
            if value["key"] != self.key:
                return None
            found = self.load(value["found"])
            enough = self.is_whole(found) or float(value["budget"]) >= self.budget
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            _log.warning("ignoring %s in %s: %r", self.what, self.path, error)
            return None
        return found if enough else None

    def write(self, found: T) -> None:
        """Write a result, at once or not at all. Logs if that is impossible."""
        value = {"key": self.key, "budget": self.budget, "found": self.dump(found)}
        temporary = ""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            handle, temporary = tempfile.mkstemp(dir=self.path.parent, suffix=".part")
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump(value, file, indent=1)
            Path(temporary).replace(self.path)
        except OSError as error:
            _log.warning("%s are not kept in %s: %s", self.what, self.path.parent, error)
            if temporary:
                with suppress(OSError):
                    Path(temporary).unlink()

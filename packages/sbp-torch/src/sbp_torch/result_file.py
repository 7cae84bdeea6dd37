"""`ResultFile`: a cache file for one slow result: a proof of a step, or discovered signatures.

The work (`proof.proofs`, `signatures.discovery`) may be cut short by a budget. The file keeps the
budget, so that an incomplete result is not used by a run that allows more.
"""

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
    """The file of one result.

    Args:
        path: The file; its folder is created when a result is stored.
        key: Everything that the result depends on.
        budget: Budget of the work. A result that a smaller budget cut short is not used.
        what: Name of such results in log messages.
        dump: Returns a JSON value of a result.
        load: Reads it; raises ValueError, KeyError, TypeError or AttributeError if it is damaged.
        is_whole: Whether a result is complete, that is, the budget did not cut it short.
    """

    path: Path
    key: str
    budget: float
    what: str
    dump: Callable[[T], dict[str, Any]]
    load: Callable[[Any], T]
    is_whole: Callable[[T], bool]

    def read(self) -> T | None:
        """Return the stored result; None if none is usable. Log why a file cannot be used."""
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
        """Write a result atomically. Log if that is impossible."""
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

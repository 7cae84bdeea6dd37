"""What was found out about an operator by execution, and where it is kept between runs.

This module holds values and files; `discover` finds.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sbp_core.sbp import parse_sbp
from sbp_core.serialize import parse, read_text
from sbp_core.signatures import OpCall, Requirement, Signature1d, call_key

#: Raised whenever what a file means, or what discovery tries, changes.
FORMAT = 1

#: Where a discovered signature comes from.
ORIGIN = "discovered"

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Discovery:
    """The legal signatures of a call along one mesh axis, as found by execution.

    Args:
        signatures: Those that held; each with the strongest outputs. Empty for an operator that
            draws random numbers.
        tried: How many candidates were run.
        crashed: How many of them ended their process or their time.
        complete: Whether every candidate was tried, and not only as many as the budget allows.
    """

    signatures: tuple[Signature1d, ...]
    tried: int
    crashed: int
    complete: bool

    def __str__(self) -> str:
        head = f"{len(self.signatures)} signatures of {self.tried} candidates"
        notes = [f"{self.crashed} crashed"] * bool(self.crashed)
        notes += ["cut short by the budget"] * (not self.complete)
        return "\n  ".join([", ".join([head, *notes]), *map(str, self.signatures)])

    def to_json(self) -> dict[str, Any]:
        """Return a JSON value that `from_json` reads."""
        return {
            "signatures": [
                {
                    "inputs": list(map(str, entry.inputs)),
                    "outputs": list(map(str, entry.outputs)),
                    "requires": [
                        {"label": need.label, "extents": list(need.extents), "even": need.even}
                        for need in entry.requires
                    ],
                }
                for entry in self.signatures
            ],
            "tried": self.tried,
            "crashed": self.crashed,
            "complete": self.complete,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Discovery:
        """Read what `to_json` wrote.

        Raises:
            KeyError: something is missing.
            SbpValueError: an SBP cannot be read.
        """
        return cls(
            signatures=tuple(
                Signature1d(
                    inputs=tuple(map(parse_sbp, entry["inputs"])),
                    outputs=tuple(map(parse_sbp, entry["outputs"])),
                    origin=ORIGIN,
                    requires=tuple(
                        Requirement(
                            label=str(need["label"]),
                            extents=tuple(map(int, need["extents"])),
                            even=bool(need["even"]),
                        )
                        for need in entry["requires"]
                    ),
                )
                for entry in value["signatures"]
            ),
            tried=int(value["tried"]),
            crashed=int(value["crashed"]),
            complete=bool(value["complete"]),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheEntry:
    """The place of one discovery in a cache folder.

    Args:
        folder: The folder; made when something is stored.
        key: What the discovery depends on: the call (op, literals, shapes, dtypes), the schema of
            the operator, torch's version, the axis size. The kernel's own code is not part of it.
        budget: How many candidates may be tried.
    """

    folder: Path
    key: str
    budget: int

    @classmethod
    def of(
        cls, folder: Path, call: OpCall, *, schema: str, torch: str, axis_size: int, budget: int
    ) -> CacheEntry:
        """Return the entry of a call; its outputs need not be known."""
        text = call_key(replace(call, outputs=()))
        key = f"format {FORMAT}, torch {torch}, axis {axis_size}, {schema}: {text}"
        return cls(folder=folder, key=key, budget=budget)

    @property
    def path(self) -> Path:
        """The file."""
        op = "".join(letter if letter.isalnum() else "_" for letter in self.key.split(": ")[-1])
        digest = hashlib.sha256(self.key.encode()).hexdigest()
        return self.folder / f"{op[:40]}-{digest[:32]}.json"

    def load(self) -> Discovery | None:
        """Return what is stored; None if nothing usable is. Logs what cannot be used."""
        try:
            if not self.path.exists():
                return None
            value = parse(read_text(self.path))
            if value["key"] != self.key:
                return None
            found = Discovery.from_json(value["found"])
            enough = found.complete or int(value["budget"]) >= self.budget
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            _log.warning("ignoring discovered signatures in %s: %r", self.path, error)
            return None
        return found if enough else None

    def store(self, found: Discovery) -> None:
        """Write a discovery, at once or not at all. Logs if that is impossible."""
        value = {"key": self.key, "budget": self.budget, "found": found.to_json()}
        temporary = ""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            handle, temporary = tempfile.mkstemp(dir=self.folder, suffix=".part")
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump(value, file, indent=1)
            Path(temporary).replace(self.path)
        except OSError as error:
            _log.warning("discovered signatures are not kept in %s: %s", self.folder, error)
            if temporary:
                with suppress(OSError):
                    Path(temporary).unlink()

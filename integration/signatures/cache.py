"""Verdicts and discoveries of earlier runs, in a file of JSON lines.

Their keys are hashes of everything that they depend on. So a run after a change of one rule
executes only the calls of that rule, and repeats no search.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sbp_core.sbp import Sbp, parse_sbp
from sbp_core.signatures import Signature1d
from signatures.judge import Found, Verdict


class Cache:
    """Verdicts by hash, and discoveries by hash.

    Args:
        file: The file; None keeps them only in memory.
    """

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self.verdicts: dict[str, Verdict] = {}
        self.found: dict[str, Found] = {}
        if file is not None and file.exists():
            for line in file.read_text("utf-8").splitlines():
                self._read(line)

    def _read(self, line: str) -> None:
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:  # the last line of a run that was stopped
            return
        if "verdict" in entry:
            self.verdicts[entry["hash"]] = Verdict.from_json(entry["verdict"])
        else:
            self.found[entry["hash"]] = found_from_json(entry["found"])

    def keep_verdict(self, hashed: str, verdict: Verdict) -> None:
        """Store a verdict."""
        self.verdicts[hashed] = verdict
        self._append({"hash": hashed, "verdict": verdict.to_json()})

    def keep_found(self, hashed: str, found: Found) -> None:
        """Store the result of discovery."""
        self.found[hashed] = found
        self._append({"hash": hashed, "found": found_to_json(found)})

    def _append(self, entry: Mapping[str, Any]) -> None:
        if self._file is not None:
            with self._file.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(entry) + "\n")


def found_to_json(found: Found) -> dict[str, Any]:
    """Return a JSON value that `found_from_json` reads."""
    return {
        str(size): [
            [list(map(repr, side)) for side in (entry.inputs, entry.outputs)]
            for entry in signatures
        ]
        for size, signatures in found.items()
    }


def found_from_json(value: Mapping[str, Any]) -> Found:
    """Read the result of `found_to_json`."""

    def side(texts: Sequence[str]) -> tuple[Sbp, ...]:
        return tuple(map(parse_sbp, texts))

    return {
        int(size): [
            Signature1d(inputs=side(inputs), outputs=side(outputs), origin="discovered")
            for inputs, outputs in entries
        ]
        for size, entries in value.items()
    }

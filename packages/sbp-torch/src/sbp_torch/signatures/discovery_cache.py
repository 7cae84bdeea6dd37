"""`Discovery`: the ways to shard an operator call that `discovery` found, and their cache file."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

from sbp_core.sbp import parse_sbp
from sbp_core.signatures import OpCall, Requirement, Signature1d, call_key
from sbp_torch.result_file import ResultFile

#: The version of the format; increase it if the format or the search of discovery changes.
FORMAT = 1

#: The origin of a discovered signature.
ORIGIN = "discovered"


@dataclass(frozen=True, slots=True, kw_only=True)
class Discovery:
    """The legal signatures of a call along one mesh axis, as found by execution.

    Args:
        signatures: The legal signatures, each with the strongest outputs. Empty for an operator
            that draws random numbers.
        tried: Number of candidates that were run.
        crashed: Number of candidates that crashed their process or ran out of time.
        complete: Whether every candidate was tried, instead of a part within the budget.
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
        """Read the result of `to_json`.

        Raises:
            KeyError: an entry is missing.
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


def discovery_file(
    folder: Path, call: OpCall, *, schema: str, torch: str, axis_size: int, budget: int
) -> ResultFile[Discovery]:
    """Return the file for the discovery of a call, whose outputs need not be known.

    The kernel's own code is not part of the key.

    Args:
        folder: The folder of all discoveries.
        call: The call: op, literals, shapes, dtypes.
        schema: Schema of the operator.
        torch: The version of PyTorch.
        axis_size: Size of the mesh axis.
        budget: The greatest number of candidates to try.
    """
    text = call_key(replace(call, outputs=()))
    op = "".join(letter if letter.isalnum() else "_" for letter in text.split(": ")[-1])
    key = f"format {FORMAT}, torch {torch}, axis {axis_size}, {schema}: {text}"
    digest = hashlib.sha256(key.encode()).hexdigest()
    return ResultFile(
        path=folder / f"{op[:40]}-{digest[:32]}.json",
        key=key,
        budget=budget,
        what="discovered signatures",
        dump=Discovery.to_json,
        load=Discovery.from_json,
        is_whole=attrgetter("complete"),
    )

"""What was found out about an operator by execution, and where it is kept between runs.

This module holds values and files; `discover` finds.
"""

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

#: Raised whenever what a file means, or what discovery tries, changes.
FORMAT = 1

#: Where a discovered signature comes from.
ORIGIN = "discovered"


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


def discovery_file(
    folder: Path, call: OpCall, *, schema: str, torch: str, axis_size: int, budget: int
) -> ResultFile[Discovery]:
    """Return where what is found out about a call is kept; its outputs need not be known.

    The kernel's own code is not part of the key.

    Args:
        folder: Of all discoveries.
        call: The call: op, literals, shapes, dtypes.
        schema: Of the operator.
        torch: The version of PyTorch.
        axis_size: Of the mesh axis.
        budget: How many candidates may be tried.
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

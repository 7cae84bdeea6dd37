"""What was proved of a step, and where that is kept between runs.

A form is two graphs, so it is proved once for all meshes and planners that plan the same graph, and
for all processes and later runs of a user.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch

from sbp_core.graph import LogicalGraph, graph_hash
from sbp_core.units import format_seconds
from sbp_core.user_paths import cache_folder
from sbp_torch.result_file import ResultFile

#: Raised whenever what a file means, or what is compared, changes.
FORMAT = 2

_PACKAGES = ("sbp-core", "sbp-aten", "sbp-torch")


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """What was proved of a step.

    Args:
        operators: Of the planned step.
        alike: How many of them compute what operators of the captured step compute, as they are
            the same on the same values; part by part.
        parts: Different parts in which the others were run.
        num_not_run: Operators that would take too long, or do not run in float64 on the CPU.
        not_run: Where the first of them is.
        draws: Of whole steps: which rows were ignored in each.
        of: Whole steps of what, if not of all rows.
        but: What differs where the loss itself is no number.
        reason: Why nothing was proved; empty if something was.
        took_s: What it took, in seconds.
        is_known: Whether this form was proved earlier.
    """

    operators: int
    alike: int = 0
    parts: int = 0
    num_not_run: int = 0
    not_run: tuple[str, ...] = ()
    draws: tuple[str, ...] = ()
    of: str = ""
    but: str = ""
    reason: str = ""
    took_s: float = 0.0
    is_known: bool = False

    @property
    def is_whole(self) -> bool:
        """Whether all of the step was proved."""
        return not self.reason and not self.num_not_run

    def lines(self) -> list[str]:
        """Return what is reported."""
        when = "by an earlier run" if self.is_known else f"in {format_seconds(self.took_s)}"
        if self.reason:
            return [f"not proved that the planned step is the captured one: {self.reason}"]
        if self.draws:
            rows = ", ".join(self.draws)
            return [
                f"proved {when}: loss, metrics and new states are those of the captured step, "
                f"run{self.of} in float64 on random data (rows ignored: {rows})",
                *([f"  {self.but}"] if self.but else []),
            ]
        run = self.operators - self.alike - self.num_not_run
        lines = [
            f"proved {when}: of {self.operators} operators {self.alike} are those of the captured "
            f"step, {run} give the same in float64 on random data"
        ]
        if self.num_not_run:
            lines.append(
                f"  not proved of {self.num_not_run}, which take longer than compile.prove_s or do "
                f"not run: {', '.join(self.not_run)}"
            )
        return lines


def proof_file(
    before: LogicalGraph, after: LogicalGraph, budget_s: float, folder: Path | None
) -> ResultFile[Proof]:
    """Return where the proof of two graphs is kept.

    Args:
        before: The captured step.
        after: The planned one.
        budget_s: Of the proof: what was not proved for want of time is tried again with more.
        folder: Of all proofs; the user's own if None.
    """
    versions = [f"{name} {importlib.metadata.version(name)}" for name in _PACKAGES]
    texts = [f"format {FORMAT}", f"torch {torch.__version__}", *versions]
    key = ", ".join([*texts, f"{graph_hash(before)} as {graph_hash(after)}"])
    digest = hashlib.sha256(key.encode()).hexdigest()
    return ResultFile(
        path=(folder or cache_folder("proofs")) / f"{digest[:32]}.json",
        key=key,
        budget=budget_s,
        what="proofs",
        dump=asdict,
        load=_from_json,
        is_whole=attrgetter("is_whole"),
    )


def _from_json(value: Mapping[str, Any]) -> Proof:
    known = {one.name for one in fields(Proof)}
    found: dict[str, Any] = {
        key: tuple(part) if isinstance(part, list) else part
        for key, part in value.items()
        if key in known
    }
    return Proof(**found)

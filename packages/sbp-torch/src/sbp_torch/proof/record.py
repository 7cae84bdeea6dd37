"""What was proved of a step, and where that is kept between runs.

A form is two graphs, so it is proved once for all meshes and planners that plan the same graph, and
for all processes and later runs of a user.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import logging
import os
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch

from sbp_core.graph import LogicalGraph, graph_hash
from sbp_core.serialize import parse, read_text
from sbp_core.units import format_seconds
from sbp_core.user_paths import cache_folder

#: Raised whenever what a file means, or what is compared, changes.
FORMAT = 1

_PACKAGES = ("sbp-core", "sbp-aten", "sbp-torch")

_log = logging.getLogger(__name__)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class ProofEntry:
    """The place of one proof in a cache folder.

    Args:
        folder: Is made when something is stored.
        key: What was compared, by which versions.
        budget_s: Of the proof: what was not proved for want of time is tried again with more.
    """

    folder: Path
    key: str
    budget_s: float

    @classmethod
    def of(
        cls, before: LogicalGraph, after: LogicalGraph, budget_s: float, folder: Path | None
    ) -> ProofEntry:
        """Return the entry of two graphs in a folder; in the user's own if None."""
        versions = [f"{name} {importlib.metadata.version(name)}" for name in _PACKAGES]
        texts = [f"format {FORMAT}", f"torch {torch.__version__}", *versions]
        key = ", ".join([*texts, f"{graph_hash(before)} as {graph_hash(after)}"])
        return cls(folder=folder or cache_folder("proofs"), key=key, budget_s=budget_s)

    @property
    def path(self) -> Path:
        """The file."""
        return self.folder / f"{hashlib.sha256(self.key.encode()).hexdigest()[:32]}.json"

    def load(self) -> Proof | None:
        """Return what is stored; None if nothing usable is. Logs what cannot be used."""
        try:
            if not self.path.exists():
                return None
            value = parse(read_text(self.path))
            if value["key"] != self.key:
                return None
            found = _from_json(value["proof"])
            enough = found.is_whole or float(value["budget_s"]) >= self.budget_s
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            _log.warning("ignoring the proof in %s: %r", self.path, error)
            return None
        return found if enough else None

    def store(self, found: Proof) -> None:
        """Write a proof, at once or not at all. Logs if that is impossible."""
        value = {"key": self.key, "budget_s": self.budget_s, "proof": asdict(found)}
        temporary = ""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            handle, temporary = tempfile.mkstemp(dir=self.folder, suffix=".part")
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump(value, file, indent=1)
            Path(temporary).replace(self.path)
        except OSError as error:
            _log.warning("the proof is not kept in %s: %s", self.folder, error)
            if temporary:
                with suppress(OSError):
                    Path(temporary).unlink()


def _from_json(value: Mapping[str, Any]) -> Proof:
    known = {one.name for one in fields(Proof)}
    found: dict[str, Any] = {
        key: tuple(part) if isinstance(part, list) else part
        for key, part in value.items()
        if key in known
    }
    return Proof(**found)

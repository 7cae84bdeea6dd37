"""What a planner decides: the stage and signature of every op, the storage of every state.

A `Strategy` is a value, readable and editable as a file. It says nothing about how it was found
beyond `report`, and nothing about how it is run. Imports no torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from sbp_core.errors import SbpValueError
from sbp_core.placement import Placement
from sbp_core.sbp import NdSbp

FORMAT = 1


@dataclass(frozen=True, slots=True)
class Signature:
    """How one call is cut: the nd-SBP of its tensor arguments and of its outputs, in order.

    `inputs` has one entry for each tensor argument in argument order (list arguments flattened,
    repeated tensors repeated, host scalars left out); `outputs` one for each output value.
    """

    inputs: tuple[NdSbp, ...]
    outputs: tuple[NdSbp, ...]

    def __str__(self) -> str:
        left = " ".join(f"({sbp})" for sbp in self.inputs)
        right = " ".join(f"({sbp})" for sbp in self.outputs)
        return f"{left} -> {right}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """Where one op runs and how it is cut."""

    stage: int
    signature: Signature


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """Where a graph input (state or batch tensor) lives, and how it is cut there."""

    stage: int
    sbp: NdSbp


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """One decision for every op and every state of one graph.

    Args:
        planner: The planner that made it.
        graph_hash: Hash of the graph it was made for.
        stages: Placement of each stage.
        num_micro_batches: Micro-batches of one step.
        nodes: Stage and signature of every node that computes tensors.
        storage: Stage and SBP of every tensor input.
        in_flight: For each stage, how many micro-batches may be between its forward and its
            backward: `num_micro_batches` everywhere is GPipe, `num_stages - stage` is 1F1B.
        report: What the planner predicts and why it chose so; plain JSON values, SI base units.
        regather: Patterns (`*`, `?`) of the parameters that are boxed anew for the backward phase;
            the boxed copy of any other one lives from its forward use to its last backward use.
            `("*",)` is ZeRO-3 as it was published, `()` keeps all copies.
    """

    planner: str
    graph_hash: str
    stages: tuple[Placement, ...]
    num_micro_batches: int
    nodes: Mapping[str, Assignment]
    storage: Mapping[str, Storage]
    in_flight: tuple[int, ...]
    report: Mapping[str, Any] = field(default_factory=dict)
    regather: tuple[str, ...] = ("*",)

    def __post_init__(self) -> None:
        if len(self.in_flight) != len(self.stages) or min(self.in_flight, default=1) < 1:
            raise SbpValueError(
                f"in_flight={self.in_flight} does not fit {len(self.stages)} stages",
                accepted="one quota >= 1 for each stage",
            )
        if self.num_micro_batches < 1:
            raise SbpValueError(
                f"num_micro_batches={self.num_micro_batches}", accepted="an integer >= 1"
            )

    def is_regathered(self, parameter: str) -> bool:
        """Whether a parameter is boxed anew for the backward phase."""
        return any(fnmatchcase(parameter, pattern) for pattern in self.regather)

    @property
    def ranks(self) -> tuple[int, ...]:
        """All ranks of all stages, sorted."""
        return tuple(sorted({rank for stage in self.stages for rank in stage.rank_list}))

    def to_json(self) -> dict[str, Any]:
        """Return a JSON value that `from_json` reads."""
        return {
            "format": FORMAT,
            "planner": self.planner,
            "graph_hash": self.graph_hash,
            "stages": [stage.to_json() for stage in self.stages],
            "num_micro_batches": self.num_micro_batches,
            "in_flight": list(self.in_flight),
            "regather": list(self.regather),
            "storage": {
                name: [entry.stage, str(entry.sbp)] for name, entry in self.storage.items()
            },
            "nodes": {
                name: [
                    entry.stage,
                    [str(sbp) for sbp in entry.signature.inputs],
                    [str(sbp) for sbp in entry.signature.outputs],
                ]
                for name, entry in self.nodes.items()
            },
            "report": dict(self.report),
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Strategy:
        """Read what `to_json` wrote.

        Raises:
            SbpValueError: the format is another one, or an SBP cannot be read.
        """
        if value.get("format") != FORMAT:
            raise SbpValueError(
                f"a strategy of format {value.get('format')!r}",
                accepted=f"format {FORMAT}",
                todo="plan again with this version",
            )

        def signature(inputs: list[str], outputs: list[str]) -> Signature:
            return Signature(tuple(map(NdSbp.parse, inputs)), tuple(map(NdSbp.parse, outputs)))

        return cls(
            planner=value["planner"],
            graph_hash=value["graph_hash"],
            stages=tuple(Placement.from_json(stage) for stage in value["stages"]),
            num_micro_batches=value["num_micro_batches"],
            in_flight=tuple(value["in_flight"]),
            regather=tuple(value.get("regather", ("*",))),
            storage={
                name: Storage(stage=stage, sbp=NdSbp.parse(sbp))
                for name, (stage, sbp) in value["storage"].items()
            },
            nodes={
                name: Assignment(stage=stage, signature=signature(inputs, outputs))
                for name, (stage, inputs, outputs) in value["nodes"].items()
            },
            report=value["report"],
        )

    def save(self, path: Path) -> None:
        """Write the strategy as JSON, one line an op, for people to read and edit."""
        value = self.to_json()
        lines = ["{"]
        for key, entry in value.items():
            if isinstance(entry, dict) and entry:
                inner = ",\n".join(f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in entry.items())
                lines.append(f"{json.dumps(key)}: {{\n{inner}\n}},")
            else:
                lines.append(f"{json.dumps(key)}: {json.dumps(entry)},")
        lines[-1] = lines[-1].rstrip(",")
        path.write_text("\n".join([*lines, "}"]) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Strategy:
        """Read a file that `save` wrote."""
        return cls.from_json(json.loads(path.read_text(encoding="utf-8")))

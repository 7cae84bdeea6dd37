"""The ways in which the matrix runs every model: a mesh, pins, micro-batches, passes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import yaml

from models.programs import Program
from sbp_core.infer import PinValue


@dataclass(frozen=True, kw_only=True)
class Layout:
    """One way to run a program.

    Args:
        mesh, axes: The mesh.
        preset: A preset of the planner `manual`, for its pins.
        micro_batches: Micro-batches of a step.
        tensor: Whether to also pin the program's pattern of tensor parallelism.
        recompute: Whether the program's blocks are recomputed in the backward phase.
    """

    mesh: tuple[int, ...]
    axes: tuple[str, ...]
    preset: str
    micro_batches: int = 1
    tensor: bool = False
    recompute: bool = False

    def fits(self, program: Program) -> str:
        """Return why a program cannot run in this layout; empty if it can."""
        if self.tensor and not program.has_tensor_pattern:
            return "no tensor-parallel pattern"
        return ""

    def pins(self, program: Program) -> dict[str, PinValue]:
        """Return the pins of the program's tensors."""
        found = dict(preset_pins(self.preset))
        if self.tensor:
            found |= tensor_pins(program, others=[axis for axis in self.axes if axis != "tensor"])
        return found


LAYOUTS = {
    "data": Layout(mesh=(4,), axes=("data",), preset="data_parallel"),
    "tensor": Layout(mesh=(2,), axes=("tensor",), preset="data_parallel", tensor=True),
    "zero1": Layout(mesh=(4,), axes=("data",), preset="zero1", micro_batches=2),
    "zero2": Layout(mesh=(4,), axes=("data",), preset="zero2", micro_batches=2),
    "zero3": Layout(mesh=(4,), axes=("data",), preset="zero"),
    "2-D": Layout(mesh=(2, 2), axes=("data", "tensor"), preset="data_parallel", tensor=True),
    "pipeline": Layout(mesh=(2,), axes=("pipe",), preset="pipeline", micro_batches=2),
    "recompute": Layout(mesh=(2,), axes=("data",), preset="data_parallel", recompute=True),
}


def preset_pins(name: str) -> Mapping[str, PinValue]:
    """Return the pins of a preset of the planner `manual`, from its file."""
    text = files("sbp_planner").joinpath(f"conf/planner/manual/{name}.yaml").read_text("utf-8")
    settings: dict[str, Any] = yaml.safe_load(text)
    pins: Mapping[str, PinValue] = settings["pins"]
    return pins


def tensor_pins(program: Program, others: list[str]) -> dict[str, PinValue]:
    """Return the pins of tensor parallelism, with the pins `others` on the other axes."""
    made, taken = ("S(1)", "S(0)") if program.transposed else ("S(0)", "S(1)")
    data = dict.fromkeys(others, "S(0)")
    whole = dict.fromkeys(others, "B")
    found: dict[str, PinValue] = {
        "batch": {**data, "tensor": "B"},
        "use:batch": {**data, "tensor": "free"},
        "activations": {**data, "tensor": "free"},
        "gradients": {**whole, "tensor": "free"},
        "updates": {**whole, "tensor": "free"},
    }
    for pattern in program.columns:
        found[pattern] = {"tensor": "S(-1)" if program.transposed else "S(0)"}
        found[f"use:{_weights(pattern)}"] = {"tensor": made}
    for pattern in program.rows:
        found[pattern] = {"tensor": taken}
        found[f"use:{pattern}"] = {"tensor": taken}
    return {**found, **{name: {"tensor": entry} for name, entry in program.others.items()}}


def _weights(pattern: str) -> str:
    return pattern.removesuffix("*") + "weight" if pattern.endswith(".*") else pattern

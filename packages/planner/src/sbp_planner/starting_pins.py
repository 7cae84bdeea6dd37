"""Make sets of pins (given splits of some tensors) as first candidates of the planner `auto`.

Inference completes each set, on any mesh and for any model.

                      batch           states                    other tensors
    data parallel     S(0) on data    free                      -
    ZeRO-1            S(0) on data    updates sharded           -
    ZeRO-3            S(0) on data    all sharded               -
    tensor parallel   B               columns and rows          values between these
    free              free or S(0)    free                      everything

On a mesh of several axes, the first is the data axis; some sets split the batch on all axes. Where
a set has no pins, inference finds the operators to split by columns or rows, and the classes,
tables or experts to split. Columns and rows from the graph are tried as well, because inference
minimises a sum of times, without overlap.

Source: Rajbhandari et al., "ZeRO", SC 2020, section 5 (stages 1 and 3); Shoeybi et al.,
"Megatron-LM", 2019, section 3.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from sbp_core.graph import LogicalGraph
from sbp_core.infer import PinValue
from sbp_core.placement import Placement
from sbp_planner.pattern_pins import pattern_pins

_DATA = ("batch", "use:batch", "activations")
_UPDATES = ("optimizer_states", "gradients", "updates")


@dataclass(frozen=True, slots=True, kw_only=True)
class StartingPins:
    """One set of pins.

    Args:
        pins: Pins of words, such as `batch`.
        patterns: Patterns to find in the graph: mesh axis -> names of patterns.
    """

    pins: Mapping[str, PinValue]
    patterns: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def of(self, graph: LogicalGraph, mesh: Placement) -> Mapping[str, PinValue]:
        """Return its pins for a step.

        Args:
            graph: The step.
            mesh: The mesh of one stage.

        Raises:
            ConfigError: the graph does not have the patterns.
        """
        return {**self.pins, **pattern_pins(graph, mesh, self.patterns).pins}


def starting_pins(mesh: Placement) -> Mapping[str, StartingPins]:
    """Return the sets by name.

    Args:
        mesh: The mesh of one stage.
    """
    found = {name: StartingPins(pins=pins) for name, pins in _without_patterns(mesh).items()}
    first, last = mesh.axes[0], mesh.axes[-1]
    tensor = {last: ["tensor"]}
    if len(mesh.axes) == 1:
        return found | {"tensor parallel": StartingPins(pins={"batch": "B"}, patterns=tensor)}
    split = {first: "S(0)"}
    pins = {**dict.fromkeys(_DATA, split), "batch": {**split, last: "B"}}
    return found | {f"tensor parallel over {last}": StartingPins(pins=pins, patterns=tensor)}


def _without_patterns(mesh: Placement) -> Mapping[str, Mapping[str, PinValue]]:
    if len(mesh.axes) == 1:
        return {
            "data parallel": dict.fromkeys(_DATA, "S(0)"),
            "ZeRO-1": dict.fromkeys((*_DATA, *_UPDATES), "S(0)") | {"parameters": "B"},
            "ZeRO-3": dict.fromkeys((*_DATA, *_UPDATES, "parameters"), "S(0)"),
            "free but for the batch": {"batch": "S(0)"},
            "free": {},
        }
    first = mesh.axes[0]
    split, whole = {first: "S(0)"}, {first: "B"}
    return {
        "data parallel over all axes": dict.fromkeys(_DATA, "S(0)"),
        f"data parallel over {first}": dict.fromkeys(_DATA, split),
        f"ZeRO-1 over {first}": dict.fromkeys((*_DATA, *_UPDATES), split) | {"parameters": whole},
        f"ZeRO-3 over {first}": dict.fromkeys((*_DATA, *_UPDATES, "parameters"), split),
        "ZeRO-3 over all axes": dict.fromkeys((*_DATA, *_UPDATES, "parameters"), "S(0)"),
        "free": {},
    }

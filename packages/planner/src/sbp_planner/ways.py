"""Ways to begin: sets of pins that inference completes, on any mesh and for any model.

                      batch           states                    what is left
    data parallel     S(0) on data    free                      -
    ZeRO-1            S(0) on data    updates sharded           -
    ZeRO-3            S(0) on data    all sharded               -
    free              free            free                      everything

On a mesh of several axes, the first is that of the data, and everything is free on the others:
there inference finds which operators are split by columns or rows, whose classes, tables or
experts.

Source: Rajbhandari et al., "ZeRO", SC 2020, section 5 (stages 1 and 3).
"""

from __future__ import annotations

from collections.abc import Mapping

from sbp_core.infer import PinValue
from sbp_core.placement import Placement

_DATA = ("batch", "use:batch", "activations")
_UPDATES = ("optimizer_states", "gradients", "updates")


def ways(mesh: Placement) -> Mapping[str, Mapping[str, PinValue]]:
    """Return sets of pins by name.

    Args:
        mesh: Of one stage.
    """
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
        "data parallel on all axes": dict.fromkeys(_DATA, "S(0)"),
        f"data parallel on {first}": dict.fromkeys(_DATA, split),
        f"ZeRO-1 on {first}": dict.fromkeys((*_DATA, *_UPDATES), split) | {"parameters": whole},
        f"ZeRO-3 on {first}": dict.fromkeys((*_DATA, *_UPDATES, "parameters"), split),
        "ZeRO-3 on all axes": dict.fromkeys((*_DATA, *_UPDATES, "parameters"), "S(0)"),
        "free": {},
    }

"""Other plans of a step, each with one pin more: what the tensors of a pattern might be instead.

A pin can be kept in two ways, and the faster plan counts:

* *nearby*: only the modules that the pinned tensors belong to, and what takes those, are decided
  anew (`sbp_core.infer.infer_nearby`); all else stays, whichever planner decided it;
* *anew*: the planner plans the whole step again, with the pin among the user's. A planner that
  only reads its plans heeds no pins, so nothing is planned anew then.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from sbp_core.errors import ConfigError, SbpError
from sbp_core.graph import LogicalGraph
from sbp_core.infer import PinValue, infer_nearby, resolve_pins
from sbp_core.placement import Placement
from sbp_core.sbp import NdSbp
from sbp_core.strategy import Strategy
from sbp_launch.explaining.figures import Figures, figures_of
from sbp_launch.planning.flow import Planned, compiled

#: Plans the whole step with some pins of the user.
Replan = Callable[[Mapping[str, PinValue]], Planned]

#: Alternatives of all mesh axes at once beyond which one axis at a time is changed.
_MOST_PRODUCTS = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensors:
    """What a pattern means in a graph.

    Args:
        stored: Inputs, of which it says how they are stored.
        used: Values and inputs, of which it says how they are used.
    """

    stored: tuple[str, ...]
    used: tuple[str, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """All of them."""
        return (*self.stored, *self.used)


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """A plan with one pin more, or why there is none.

    Args:
        value: What the pin says.
        planned: The plan; None if nothing fulfils the pin.
        figures: What it costs.
        modules: The modules that were decided anew; None: the whole step.
        refused: Why there is no plan.
    """

    value: PinValue
    planned: Planned | None = None
    figures: Figures | None = None
    modules: tuple[str, ...] | None = None
    refused: SbpError | None = None


def tensors_of(graph: LogicalGraph, pattern: str) -> Tensors:
    """Return what a pattern of pins means.

    Raises:
        ConfigError: nothing.
    """
    try:
        pins = resolve_pins(graph, ("any",), {pattern: "B"})
    except ConfigError as error:
        raise error.replaced(
            ConfigError,
            what=f"{pattern!r} matches no tensor and no module of {graph.name!r}",
            where="why",
        ) from error
    return Tensors(
        stored=tuple(name for name, _ in pins.storage), used=tuple(name for name, _ in pins.use)
    )


def present(graph: LogicalGraph, strategy: Strategy, tensors: Tensors) -> list[NdSbp]:
    """Return how tensors are stored or used, the most frequent way first."""
    found = Counter(strategy.storage[name].sbp for name in tensors.stored)
    for value in tensors.used:
        for user in graph.users[value]:
            if user.is_host:
                continue
            taken = strategy.nodes[user.name].signature.inputs
            names = graph.tensor_inputs(user)
            found.update(sbp for name, sbp in zip(names, taken, strict=True) if name == value)
    return [sbp for sbp, _ in found.most_common()]


def values_of(
    graph: LogicalGraph, stages: Sequence[Placement], tensors: Tensors, now: NdSbp | None
) -> list[str]:
    """Return the pins that are worth a look: every way to cut the tensors.

    Args:
        graph: The step.
        stages: Placement of each stage.
        tensors: Of the pattern.
        now: How they are cut. Where there are very many ways, those that differ on one axis only.
    """
    num_dims = min(len(graph.tensor(name).shape) for name in tensors.names)
    entries = ["B", *(f"S({dim})" for dim in range(num_dims)), *["P"] * (not tensors.stored)]
    by_axis = [entries if size > 1 else ["B"] for size in stages[0].mesh_shape]
    found = [", ".join(parts) for parts in product(*by_axis)]
    if len(found) <= _MOST_PRODUCTS or now is None:
        return found
    kept = [str(entry) for entry in now]
    return list(
        dict.fromkeys(
            ", ".join([*kept[:axis], entry, *kept[axis + 1 :]])
            for axis, possible in enumerate(by_axis)
            for entry in possible
        )
    )


def alternative(
    planned: Planned, pattern: str, value: PinValue, replan: Replan | None
) -> Alternative:
    """Return the faster of the plans that keep a pin.

    Args:
        planned: The plan as it is.
        pattern: Of the pin.
        value: Of the pin.
        replan: Plans the whole step; None if only what is nearby is to be decided anew.
    """
    made: list[tuple[Figures, Alternative]] = []
    refused: list[SbpError] = []

    def add(found: Planned, modules: tuple[str, ...] | None) -> None:
        figures = figures_of(found)
        one = Alternative(value=value, planned=found, figures=figures, modules=modules)
        made.append((figures, one))

    try:
        settings, graph = planned.settings, planned.graph
        near = infer_nearby(settings.request(graph), planned.strategy, {pattern: value})
        add(compiled(graph, near.strategy, settings), near.modules)
    except SbpError as error:
        refused.append(error)
    try:
        if replan is not None and holds(anew := replan({pattern: value}), pattern, value):
            add(anew, None)
    except SbpError as error:
        refused.append(error)
    if not made:
        return Alternative(value=value, refused=refused[0])
    # One that fits its memory before one that does not; of equals, what changes least.
    return min(made, key=lambda pair: (not pair[0].fits, pair[0].step_s))[1]


def holds(planned: Planned, pattern: str, value: PinValue) -> bool:
    """Return whether a plan keeps a pin."""
    graph, strategy = planned.graph, planned.strategy
    pins = resolve_pins(graph, strategy.stages[0].axes, {pattern: value})
    return all(
        strategy.storage[name].sbp[axis] == pin.entry for (name, axis), pin in pins.storage.items()
    ) and all(
        sbp[axis] == pin.entry
        for (used, axis), pin in pins.use.items()
        for sbp in present(graph, strategy, Tensors(stored=(), used=(used,)))
    )

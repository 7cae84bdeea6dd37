"""The planner `manual`: takes some splits (pins) from the config, infers the rest at least cost.

Pins are words (`batch`, `activations`, ...), patterns and dims of a layout that are found in the
graph, and names, in this order. Later pins override earlier ones, and the user's override all.

The inference is in `sbp_core.infer`, and the patterns are in `sbp_planner.patterns`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from sbp_core.errors import ConfigError, PlanError
from sbp_core.infer import PINS, PinValue, Pipelined, infer_strategy, is_pin_word
from sbp_core.planning import PlanContext, SearchedPlanner
from sbp_core.strategy import Strategy
from sbp_planner.configs import ManualConfig, check_axes, fit_any, layout_of
from sbp_planner.layout_pins import layout_pins
from sbp_planner.pattern_pins import pattern_pins
from sbp_planner.schedules import with_schedule


@dataclass(frozen=True, slots=True)
class ManualPlanner(SearchedPlanner):
    """Plans by pins."""

    config: ManualConfig

    def propose(self, context: PlanContext) -> Strategy:
        """Return the cheapest strategy that keeps the pins.

        Raises:
            ConfigError: a pin or a stage pattern is invalid; the pins cannot be satisfied; a
                pattern is not in the graph; the mesh lacks an axis of the preset; or its schedule
                is undefined for the mesh.
            PlanError: the stages are impossible.
        """
        config, request = self.config, context.request
        mesh, fits = request.mesh, config.fits
        check_axes(config.needed_axes, mesh.mesh_shape, mesh.axes)
        found = pattern_pins(request.graph, mesh, config.patterns)
        pins, told = _joined(found.pins, config.pins), [*found.explanation]
        if layout := layout_of(config.layout):
            named = layout_pins(request.graph, mesh, layout, config.names)
            pins = _joined(_merged(found.pins, named.pins), _merged(named.words, config.pins))
            told += named.explanation

        def propagate(stages: Pipelined) -> Strategy:
            return infer_strategy(
                request,
                planner="manual",
                pins=pins,
                stage_patterns=config.stage_patterns,
                stages=stages.stages,
                in_flight=stages.in_flight,
                orders=stages.orders,
                staleness=stages.staleness,
            )

        try:
            planned = with_schedule(request, config, propagate)
        except (ConfigError, PlanError) as error:
            if PINS not in error.where:
                raise
            preset = f"; this preset is for {fits}" if fits else ""
            raise error.replaced(
                ConfigError,
                what=f"planner.pins: {error.what}{preset}",
                where=[place for place in error.where if place != PINS],
                todo=f"choose a preset for any model: {fit_any()}" if fits else error.todo,
            ) from error
        told += planned.report.get("explanation", ())
        return replace(planned, report={**planned.report, "explanation": told}) if told else planned


def _joined(found: Mapping[str, PinValue], pins: Mapping[str, PinValue]) -> dict[str, PinValue]:
    """Return the pins of words, then the pins of found patterns, then the pins of names.

    Args:
        found: Pattern -> mesh axis -> SBP.
        pins: Pins of words and names, in the order in which they apply.
    """
    words = {name: pin for name, pin in pins.items() if is_pin_word(name)}
    names = {name: pin for name, pin in pins.items() if name not in words}
    return _merged({**words, **found}, names)


def _merged(first: Mapping[str, PinValue], then: Mapping[str, PinValue]) -> dict[str, PinValue]:
    """Return pins of which the second ones override the first ones, axis by axis."""
    joined = dict(first)
    for name, pin in then.items():
        # An earlier pin still holds on the mesh axes that the later one leaves open.
        before = joined.pop(name, None)
        both = isinstance(pin, Mapping) and isinstance(before, Mapping) and "*" not in pin
        joined[name] = {**before, **pin} if both else pin  # type: ignore[dict-item]  # see `both`
    return joined

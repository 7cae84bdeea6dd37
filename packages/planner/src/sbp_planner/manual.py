"""The planner `manual`: pins from the config, everything else inferred at least cost.

Holds no inference; that is `sbp_core.infer`.
"""

from __future__ import annotations

from dataclasses import dataclass

from sbp_core.errors import ConfigError, PlanError
from sbp_core.infer import PINS, Pipelined, infer_strategy
from sbp_core.plugins import PlanRequest
from sbp_core.strategy import Strategy
from sbp_planner.configs import ManualConfig, check_axes, fit_any
from sbp_planner.schedules import with_schedule


@dataclass(frozen=True, slots=True)
class ManualPlanner:
    """Plans by pins."""

    config: ManualConfig

    def plan(self, request: PlanRequest) -> Strategy:
        """Return the cheapest strategy that keeps the pins.

        Raises:
            ConfigError: a pin or a stage pattern cannot be meant, nothing fulfils the pins, the
                mesh lacks an axis that the preset needs, or its schedule is none for the mesh.
            PlanError: nothing fulfils the stages.
        """
        mesh, fits = request.mesh, self.config.fits
        check_axes(self.config.needed_axes, mesh.mesh_shape, mesh.axes)
        config = self.config

        def infer(stages: Pipelined) -> Strategy:
            return infer_strategy(
                request,
                planner="manual",
                pins=config.pins,
                stage_patterns=config.stage_patterns,
                stages=stages.stages,
                in_flight=stages.in_flight,
                orders=stages.orders,
                staleness=stages.staleness,
            )

        try:
            return with_schedule(request, config, infer)
        except (ConfigError, PlanError) as error:
            if PINS not in error.where:
                raise
            preset = f"; this preset is for {fits}" if fits else ""
            raise ConfigError(
                f"planner.pins: {error.what}{preset}",
                where=[place for place in error.where if place != PINS],
                accepted=error.accepted,
                todo=f"choose a preset for any model: {fit_any()}" if fits else error.todo,
            ) from error


def build(config: ManualConfig) -> ManualPlanner:
    """Make the planner."""
    return ManualPlanner(config)

"""Plan a run and print the plan without training, for `sbp-plan`."""

from __future__ import annotations

from time import perf_counter

from rich.console import Console

from sbp_core.errors import ConfigError
from sbp_core.plugins import PluginRegistry
from sbp_launch.console import make_console
from sbp_launch.explaining.cluster_lines import machine_lines
from sbp_launch.planning.flow import Planned
from sbp_launch.run.run import Run
from sbp_launch.settings.config import RunConfig
from sbp_launch.step.step_planner import StepPlanner
from sbp_launch.trainer.planned import planner_of, with_micro_batches
from sbp_launch.trainer.run_program import make_program
from sbp_launch.trainer.trainer import show_plan


class PlanningOnly:
    """Plans a run, and keeps planner and plan for reports, even if the plan was refused.

    Args:
        config: The config of the run.
        registry: The plugins.
        console: The console to print on; standard output if None.
    """

    def __init__(
        self, config: RunConfig, registry: PluginRegistry, console: Console | None = None
    ) -> None:
        self.run = Run(config=config, registry=registry, console=console or make_console())
        self.program = make_program(self.run)
        #: The latest planner of the step, and its plan, whether or not it fits.
        self.planner: StepPlanner | None = None
        self.planned: Planned | None = None
        #: Seconds of planning and compiling.
        self.planning_s = 0.0

    def plan(self) -> Planned:
        """Return a plan that fits the memory of its ranks.

        Raises:
            ConfigError: there is none; the last plan that did not fit is kept.
        """
        self.planned = None
        self.planner = planner_of(self.run, self.program)
        begun_s = perf_counter()
        try:
            self.planned = self.planner.plan()
        finally:
            self.planning_s = perf_counter() - begun_s
        self.planner.check_fits(self.planned)
        self.run = with_micro_batches(self.run, self.planned)
        return self.planned

    def show(self) -> None:
        """Print the plan.

        Raises:
            ConfigError: there is no plan.
        """
        if self.planned is None:
            raise ConfigError("nothing was planned", todo="call plan first")
        show_plan(self.run, self.planned, todo="raise trainer.plan_rows to see them")
        self.run.say(machine_lines(self.program.cluster))

"""A planner in one idea: split the batch over one mesh axis, keep every state whole."""

from dataclasses import dataclass

from sbp_core import Strategy, infer_strategy
from sbp_core.errors import unknown_name
from sbp_core.planning import PlanContext, SearchedPlanner
from sbp_example_plugin.plugin import PlannerConfig


@dataclass(frozen=True, slots=True)
class ExamplePlanner(SearchedPlanner):
    """Plan data parallelism on one mesh axis; other axes repeat the same work."""

    config: PlannerConfig

    def propose(self, context: PlanContext) -> Strategy:
        """Pin the batch and the states; sbp infers every other tensor from these.

        Raises:
            SbpLookupError: the mesh has no axis of the configured name.
        """
        request = context.request
        axes = request.mesh.axes
        axis = self.config.axis or axes[0]
        if axis not in axes:
            raise unknown_name("mesh axis", axis, axes, where="planner.axis")
        pins: dict[str, str | dict[str, str]] = {
            "batch": {axis: "S(0)", "*": "B"},
            "use:batch": {axis: "S(0)"},
            "activations": {axis: "S(0)"},
            "parameters": "B",
            "optimizer_states": "B",
        }
        return infer_strategy(request, planner="example", pins=pins)


def build(config: PlannerConfig) -> ExamplePlanner:
    """Make the planner."""
    return ExamplePlanner(config)

"""Which states the programs of a parallel step have, how they lie, and how new ones begin."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from sbp_core.compile import PhysicalPlan
from sbp_core.errors import ConfigError, PlanError
from sbp_core.graph import LogicalGraph
from sbp_core.runtime import state_slots, widened, with_states_of
from sbp_launch.parallelize.program import OneDeviceProgram, trainable, without_states
from sbp_launch.planning.flow import Planned, check_fits
from sbp_torch.capture import initial_states


class ProgramStates:
    """The states of some programs over one model."""

    def __init__(self) -> None:
        #: All of them, the first one first; and how they are planned.
        self.programs: list[OneDeviceProgram] = []
        self._planned: list[Planned] = []
        #: The states that a step has updated, or that were loaded.
        self.updated: set[str] = set()
        #: What states there are, to be compared between processes; empty while all are as planned.
        self.told = ""
        self._seen: LogicalGraph | None = None
        self._plan: PhysicalPlan | None = None
        #: A plan that also has the states of programs that are not started.
        self._all: PhysicalPlan | None = None

    @property
    def plan(self) -> PhysicalPlan:
        """Says where all states are: a plan of the first program, whose ranks hold them all."""
        assert self._plan is not None, "a program is planned"
        return self._plan

    @property
    def planned(self) -> Planned:
        """How the first program is planned."""
        return self._planned[0]

    @property
    def names(self) -> list[str]:
        """The names of all states that ranks hold: those of `state_dict`."""
        return names_of(self.plan)

    @property
    def stored(self) -> dict[str, str]:
        """How the states of all programs are stored: SBP by name, but for host numbers."""
        slots = state_slots(self._all or self.plan)
        return {name: str(slot.sbp) for name, slot in slots.items() if slot.sbp is not None}

    @property
    def groups(self) -> list[dict[str, Any]]:
        """The parameter groups of all optimizers, those of the first program first."""
        optimizers = {id(one.optimizer): one.optimizer for one in self.programs}
        return [group for one in optimizers.values() for group in one.param_groups]

    # What becomes of them.

    def add(self, program: OneDeviceProgram, planned: Planned) -> None:
        """Note a program.

        Raises:
            ConfigError: with its states, a rank would not fit its memory.
        """
        self.check_fits(planned)
        self.programs.append(program)
        self._planned.append(planned)
        if self._plan is None:
            self._plan = planned.plan

    def check_fits(self, planned: Planned) -> None:
        """See that each program fits its ranks' memory beside the states of all, with those of one.

        Args:
            planned: A program, or one of its forms.

        Raises:
            ConfigError: a rank would not fit its memory.
        """
        if self._all is None:  # the first one, which was compared by itself
            self._all = planned.plan
            return
        everything = widened(self._all, planned.plan)
        if {*names_of(everything)} != {*names_of(self._all)}:
            for one in (*self._planned, planned):
                beside = replace(one, plan=widened(one.plan, everything), known_memory=None)
                check_fits(beside, one.settings.cluster)
        self._all = everything

    def hold(self, plan: PhysicalPlan) -> None:
        """Note that ranks hold the states of a plan, too."""
        self._plan = widened(self.plan, plan)
        self._all = widened(self._all or self._plan, self._plan)
        self.told = ", ".join(sorted(self.names))

    def note_updated(self, graph: LogicalGraph) -> None:
        """Note that a step has updated states.

        Args:
            graph: Of the step.
        """
        if graph is not self._seen:  # or it is known
            tied = {entry.name: entry.stands_for for entry in graph.inputs if entry.stands_for}
            for name in graph.new_states:
                self.updated.update(tied.get(name, (name,)))
            self._seen = graph

    # What others need.

    def has(self, plan: PhysicalPlan) -> bool:
        """Whether ranks hold all states of a plan, as it keeps them."""
        here = self.plan.ties
        return state_slots(plan).keys() <= state_slots(self.plan).keys() and all(
            here.get(name) == tied for name, tied in plan.ties.items()
        )

    def counts_as(self, plan: PhysicalPlan) -> bool:
        """Whether a plan's host numbers stand for the states that they stand for here."""
        here = self.plan.ties
        single = {state for tied in here.values() for state in tied}
        return all(
            here.get(name) == tied or (name not in here and single.isdisjoint(tied))
            for name, tied in plan.ties.items()
        )

    def check_new(self, names: Collection[str]) -> None:
        """See that states which are to be added are of parameters that were not trained so far.

        Raises:
            PlanError: one is not: the optimizer would have had it from the beginning.
        """
        updated = {one.rpartition(".")[0]: one for one in sorted(self.updated)}
        for name in sorted(names):
            if (parameter := name.rpartition(".")[0]) in updated:
                raise PlanError(
                    f"it has the state {name!r}, and {parameter!r} was trained without it: there "
                    f"is {updated[parameter]!r} only",
                    accepted="new states of parameters that were not trained so far",
                )

    def check_optimizer(self, program: OneDeviceProgram) -> None:
        """See that another program has states of its own, or the optimizer of one that is here.

        Raises:
            ConfigError: two optimizers have states of one parameter.
        """
        for number, other in enumerate(self.programs, 1):
            both = _own_states(program) & _own_states(other)
            if both and other.optimizer is not program.optimizer:
                raise ConfigError(
                    f"two optimizers have a state {min(both)!r}",
                    where=f"the optimizer of another program, and that of program {number}",
                    accepted="optimizers over different parameters of the model, or the same "
                    "optimizer",
                    todo="give each its own parameters: Adam(model.critic.parameters()); or train "
                    "both losses by one optimizer: leave out optimizer=",
                )

    def plan_with(self, states: Mapping[str, Tensor]) -> PhysicalPlan:
        """Return the plan with further states, each like its parameter.

        Args:
            states: Whole tensors by name.
        """
        like = {
            name: (
                name.rpartition(".")[0],
                tuple(value.shape),
                str(value.dtype).removeprefix("torch."),
            )
            for name, value in states.items()
        }
        return with_states_of(self.plan, like)

    def fresh(self, names: Collection[str], given: Collection[str]) -> dict[str, Tensor]:
        """Return first values for states of parameters that were not trained at a save.

        Args:
            names: Of states that were not saved.
            given: Of those that were.
        """
        found: dict[str, Tensor] = {}
        for program in self.programs:
            parameters = dict(program.model.named_parameters())
            with trainable(parameters.values()):
                own = _own_states(program)
                untrained = [
                    name
                    for name in parameters
                    if not any(one.startswith(f"{name}.") for one in own & set(given))
                ]
                if len(untrained) == len(parameters):
                    continue  # nothing of its optimizer was saved
                with without_states(program, untrained):
                    first = initial_states(program.model, program.optimizer, program.update)
            found |= {
                name: first[name]
                for name in names
                if name in own and name.rpartition(".")[0] in untrained
            }
        return found

    def frozen(self, names: Collection[str]) -> set[str]:
        """Return those names of states that are of parameters which are frozen now."""
        frozen = {
            name
            for program in self.programs
            for name, one in program.model.named_parameters()
            if not one.requires_grad
        }
        return {name for name in names if name.rpartition(".")[0] in frozen}


def names_of(plan: PhysicalPlan) -> list[str]:
    """Return the names of the states of a plan: those of `state_dict`."""
    return [state for name in state_slots(plan) for state in plan.ties.get(name, (name,))]


def _own_states(program: OneDeviceProgram) -> set[str]:
    """Return the names of the states that a program has beside those of the model."""
    everything = initial_states(program.model, program.optimizer, program.update, copy=False)
    return everything.keys() - initial_states(program.model, copy=False).keys()

"""What the programs of a parallel step share while they are trained: states, ranks, counts.

A step has one set of states, which live on its ranks. Its forms, and the programs that were put
beside it, run on them in turn; what one of them needs and the others have not is added to the set.

    parallelize(loss_d, optimizer_d)          parameters of both networks, moments of the one
    step.beside(loss_g, optimizer_g)          the moments of the other are added
    backbone.requires_grad_(True)             and those of parameters that begin to be trained
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import torch
import xxhash
from torch import Tensor, nn

from sbp_core.boxing import BoxingBackend, bounds_of
from sbp_core.compile import PhysicalPlan
from sbp_core.errors import ConfigError, PlanError, RunError, SbpError, words_of
from sbp_core.graph import LogicalGraph
from sbp_core.plugins import PluginRegistry
from sbp_core.runtime import Session, counted_apart, known_state, state_slots, widened
from sbp_launch.parallelize.agreement import THE_BATCH, Gather, compare, digest_of, manifest
from sbp_launch.parallelize.program import OneDeviceProgram, as_stepped, without_states
from sbp_launch.planning.flow import Planned, check_fits
from sbp_launch.team import Team
from sbp_torch.capture import copied_states, initial_states
from sbp_torch.capture.step import model_tensors
from sbp_torch.guards import ConnectedStates, connected_elsewhere

if TYPE_CHECKING:
    from sbp_launch.parallelize.saved import StepSaves

#: Of a tensor of a batch, so many bytes are compared between processes.
_HASHED_BYTES = 2**20


class Training:
    """The states that programs over one model train, on the ranks of one session.

    Args:
        model: Whose tensors are states.
        has_states: Whether it is trained from states that are given, not from its own.

    Raises:
        ConfigError: another parallel step, which is not over, trains the model.
        RunError: what an earlier one has trained is spread over other processes, or lost.
    """

    def __init__(self, model: nn.Module, *, has_states: bool) -> None:
        self._model = model
        if (before := connected_elsewhere(model)) is not None:
            before.let_go(has_states)
        #: All of them, the first one first.
        self.programs: list[OneDeviceProgram] = []
        self.backend: BoxingBackend | None = None
        #: Gathers texts of the ranks of other processes, between steps.
        self.gather: Gather | None = None
        #: Whether the states are gone, as those that were loaded in their place are damaged.
        self.has_damaged_states = False
        #: Steps before a `load`, and those that were taken since the start, of all programs.
        self.first_step = self.num_steps = 0
        self._session: Session | None = None
        self._plan: PhysicalPlan | None = None
        #: How the programs are planned, and a plan with the states of all of them.
        self._planned: list[Planned] = []
        self._all: PhysicalPlan | None = None
        #: Called when step counters come apart.
        self._forget_forms: list[Callable[[], None]] = []
        #: Of what the step saves.
        self.saves: StepSaves | None = None
        self._connected: ConnectedStates | None = None
        self._team: Team = Team()
        self._is_open = False
        #: States that a step has updated, or that were loaded.
        self._updated: set[str] = set()
        self._seen: LogicalGraph | None = None
        #: States that were loaded, and that no program has so far.
        self.not_yet_needed: dict[str, Tensor] = {}

    @property
    def team(self) -> Team:
        """All processes, once it has begun."""
        return self._team

    @property
    def has_begun(self) -> bool:
        """Whether there is a session."""
        return self._session is not None

    @property
    def steps_done(self) -> int:
        """Steps that all programs have taken."""
        return self.first_step + self.num_steps

    @property
    def started(self) -> Session:
        """The session that has the states, whatever became of them.

        Raises:
            RunError: it is not started.
        """
        if self._session is None:
            raise RunError(
                "this parallel step is not started",
                todo="use it in a `with` block: with parallelize(...) as step; or call start()",
            )
        return self._session

    @property
    def session(self) -> Session:
        """The session that has the states.

        Raises:
            RunError: it is not started, or has lost its states in `load`.
        """
        if self.has_damaged_states:
            raise RunError(
                "this parallel step has no states: those that it was to load are damaged",
                todo="load others: step.load(PATH), or step.load_state_dict(states)",
            )
        return self.started

    @property
    def plan(self) -> PhysicalPlan:
        """Says where all states are: a plan of the first program, whose ranks hold them all."""
        assert self._plan is not None, "it has begun"
        return self._plan

    @property
    def planned(self) -> Planned:
        """How the first program is planned."""
        return self._planned[0]

    # Life.

    def add(
        self, program: OneDeviceProgram, planned: Planned, forget_forms: Callable[[], None]
    ) -> None:
        """Note a program.

        Args:
            program: Over the model.
            planned: How it is trained.
            forget_forms: Called when step counters come apart.

        Raises:
            ConfigError: with its states, a rank would not fit its memory.
        """
        self.check_fits(planned)
        self.programs.append(program)
        self._planned.append(planned)
        self._forget_forms.append(forget_forms)
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

    def begin(self, session: Session, backend: BoxingBackend, gather: Gather | None) -> None:
        """Note the session of the first program."""
        self._session, self.backend, self.gather = session, backend, gather
        self._is_open = True
        self._team = Team.of(backend, [part.rank for part in self.plan.ranks])

    def connect(self) -> None:
        """Connect the model, and the optimizers of all programs, to the states."""
        read = partial(self._read, alone=self.backend is None or not self.backend.spans_processes)
        self._connected = ConnectedStates(self._model, read)
        for one in self.programs:
            self._connected.add(one.optimizer, one.update)
        self._connected.connect(self._let_go)
        self._connected.behind_step()  # states may be others: given, or those of rank 0

    def widen(self, plan: PhysicalPlan, program: OneDeviceProgram) -> None:
        """Have the states of a plan, too; nothing if they are there.

        Args:
            plan: Of a program, or of one of its forms.
            program: Gives new states their first values.

        Raises:
            RunError: they begin as copies of parameters that are spread over other processes.
        """
        have, need = state_slots(self.plan), state_slots(plan)
        if need.keys() <= have.keys() and all(
            self.plan.ties.get(name) == tied for name, tied in plan.ties.items()
        ):
            return
        known = set(self.names)
        self._check_new({*names_of(plan)} - known)
        copies = copied_states(program.model, program.optimizer, program.update)
        if self._connected is not None and copies.keys() - known:
            self._connected.read_model()
        with self.apart():
            own = program.own_states()
        if self.not_yet_needed:
            own = {**own, **self.not_yet_needed}
        self.started.widen(plan, own)
        self._plan = widened(self.plan, plan)
        for name in [one for one in self.not_yet_needed if one in state_slots(self._plan)]:
            del self.not_yet_needed[name]
        if self._connected is not None:
            self._connected.add(program.optimizer, program.update)

    def _check_new(self, names: Collection[str]) -> None:
        """See that states which are to be added are of parameters that were not trained so far.

        Raises:
            PlanError: one is not: the optimizer would have had it from the beginning.
        """
        updated = {one.rpartition(".")[0]: one for one in sorted(self._updated)}
        for name in sorted(names):
            if (parameter := name.rpartition(".")[0]) in updated:
                raise PlanError(
                    f"it has the state {name!r}, and {parameter!r} was trained without it: there "
                    f"is {updated[parameter]!r} only",
                    accepted="new states of parameters that were not trained so far",
                )

    @property
    def names(self) -> list[str]:
        """The names of all states: those of `state_dict`."""
        return names_of(self.plan)

    @property
    def groups(self) -> list[dict[str, Any]]:
        """The parameter groups of all optimizers, those of the first program first."""
        optimizers = {id(one.optimizer): one.optimizer for one in self.programs}
        return [group for one in optimizers.values() for group in one.param_groups]

    def _states_of(self, program: OneDeviceProgram) -> set[str]:
        """Return the names of the states that a program has beside those of the model."""
        own = initial_states(program.model, program.optimizer, program.update, copy=False)
        return own.keys() - model_tensors(program.model).keys()

    def check_optimizer(self, program: OneDeviceProgram) -> None:
        """See that another program has states of its own, or the optimizer of one that is here.

        Raises:
            ConfigError: two optimizers have states of one parameter.
        """
        for number, other in enumerate(self.programs):
            if other.optimizer is program.optimizer:
                continue
            with self.apart():
                both = self._states_of(program) & self._states_of(other)
            if both:
                raise ConfigError(
                    f"two optimizers have a state {min(both)!r}",
                    where=f"the optimizer of another program, and that of program {number + 1}",
                    accepted="optimizers over different parameters of the model, or the same "
                    "optimizer",
                    todo="give each its own parameters: Adam(model.critic.parameters()); or train "
                    "both losses by one optimizer: leave out optimizer=",
                )

    def compare_programs(self, planned: Planned, registry: PluginRegistry) -> None:
        """See that all processes put the same program beside the others; all of them call this.

        Raises:
            ConfigError: they do not; raised in all of them.
        """
        if self.gather is not None:
            compare(manifest(planned, registry, {}), self.gather)

    def fresh_states(self, names: Collection[str], given: Collection[str]) -> dict[str, Tensor]:
        """Return first values for states of parameters that were not trained at a save.

        Args:
            names: Of states that were not saved.
            given: Of those that were.
        """
        found: dict[str, Tensor] = {}
        for program in self.programs:
            own = self._states_of(program)
            parameters = dict(program.model.named_parameters())
            untrained = [
                name
                for name in parameters
                if not any(one.startswith(f"{name}.") for one in own & set(given))
            ]
            if len(untrained) == len(parameters):
                continue  # nothing of its optimizer was saved
            with self.apart(), without_states(program, untrained):
                first = initial_states(program.model, program.optimizer, program.update)
            found |= {
                name: first[name]
                for name in names
                if name in own and name.rpartition(".")[0] in untrained
            }
        return found

    def frozen_states(self, names: Collection[str]) -> set[str]:
        """Return those names of states that are of parameters which are frozen now."""
        frozen = {
            name
            for program in self.programs
            for name, one in program.model.named_parameters()
            if not one.requires_grad
        }
        return {name for name in names if name.rpartition(".")[0] in frozen}

    def counts_as(self, plan: PhysicalPlan) -> bool:
        """Whether a plan's host numbers stand for the states that they stand for here."""
        here = self.plan.ties
        single = {state for tied in here.values() for state in tied}
        return all(
            here.get(name) == tied or (name not in here and single.isdisjoint(tied))
            for name, tied in plan.ties.items()
        )

    def count_apart(self) -> None:
        """Give each parameter a step counter of its own: all programs forget their forms."""
        for forget in self._forget_forms:
            forget()
        apart = counted_apart(self.plan)
        self.started.widen(apart, {})
        self._plan = widened(self.plan, apart)

    def _let_go(self, has_states: bool) -> None:
        """Disconnect, as another step is to train the model.

        Args:
            has_states: Whether that has other states.

        Raises:
            ConfigError: this step is not over.
            RunError: the states are spread over other processes, or lost.
        """
        if self._is_open:
            raise ConfigError(
                "the model is trained by another parallel step, which is not over",
                accepted="one step at a time for each model, and programs beside it",
                todo="another loss, or another optimizer, over the same states is "
                "step.beside(loss, batch, optimizer); else end that step's `with` block first, or "
                "give this one a copy of the model: copy.deepcopy(model)",
            )
        connected = self._connected
        assert connected is not None, "it has begun"
        if not has_states:
            connected.read_all()
        connected.disconnect()

    def end(self) -> None:
        """Note that the step is over; its states can still be read."""
        self._is_open = False

    # Steps.

    def agree(
        self,
        problem: SbpError | None,
        form: str,
        scalars: Mapping[str, float],
        whole: Mapping[str, Tensor] | None,
        written: Mapping[str, Tensor],
    ) -> None:
        """See that all processes are about to take the same step; all of them call this.

        Args:
            problem: Why this process cannot take it.
            form: What program and form are called.
            scalars: Of the update.
            whole: The batch, if each process gives the whole one.
            written: What was taken over of model and optimizer.

        Raises:
            SbpError: `problem`.
            ConfigError: they are not; names what differs. Raised in all of them.
        """
        if self.gather is None:
            if problem is not None:
                raise problem
            return
        own = {name: repr(value) for name, value in scalars.items()}
        own["the step"] = form if problem is None else words_of(problem)
        if written:
            own["the values written to model and optimizer"] = digest_of(written)
        if whole is not None:
            own[THE_BATCH] = _quick_digest(whole)
        digest = int.from_bytes(blake2b(repr(own).encode(), digest_size=7).digest(), "big")
        highest, lowest = self._team.highest_of([digest, -digest])
        if highest != -lowest:
            try:
                compare(own, self.gather)
            except ConfigError as error:
                raise (problem or error) from None
        if problem is not None:
            raise problem

    def take_over(self, *, looks_again: bool) -> dict[str, Tensor]:
        """Take over what was written to model and optimizers; return it by the names of states.

        Args:
            looks_again: Whether other tensors may be in the places of the model's.
        """
        connected, session = self._connected, self._session
        assert connected is not None and session is not None, "it has begun"
        if looks_again:
            connected.look_again()
        written = connected.written()
        if written:
            session.replace(written)
            connected.taken_over()
        return written

    def behind_step(self, graph: LogicalGraph) -> None:
        """Note that a step has changed the states.

        Args:
            graph: Of the step.
        """
        self.num_steps += 1
        if graph is not self._seen:  # or it is known
            tied = {entry.name: entry.stands_for for entry in graph.inputs if entry.stands_for}
            for name in graph.new_states:
                self._updated.update(tied.get(name, (name,)))
            self._seen = graph
        if self._connected is not None:
            self._connected.behind_step()

    def replaced(self) -> None:
        """Note that the states were replaced, and with them what was written before."""
        self._updated.update(self.names)
        if self._connected is not None:
            self._connected.look_again()
            self._connected.taken_over()
            self._connected.behind_step()

    @contextmanager
    def capturing(self, program: OneDeviceProgram) -> Iterator[None]:
        """Let a program be captured: with ordinary tensors, and an optimizer that has stepped."""
        with self.apart(), as_stepped(program, self._updated):
            yield

    def apart(self) -> AbstractContextManager[None]:
        """Let the model's tensors be ordinary ones meanwhile."""
        return nullcontext() if self._connected is None else self._connected.apart()

    def copied_to(
        self,
        states: Mapping[str, Tensor],
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
    ) -> bool:
        """Give model and optimizer of a program the states; whether they are those.

        Args:
            states: All of them, whole.
            model: What states are copied to.
            optimizer: Likewise.
        """
        connected = self._connected
        if connected is None or model is not self._model:
            return False
        connected.take_values(states)
        if any(optimizer is one.optimizer for one in self.programs):
            assert optimizer is not None, "programs have optimizers"
            connected.take_optimizer(states, optimizer)
            return True
        return optimizer is None

    def _read(self, names: Sequence[str], *, alone: bool) -> dict[str, Tensor]:
        """Return whole states, without sending anything.

        Raises:
            RunError: ranks of other processes hold parts of one.
        """
        session, plan = self.started, self.plan
        if alone:
            gathered = ((name, session.gather(name)) for name in names)
            return {name: value for name, value in gathered if value is not None}
        (rank,), slots = session.local_ranks, state_slots(plan)
        found: dict[str, Tensor] = {}
        for name in names:
            slot = slots[known_state(plan, name)]
            if slot.sbp is None:
                found[name] = torch.tensor(session.shard(name, rank))
                continue
            held = bounds_of(slot.shape, plan.stages[slot.stage], slot.sbp).get(rank)
            if held != tuple((0, size) for size in slot.shape):
                raise RunError(
                    f"{name!r} of the model is asked for, and ranks of other processes hold parts "
                    "of it",
                    accepted="calls that all processes make: step.copy_to(model, optimizer), "
                    "behind which both read as what was trained; step.state_dict()",
                    todo="call step.copy_to(model, optimizer) in all processes first; to train "
                    "from other values, pass states=... to parallelize",
                )
            value = session.shard(name, rank)
            assert isinstance(value, Tensor), "no host number"
            found[name] = value
        return found


def names_of(plan: PhysicalPlan) -> list[str]:
    """Return the names of the states of a plan: those of `state_dict`."""
    return [state for name in state_slots(plan) for state in plan.ties.get(name, (name,))]


def _quick_digest(batch: Mapping[str, Any]) -> str:
    """Return a hash of a batch on the host: of large tensors, of evenly spread elements."""
    found = xxhash.xxh3_64()
    for name, value in batch.items():
        found.update(f"{name} {tuple(value.shape)} {value.dtype}".encode())
        if value.device.type != "cpu":
            continue
        flat = value.detach().reshape(-1)
        if flat.nbytes > _HASHED_BYTES:
            flat = flat[:: -(-flat.nbytes // _HASHED_BYTES)]
        flat = flat.contiguous()
        found.update(flat.as_strided(flat.shape, (1,)).view(torch.uint8).numpy().data)
    return found.hexdigest()

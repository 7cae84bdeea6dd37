"""`Training`: the states of a parallel step on its ranks, shared by its programs (loss, optimizer).

A step has one set of states, which live on its ranks. Its forms, and further programs, run on them
in turn. A state that only one of them needs is added to the set.

    parallelize(loss_d, optimizer_d)     parameters of both networks, moments of optimizer_d
    step.add_step(loss_g, optimizer_g)   adds the moments of optimizer_g
    backbone.requires_grad_(True)        adds the moments of the unfrozen parameters
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from hashlib import blake2b
from types import MappingProxyType

import torch
from torch import Tensor, nn

from sbp_core.boxing import BoxingBackend
from sbp_core.compile import PhysicalPlan
from sbp_core.errors import BoxingError, ConfigError, RunError, SbpError, words_of
from sbp_core.graph import LogicalGraph
from sbp_core.interrupts import HeldInterrupts
from sbp_core.plugins import PluginRegistry
from sbp_core.runtime import Session, check_not_forked, counted_apart
from sbp_launch.planning.flow import Planned
from sbp_launch.planning.one_at_a_time import one_at_a_time
from sbp_launch.step.agreement import (
    THE_BATCH,
    THE_CALL,
    compare,
    digest_of,
    manifest,
    quick_digest,
)
from sbp_launch.step.interrupts import until_all_agree, until_done
from sbp_launch.step.optimizer_calls import OptimizerCalls
from sbp_launch.step.program import OneDeviceProgram, as_stepped
from sbp_launch.step.states import ProgramStates, held_whole, names_of
from sbp_launch.team import Team
from sbp_torch.graph_capture import copied_states
from sbp_torch.guards import ConnectedStates, connected_elsewhere


class Training:
    """The states that programs over one model train, on the ranks of one session.

    Args:
        model: The model, whose tensors are states.
        has_states: Whether training starts from given states instead of the values of the model.
        holds_interrupts: Whether Ctrl-C waits until a step is complete.

    Raises:
        ConfigError: another parallel step, which is not over, trains the model.
        RunError: the states of an earlier step are spread over other processes, or lost.
    """

    def __init__(
        self, model: nn.Module, *, has_states: bool, holds_interrupts: bool = True
    ) -> None:
        self._model, self._holds_interrupts = model, holds_interrupts
        if (before := connected_elsewhere(model)) is not None:
            before.let_go(has_states)
        #: The states, and the programs that have them.
        self.states = ProgramStates()
        self.backend: BoxingBackend | None = None
        #: Whether the states are lost, because a damaged checkpoint was loaded in their place.
        self.has_damaged_states = False
        #: Steps before a `load`, and steps of all programs since the start.
        self.first_step = self.num_steps = 0
        self._session: Session | None = None
        #: Values for states of programs that are not started yet.
        self.given: dict[str, Tensor] = {}
        #: Called when parameters get separate step counters.
        self._forget_forms: list[Callable[[], None]] = []
        #: Whether a step whose loss or gradients are infinite or NaN is undone, and raises.
        self.only_finite = False
        #: Called after each step, in all processes.
        self.after_step: list[Callable[[], None]] = []
        #: Watches for calls that the loop makes on the optimizers.
        self.optimizer_calls = OptimizerCalls()
        self._connected: ConnectedStates | None = None
        #: All processes, after the session was started.
        self.team = Team()
        self._is_open = False
        #: If ranks are processes, holds Ctrl-C until all of them raise it.
        self.interrupts = HeldInterrupts()
        self._process = os.getpid()

    @property
    def has_begun(self) -> bool:
        """Whether there is a session."""
        return self._session is not None

    @property
    def steps_done(self) -> int:
        """Number of steps that all programs together have taken, including those before a load."""
        return self.first_step + self.num_steps

    @property
    def started(self) -> Session:
        """The session that has the states, even if they are damaged or the step is over.

        Raises:
            RunError: it is not started.
        """
        if self._session is None:
            raise RunError(
                "this parallel step is not started",
                todo="use it in a `with` block: with parallelize(...) as step; or call start()",
            )
        return self._session

    def check_open(self) -> None:
        """Check that the step is not over, and that this process has its ranks.

        Raises:
            RunError: it is over; or this process was forked from the one that has the ranks.
        """
        if self._is_open:
            check_not_forked(self._process)
        if self._session is not None and not self._is_open:
            raise RunError(
                "this parallel step is over, and the session is closed",
                accepted="steps and evaluations inside of its `with` block",
                todo="call parallelize again: model and optimizer are what was trained",
            )

    @property
    def session(self) -> Session:
        """The session that has the states.

        Raises:
            RunError: it is not started, or has lost its states in `load`; or this process was
                forked from the one that has the ranks.
        """
        if self._is_open:
            check_not_forked(self._process)
        if self.has_damaged_states:
            raise RunError(
                "this parallel step has no states: the states that it began to load are damaged",
                todo="load other states: step.load(PATH), or step.load_state_dict(states)",
            )
        return self.started

    def until_done(self) -> AbstractContextManager[object]:
        """Return a context manager that holds the first interrupt until its block ends."""
        return until_done() if self._holds_interrupts else nullcontext()

    # Life cycle.

    def add(
        self, program: OneDeviceProgram, planned: Planned, forget_forms: Callable[[], None]
    ) -> None:
        """Register a program.

        Args:
            program: A program over the model.
            planned: Its plan.
            forget_forms: Called when parameters get separate step counters.

        Raises:
            ConfigError: with its states, a rank would not fit its memory.
        """
        self.states.add(program, planned)
        self._forget_forms.append(forget_forms)

    def drop(self, program: OneDeviceProgram) -> None:
        """Forget the last program, which could not be started."""
        self.states.drop(program)
        self._forget_forms.pop()

    def begin(self, session: Session, backend: BoxingBackend, team: Team) -> None:
        """Register the session of the first program."""
        self._session, self.backend, self.team = session, backend, team
        self._process = os.getpid()  # not earlier: a forked process may start a step planned before
        self._is_open = self.optimizer_calls.is_open = True
        if not team.is_alone and self._holds_interrupts:
            self.interrupts = until_all_agree(tells=0 in session.local_ranks)
            self.interrupts.__enter__()

    def connect(self) -> None:
        """Connect the model, and the optimizers of all programs, to the states."""
        read = partial(self._read, alone=self.backend is None or not self.backend.spans_processes)
        self._connected = ConnectedStates(self._model, read)
        self._know_states()
        self._connected.connect(self._let_go)
        self._connected.note_step()  # the states may differ from the model: given, or of rank 0

    def _know_states(self) -> None:
        """Let model and optimizers read all states that there are."""
        if self._connected is not None:
            names = set(self.states.names)
            for one in self.states.programs:
                self._connected.add(one.optimizer, one.update, names)

    def widen(self, plan: PhysicalPlan, program: OneDeviceProgram) -> None:
        """Add the states of a plan, unless they are there.

        Args:
            plan: The plan of a program, or of one of its forms.
            program: Gives new states their initial values, if none were given.

        Raises:
            PlanError: a state is new, and its parameter was trained without it.
            RunError: a new state is a copy of a parameter that is spread over other processes.
        """
        if self.states.has(plan):
            return
        new = {*names_of(plan)} - {*self.states.names}
        self.states.check_new(new)
        with self.disconnected():
            copies = copied_states(program.model, program.optimizer, program.update).keys() & new
        if copies - self.given.keys():
            self._read_model(min(copies))
        if self.states.moves(plan):  # to host numbers, which the earlier plans do not have
            self._forget()
        with self.disconnected():
            states = program.own_states()
            own = {name: states[name] for name in sorted(new) if name in states}
        self._widen(plan, {**own, **self.given})
        self._know_states()

    def _read_model(self, name: str) -> None:
        """Update the model, because a new state starts as a copy of one of its tensors."""
        assert self._connected is not None, "it is connected"
        if any(one.is_meta for one in self._model.parameters()):
            raise RunError(
                f"{name!r} begins as a copy of its parameter, which the model has no value of",
                accepted="such states of the first program, or of models with values",
                todo="give update= to parallelize, not to step.add_step",
            )
        self._connected.read_model()

    def compare_programs(self, planned: Planned, registry: PluginRegistry) -> None:
        """Check that all processes add the same program; all of them call this.

        Raises:
            ConfigError: they do not; raised in all of them.
        """
        self.enter("step.add_step(...)")
        if not self.team.is_alone:
            compare(manifest(planned, registry, {}), self.team.gather)

    def count_apart(self) -> None:
        """Give each parameter a step counter of its own: all programs forget their forms."""
        self._forget()
        self._widen(counted_apart(self.states.plan), {})

    def _forget(self) -> None:
        """Let all programs forget their forms, which are planned again when they are needed."""
        for forget in self._forget_forms:
            forget()
        self.states.forget_forms()

    def keep(self, states: Mapping[str, Tensor]) -> None:
        """Add states of frozen parameters, so that they are saved, and used after unfreezing.

        Args:
            states: Whole tensors by name.
        """
        if states:
            self._widen(self.states.plan_with(states), states)
            self._know_states()

    def _widen(self, plan: PhysicalPlan, states: Mapping[str, Tensor]) -> None:
        self.started.widen(plan, states)
        self.states.hold(plan)

    def _let_go(self, has_states: bool) -> None:
        """Disconnect the model, because another step will train it.

        Args:
            has_states: Whether the other step has its own states.

        Raises:
            ConfigError: this step is not over.
            RunError: the states are spread over other processes, or lost.
        """
        if self._is_open:
            raise ConfigError(
                "the model is trained by another parallel step, which is not over",
                accepted="one step at a time for each model, and more programs on the same states",
                todo="for another loss or optimizer over the same states, call "
                "step.add_step(loss, batch, optimizer); otherwise end that step's `with` block "
                "first, or give this one a copy of the model: copy.deepcopy(model)",
            )
        connected = self._connected
        assert connected is not None, "it has begun"
        if not has_states:
            connected.read_all()
        connected.disconnect()

    @property
    def is_forked(self) -> bool:
        """Whether this process was forked from the one that has the ranks."""
        return os.getpid() != self._process

    def end(self) -> None:
        """Register that the step is over; its states can still be read."""
        self._is_open = False
        self.optimizer_calls.end()

    # Steps.

    def enter(self, call: str, compared: Mapping[str, str] = MappingProxyType({})) -> None:
        """Check that all processes make the same call; all of them call this before they send.

        Args:
            call: The call that the user made, such as `step.evaluate(batch)`.
            compared: Further values that must be equal, by their names in messages.

        Raises:
            ConfigError: they do not; names both calls. Raised in all of them.
            BoxingError: another process has failed, or did not make a call.
            RunError: this process was forked from the one that has the ranks.
        """
        if self._is_open:
            check_not_forked(self._process)
        # A step that is over, or has failed, sends nothing any more, and raises its own error.
        if self.team.is_alone or self.backend is None or not self._is_open:
            return
        if self.backend.failure_reason():
            return
        try:
            self._compare({THE_CALL: call, **compared})
        except BoxingError as error:
            raise error.replaced(BoxingError, what=f"{call}: {error.what}") from error

    def _compare(self, own: Mapping[str, str]) -> None:
        """Check that the values are equal; if they are, this sends one vote of two numbers.

        Raises:
            ConfigError: they differ.
            KeyboardInterrupt: one of the processes holds an interrupt. Raised in all of them.
        """
        compared = {name: value.partition("\0")[0] for name, value in own.items()}
        digest = int.from_bytes(blake2b(repr(compared).encode(), digest_size=7).digest(), "big")
        highest, lowest = self._vote(digest, -digest)
        if highest != -lowest:
            compare(own, self.team.gather)

    def agree(
        self,
        call: str,
        problem: SbpError | None,
        form: str,
        scalars: Mapping[str, float],
        whole: Mapping[str, Tensor] | None,
        written: Mapping[str, Tensor],
    ) -> None:
        """Check that all processes are about to take the same step; all of them call this.

        Args:
            call: The call that the user made.
            problem: Why this process cannot take the step.
            form: A text that identifies the form; a NUL; and a description of the form.
            scalars: The scalars of the update.
            whole: The batch, if each process gives the whole one.
            written: Values that the loop has written to model and optimizer.

        Raises:
            SbpError: `problem`.
            ConfigError: they are not; names the difference. Raised in all of them.
            KeyboardInterrupt: one of them holds an interrupt. Raised in all of them.
        """
        if self.team.is_alone:
            if problem is not None:
                raise problem
            return
        own = {THE_CALL: call, **{name: repr(value) for name, value in scalars.items()}}
        own["the step"] = form if problem is None else words_of(problem)
        own["the states"] = self.states.told
        if written:
            own["the values written to model and optimizer"] = digest_of(written)
        if whole is not None:
            own[THE_BATCH] = quick_digest(whole)
        try:
            self._compare(own)
        except ConfigError as error:
            raise (problem or error) from None
        if problem is not None:
            raise problem

    def _vote(self, *values: int) -> list[int]:
        """Return the maxima of the values over all processes, unless one holds an interrupt."""
        interrupted = int(self.interrupts.error is not None)
        *found, interrupted = self.team.highest_of([*values, interrupted])
        if interrupted:
            self.interrupts.raise_held()
            raise KeyboardInterrupt
        return found

    def take_over(self, *, looks_again: bool) -> dict[str, Tensor]:
        """Copy values written to model and optimizers to the ranks; return them by state name.

        Args:
            looks_again: Whether tensors of the model may have been replaced by others.
        """
        connected, session = self._connected, self._session
        assert connected is not None and session is not None, "it has begun"
        if looks_again:
            connected.reconnect()
        written = connected.written_states()
        if written:
            with self.until_done():
                if self._counters_differ(written):
                    self.count_apart()
                session.replace(written)
                connected.taken_over()
        return written

    def _counters_differ(self, written: Mapping[str, Tensor]) -> bool:
        """Whether parameters that share a step counter no longer can, because some start anew."""
        rank = self.started.local_ranks[0]
        for counter, tied in self.states.plan.ties.items():
            found = {float(written[name]) for name in tied if name in written}
            if found and any(name not in written for name in tied):
                found.add(float(self.started.shard(counter, rank)))
            if len(found) > 1:
                return True
        return False

    def note_step(self, graph: LogicalGraph) -> None:
        """Register that a step has changed the states.

        Args:
            graph: The graph of the step.
        """
        self.num_steps += 1
        self.states.note_updated(graph)
        if self._connected is not None:
            self._connected.note_step()

    def note_replacement(self) -> None:
        """Register that all states were replaced, including values written to the model before."""
        self.states.updated.update(self.states.names)
        if self._connected is not None:
            self._connected.reconnect()
            self._connected.taken_over()
            self._connected.note_step()

    @contextmanager
    def capturing(self, program: OneDeviceProgram) -> Iterator[None]:
        """Return a context to capture a program: with ordinary tensors and placeholder momenta."""
        with one_at_a_time(), self.disconnected(), as_stepped(program, self.states.updated):
            yield

    def disconnected(self) -> AbstractContextManager[None]:
        """Return a context in which the model's tensors are ordinary ones."""
        return nullcontext() if self._connected is None else self._connected.disconnected()

    def copied_to(
        self,
        states: Mapping[str, Tensor],
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
    ) -> bool:
        """Copy the states to model and optimizer if they are those of the step; return whether.

        Args:
            states: All states, as whole tensors.
            model: The model to which states are copied.
            optimizer: The optimizer to which states are copied, if any.
        """
        connected = self._connected
        if connected is None or model is not self._model:
            return False
        connected.take_values(states)
        if any(optimizer is one.optimizer for one in self.states.programs):
            assert optimizer is not None, "programs have optimizers"
            connected.take_optimizer(states, optimizer)
            return True
        return optimizer is None

    def _read(self, names: Sequence[str], *, alone: bool) -> dict[str, Tensor]:
        """Return whole states, without sending anything.

        Raises:
            RunError: ranks of other processes hold parts of a state.
        """
        session, plan = self.started, self.states.plan
        if alone:
            gathered = ((name, session.gather(name)) for name in names)
            return {name: value for name, value in gathered if value is not None}
        return held_whole(session, plan, names)

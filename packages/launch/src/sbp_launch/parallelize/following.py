"""What a loop changes between steps: followed, or refused by name; and the same on all ranks.

weights, buffers, states of the optimizer that are written    taken over
what the program read, changed, and it is the same step       followed: it is captured again
... and it is another step over the same states               another form, see `forms`
... and it has other states, or cannot be captured            refused, with the user's line
learning rates, written weights, batches that ranks differ in refused on all ranks
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from hashlib import blake2b

import torch
import xxhash
from torch import Tensor, nn

from sbp_core.boxing import BoxingBackend, bounds_of
from sbp_core.compile import PhysicalPlan
from sbp_core.errors import ConfigError, RunError, SbpError, words_of
from sbp_core.graph import LogicalGraph, graph_hash
from sbp_core.runtime import Session, known_state, state_slots
from sbp_launch.parallelize.agreement import THE_BATCH, Gather, compare, digest_of
from sbp_launch.parallelize.program import OneDeviceProgram
from sbp_launch.team import Team
from sbp_torch.capture import NumberPlace
from sbp_torch.guards import (
    Changed,
    ConnectedStates,
    Guard,
    connected_elsewhere,
    modules_in_eval_mode,
)

#: Of a tensor of a batch, so many bytes are compared between processes.
_HASHED_BYTES = 2**20


class Following:
    """Follows what becomes of the program of a step behind its capture.

    Args:
        program: Not yet captured.
        has_states: Whether it is trained from states that are given, not from its own.

    Raises:
        ConfigError: another parallel step, which is not over, trains the model.
        RunError: what an earlier one has trained is spread over other processes, or lost.
    """

    def __init__(self, program: OneDeviceProgram, *, has_states: bool) -> None:
        self._program = program
        if (before := connected_elsewhere(program.model)) is not None:
            before.let_go(has_states)
        self._guard = Guard(program.model, program.loss, program.optimizer, program.update)
        self._evaluated: Guard | None = None
        self._connected: ConnectedStates | None = None
        self._session: Session | None = None
        self._team: Team = Team()
        self._gather: Gather | None = None
        self._is_open = self._has_changed = False
        asleep = () if program.model.training else modules_in_eval_mode(program.model)
        if asleep:
            warnings.warn(
                f"the model is in eval mode, and is trained in that, as in a loop of your own: "
                f"{asleep[0]!r} does what it does in evaluation; call model.train() before "
                "parallelize if that is not meant",
                stacklevel=4,
            )

    # From capture to the first step.

    def captured(self, graph: LogicalGraph, again: Callable[[], LogicalGraph]) -> None:
        """Note that the step was captured.

        What its capture has changed is set back. That it changes something once, such as a cache
        that is filled, is harmless: the next capture changes nothing more, and makes the same step.

        Args:
            graph: The captured step.
            again: Captures it.

        Raises:
            ConfigError: each capture changes what the program reads.
        """
        changes = self._guard.changes()
        if not changes:
            return
        program = self._program
        behind = Guard(program.model, program.loss, program.optimizer, program.update)
        try:
            is_once = graph_hash(again()) == graph_hash(graph) and not behind.changes()
        except SbpError:  # such as of tensors of the first capture
            is_once = False
        self._guard.restore()
        if not is_once:
            raise ConfigError(
                f"the loss changes what it reads: {changes[0].what}",
                where=changes[0].where,
                accepted="a loss that reads its batch, and changes nothing but buffers of the "
                "model",
                todo="return what is to be kept as a metric; or let it be a buffer of the model, "
                "which self.register_buffer(...) makes and copy_ changes",
            )

    def begin(
        self, session: Session, backend: BoxingBackend, plan: PhysicalPlan, gather: Gather | None
    ) -> None:
        """Connect model and optimizer to the states of a started session."""
        program = self._program
        self._session, self._gather, self._is_open = session, gather, True
        self._team = Team.of(backend, [part.rank for part in plan.ranks])
        read = partial(_read_here, session, plan, alone=not backend.spans_processes)
        self._connected = ConnectedStates(program.model, program.optimizer, program.update, read)
        self._connected.connect(self._let_go)
        self._connected.behind_step()  # states may be others: given, or those of rank 0

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
                accepted="one step at a time for each model",
                todo="end that step's `with` block first, or give this one a copy of the model: "
                "copy.deepcopy(model)",
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

    def changes(self) -> list[Changed]:
        """Return what the program read and is not as it was when a form was last found for it."""
        found = self._guard.changes()
        self._has_changed |= bool(found)
        return found

    def accept(self, numbers: Collection[NumberPlace]) -> None:
        """Note that there is a form for the program as it is.

        Args:
            numbers: Floats that may be others, as the form has inputs for them.
        """
        self._guard.renew(numbers)

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
            form: What its form is called.
            scalars: Of the update.
            whole: The batch, if each process gives the whole one.
            written: What was taken over of model and optimizer.

        Raises:
            SbpError: `problem`.
            ConfigError: they are not; names what differs. Raised in all of them.
        """
        if self._gather is None:
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
                compare(own, self._gather)
            except ConfigError as error:
                raise (problem or error) from None
        if problem is not None:
            raise problem

    def has_other_forward(self) -> bool:
        """Whether the program may evaluate otherwise than when this was asked last.

        Raises:
            RunError: its modules or parameters are others.
        """
        if self._evaluated is None:
            program = self._program
            self._evaluated = Guard(program.model, program.loss, program.optimizer)
            # What has changed since capture counts, too.
            changes = self._guard.changes(training=False)
        else:
            changes = self._evaluated.changes(training=False)
        if any(one.is_structure for one in changes):
            raise refusal([one for one in changes if one.is_structure])
        if changes:
            self._evaluated.renew()
        return bool(changes)

    def take_over(self, *, is_checked: bool = False) -> dict[str, Tensor]:
        """Take over what was written to model and optimizer; return it by the names of states.

        Args:
            is_checked: Whether `changes` was just called.
        """
        connected, session = self._connected, self._session
        assert connected is not None and session is not None, "it has begun"
        if self._has_changed or (not is_checked and not self._guard.holds()):
            connected.look_again()
            self._has_changed = False
        written = connected.written()
        if written:
            session.replace(written)
            connected.taken_over()
        return written

    def behind_step(self) -> None:
        """Note that the states have changed."""
        if self._connected is not None:
            self._connected.behind_step()

    def replaced(self) -> None:
        """Note that the states were replaced, and with them what was written before."""
        if self._connected is not None:
            self._connected.look_again()
            self._connected.taken_over()
            self._connected.behind_step()

    def apart(self) -> AbstractContextManager[None]:
        """Let the model's tensors be ordinary ones meanwhile."""
        return nullcontext() if self._connected is None else self._connected.apart()

    def copied_to(
        self,
        states: Mapping[str, Tensor],
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
    ) -> bool:
        """Give model and optimizer of the program the states; whether they are those.

        Args:
            states: All of them, whole.
            model: What states are copied to.
            optimizer: Likewise.
        """
        connected = self._connected
        if connected is None or model is not self._program.model:
            return False
        connected.take_values(states)
        if optimizer is self._program.optimizer:
            connected.take_optimizer(states)
            return True
        return optimizer is None


def refusal(changes: Sequence[Changed], problem: str = "") -> RunError:
    """Return the error for a program that has changed and cannot be followed.

    Args:
        changes: What has.
        problem: Why there is no form for it.
    """
    first, more = changes[0], len(changes) - 1
    also = f" (and {more} more: {'; '.join(one.what for one in changes[1:4])})" if more else ""
    return RunError(
        f"{first.what}: it is another step now{also}",
        where=(first.where, problem) if problem else first.where,
        accepted="changes that need no other states, of what the step reads; weights, buffers, "
        "states of the optimizer, learning rates",
        todo=first.todo,
    )


def _read_here(
    session: Session, plan: PhysicalPlan, names: Sequence[str], *, alone: bool
) -> dict[str, Tensor]:
    """Return whole states, without sending anything.

    Raises:
        RunError: ranks of other processes hold parts of one.
    """
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
                f"{name!r} of the model is asked for, and ranks of other processes hold parts of "
                "it",
                accepted="calls that all processes make: step.copy_to(model, optimizer), behind "
                "which both read as what was trained; step.state_dict()",
                todo="call step.copy_to(model, optimizer) in all processes first; to train from "
                "other values, pass states=... to parallelize",
            )
        value = session.shard(name, rank)
        assert isinstance(value, Tensor), "no host number"
        found[name] = value
    return found


def _quick_digest(batch: Mapping[str, Tensor]) -> str:
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

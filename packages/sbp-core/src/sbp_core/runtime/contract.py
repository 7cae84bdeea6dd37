"""The contract of runtimes: start a plan on states, run steps, hand states back.

A runtime owns the ranks of one process. Batches come in whole, as the one-device program would see
them, and each rank takes its own part; or as the part of the process' ranks. States are handed over
as whole logical tensors, of which each process cuts what its ranks hold, and handed back as those,
as the pieces that ranks own or, for those who compare, as each rank's shard.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

from sbp_core.errors import RunError

if TYPE_CHECKING:
    from sbp_core.boxing.backend import BoxingBackend
    from sbp_core.compile.physical import PhysicalPlan
    from sbp_core.runtime.ownership import Number, StatePiece, StateSlice
    from sbp_core.runtime.trace import Trace
    from sbp_core.tensor import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What one step gave: losses and metrics by name, in every process and equal on every rank."""

    outputs: Mapping[str, Tensor]

    @property
    def loss(self) -> Tensor:
        """The loss: a 0-d tensor."""
        return self.outputs["loss"]


class NotFiniteStepError(RunError):
    """A step that was undone as `loss` or `grad_norm` is infinite or no number.

    The session goes on.

    `outputs` are its losses and metrics by name, as in `StepResult`, as far as they were known.
    """

    outputs: Mapping[str, Tensor] = MappingProxyType({})


#: What a process passes to a step: the whole batch, or the part of its ranks.
BatchIs = Literal["global", "local"]

#: Returns, for a rank, a context manager around that rank's work of a step, such as a profiler.
Watch = Callable[[int], AbstractContextManager[object]]


def check_not_forked(pid: int) -> None:
    """Refuse a call in a child that was forked: it has none of the threads that ranks are.

    Args:
        pid: Of the process that has the ranks.

    Raises:
        RunError: this process is another one.
    """
    if os.getpid() != pid:
        raise RunError(
            f"the ranks of this session are in process {pid}, and process {os.getpid()} was forked "
            "from it",
            accepted="steps, evaluations and changes of states in the process that started them",
            todo="call it there; what the child needs can be given to it before, such as "
            "step.state_dict()",
        )


def unwatched(rank: int) -> AbstractContextManager[object]:
    """Return a context that does nothing."""
    return nullcontext()


class Snapshot(ABC):
    """The local ranks' parts of the states at the time of the call of `Session.snapshot`.

    Any thread may read it, also when the session has gone on, has failed or is closed. Use it as a
    context manager: `release` hands its memory to the next snapshot.

    Args:
        steps_done: The steps that the session had done.
    """

    steps_done: int

    @abstractmethod
    def slices(self) -> Sequence[StateSlice]:
        """Return what `pieces` yields, in its order, without the values; waits for nothing.

        Those of larger elements come first, so that all are aligned where they lie without gaps.
        """

    @abstractmethod
    def pieces(self) -> Iterator[StatePiece]:
        """Yield what `Session.pieces` would have yielded, in the order in which it is overwritten.

        Waits for each piece until it is copied. Values that were copied are in the memory of the
        host; the others, which nothing overwrites, where they are. They hold until `release`.

        Of a snapshot with a limit, each holds until the next is asked for, and they are read once:
        what has been read makes room for other copies. What was not copied for want of room is read
        where it is, and its update waits.

        Raises:
            RunError: a value could not be copied, such as for lack of memory: the session goes on,
                and this snapshot is of no use; or it was released, or has a limit and was read.
        """

    @abstractmethod
    def release(self) -> None:
        """Let go of all values; what is not yet copied no longer is. Safe to call twice."""

    def __enter__(self) -> Snapshot:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class Session(ABC):
    """A started plan. Use it as a context manager.

    Who wants to observe the work of ranks, such as `memory.meter`, sets `watch` between steps; who
    wants to know when they did what, sets `trace`, if `Runtime.traces`.
    """

    watch: Watch = staticmethod(unwatched)
    trace: Trace | None = None

    #: Whether a step whose loss is infinite or no number is undone, where the runtime can do that:
    #: where no state is overwritten before all ranks know the loss. So is one whose `grad_norm` is,
    #: if that is known by then. Equal in all processes.
    only_finite: bool = False

    #: The ranks that run in this process, and the steps that have been done.
    local_ranks: tuple[int, ...]
    steps_done: int

    @abstractmethod
    def step(
        self,
        batch: Mapping[str, Tensor],
        scalars: Mapping[str, Number],
        *,
        batch_is: BatchIs = "global",
    ) -> StepResult:
        """Run one step.

        Args:
            batch: Batch tensors by name, with dim 0 micro-batches times the captured size; or the
                part of each that the local ranks hold.
            scalars: Every scalar input by name, such as `lr`; `seed` and `step` (from 0), if the
                program draws random numbers. Others are left aside.
            batch_is: `global`, the whole batch; or `local`, in dim 0 what the local ranks hold of
                it: `sbp_core.runtime.batch_parts` says which samples. Of tensors that they hold
                nothing of, anything or nothing.

        Raises:
            SbpTypeError: the batch is no mapping, an entry is no tensor, a scalar no number.
            SbpValueError: a batch tensor or scalar is missing, or of another shape or dtype; or
                the batch has an entry that is no input and not None.
            NotFiniteStepError: with `only_finite`, `loss` or `grad_norm` is infinite or no number.
                States are those from before the step.
            RunError: a rank failed; names the rank and the actor, and says which states are left:
                those from before the step, or, if it had overwritten some, those of two steps,
                which no method hands out but `shard`. Or the session is closed.
        """

    def status(self) -> Sequence[str]:
        """Say in lines what each local rank is at, such as what it waits for.

        For people who wonder why a run does not go on: called from any thread, in the middle of a
        step that hangs, too, and returns at once. A runtime that knows no more says this.
        """
        ranks = ", ".join(map(str, self.local_ranks))
        return [f"ranks {ranks}: {self.steps_done} steps are done"]

    @abstractmethod
    def shard(self, name: str, rank: int) -> Tensor | Number:
        """Return one rank's part of a state (not a copy).

        Raises:
            SbpLookupError: there is no such state, or the rank has no part of it in this process.
        """

    @abstractmethod
    def pieces(self, *, among: Collection[int] | None = None) -> Iterator[StatePiece]:
        """Yield what the local ranks own of the states: over all ranks, each element once.

        Nothing is sent and nothing is copied, so this works after a failed step, too.

        Args:
            among: The ranks that are left, if others are lost: what is owned is dealt out among
                them. See `lost_states`.

        Raises:
            RunError: a step failed when it had overwritten some states.
        """

    @abstractmethod
    def snapshot(self, *, limit_bytes: int | None = None) -> Snapshot:
        """Return what `pieces` yields, to be read while later steps run; they do not change it.

        Returns at once. What the next update overwrites is copied aside by one thread, which the
        first snapshot starts, while that step computes, in the order in which its update needs it.
        The update of a state waits for the copies of that state only, and makes those that nobody
        has begun. What no update overwrites is not copied. A runtime may copy all of it at once,
        as the reference runtime does: then a limit means nothing to it.

        Called between steps; nothing is sent. Processes that save together call it between the same
        two steps.

        - A snapshot before another is copied or released: each has copies of its own.
        - A step that fails or is undone: a snapshot from before it stays whole, even where states
          are left of two steps; one from after it is as `pieces`.
        - `load_state_dict`: snapshots from before it keep what was replaced.
        - `close`: waits until all copies are made; snapshots can still be read.
        - Of a session that shares the states of another: steps of that one wait for the copies.

        A snapshot holds at most a copy of what the local ranks own and updates overwrite; so does
        the session from the first release of one on, which the next snapshot uses, until `close`.
        With a limit, a snapshot and what the session keeps are at most that large together. Then
        somebody has to read it while steps go on: an update that finds no room waits for the
        reader, and says so if that takes a second; if it takes too long for the other ranks, it
        goes beyond the limit, and says so.

        Args:
            limit_bytes: Most bytes of copies at a time, >= 0; None for all.

        Raises:
            RunError: as of `pieces`.
        """

    @abstractmethod
    def gather(self, name: str, *, to: int | None = None) -> Tensor | None:
        """Return a state as a whole logical tensor, a copy; None where it does not go.

        Where ranks live in several processes, all of them call this, in one order, between the same
        steps. It is sent through boxing.

        Args:
            name: One of `state_dict`.
            to: The rank whose process gets the state; all of them if None.

        Raises:
            SbpLookupError: there is no such state or rank.
            RunError: the processes do not ask for the same; a rank did not come by the deadline;
                ranks of other processes can no longer be asked, as the session is closed or a step
                failed; or a step failed when it had overwritten some states.
        """

    @abstractmethod
    def state_dict(self, *, to: int | None = None) -> dict[str, Tensor]:
        """Return every state as a whole logical tensor, by the names of `initial_states`.

        They are gathered one at a time, as `gather` does. Where they do not go, there are none.

        Raises:
            SbpLookupError: there is no such rank.
            RunError: as of `gather`.
        """

    @abstractmethod
    def load_state_dict(self, states: Mapping[str, Tensor]) -> None:
        """Replace every state. Each process calls it, and cuts what its ranks hold.

        One state after the other is replaced, and the old one is let go of before the new one is
        read or cut: old and new ones are not held together, but for what a snapshot keeps.

        Args:
            states: Whole tensors by name, in a `dict`; or a mapping that makes each when it is
                asked for, of which a process asks for those that its ranks hold a part of, or one
                that reads parts of them, such as a file.

        Raises:
            SbpValueError: a state is missing, unknown, or of another shape or dtype. The states are
                as they were, unless the mapping only makes them when they are asked for.
            Exception: what the mapping raises, such as for a damaged file. If some states were
                replaced by then, there are none: steps, and all that hands states out, raise a
                `RunError` that says so, until others are loaded.
        """

    def replace(self, states: Mapping[str, Tensor]) -> None:
        """Replace some states; the others stay. Each process calls it with the same ones.

        Args:
            states: Whole tensors, by names of `state_dict`.

        Raises:
            SbpValueError: one is unknown, or of another shape or dtype. The states are as they
                were.
            RunError: as of `gather`, in a runtime that replaces all or none.
        """
        self.load_state_dict({**self.state_dict(), **states})

    def widen(self, plan: PhysicalPlan, states: Mapping[str, Tensor]) -> None:
        """Hold the states of another plan, too. Each process calls it with the same plan.

        What is here stays where it is. Another session for that plan can then be started on the
        states of this one. Where a host number stood for several states, and there is one for each
        in that plan, this session takes no more steps of its own.

        Args:
            plan: Of the same ranks; stores the states of this session as they are stored here.
            states: Whole tensors, by the names of what only that plan has.

        Raises:
            SbpValueError: one is missing, or of another shape or dtype. The states are as they
                were.
            RunError: the runtime cannot; see `Runtime.has_forms`.
        """
        raise RunError(
            f"a session of type {type(self).__name__} holds the states of one plan only",
            accepted="sessions of a runtime that has forms, such as 'actor'",
        )

    @abstractmethod
    def close(self) -> None:
        """Stop threads and leave the backend. Safe to call twice; states can still be read."""

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Runtime(ABC):
    """Kind `runtime`: `build(config)` returns one.

    `traces` says whether its sessions note what they do in `Session.trace`, and `traces_operators`
    whether they note each operator if the trace asks for it; `has_forms` whether `start` takes
    `keeps`; `uses_backend` whether ranks exchange data through the backend that `start` is given.
    """

    traces: bool = False
    traces_operators: bool = False
    has_forms: bool = False
    uses_backend: bool = True

    @abstractmethod
    def start(
        self,
        plan: PhysicalPlan,
        states: Mapping[str, Tensor] | Session,
        backend: BoxingBackend | None = None,
        ranks: Sequence[int] | None = None,
        *,
        keeps: bool = False,
    ) -> Session:
        """Start a plan on initial states; the backend is opened here and closed by the session.

        Args:
            plan: Checked (see `sbp_core.check`).
            states: Whole tensors by the names of `initial_states`. Or a session that runs in this
                process: its states are shared, as they are when a step begins, and new values that
                steps of the new session make of them are dropped, unless it `keeps` them; so an
                evaluation runs on what is being trained. The two take their steps in turn.
            backend: Not yet open. None uses that of the session whose states are shared, which
                closes it; what fails in one of them ends both.
            ranks: Ranks to run in this process; all that the backend has here, if None.
            keeps: Whether the session whose states are shared goes on with new values that steps
                of the new one make: another form of the same training step. Asked for with a
                session as `states` only.

        Raises:
            SbpValueError: a state is missing, or not as the plan says; a shared one is stored
                otherwise in its session, or the plan overwrites it.
        """

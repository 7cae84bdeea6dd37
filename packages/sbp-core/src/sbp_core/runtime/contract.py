"""The interface of runtimes: the abstract classes `Runtime`, `Session` and `Snapshot`.

A runtime owns the ranks of one process. It takes whole batches, as the one-device program would,
and each rank uses its own part; or only the part of the process' ranks. It takes states as whole
logical tensors, of which each process keeps the shards of its ranks. It returns states as whole
tensors, as the pieces that ranks own or, for tests that compare, as each rank's shard.
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
    """Losses and metrics of one step by name, in every process and equal on every rank."""

    outputs: Mapping[str, Tensor]

    @property
    def loss(self) -> Tensor:
        """The loss: a 0-d tensor."""
        return self.outputs["loss"]


class NotFiniteStepError(RunError):
    """A step that was undone because `loss` or `grad_norm` is infinite or NaN.

    The session can run further steps.

    `outputs` are its losses and metrics by name, as in `StepResult`, as far as they were known.
    """

    outputs: Mapping[str, Tensor] = MappingProxyType({})


#: The batch that a process passes to a step: the whole one, or the part of its ranks.
BatchIs = Literal["global", "local"]

#: Returns, for a rank, a context manager around that rank's work of a step, such as a profiler.
Watch = Callable[[int], AbstractContextManager[object]]


def check_not_forked(pid: int) -> None:
    """Refuse a call in a forked child process: it lacks the threads that execute the ranks.

    Args:
        pid: The id of the process that has the ranks.

    Raises:
        RunError: the current process has another id.
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

    Any thread may read it, even when the session has run further steps, has failed or is closed.
    Use it as a context manager: `release` gives its memory to the next snapshot.

    Args:
        steps_done: The number of steps that the session had done.
    """

    steps_done: int

    @abstractmethod
    def slices(self) -> Sequence[StateSlice]:
        """Return the slices of `pieces` in the same order, without values and without waiting.

        Slices with larger elements come first, so that all are aligned when stored without gaps.
        """

    @abstractmethod
    def pieces(self) -> Iterator[StatePiece]:
        """Yield the pieces that `Session.pieces` would have yielded, in the order of their updates.

        Waits until each piece is copied. Copied values are in host memory; values that no update
        overwrites are not copied and stay where they are. All are valid until `release`.

        If the snapshot has a limit, each piece is valid until the next one is requested, and the
        pieces can be read once: reading a piece frees its room for other copies. A piece that found
        no room is read in place, and its update waits.

        Raises:
            RunError: a value could not be copied, such as for lack of memory: the session
                continues, but this snapshot is useless; or it was released, or has a limit and was
                read.
        """

    @abstractmethod
    def release(self) -> None:
        """Free all values; no further values are copied. Safe to call twice."""

    def __enter__(self) -> Snapshot:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class Session(ABC):
    """A started plan. Use it as a context manager.

    To observe the work of ranks, for example with `memory.meter`, set `watch` between steps; to
    record when ranks did what, set `trace`, if `Runtime.traces`.
    """

    watch: Watch = staticmethod(unwatched)
    trace: Trace | None = None

    #: Whether to undo a step with an infinite or NaN loss, if the runtime can do that: if no state
    #: is overwritten before all ranks know the loss. The same holds for `grad_norm`, if it is known
    #: by then. Equal in all processes.
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
                program draws random numbers. Further names are ignored.
            batch_is: `global`, the whole batch; or `local`, the samples (dim 0) that the local
                ranks hold, see `sbp_core.runtime.batch_parts`. Tensors that the local ranks hold
                nothing of may be anything, or missing.

        Raises:
            SbpTypeError: the batch is not a mapping, an entry no tensor, or a scalar no number.
            SbpValueError: a batch tensor or scalar is missing, or of another shape or dtype; or the
                batch has an entry that is not an input and not None.
            NotFiniteStepError: with `only_finite`, `loss` or `grad_norm` is infinite or NaN; no
                state has changed.
            RunError: a rank failed; names the rank, the actor, and the condition of the states:
                either unchanged, or a mixture of two steps, if the step had overwritten some. Only
                `shard` returns such a mixture. Or the session is closed.
        """

    def status(self) -> Sequence[str]:
        """Describe in lines what each local rank is doing, such as what it waits for.

        For people who wonder why a run makes no progress: any thread may call it, even while a step
        hangs, and it returns at once. A runtime that lacks this knowledge says so.
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
        """Yield the pieces of states that the local ranks own: over all ranks, each element once.

        Nothing is sent and nothing is copied, so this works after a failed step, too.

        Args:
            among: The ranks that remain, if some ranks are lost: ownership is distributed among the
                remaining ones. See `lost_states`.

        Raises:
            RunError: a step failed when it had overwritten some states.
        """

    @abstractmethod
    def snapshot(self, *, limit_bytes: int | None = None) -> Snapshot:
        """Return the content of `pieces`, to be read while later steps run; they do not change it.

        Returns at once. While the next step computes, one thread, which the first snapshot starts,
        copies the values that its update overwrites, in the order of the update. The update of a
        state waits for the copies of that state only, and makes the copies that the thread has not
        begun. Values that no update overwrites are not copied. A runtime may also copy everything
        at once, as the reference runtime does: then it ignores the limit.

        Call it between steps; nothing is sent. All processes that save call it after the same step.

        - A snapshot while another one is not yet copied or released: each has copies of its own.
        - A step that fails or is undone: a snapshot from before it stays valid, even if the states
          are a mixture of two steps; a snapshot after it behaves like `pieces`.
        - `load_state_dict`: snapshots from before it keep the replaced values.
        - `close`: waits until all copies are made; snapshots can still be read.
        - If a session shares the states of another one, steps of the other one wait for the copies.

        A snapshot holds at most a copy of everything that the local ranks own and updates
        overwrite. After the first release, the session keeps as much memory for the next snapshot,
        until `close`. With a limit, a snapshot and the memory that the session keeps are at most
        that large together. Then the snapshot must be read while steps run: an update that finds no
        room waits for the reader, and logs this after one second; if the other ranks would wait too
        long, it exceeds the limit, and logs this.

        Args:
            limit_bytes: Most bytes of copies at a time, >= 0; None for all.

        Raises:
            RunError: for the reasons of `pieces`.
        """

    @abstractmethod
    def gather(self, name: str, *, to: int | None = None) -> Tensor | None:
        """Return a state as a whole logical tensor, a copy; None in processes that do not get it.

        If the ranks are in several processes, all processes call this, in the same order, between
        the same steps. The state is sent through boxing (resharding).

        Args:
            name: One of `state_dict`.
            to: The rank whose process gets the state; all processes if None.

        Raises:
            SbpLookupError: there is no such state or rank.
            RunError: the processes' requests differ; a rank did not arrive by the deadline; ranks
                of other processes are unreachable, because the session is closed or a step failed;
                or a step failed when it had overwritten some states.
        """

    @abstractmethod
    def state_dict(self, *, to: int | None = None) -> dict[str, Tensor]:
        """Return every state as a whole logical tensor, by the names of `initial_states`.

        They are gathered one at a time by `gather`. Processes that receive no states return none.

        Raises:
            SbpLookupError: there is no such rank.
            RunError: for the reasons of `gather`.
        """

    @abstractmethod
    def load_state_dict(self, states: Mapping[str, Tensor]) -> None:
        """Replace every state. Each process calls it, and keeps the shards of its ranks.

        The states are replaced one by one, and the old value is freed before the new one is read or
        cut. So old and new states are never in memory together, except for copies of a snapshot.

        Args:
            states: Whole tensors by name, in a `dict`; or a mapping that makes each tensor on
                access, of which a process reads only the states that its ranks hold a part of; or a
                mapping that reads parts of tensors, such as a file.

        Raises:
            SbpValueError: a state is missing, unknown, or of another shape or dtype. The states are
                unchanged, unless the mapping makes tensors on access.
            Exception: raised by the mapping, such as for a damaged file. If some states were
                replaced by then, the session has no states: steps, and all methods that return
                states, raise a `RunError` that explains this, until states are loaded again.
        """

    def replace(self, states: Mapping[str, Tensor]) -> None:
        """Replace some states and keep the rest. Each process calls it with the same states.

        Args:
            states: Whole tensors, by names of `state_dict`.

        Raises:
            SbpValueError: a state is unknown, or of another shape or dtype. The states are
                unchanged.
            RunError: for the reasons of `gather`, in a runtime that replaces all or none.
        """
        self.load_state_dict({**self.state_dict(), **states})

    def widen(self, plan: PhysicalPlan, states: Mapping[str, Tensor]) -> None:
        """Hold the states of another plan, too. Each process calls it with the same plan.

        Existing states do not move. Another session for that plan can then be started on the states
        of this session. If a host number represents several states here, but that plan has one
        number for each, this session can run no more steps of its own.

        Args:
            plan: A plan for the same ranks that stores the states of this session as here.
            states: Whole tensors, by the names of the states that only that plan has.

        Raises:
            SbpValueError: a state is missing, or of another shape or dtype. The states are
                unchanged.
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
    """Base class of plugins of kind `runtime`: `build(config)` returns one.

    `traces`: its sessions record their work in `Session.trace`. `traces_operators`: they also
    record each operator if the trace asks for it. `has_forms`: `start` accepts `keeps`.
    `uses_backend`: ranks exchange data through the backend that is passed to `start`.
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
            plan: A checked plan (see `sbp_core.check`).
            states: Whole tensors by the names of `initial_states`. Or a session of this process,
                whose states are shared: the new session reads the values that they have when a step
                begins, and drops the new values that its steps make, unless it `keeps` them. So an
                evaluation uses the states of a running training. The sessions take turns.
            backend: A backend that is not yet open. None uses the backend of the session whose
                states are shared, which closes it; a failure in one of the two sessions ends both.
            ranks: Ranks to run in this process; all that the backend has here, if None.
            keeps: Whether the shared states take the new values that steps of the new session make:
                for another form (captured version) of the step. Needs a session as `states`.

        Raises:
            SbpValueError: a state is missing, or does not match the plan; a shared state is stored
                differently in its session, or the plan overwrites it.
        """

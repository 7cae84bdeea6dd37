"""Interfaces of backends that send tensors between ranks (NCCL, gloo, MPI, threads).

Boxing is the conversion of a tensor between layouts. A backend opens one `Communicator` for each
rank in this process. Everything above it (routes, prices, order, buffers) is shared; a communicator
only executes one step for one rank. Neither side changes tensors in place, except a shard that was
donated: a communicator may hand several ranks the same tensor, and may keep its inputs until the
step is over on every rank.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from sbp_core.errors import BoxingError, SbpValueError

if TYPE_CHECKING:
    from sbp_core.boxing.step import BoxingStep
    from sbp_core.tensor import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchSpec:
    """One process to start, and its ranks.

    Args:
        command: Program and arguments.
        ranks: The rank of the process; several if their threads live in it, or if it is a launcher
            that starts their processes.
        environment: Variables that it gets, overriding the environment.
        defaults: Variables that it gets if the environment does not have them.
        forwards_signals: For a launcher: whether it passes SIGINT, SIGTERM and SIGHUP on to its
            ranks, and waits for them. Otherwise the signals are sent to the ranks directly.
        failure_patterns: Regular expressions of lines in which a launcher names a rank that failed,
            the most reliable first; their group `rank` is its number.

    Raises:
        SbpValueError: there is no command, or no rank.
    """

    command: tuple[str, ...]
    ranks: tuple[int, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, str] = field(default_factory=dict)
    forwards_signals: bool = False
    failure_patterns: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.command or not self.ranks:
            raise SbpValueError(
                f"a launch of command {self.command} as ranks {self.ranks}",
                accepted="a program, and at least one rank",
            )

    @property
    def name(self) -> str:
        """Its name in messages: `rank 3`, `ranks 0-3`."""
        first, last = self.ranks[0], self.ranks[-1]
        if len(self.ranks) == 1:
            return f"rank {first}"
        if self.ranks == tuple(range(first, last + 1)):
            return f"ranks {first}-{last}"
        return f"ranks {', '.join(map(str, self.ranks))}"


def thread_share(num_processes: int) -> dict[str, str]:
    """Return the environment variables that share this machine's cores among equal processes."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {"OMP_NUM_THREADS": str(max(1, (cores or 1) // num_processes))}


class Pending(ABC):
    """A collective or a receive that has begun on one rank; `wait` is called once.

    A rank may have several under way, and wait for them in any order. One that is never waited for
    does no harm: it ends with its backend.
    """

    @abstractmethod
    def wait(self) -> Tensor:
        """Wait until it has ended; return the result of `Communicator.collective` or `receive`.

        Its deadline counts from here: the time of this rank's other work does not count.

        Raises:
            BoxingError: see `Communicator`.
        """


class Postponed(Pending):
    """A call that runs when it is waited for, or that ran when it began.

    Args:
        run: Runs it, and returns the result.
    """

    def __init__(self, run: Callable[[], Tensor]) -> None:
        self._run = run

    def wait(self) -> Tensor:
        """See `Pending.wait`."""
        return self._run()


class Delivery(ABC):
    """The messages that a rank has sent in one call. Waiting for them is optional."""

    @abstractmethod
    def wait(self) -> None:
        """Wait until every receiver has its message, and the sender has no copy left.

        So a sender that waits for its message before last holds two at most, however late the
        receivers are.

        Raises:
            BoxingError: see `Communicator`; the deadline is `deadline_s` of `Communicator.send`.
        """


class Delivered(Delivery):
    """A delivery of which the sender has made no copy."""

    def wait(self) -> None:
        """See `Delivery.wait`."""


class Communicator(ABC):
    """Executes boxing steps for one rank: its part of each. Called from one thread at a time.

    A step is run at once (`collective`, `receive`), or begun and waited for later (`begin`,
    `begin_receive`), so that the rank computes while data moves:

        collective(a)                     collective(b)
        ------------------- compute       -------------------        one after the other
        begin(a)   begin(b)   compute ...........   a.wait()   b.wait()        overlapped

    `tag` names the firing (actor and micro-batch) and is equal on all ranks of the step's group;
    every rank issues or begins the steps of one group in the same order. `deadline_s` is the time a
    call may wait for other ranks, in seconds.

    Raises (all methods):
        BoxingError: the deadline passed, another rank failed, or the backend was closed; names the
            tag, the step and the ranks that did not arrive.
    """

    rank: int

    #: Bytes this rank has sent to other ranks so far: counted from the sizes that the transport is
    #: called with, to be compared with `BoxingStep.size_bytes`; a collective counts by its
    #: definition, whatever the transport does inside (`boxing.manifest`).
    sent_bytes: int

    #: The device of the tensors that it takes and makes: `cpu`, or `cuda:N`.
    device: str = "cpu"

    @abstractmethod
    def collective(
        self, step: BoxingStep, shard: Tensor, *, tag: str, deadline_s: float, donate: bool = False
    ) -> Tensor:
        """Run an all-reduce, reduce-scatter, all-gather or all-to-all with the step's group.

        Args:
            step: Any kind but `TRANSFER` and `LOCAL`.
            shard: This rank's part, of the local shape that `step.source` gives.
            tag: Name of the firing, see the class.
            deadline_s: Seconds to wait for other ranks.
            donate: Whether nobody else uses the memory of `shard`, now or later: then it may be
                overwritten, and may become the result.

        Returns:
            This rank's part under `step.target`.
        """

    def begin(
        self, step: BoxingStep, shard: Tensor, *, tag: str, deadline_s: float, donate: bool = False
    ) -> Pending:
        """Begin a `collective`; it continues while this rank does other work.

        A transport that cannot do so runs it here, so a plan must be live even if each rank waits
        where it begins. The first collective of a group may also wait here for its ranks to
        connect.

        Args:
            step: As in `collective`.
            shard: As in `collective`; not to be written to until the collective has ended.
            tag: As in `collective`.
            deadline_s: Seconds that `Pending.wait` may wait for other ranks.
            donate: As in `collective`.
        """
        result = self.collective(step, shard, tag=tag, deadline_s=deadline_s, donate=donate)
        return Postponed(lambda: result)

    def progress(self) -> None:  # noqa: B027 (most transports need none)
        """Advance the work that has begun, without waiting; called now and then meanwhile.

        For transports that move data only while they are called.
        """

    @abstractmethod
    def send(self, step: BoxingStep, shard: Tensor, *, tag: str, deadline_s: float) -> Delivery:
        """Send this rank's pieces of a `TRANSFER`, without waiting for the receivers.

        Args:
            step: A `TRANSFER` whose source has this rank.
            shard: Its part of the source.
            tag: Name of the firing, see the class.
            deadline_s: Seconds within which the receivers have to post their receives.

        Returns:
            The delivery, to wait for the receivers.
        """

    @abstractmethod
    def receive(
        self, step: BoxingStep, shard: Tensor | None, *, tag: str, deadline_s: float
    ) -> Tensor:
        """Receive and put together this rank's part of a `TRANSFER`.

        Args:
            step: A `TRANSFER` whose target has this rank.
            shard: The rank's own source part if it is also a sender, else None.
            tag: Name of the firing, see the class.
            deadline_s: Seconds to wait for the senders.
        """

    def begin_receive(
        self, step: BoxingStep, shard: Tensor | None, *, tag: str, deadline_s: float
    ) -> Pending:
        """Begin a `receive`: post it; the messages come while this rank does other work.

        A transport that cannot do so receives in `Pending.wait`.

        Args:
            step: As in `receive`.
            shard: As in `receive`; not to be written to until the receive has ended.
            tag: As in `receive`.
            deadline_s: Seconds that `Pending.wait` may wait for the senders.
        """
        return Postponed(lambda: self.receive(step, shard, tag=tag, deadline_s=deadline_s))


class SurvivingRanks(Protocol):
    """The ranks whose processes still run after a backend has failed.

    See `sbp_core.processes.Survivors`.
    """

    ranks: tuple[int, ...]

    def gather(self, text: str, limit_s: float) -> list[str]:
        """Return a text from each rank, in the order of `ranks`; all of them call this.

        Raises:
            BoxingError: another rank has ended too, or did not come within `limit_s` seconds.
        """

    def leave(self) -> None:
        """Wait a moment for the other ranks to read the last text."""


class BoxingBackend(ABC):
    """A transport. Kind `boxing`: `build(config)` returns one, not yet open.

    `spans_processes` says whether its ranks live in several processes. If they do, its config says
    so, too, so that a launcher can be chosen before anything is made.
    """

    spans_processes: bool = True

    def launch_specs(self, num_ranks: int, command: Sequence[str]) -> tuple[LaunchSpec, ...]:
        """Return how to start `command` as the processes of a run on this machine.

        By default, one process holds all ranks. See `sbp_core.processes.supervise`.

        Args:
            num_ranks: Ranks of the run, >= 1.
            command: Program and arguments; a Python program begins with `sys.executable`.

        Raises:
            BoxingError: the launcher that is needed is not installed.
            ConfigError: the settings are for a single process, and cannot start several.
        """
        return (LaunchSpec(command=tuple(command), ranks=tuple(range(num_ranks))),)

    @abstractmethod
    def open(self, ranks: Sequence[int]) -> None:
        """Connect all `ranks` of the run, in this process and in others.

        Raises:
            BoxingError: they cannot be connected.
        """

    @abstractmethod
    def local_ranks(self) -> tuple[int, ...]:
        """Return the ranks that live in this process."""

    @abstractmethod
    def communicator(self, rank: int) -> Communicator:
        """Return the communicator of one local rank."""

    @abstractmethod
    def fail(self, error: BaseException) -> None:
        """Unblock every waiting call of this process with a `BoxingError` caused by `error`."""

    def failure_reason(self) -> str:
        """Return why the backend failed, as the first rank to notice put it; "" if it has not.

        Does not communicate: only failures that other processes have announced are known.
        """
        return ""

    def survivors(self, limit_s: float) -> SurvivingRanks:
        """Return the ranks whose processes still run after a failure; each of them calls this.

        They can still exchange short texts. By default no rank can.

        Args:
            limit_s: Seconds to wait for ranks that may or may not run.

        Raises:
            BoxingError: the backend has not failed, or the other ranks cannot be reached.
        """
        raise BoxingError("the surviving ranks cannot reach each other")

    @abstractmethod
    def close(self) -> None:
        """Release everything; further calls raise `BoxingError`. Safe to call twice.

        Raises:
            BoxingError: a rank of another process ended, or hangs, without closing its backend,
                and no call of this one has reported it. Everything is released even so.
        """

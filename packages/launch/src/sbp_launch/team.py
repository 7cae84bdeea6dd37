"""Communication between the processes of a run after each step: stop together, exchange texts.

    rank 0   step 7   metrics cannot be written   vote: stop ...  -> all stop after step 7
    rank 1   step 7   nothing                     vote: go on

Every process votes after every step, so that all stop after the same step, and can still gather the
states. A vote is an all-reduce (maximum) of a few numbers: the vote itself, the requests of
callbacks, and the training time. With a single process, no communication is needed.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence

import torch
from torch import Tensor

from sbp_core import boxing
from sbp_core.boxing import BoxingBackend, BoxingStep, Communicator, StepKind, SurvivingRanks
from sbp_core.errors import BoxingError, RunError, words_of
from sbp_core.placement import Placement
from sbp_core.sbp import B, NdSbp, P
from sbp_launch.run.stopping import StopSignals, Terminated
from sbp_launch.settings.config import RunConfig
from sbp_torch.boxing.processes import gather_texts

#: Seconds that a process waits for another one, which may be comparing with one device or writing
#: states. A process that has ended is noticed at once.
DEADLINE_S = 600.0

#: The vote of a process that cannot continue; above the number of any signal.
_PROBLEM = 1000

#: Bytes of a text that `Team.gather` gathers, as UTF-8.
TEXT_BYTES = 8192

#: Most characters that are quoted of the problem of another process, each of up to 4 bytes.
_QUOTED = 1000


class Team:
    """The processes of a run, with one rank each; or a single process.

    Args:
        communicator: The open communicator of this process's rank; None for a single process.
        ranks: All ranks of the run.
        backend: The backend of the communicator; survivors of a failure need it to connect.
    """

    def __init__(
        self,
        communicator: Communicator | None = None,
        ranks: Sequence[int] = (),
        backend: BoxingBackend | None = None,
    ) -> None:
        self._communicator, self._ranks, self._backend = communicator, tuple(ranks), backend
        #: Whether this process is the only one.
        self.is_alone = communicator is None
        #: Whether all processes stop after the same step, and so can still gather the states.
        self.stops_together = communicator is None
        self._num_votes = 0

    def _step(self, width: int) -> BoxingStep:
        """Return the boxing step of an all-reduce (maximum) of `width` numbers."""
        mesh = Placement(list(self._ranks), ("rank",))
        return BoxingStep(
            kind=StepKind.ALL_REDUCE,
            shape=(width,),
            dtype="int64",
            source=(mesh, NdSbp(P("max"))),
            target=(mesh, NdSbp(B)),
            axes=(0,),
            size_bytes=2 * (len(self._ranks) - 1) * 8 * width,
        )

    @classmethod
    def of(cls, backend: BoxingBackend, ranks: Sequence[int]) -> Team:
        """Return the team of an open backend, whose ranks are all `ranks`."""
        if not backend.spans_processes or len(ranks) == 1:
            return cls()
        (rank,) = backend.local_ranks()
        return cls(backend.communicator(rank), ranks, backend)

    def survivors(self, error: Exception, limit_s: float) -> SurvivingRanks:
        """Return the surviving ranks after the run has failed; each of them calls this.

        Args:
            error: The error of this process; it is sent to the others.
            limit_s: Seconds to wait for ranks that may have ended.

        Raises:
            BoxingError: they cannot reach each other.
        """
        if self._backend is None:
            raise BoxingError("there are no other processes")
        self._backend.fail(error)
        return self._backend.survivors(limit_s)

    def highest(self, vote: int, deadline_s: float = DEADLINE_S) -> int:
        """Return the highest vote of all processes; all of them call this.

        Args:
            vote: The vote of this process, >= 0.
            deadline_s: Seconds to wait for the other processes.

        Raises:
            BoxingError: another process has failed, or did not answer.
        """
        return self.highest_of([vote], deadline_s)[0]

    def highest_of(self, values: Sequence[int], deadline_s: float = DEADLINE_S) -> list[int]:
        """Return the maximum over all processes of each value; all of them call this.

        Args:
            values: 64-bit integers of this process, equally many in each process.
            deadline_s: Seconds to wait for the other processes.

        Raises:
            BoxingError: another process has failed, or did not answer.
        """
        if self._communicator is None:
            return list(values)
        self._num_votes += 1
        found = self._communicator.collective(
            self._step(len(values)),
            torch.tensor(values, device=self._communicator.device),
            tag=f"vote {self._num_votes}",
            deadline_s=deadline_s,
        )
        return [int(value) for value in found.tolist()]

    def gather(self, text: str, what: str = "what was measured") -> list[str]:
        """Return a text of every process, in order; all of them call this.

        Args:
            text: The text of this process, at most 8 KiB.
            what: The name of the exchange in messages; the same in all processes.

        Raises:
            BoxingError: another process has failed, or did not answer.
        """
        if self._communicator is None:
            return [text]
        texts = gather_texts(
            self._communicator,
            self._ranks,
            text,
            tag=what,
            width_bytes=TEXT_BYTES,
            deadline_s=DEADLINE_S,
        )
        return list(texts.values())

    def from_first(self, name: str, value: Tensor) -> Tensor:
        """Return the value of a tensor in the first process; all of them call this.

        Args:
            name: The name of the tensor, for messages.
            value: The value in this process; shape and dtype are the same in all of them.

        Raises:
            BoxingError: another process has failed, or did not answer.
        """
        if self._communicator is None:
            return value
        everyone, communicator = NdSbp(B), self._communicator
        here = value.detach().contiguous().to(communicator.device)
        shape, dtype = tuple(here.shape), str(here.dtype).removeprefix("torch.")
        first, others = (
            Placement(list(of), ("rank",)) for of in (self._ranks[:1], self._ranks[1:])
        )
        route = boxing.route(shape, dtype, (first, everyone), (others, everyone))
        for index, step in enumerate(route.steps):
            tag = f"first value of {name!r}, step {index}"
            if communicator.rank in step.source[0]:
                communicator.send(step, here, tag=tag, deadline_s=DEADLINE_S)
            if communicator.rank in step.target[0]:
                here = communicator.receive(step, None, tag=tag, deadline_s=DEADLINE_S)
        return here.to(value.device)


def stop_together(
    team: Team,
    signals: StopSignals,
    problem: Exception | None = None,
    deadline_s: float = DEADLINE_S,
    asked: Sequence[int] = (),
) -> list[int]:
    """Stop after a step if this or another process has to stop; all of them call this.

    Args:
        team: All processes.
        signals: The signals of this process.
        problem: The error because of which this process cannot continue, if there is one.
        deadline_s: Seconds to wait for the other processes.
        asked: Numbers of this process, equally many in each process.

    Returns:
        The maximum over all processes of each number in `asked`.

    Raises:
        Exception: `problem`, or a `RunError` that quotes the problem of another process.
        BoxingError: another process has failed or did not answer, and there is no `problem` here.
        Terminated, KeyboardInterrupt: a signal has arrived in any process.
    """
    highest, *heard = _vote(team, problem, [signals.pending_number, *asked], deadline_s)
    if not highest:
        return heard
    signals.stop_if_asked()
    raise KeyboardInterrupt if highest == signal.SIGINT else Terminated(highest)


def fail_together(
    team: Team, problem: Exception | None = None, deadline_s: float = DEADLINE_S
) -> None:
    """Stop if this or another process cannot continue; all of them call this.

    Raises:
        Exception: `problem`, or a `RunError` that quotes the problem of another process.
        BoxingError: another process has failed or did not answer, and there is no `problem` here.
    """
    _vote(team, problem, [0], deadline_s)


def _vote(
    team: Team, problem: Exception | None, values: Sequence[int], deadline_s: float
) -> list[int]:
    """Return the maximum of each value over all processes, if none of them has a problem."""
    vote = _PROBLEM if problem is not None else values[0]
    try:
        highest, *heard = team.highest_of([vote, *values[1:]], deadline_s)
        if highest:
            team.stops_together = True
        if highest < _PROBLEM:
            return [highest, *heard]
        told = team.gather(words_of(problem)[:_QUOTED] if problem is not None else "")
    except BoxingError:
        if problem is None:
            raise
        raise problem from problem.__cause__
    if problem is not None:
        raise problem
    rank, text = next((rank, text) for rank, text in enumerate(told) if text)
    raise RunError(f"rank {rank} cannot continue: {text}", todo="see its log")


def vote_deadline_s(config: RunConfig, index: int) -> float:
    """Return how long a rank waits for others after a step: as long as in a step, in seconds.

    Longer after the steps, counted from 0, that the first rank compares with one device.
    """
    deadline_s = config.runtime.settings.get("deadline_s")
    if index < config.trainer.compare_steps or not isinstance(deadline_s, int | float):
        return DEADLINE_S
    return float(deadline_s)

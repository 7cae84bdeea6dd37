"""What the processes of a run say to each other between steps: whether to stop, what they measured.

    rank 0   step 7   metrics cannot be written   vote: stop ...  -> all stop after step 7
    rank 1   step 7   nothing                     vote: go on

Every process votes after every step, so that all stop after the same one, and can still gather
the states. A vote is an all-reduce of a few numbers, of each of which the highest is heard: beside
the vote, what callbacks ask for and how long the run has trained. A process that is alone agrees
with itself.
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

#: Seconds that a process waits for another, which may compare with one device or write states.
#: One that has ended is noticed at once.
DEADLINE_S = 600.0

#: The vote of a process that cannot go on; above the number of any signal.
_PROBLEM = 1000

#: Bytes of a text that `Team.gather` gathers, as UTF-8.
TEXT_BYTES = 8192

#: Most characters that are quoted of the problem of another process, each of up to 4 bytes.
_QUOTED = 1000


class Team:
    """The processes of a run, one a rank; or one that is alone.

    Args:
        communicator: Of this process' rank, open; None if it is alone.
        ranks: All ranks of the run.
        backend: That of the communicator; without it, survivors of a failure cannot meet.
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
        """Return the all-reduce of so many numbers, of each the highest."""
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
        """Return the ranks that are left when the run has failed; each of them calls this.

        Args:
            error: Why it has failed here; the others hear of it.
            limit_s: Seconds to wait for ranks of which it is not known whether they run.

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
            vote: Of this process, >= 0.
            deadline_s: Seconds to wait for the others.

        Raises:
            BoxingError: another process has failed, or did not come.
        """
        return self.highest_of([vote], deadline_s)[0]

    def highest_of(self, values: Sequence[int], deadline_s: float = DEADLINE_S) -> list[int]:
        """Return the highest of all processes in each place; all of them call this.

        Args:
            values: Of this process, of 64 bits; as many in each process.
            deadline_s: Seconds to wait for the others.

        Raises:
            BoxingError: another process has failed, or did not come.
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
            text: Of this process, at most 8 KiB.
            what: Names the exchange, for messages; the same in all processes.

        Raises:
            BoxingError: another process has failed, or did not come.
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
            name: Of the tensor, for messages.
            value: In this process; shape and dtype are the same in all of them.

        Raises:
            BoxingError: another process has failed, or did not come.
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
    """Stop, after a step, if this process or another one has to; all of them call this.

    Args:
        team: All processes.
        signals: Of this process.
        problem: Why this process cannot go on, if so.
        deadline_s: Seconds to wait for the others.
        asked: Numbers of this process, as many as in the others.

    Returns:
        The highest of `asked` of all processes, in each place.

    Raises:
        Exception: `problem`, or a `RunError` that quotes that of another process.
        BoxingError: another process has failed, or did not come, and there is no `problem` here.
        Terminated, KeyboardInterrupt: a signal has come, here or there.
    """
    highest, *heard = _vote(team, problem, [signals.pending_number, *asked], deadline_s)
    if not highest:
        return heard
    signals.stop_if_asked()
    raise KeyboardInterrupt if highest == signal.SIGINT else Terminated(highest)


def fail_together(
    team: Team, problem: Exception | None = None, deadline_s: float = DEADLINE_S
) -> None:
    """Stop if this process or another one cannot go on; all of them call this.

    Raises:
        Exception: `problem`, or a `RunError` that quotes that of another process.
        BoxingError: another process has failed, or did not come, and there is no `problem` here.
    """
    _vote(team, problem, [0], deadline_s)


def _vote(
    team: Team, problem: Exception | None, values: Sequence[int], deadline_s: float
) -> list[int]:
    """Return the highest values of all processes, if none of them has a problem."""
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
    raise RunError(f"rank {rank} cannot go on: {text}", todo="see its log")


def vote_deadline_s(config: RunConfig, index: int) -> float:
    """Return how long a rank waits for the others after a step: as long as in it, in seconds.

    Longer after the steps, counted from 0, that the first rank compares with one device.
    """
    deadline_s = config.runtime.settings.get("deadline_s")
    if index < config.trainer.compare_steps or not isinstance(deadline_s, int | float):
        return DEADLINE_S
    return float(deadline_s)

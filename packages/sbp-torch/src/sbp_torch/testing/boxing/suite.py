"""`BoxingConformance`: tests of a boxing (communication) backend, which its author subclasses.

The package's docstring has an example.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any
from unittest import SkipTest

from sbp_core.testing.holdings import grown
from sbp_core.testing.marks import exhaustive
from sbp_torch.testing.boxing import failures, in_flight, mismatches
from sbp_torch.testing.boxing.conversion_cases import BoxingCase
from sbp_torch.testing.boxing.convert import find_problems, make_trials, run_trials
from sbp_torch.testing.boxing.families import FAMILIES, quick_cases, sample

if TYPE_CHECKING:
    from sbp_core.boxing import BoxingBackend, Communicator

#: A program of a rank: (rank, its communicator) -> picklable result.
Program = Callable[[int, "Communicator"], Any]

#: A program that also uses the backend itself: (rank, the open backend) -> picklable result.
Job = Callable[[int, "BoxingBackend"], Any]

#: Numbers of small and of large cases that are in flight at once.
_IN_FLIGHT, _LARGE_IN_FLIGHT = 24, 4

#: Largest number of failing cases in a message.
_SHOWN = 5

_logger = logging.getLogger("sbp_torch.testing.boxing")


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseCount:
    """Number of cases of one family that a suite has run, and their time.

    Args:
        backend: Name of the suite that ran them.
        num_ranks: Number of ranks.
        family: Name of the family, or `quick`.
        num_cases: Number of cases.
        time_s: Duration in seconds.
    """

    backend: str
    num_ranks: int
    family: str
    num_cases: int
    time_s: float

    def __str__(self) -> str:
        rate = self.num_cases / max(self.time_s, 1e-9)
        return (
            f"{self.backend}, {self.num_ranks} ranks, {self.family}: {self.num_cases} cases "
            f"in {self.time_s:.1f} s ({rate:.0f}/s)"
        )


def use_communicator(rank: int, backend: BoxingBackend, *, program: Program) -> Any:
    """Run a program as a job, for suites that implement `run_ranks` by `run_backends`."""
    return program(rank, backend.communicator(rank))


class BoxingConformance(ABC):
    """Tests of a boxing backend. See the package's docstring for how to use it."""

    #: Name of the backend in reports; the name of the class if empty.
    name: str = ""

    #: Seconds that one step may wait for other ranks if all of them take part.
    deadline_s: float = 30.0

    #: Seconds that ranks wait for a rank that never takes part.
    missing_deadline_s: float = 1.0

    #: Seconds after a deadline until the error must have been raised.
    grace_s: float = 5.0

    #: Dtypes of the tensors to convert.
    dtypes: tuple[str, ...] = ("float32", "float64", "bfloat16", "int64", "bool")

    #: Device of the shards.
    device: str = "cpu"

    #: Numbers of ranks of the exhaustive tests. Tests that need more than the largest are skipped.
    rank_counts: tuple[int, ...] = (2, 3, 4)

    #: Whether a sender keeps a copy of its message until the message is received.
    copies_messages: bool = True

    #: Number of cases in one call of `run_ranks`.
    cases_at_once: int = 2000

    @abstractmethod
    def run_ranks(self, num_ranks: int, program: Program) -> Sequence[Any]:
        """Run `program(rank, communicator)` on ranks 0 .. num_ranks - 1; results in rank order."""

    def run_backends(self, num_ranks: int, job: Job) -> Sequence[Any]:
        """Run `job(rank, backend)` on ranks 0 .. num_ranks - 1; without it, tests are skipped."""
        raise SkipTest("the suite has no run_backends, so nothing can be closed or fail here")

    def convert(self, num_ranks: int, cases: Sequence[BoxingCase], what: str) -> CaseCount:
        """Run cases on `num_ranks` ranks, check every rank's shards and bytes, and log the number.

        Raises:
            AssertionError: a case fails; the message names the cases and ranks.
        """
        start, found = time.monotonic(), list[str]()
        for first in range(0, len(cases), self.cases_at_once):
            trials = make_trials(cases[first : first + self.cases_at_once])
            program = partial(
                run_trials, trials=trials, deadline_s=self.deadline_s, device=self.device
            )
            answers = self.run_ranks(num_ranks, program)
            assert len(answers) == num_ranks, "run_ranks returns one result for each rank"
            found += find_problems(trials, answers)
        tally = CaseCount(
            backend=self.name or type(self).__name__,
            num_ranks=num_ranks,
            family=what,
            num_cases=len(cases),
            time_s=time.monotonic() - start,
        )
        _logger.info("%s", tally, extra={"tally": tally})
        shown = "\n\n".join(found[:_SHOWN])
        assert not found, f"{len(found)} of {len(cases)} cases fail on {num_ranks} ranks\n{shown}"
        return tally

    def _need(self, num_ranks: int) -> None:
        if num_ranks > max(self.rank_counts):
            raise SkipTest(f"the suite runs on at most {max(self.rank_counts)} ranks")

    def _quick(self, num_ranks: int) -> None:
        self._need(num_ranks)
        self.convert(num_ranks, quick_cases(num_ranks, self.dtypes), "quick")

    def _family(self, family: str) -> None:
        for num_ranks in self.rank_counts:
            cases = FAMILIES[family](num_ranks, self.dtypes)
            if cases:
                self.convert(num_ranks, cases, family)

    def test_a_rank_alone_needs_nobody(self) -> None:
        """Every pair of SBPs and a sample of all families, on one rank."""
        self._quick(1)

    def test_a_sample_on_two_ranks(self) -> None:
        """Every pair of SBPs and a sample of all families, on two ranks."""
        self._quick(2)

    def test_a_sample_on_three_ranks(self) -> None:
        """Every pair of SBPs and a sample of all families, on three ranks."""
        self._quick(3)

    def test_a_sample_on_four_ranks(self) -> None:
        """Every pair of SBPs and a sample of all families, on four ranks."""
        self._quick(4)

    @exhaustive
    def test_every_pair_on_one_axis(self) -> None:
        """See `families.one_axis`."""
        self._family("one axis")

    @exhaustive
    def test_every_pair_on_two_axes(self) -> None:
        """See `families.two_axes`."""
        self._family("two axes")

    @exhaustive
    def test_every_pair_on_three_axes(self) -> None:
        """See `families.three_axes`."""
        self._family("three axes")

    @exhaustive
    def test_every_pair_across_placements(self) -> None:
        """See `families.across`."""
        self._family("across placements")

    @exhaustive
    def test_every_kind_of_step(self) -> None:
        """See `families.steps`."""
        self._family("steps")

    @exhaustive
    def test_every_collective_on_merged_axes(self) -> None:
        """See `families.merged_axes`."""
        self._family("merged axes")

    @exhaustive
    def test_every_pair_of_large_tensors(self) -> None:
        """See `families.large`."""
        self._family("large")

    def test_what_two_ranks_have_under_way_may_be_waited_for_in_any_order(self) -> None:
        """Collectives and receives, small and large, begun one after the other."""
        self._convert_together(2)

    def test_what_three_ranks_have_under_way_may_be_waited_for_in_any_order(self) -> None:
        """The same on three ranks."""
        self._convert_together(3)

    def _convert_together(self, num_ranks: int) -> None:
        self._need(num_ranks)
        quick = filter(in_flight.can_be_in_flight, quick_cases(num_ranks, self.dtypes))
        large = filter(in_flight.can_be_in_flight, FAMILIES["large"](num_ranks, self.dtypes))
        cases = (*sample([*quick], _IN_FLIGHT), *sample([*large], _LARGE_IN_FLIGHT))
        trials = make_trials(cases)
        for order in in_flight.ORDERS:
            program = partial(
                in_flight.convert_together,
                trials=trials,
                order=order,
                deadline_s=self.deadline_s,
                device=self.device,
            )
            answers = self.run_ranks(num_ranks, program)
            problems = [problem for found, _ in answers for problem in found]
            shown = "\n".join(problems[:_SHOWN])
            assert not problems, f"waited for {order}, {len(problems)} are wrong:\n{shown}"
            sent = sum(sent_bytes for _, sent_bytes in answers)
            predicted = sum(step.size_bytes for trial in trials for step in trial.route.steps)
            assert sent == predicted, f"{sent} bytes sent, {predicted} predicted"

    def test_a_rank_that_computes_between_begin_and_end_is_not_missing(self) -> None:
        """One rank waits, one computes meanwhile, one never takes part: only the last is named."""
        self._need(3)
        program = partial(
            in_flight.compute_while_others_wait,
            deadline_s=self.deadline_s,
            waits_s=self.missing_deadline_s,
            device=self.device,
        )

        first, _, last = self.run_ranks(3, program)

        self._check_missing(0, first, missing=1)
        self._check_missing(2, last, missing=1)

    def test_a_rank_that_never_comes_to_a_collective_is_named(self) -> None:
        """Every rank that waits gets a BoxingError in time that names the rank and the tag."""
        self._miss_a_sum(met_before=False)

    def test_a_rank_that_does_not_come_again_to_a_collective_is_named(self) -> None:
        """The same with ranks that are connected; only the missing rank is named."""
        self._miss_a_sum(met_before=True)

    def _miss_a_sum(self, *, met_before: bool) -> None:
        self._need(3)
        program = partial(
            failures.miss_a_sum,
            missing=1,
            met_before=met_before,
            deadline_s=self.deadline_s,
            waits_s=self.missing_deadline_s,
            device=self.device,
        )

        first, _, last = self.run_ranks(3, program)

        self._check_missing(0, first, missing=1)
        self._check_missing(2, last, missing=1)

    def test_a_sender_that_never_comes_is_named(self) -> None:
        """A receiver gets a BoxingError in time that names the sender and the tag."""
        self._need(2)
        program = partial(
            failures.miss_a_message, waits_s=self.missing_deadline_s, device=self.device
        )

        _, receiver = self.run_ranks(2, program)

        self._check_missing(1, receiver, missing=0)

    def test_a_sender_learns_that_its_message_is_received(self) -> None:
        """Delivery is reported if the receiver begins to receive before or after the send."""
        self._need(2)
        program = partial(failures.await_delivery, deadline_s=self.deadline_s, device=self.device)

        assert self.run_ranks(2, program) == [8.0, 8.0]

    def test_a_sender_learns_that_its_message_is_not_received(self) -> None:
        """A rank that waits for the delivery gets a BoxingError that names the receiver."""
        self._need(2)
        if not self.copies_messages:
            raise SkipTest(
                "messages are handed over, so a sender holds none that it could wait for"
            )
        program = partial(
            failures.miss_a_delivery, waits_s=self.missing_deadline_s, device=self.device
        )

        sender, _ = self.run_ranks(2, program)

        self._check_missing(0, sender, missing=1)

    def test_all_senders_that_never_come_are_named(self) -> None:
        """Two of three senders do not send; the error of the receiver names only these two."""
        self._need(4)
        program = partial(
            failures.miss_messages, waits_s=self.missing_deadline_s, device=self.device
        )

        *_, receiver = self.run_ranks(4, program)

        self._check_missing(3, receiver, missing="0, 2")

    def _check_missing(self, rank: int, answer: failures.Told, *, missing: int | str) -> None:
        said, took_s = answer
        named = f"did not arrive: {missing}\n" in f"{said}\n"
        assert named, f"rank {rank} was told of the missing ranks: {said!r}"
        assert "'lost'" in said, f"rank {rank} was not told the tag: {said!r}"
        assert took_s < self.missing_deadline_s + self.grace_s, f"rank {rank}: {took_s} s"

    def test_a_shard_of_another_shape_is_refused_and_does_no_harm(self) -> None:
        """BoxingError with both shapes, and the step runs with the right shard."""
        self._need(2)
        program = partial(failures.give_wrong_shard, deadline_s=self.deadline_s, device=self.device)

        for rank, (said, right) in enumerate(self.run_ranks(2, program)):
            assert "(2, 4)" in said and "(4, 2)" in said, f"rank {rank} was told: {said!r}"
            assert right, f"rank {rank} has a wrong sum after it gave a wrong shard"

    def test_messages_wait_for_their_receiver_and_find_it_by_their_tag(self) -> None:
        """Two ranks send ten messages each, and then receive them in reverse order."""
        self._need(2)
        program = partial(failures.exchange_many, deadline_s=self.deadline_s, device=self.device)

        for rank, received in enumerate(self.run_ranks(2, program)):
            sent = [10.0 * (1 - rank) + number for number in reversed(range(10))]
            assert received == sent, f"rank {rank} received {received} and not {sent}"

    def test_a_rank_that_is_done_leaves_its_messages_behind(self) -> None:
        """A rank receives a message of a rank whose program has ended."""
        self._need(2)
        program = partial(failures.send_and_go, deadline_s=self.deadline_s, device=self.device)

        _, total = self.run_ranks(2, program)

        assert total == 8.0, f"eight ones of a rank that is done add up to {total}"

    def test_a_failure_unblocks_ranks_that_never_met(self) -> None:
        """Without a connection, a failure still reaches every waiting call, with its reason."""
        self._fail(met_before=False)

    def test_a_failure_unblocks_ranks_that_are_connected(self) -> None:
        """A failure reaches every waiting call, here and on other ranks, with its reason."""
        self._fail(met_before=True)

    def _fail(self, *, met_before: bool) -> None:
        self._need(2)
        job = partial(
            failures.fail_while_waiting,
            met_before=met_before,
            deadline_s=self.deadline_s,
            device=self.device,
        )

        answers = self.run_backends(2, job)

        for rank, ((said, took_s), tag) in enumerate(
            zip(answers, ("here", "elsewhere"), strict=True)
        ):
            assert failures.REASON in said, f"rank {rank} was told: {said!r}"
            assert repr(tag) in said, f"rank {rank} was not told the tag: {said!r}"
            assert took_s < 2 * self.grace_s, f"rank {rank}: {took_s} s"

    def test_a_closed_backend_says_so(self) -> None:
        """Closing twice is safe; then every call raises BoxingError that names the tag."""
        self._need(2)
        job = partial(failures.use_after_the_end, deadline_s=self.deadline_s, device=self.device)

        for rank, answers in enumerate(self.run_backends(2, job)):
            for said, _ in answers:
                fits = "'late'" in said and "closed" in said
                assert fits, f"rank {rank} was told after the end: {said!r}"

    def test_a_closed_backend_leaves_nothing_behind(self) -> None:
        """In a process that continues, the third backend leaves no thread, socket or file open."""
        self._need(2)
        held: dict[int, Counter[str]] = {}
        for turn in range(3):
            # Libraries may keep resources from their first use, so only the last turn is checked.
            before = held if turn == 2 else {}
            job = partial(
                failures.hold_after_the_end,
                before=before,
                settle_s=0.0 if before else 0.3,
                grace_s=self.grace_s,
                deadline_s=self.deadline_s,
                device=self.device,
            )
            held = {}
            for rank, (process, now) in enumerate(self.run_backends(2, job)):
                left = grown(before.get(process, now), now)
                assert not left, f"rank {rank} has closed its backend, and there is more: {left}"
                held[process] = held.get(process, now) | now

    def test_a_backend_has_no_communicator_for_ranks_of_others(self) -> None:
        """BoxingError that names the rank."""
        self._need(2)
        for rank, (said, _) in enumerate(self.run_backends(2, failures.ask_for_others)):
            assert f"rank {1000 + rank} " in said, f"rank {rank} was told: {said!r}"

    def test_ranks_that_differ_in_a_collective_are_both_named_on_both(self) -> None:
        """With fingerprints, before data moves: tag, dtype or kind of step."""
        self._need(2)
        for other, sign in mismatches.MISMATCHES.items():
            job = partial(
                mismatches.differ_in_a_collective,
                other=other,
                deadline_s=self.deadline_s,
                device=self.device,
            )
            for rank, said in enumerate(self.run_backends(2, job)):
                both = "rank 0: 'gradients', all-reduce" in said and "rank 1: " in said
                assert both and sign in said, f"{other} differs, and rank {rank} was told: {said!r}"

    def test_a_message_of_another_dtype_is_refused_and_its_sender_hears(self) -> None:
        """With fingerprints; the error names the sent and the expected message."""
        self._need(2)
        job = partial(
            mismatches.differ_in_a_message, deadline_s=self.deadline_s, device=self.device
        )

        for rank, said in enumerate(self.run_backends(2, job)):
            sent, awaited = "rank 0: 'activations', transfer", "rank 1: 'activations', transfer"
            assert sent in said and awaited in said, f"rank {rank} was told: {said!r}"
            assert "float32[4, 2]" in said and "int32[4, 2]" in said, f"rank {rank}: {said!r}"

    def test_messages_that_match_arrive_in_any_order(self) -> None:
        """With fingerprints, and after the ranks have agreed on a plan."""
        self._need(2)
        job = partial(mismatches.agree_on_messages, deadline_s=self.deadline_s, device=self.device)

        for rank, received in enumerate(self.run_backends(2, job)):
            assert received == [2.0, 0.0, 3.0, 1.0], f"rank {rank} received {received}"

    def test_ranks_with_different_plans_are_named_on_all(self) -> None:
        """The error on each rank names which ranks have which plan."""
        self._need(3)
        program = partial(mismatches.have_another_plan, deadline_s=self.deadline_s)

        for rank, said in enumerate(self.run_ranks(3, program)):
            named = "ranks 0, 1 have a1b2, rank 2 has c3d4" in said
            assert named, f"rank {rank} was told: {said!r}"

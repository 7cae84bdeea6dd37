"""The suite of boxing backends: passed by `local`, failed by broken ones; what it consists of."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, ClassVar
from unittest import SkipTest

import pytest
import torch

from sbp_core.boxing.backend import Delivery, Pending, Postponed
from sbp_core.boxing.step import BoxingStep, StepKind
from sbp_core.errors import BoxingError
from sbp_core.placement import Placement
from sbp_core.sbp import B, NdSbp, P, S
from sbp_torch.boxing.local import LocalBackend, LocalCommunicator
from sbp_torch.testing.boxing import (
    FAMILIES,
    BoxingCase,
    BoxingConformance,
    CaseCount,
    Job,
    Program,
    gather,
    logical_tensor,
    make_trials,
    quick_cases,
    sample,
    source_shards,
    use_communicator,
)
from sbp_torch.testing.boxing.families import placement_pairs
from sbp_torch.testing.boxing.report import CountCases, summary

DTYPES = BoxingConformance.dtypes


class Suite(BoxingConformance):
    """The suite on the local backend, with communicators of some class."""

    name = "broken"
    missing_deadline_s = 0.1
    grace_s = 2.0
    deadline_s = 5.0

    def __init__(self, kind: type[LocalCommunicator], backend: type[LocalBackend]) -> None:
        self.kind, self.backend = kind, backend

    def run_ranks(self, num_ranks: int, program: Program) -> list[Any]:
        return self.run_backends(num_ranks, partial(use_communicator, program=program))

    def run_backends(self, num_ranks: int, job: Job) -> list[Any]:
        backend = self.backend()
        backend.open(range(num_ranks))
        backend._communicators = {rank: self.kind(backend, rank) for rank in range(num_ranks)}
        with ThreadPoolExecutor(num_ranks) as threads:
            futures = [threads.submit(job, rank, backend) for rank in range(num_ranks)]
            return [future.result() for future in futures]


class CountsTooLittle(LocalCommunicator):
    def collective(self, step: BoxingStep, shard: torch.Tensor, **rest: Any) -> torch.Tensor:
        result = super().collective(step, shard, **rest)
        self.sent_bytes -= int(self.sent_bytes > 0 and step.kind is StepKind.ALL_TO_ALL)
        return result


class SendsUncounted(LocalCommunicator):
    def send(self, step: BoxingStep, shard: torch.Tensor, **rest: Any) -> Delivery:
        before = self.sent_bytes
        delivery = super().send(step, shard, **rest)
        self.sent_bytes = before
        return delivery


class IsWrongOnOneRank(LocalCommunicator):
    def collective(self, step: BoxingStep, shard: torch.Tensor, **rest: Any) -> torch.Tensor:
        result = super().collective(step, shard, **rest)
        if self.rank == 2 and result.dtype == torch.float64 and result.numel():
            result = result.clone()
            result.view(-1)[-1] += 1
        return result


class SwapsTwoRanks(LocalCommunicator):
    def collective(self, step: BoxingStep, shard: torch.Tensor, **rest: Any) -> torch.Tensor:
        group, last = step.group(self.rank), step.target[1][-1]
        if step.kind is StepKind.REDUCE_SCATTER and len(group) == 2 and last == S(0):
            shard = shard.roll(shard.shape[0] // 2, 0)
        return super().collective(step, shard, **rest)


class SpoilsItsInput(LocalCommunicator):
    def collective(self, step: BoxingStep, shard: torch.Tensor, **rest: Any) -> torch.Tensor:
        result = super().collective(step, shard, **rest).clone()
        if not rest.get("donate") and self.rank == 1:
            shard.detach().zero_()
        return result


class SpoilsWhatItSends(LocalCommunicator):
    def send(self, step: BoxingStep, shard: torch.Tensor, **rest: Any) -> Delivery:
        delivery = super().send(step, shard.clone(), **rest)
        shard.detach().zero_()
        return delivery


class MovesInHalfPrecision(LocalCommunicator):
    def collective(self, step: BoxingStep, shard: torch.Tensor, **rest: Any) -> torch.Tensor:
        result = super().collective(step, shard, **rest)
        return result.bfloat16().to(result.dtype) if result.dtype == torch.float32 else result


class MovesInSinglePrecision(LocalCommunicator):
    def receive(self, step: BoxingStep, shard: torch.Tensor | None, **rest: Any) -> torch.Tensor:
        result = super().receive(step, shard, **rest)
        return result.float().to(result.dtype) if result.dtype == torch.float64 else result


class WidensHalfPrecision(LocalCommunicator):
    def collective(self, step: BoxingStep, shard: torch.Tensor, **rest: Any) -> torch.Tensor:
        result = super().collective(step, shard, **rest)
        return result.float() if result.dtype == torch.bfloat16 else result


class ReadsPastGaps(LocalCommunicator):
    def collective(self, step: BoxingStep, shard: torch.Tensor, **rest: Any) -> torch.Tensor:
        packed = shard.as_strided(shard.shape, torch.empty(shard.shape).stride())
        return super().collective(step, packed, **rest)


class KnowsOneMeshAxis(LocalCommunicator):
    def collective(self, step: BoxingStep, shard: torch.Tensor, **rest: Any) -> torch.Tensor:
        if len(step.axes) > 1:
            raise BoxingError("several mesh axes at once")
        return super().collective(step, shard, **rest)


class IsWrongForLargeTensors(LocalCommunicator):
    def collective(self, step: BoxingStep, shard: torch.Tensor, **rest: Any) -> torch.Tensor:
        result = super().collective(step, shard, **rest)
        return result if result.numel() < 10_000 else torch.zeros_like(result)


class BlamesAnother(LocalCommunicator):
    def collective(self, step: BoxingStep, shard: torch.Tensor, **rest: Any) -> torch.Tensor:
        try:
            return super().collective(step, shard, **rest)
        except BoxingError as error:
            raise BoxingError(str(error).replace("arrive: 1", "arrive: 0, 1")) from error


class WaitsTooLong(LocalCommunicator):
    def receive(self, step: BoxingStep, shard: torch.Tensor | None, **rest: Any) -> torch.Tensor:
        return super().receive(step, shard, **{**rest, "deadline_s": 3.0})


class MixesWhatIsUnderWay(LocalCommunicator):
    """Whatever is waited for first gets what was begun first."""

    def __init__(self, backend: LocalBackend, rank: int) -> None:
        super().__init__(backend, rank)
        self.begun: list[Pending] = []

    def begin(self, step: BoxingStep, shard: torch.Tensor, **rest: Any) -> Pending:
        self.begun.append(super().begin(step, shard, **rest))
        return Postponed(lambda: self.begun.pop(0).wait())


class ForgetsTags(LocalCommunicator):
    def send(self, step: BoxingStep, shard: torch.Tensor, **rest: Any) -> Delivery:
        return super().send(step, shard, **{**rest, "tag": "any"})

    def receive(self, step: BoxingStep, shard: torch.Tensor | None, **rest: Any) -> torch.Tensor:
        return super().receive(step, shard, **{**rest, "tag": "any"})


class TakesAnyShard(LocalCommunicator):
    def collective(self, step: BoxingStep, shard: torch.Tensor, **rest: Any) -> torch.Tensor:
        return super().collective(step, shard.reshape(4, 2), **rest)


class IgnoresFailures(LocalBackend):
    def fail(self, error: BaseException) -> None:
        pass


class HidesReasons(LocalBackend):
    def fail(self, error: BaseException) -> None:
        super().fail(RuntimeError("something went wrong"))


class StaysOpen(LocalBackend):
    def close(self) -> None:
        pass


class KeepsAThread(LocalBackend):
    ends: ClassVar[list[threading.Event]] = []

    def open(self, ranks: Sequence[int]) -> None:
        super().open(ranks)
        self.ends.append(threading.Event())
        threading.Thread(target=self.ends[-1].wait, name="keeper", daemon=True).start()


class KeepsASocket(LocalBackend):
    sockets: ClassVar[list[socket.socket]] = []

    def open(self, ranks: Sequence[int]) -> None:
        super().open(ranks)
        self.sockets += socket.socketpair()


class HasEveryRank(LocalBackend):
    def communicator(self, rank: int) -> LocalCommunicator:
        return self._communicators.get(rank, self._communicators[0])


Test = Callable[[BoxingConformance], None]

BROKEN: list[tuple[type[Any], Test, str]] = [
    (CountsTooLittle, BoxingConformance.test_a_sample_on_two_ranks, "bytes sent"),
    (SendsUncounted, BoxingConformance.test_a_sample_on_two_ranks, "0 bytes sent"),
    (IsWrongOnOneRank, BoxingConformance.test_a_sample_on_three_ranks, "rank 2: it holds wrong"),
    (SwapsTwoRanks, BoxingConformance.test_a_sample_on_two_ranks, "rank 1: it holds wrong"),
    (SpoilsItsInput, BoxingConformance.test_a_sample_on_two_ranks, "rank 1: its input was changed"),
    (SpoilsWhatItSends, BoxingConformance.test_a_sample_on_two_ranks, "its input was changed"),
    (MovesInHalfPrecision, BoxingConformance.test_a_sample_on_two_ranks, "wrong values"),
    (MovesInSinglePrecision, BoxingConformance.test_a_sample_on_two_ranks, "wrong values"),
    (WidensHalfPrecision, BoxingConformance.test_a_sample_on_two_ranks, "it holds torch.float32"),
    (ReadsPastGaps, BoxingConformance.test_a_sample_on_two_ranks, "wrong values"),
    (KnowsOneMeshAxis, BoxingConformance.test_a_sample_on_four_ranks, "several mesh axes at once"),
    (IsWrongForLargeTensors, BoxingConformance.test_a_sample_on_two_ranks, "wrong values"),
    (
        BlamesAnother,
        BoxingConformance.test_a_rank_that_does_not_come_again_to_a_collective_is_named,
        "was told of the missing ranks",
    ),
    (WaitsTooLong, BoxingConformance.test_a_sender_that_never_comes_is_named, "rank 1: "),
    (
        MixesWhatIsUnderWay,
        BoxingConformance.test_what_two_ranks_have_under_way_may_be_waited_for_in_any_order,
        "waited for last first, ",
    ),
    (
        ForgetsTags,
        BoxingConformance.test_messages_wait_for_their_receiver_and_find_it_by_their_tag,
        "rank 0 received",
    ),
    (
        TakesAnyShard,
        BoxingConformance.test_a_shard_of_another_shape_is_refused_and_does_no_harm,
        "was told",
    ),
    (IgnoresFailures, BoxingConformance.test_a_failure_unblocks_ranks_that_never_met, "was told"),
    (HidesReasons, BoxingConformance.test_a_failure_unblocks_ranks_that_are_connected, "was told"),
    (StaysOpen, BoxingConformance.test_a_closed_backend_says_so, "after the end"),
    (KeepsAThread, BoxingConformance.test_a_closed_backend_leaves_nothing_behind, "thread keeper"),
    (KeepsASocket, BoxingConformance.test_a_closed_backend_leaves_nothing_behind, "2 x socket"),
    (
        HasEveryRank,
        BoxingConformance.test_a_backend_has_no_communicator_for_ranks_of_others,
        "was told",
    ),
]


def suite_of(kind: type[Any]) -> Suite:
    if issubclass(kind, LocalBackend):
        return Suite(LocalCommunicator, kind)
    return Suite(kind, LocalBackend)


@pytest.fixture(autouse=True)
def _end_what_broken_backends_keep() -> Iterator[None]:
    yield
    for end in KeepsAThread.ends:
        end.set()
    for one in KeepsASocket.sockets:
        one.close()


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(
    ("kind", "test", "message"), BROKEN, ids=[kind.__name__ for kind, _, _ in BROKEN]
)
def test_a_broken_backend_fails_the_suite(kind: type[Any], test: Test, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        test(suite_of(kind))


@pytest.mark.slow
def test_the_unbroken_backend_passes_what_the_broken_ones_fail() -> None:
    for test in dict.fromkeys(test for _, test, _ in BROKEN):
        test(suite_of(LocalCommunicator))


def test_a_program_that_raises_is_no_pass() -> None:
    class Raises(LocalCommunicator):
        def collective(self, step: BoxingStep, shard: torch.Tensor, **rest: Any) -> torch.Tensor:
            raise ValueError("not a boxing error")

    with pytest.raises(ValueError, match="not a boxing error"):
        suite_of(Raises).test_a_sample_on_two_ranks()


def test_tests_that_want_more_than_there_is_are_skipped() -> None:
    class Small(BoxingConformance):
        rank_counts = (1, 2)

        def run_ranks(self, num_ranks: int, program: Program) -> list[Any]:
            raise AssertionError("nothing is run")

    with pytest.raises(SkipTest, match="at most 2 ranks"):
        Small().test_a_sample_on_three_ranks()
    with pytest.raises(SkipTest, match="no run_backends"):
        Small().test_a_closed_backend_says_so()


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_the_quick_cases_have_every_kind_dtype_and_placement(num_ranks: int) -> None:
    cases = quick_cases(num_ranks, DTYPES)

    steps = [step for case in cases for step in case.route.steps]
    places = {(case.source[0].rank_list, case.target[0].rank_list) for case in cases}
    manners = {(trial.donate, trial.strided) for trial in make_trials(cases)}
    assert {step.kind for step in steps} == set(StepKind)
    assert {case.kind for case in cases} == {None, *StepKind}
    assert {(step.kind, step.dtype) for step in steps} >= {
        (kind, dtype) for kind in StepKind for dtype in DTYPES
    }
    assert places >= {
        (before.rank_list, after.rank_list) for before, after in placement_pairs(num_ranks).values()
    }
    assert len(manners) == 4
    if num_ranks == 4:
        merged = {case.kind for case in cases if len(case.axes) == 2}
        assert len(merged) == 4
    assert len(set(cases)) > 300


@pytest.mark.parametrize("num_ranks", [4, 6])
def test_two_axes_have_every_pair_with_every_shape_and_dtype(num_ranks: int) -> None:
    cases = FAMILIES["two axes"](num_ranks, DTYPES)
    mesh = {4: (2, 2), 6: (2, 3)}[num_ranks]
    seen: dict[tuple[NdSbp, NdSbp], set[tuple[tuple[int, ...], str]]] = {}
    for case in cases:
        if case.source[0].mesh_shape == mesh and len(case.shape) == 2:
            pair = (case.source[1], case.target[1])
            seen.setdefault(pair, set()).add((case.shape, case.dtype))

    assert len(seen) == 36 * 35
    for pair, tensors in seen.items():
        adds = any(P in sbp for sbp in pair)
        assert len(tensors) == 3 * (len(DTYPES) - adds)


@pytest.mark.slow
def test_every_collective_is_made_by_hand_on_merged_axes() -> None:
    cases = FAMILIES["merged axes"](8, DTYPES)

    kinds = {(case.kind, case.axes) for case in cases if case.source[0].num_axes == 3}

    collectives = set(StepKind) - {StepKind.TRANSFER, StepKind.LOCAL}
    assert kinds >= {
        (kind, axes) for kind in collectives for axes in [(0, 1), (0, 2), (1, 2), (0, 1, 2)]
    }


def test_shapes_are_even_uneven_and_too_short() -> None:
    shapes = {case.shape for case in FAMILIES["one axis"](4, ("float32",))}

    assert shapes >= {(4, 8, 4), (5, 7, 6), (1, 3, 2), (0, 2, 3)}


@pytest.mark.parametrize("dtype", [*DTYPES, "float16", "int16", "uint8"])
def test_what_is_taken_apart_is_put_together(dtype: str) -> None:
    mesh = Placement.grid((2, 3), ("x", "y"))
    for sbp in (NdSbp(P("max"), S(1)), NdSbp(S(0), P("min")), NdSbp(S(1), S(1)), NdSbp(B, S(0))):
        state = (mesh, sbp)
        case = BoxingCase(shape=(3, 7), dtype=dtype, source=state, target=state)
        shards = source_shards(case)

        whole = gather({at: shards[rank] for rank, at in mesh.coordinates()}, sbp, (2, 3))

        assert torch.equal(whole, logical_tensor(case))
        assert whole.dtype == getattr(torch, dtype)


def test_copies_that_differ_are_no_tensor() -> None:
    shards = {(0,): torch.zeros(2), (1,): torch.ones(2)}

    with pytest.raises(AssertionError, match="copies along mesh axis 0"):
        gather(shards, NdSbp(B), (2,))


def test_a_sample_is_spread_and_never_repeats() -> None:
    cases = FAMILIES["one axis"](4, DTYPES)

    chosen = sample(cases, 50)

    assert len(set(chosen)) == 50
    assert len({case.shape for case in chosen}) >= 4
    assert sample(cases[:5], 50) == cases[:5]


def test_cases_are_counted_by_backend_and_ranks(caplog: pytest.LogCaptureFixture) -> None:
    counter, logger = CountCases(), logging.getLogger("sbp_torch.testing.boxing")
    logger.addHandler(counter)
    caplog.set_level(logging.INFO, "sbp_torch.testing.boxing")

    suite_of(LocalCommunicator).test_a_sample_on_two_ranks()
    logger.removeHandler(counter)

    (tally,) = counter.tallies
    assert (tally.backend, tally.num_ranks, tally.family) == ("broken", 2, "quick")
    assert tally.num_cases == len(quick_cases(2, DTYPES))
    assert f"broken, 2 ranks, quick: {tally.num_cases} cases" in caplog.text


def test_the_summary_adds_up_families() -> None:
    tallies = [
        CaseCount(backend=backend, num_ranks=num_ranks, family="f", num_cases=count, time_s=1.5)
        for backend, num_ranks, count in [("a", 2, 10), ("a", 2, 5), ("a", 4, 7), ("b", 2, 1)]
    ]

    lines = [line.split() for line in summary(tallies)]

    assert lines == [
        ["a", "2", "ranks", "15", "cases", "3.0", "s"],
        ["a", "4", "ranks", "7", "cases", "1.5", "s"],
        ["b", "2", "ranks", "1", "cases", "1.5", "s"],
        ["all", "23", "cases", "6.0", "s"],
    ]


def test_the_long_tests_carry_the_mark() -> None:
    marked = {
        name
        for name in dir(BoxingConformance)
        if name.startswith("test_")
        and any(
            mark.name == "exhaustive"
            for mark in getattr(getattr(BoxingConformance, name), "pytestmark", [])
        )
    }

    assert len(marked) == len(FAMILIES)
    assert all(name.startswith("test_every_") for name in marked)

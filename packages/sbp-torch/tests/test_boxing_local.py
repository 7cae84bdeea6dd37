"""The `local` backend: the conformance suite, failures, and what is left behind."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from sbp_core.boxing import BoxingStep, route, slices
from sbp_core.errors import BoxingError
from sbp_core.placement import Placement
from sbp_core.plugins.hooks import EmptyConfig
from sbp_core.sbp import B, NdSbp, P, S
from sbp_torch.boxing.execute import shard
from sbp_torch.boxing.local import LocalBackend, build
from sbp_torch.boxing.share import SharedStep
from sbp_torch.testing.boxing import BoxingConformance, Job, Program, use_communicator


def run_threads(backend: LocalBackend, num_ranks: int, program: Program) -> list[Any]:
    with ThreadPoolExecutor(num_ranks) as threads:
        futures = [
            threads.submit(program, rank, backend.communicator(rank)) for rank in range(num_ranks)
        ]
        return [future.result() for future in futures]


def opened(num_ranks: int) -> LocalBackend:
    backend = build(EmptyConfig())
    backend.open(range(num_ranks))
    return backend


def only_step(
    source: str, target: str, num_ranks: int = 2, shape: tuple[int, ...] = (4, 2)
) -> BoxingStep:
    mesh = Placement.grid((num_ranks,), ("x",))
    (step,) = route(
        shape, "float32", (mesh, NdSbp.parse(source)), (mesh, NdSbp.parse(target))
    ).steps
    return step


def transfer(sources: Sequence[int], targets: Sequence[int]) -> BoxingStep:
    before, after = Placement(list(sources), ("x",)), Placement(list(targets), ("x",))
    (step,) = route((4, 2), "float32", (before, NdSbp(S(0))), (after, NdSbp(S(0)))).steps
    return step


def caught(call: Callable[[], object]) -> BoxingError | None:
    try:
        call()
    except BoxingError as error:
        return error
    return None


@pytest.mark.timeout(1800)
class TestLocalConformance(BoxingConformance):
    name = "local"
    rank_counts = (1, 2, 3, 4, 5, 6, 7, 8)
    missing_deadline_s = 0.2
    copies_messages = False

    def run_ranks(self, num_ranks: int, program: Program) -> list[Any]:
        return self.run_backends(num_ranks, partial(use_communicator, program=program))

    def run_backends(self, num_ranks: int, job: Job) -> list[Any]:
        backend = opened(num_ranks)
        # Backends of several processes send jobs and results as bytes; so they must pickle.
        job = pickle.loads(pickle.dumps(job))
        try:
            with ThreadPoolExecutor(num_ranks) as threads:
                futures = [threads.submit(job, rank, backend) for rank in range(num_ranks)]
                results = [future.result() for future in futures]
            return [pickle.loads(pickle.dumps(result)) for result in results]
        finally:
            backend.close()


def test_the_time_to_wait_begins_when_the_result_is_asked_for() -> None:
    backend, step, ones = opened(2), only_step("P", "B"), torch.ones(4, 2)
    first, second = map(backend.communicator, (0, 1))
    pending = first.begin(step, ones, tag="t", deadline_s=5.0)
    pending._call.end_s -= 60.0  # as if this rank had computed for a minute

    late = threading.Timer(0.1, second.collective, (step, ones), {"tag": "t", "deadline_s": 5.0})
    late.start()

    assert torch.equal(pending.wait(), 2 * ones)
    late.join()
    backend.close()


def test_all_ranks_get_the_same_sum_without_copies() -> None:
    backend, step = opened(3), only_step("P", "B", 3)

    results = run_threads(
        backend,
        3,
        lambda rank, end: end.collective(
            step, torch.full((4, 2), float(rank)), tag="sum", deadline_s=5
        ),
    )

    assert all(result is results[0] for result in results)
    assert torch.equal(results[0], torch.full((4, 2), 3.0))


#: Depth of a tensor (5, 2, depth) that is small, and of one whose results are made in blocks.
SMALL, LARGE = 1, 20_000

#: Change -> elements that each of three ranks hands to others, by rank, of a tensor (5, 2, 1).
#: Of its rows the ranks have 2, 2 and 1, of its columns 1, 1 and 0.
HANDED_OVER: dict[tuple[str, str], tuple[int, int, int]] = {
    # Its addends of the parts of others, of 4, 3 and 3 elements, and the sum of its part to both.
    ("P", "B"): (3 + 3 + 2 * 4, 4 + 3 + 2 * 3, 4 + 3 + 2 * 3),
    ("P(max)", "B"): (14, 13, 13),
    # Its addends of the rows of others.
    ("P", "S(0)"): (2 * 3, 2 * 3, 2 * 4),
    # Of its columns; the last rank has none.
    ("P(min)", "S(1)"): (5, 5, 10),
    # Its rows, to both others.
    ("S(0)", "B"): (2 * 4, 2 * 4, 2 * 2),
    ("S(1)", "B"): (2 * 5, 2 * 5, 0),
    # Of its rows, the columns of others.
    ("S(0)", "S(1)"): (2, 2, 2),
    ("S(1)", "S(0)"): (3, 3, 0),
}


def handed_over(step: BoxingStep, num_ranks: int = 3) -> list[int]:
    """The bytes that each rank counts when a step is run on ones."""
    backend, shards = opened(num_ranks), shard(torch.ones(step.shape), *step.source)
    run_threads(
        backend,
        num_ranks,
        lambda rank, end: end.collective(step, shards[rank], tag="t", deadline_s=5),
    )
    return [backend.communicator(rank).sent_bytes for rank in range(num_ranks)]


@pytest.mark.parametrize("depth", [SMALL, LARGE])
@pytest.mark.parametrize(("source", "target"), HANDED_OVER)
def test_what_ranks_hand_over_is_counted_for_its_owner(
    source: str, target: str, depth: int
) -> None:
    counted = handed_over(only_step(source, target, 3, (5, 2, depth)))

    expected = [4 * depth * count for count in HANDED_OVER[source, target]]
    if target == "B" and depth == LARGE and "P" in source:
        # Of more elements the ranks sum more equal parts.
        assert sum(counted) == sum(expected)
        assert max(counted) - min(counted) <= 2 * 4
    else:
        assert counted == expected


@pytest.mark.parametrize("depth", [SMALL, LARGE])
@pytest.mark.parametrize(("source", "target"), HANDED_OVER)
def test_what_is_counted_does_not_depend_on_what_is_predicted(
    monkeypatch: pytest.MonkeyPatch, source: str, target: str, depth: int
) -> None:
    step = only_step(source, target, 3, (5, 2, depth))
    for formula in ("sent_bytes", "collective_bytes", "uniform_bytes"):
        monkeypatch.setattr(slices, formula, None)

    assert sum(handed_over(replace(step, size_bytes=7))) == step.size_bytes


def test_a_tag_may_be_used_again_and_nothing_is_left_behind() -> None:
    backend, step, letters = opened(2), only_step("P", "B"), transfer([0], [1])

    def program(rank: int, end: Any) -> list[float]:
        seen = []
        for number in range(200):
            part = torch.full((4, 2), float(number))
            seen.append(float(end.collective(step, part, tag="t", deadline_s=5)[0, 0]))
            if rank == 0:
                end.send(letters, part, tag="t", deadline_s=5)
            else:
                seen.append(float(end.receive(letters, None, tag="t", deadline_s=5)[0, 0]))
        return seen

    first, second = run_threads(backend, 2, program)

    assert first == [2.0 * number for number in range(200)]
    assert second == [value for number in range(200) for value in (2.0 * number, 1.0 * number)]
    assert not backend._rendezvous
    assert not backend._mail


def test_a_send_does_not_wait_and_letters_keep_their_order() -> None:
    backend, step = opened(2), transfer([0], [1])
    sender, receiver = backend.communicator(0), backend.communicator(1)

    for number in (1.0, 2.0):
        sender.send(step, torch.full((4, 2), number), tag="t", deadline_s=0.0)
    got = [receiver.receive(step, None, tag="t", deadline_s=1)[0, 0].item() for _ in range(2)]

    assert got == [1.0, 2.0]


def test_a_receiver_needs_its_own_shard_if_it_keeps_a_piece() -> None:
    backend, step = opened(3), transfer([0, 1], [1, 2])

    error = caught(lambda: backend.communicator(1).receive(step, None, tag="t", deadline_s=0.1))

    # Rank 1 holds rows 2 and 3 and must end with rows 0 and 1, so it keeps nothing and waits.
    assert error is not None
    assert "did not arrive: 0" in str(error)
    kept = transfer([1, 0], [1, 2])
    error = caught(lambda: backend.communicator(1).receive(kept, None, tag="t", deadline_s=1))
    assert error is not None
    assert "no shard" in str(error)


def test_a_latecomer_to_a_lost_collective_hears_of_it_at_once() -> None:
    backend, step = opened(2), only_step("P", "B")
    part = torch.ones(4, 2)
    ends = [backend.communicator(rank) for rank in range(2)]

    first = caught(lambda: ends[0].collective(step, part, tag="t", deadline_s=0.05))
    late = caught(lambda: ends[1].collective(step, part, tag="t", deadline_s=600))

    assert first is not None
    assert "did not arrive: 1" in str(first)
    assert late is not None
    assert "did not arrive: 1" in str(late)
    assert not backend._rendezvous


def test_different_steps_under_one_tag_are_refused_on_both_ranks() -> None:
    backend = opened(2)
    steps = [only_step("P", "B"), only_step("P", "S(0)")]

    errors = run_threads(
        backend,
        2,
        lambda rank, end: caught(
            lambda: end.collective(steps[rank], torch.ones(4, 2), tag="t", deadline_s=5)
        ),
    )

    for error in errors:
        assert "different steps" in str(error)
        assert "all-reduce" in str(error)
        assert "reduce-scatter" in str(error)


def test_a_shard_of_the_wrong_shape_fails_the_step_on_every_rank() -> None:
    backend, step = opened(2), only_step("P", "B")

    errors = run_threads(
        backend,
        2,
        lambda rank, end: caught(
            lambda: end.collective(step, torch.ones(4, 2 + rank), tag="t", deadline_s=5)
        ),
    )

    for error in errors:
        assert "rank 1 gives a shard of shape (4, 3)" in str(error)


def large_sum(num_ranks: int) -> tuple[BoxingStep, torch.Tensor]:
    mesh = Placement.grid((num_ranks,), ("x",))
    source, target = (mesh, NdSbp(P)), (mesh, NdSbp(B))
    (step,) = route((1500, 1000), "float32", source, target).steps
    return step, torch.ones(1500, 1000)


@pytest.mark.parametrize("num_helpers", [0, 1, 3])
def test_large_tensors_need_no_helpers_and_take_any(num_helpers: int) -> None:
    backend, (step, part) = opened(4), large_sum(4)
    backend._num_helpers = num_helpers

    results = run_threads(
        backend, 4, lambda _, end: end.collective(step, part, tag="t", deadline_s=5)
    )

    assert all(result is results[0] for result in results)
    assert torch.equal(results[0], 4 * part)


def test_a_rank_that_cannot_do_its_work_fails_the_step_on_every_rank(monkeypatch) -> None:
    backend, (step, part) = opened(3), large_sum(3)

    def fail(_: SharedStep) -> int:
        raise MemoryError("none left")

    monkeypatch.setattr(SharedStep, "do", fail)

    errors = run_threads(
        backend,
        3,
        lambda _, end: caught(lambda: end.collective(step, part, tag="t", deadline_s=5)),
    )

    for error in errors:
        assert "MemoryError: none left" in str(error)


@pytest.mark.parametrize("waits", ["collective", "receive"])
def test_a_failure_elsewhere_unblocks_those_who_wait(waits: str) -> None:
    backend = opened(2)
    end, cause = backend.communicator(1), RuntimeError("the disk is full")
    threading.Timer(0.1, backend.fail, [cause]).start()

    if waits == "collective":
        step = only_step("P", "B")
        error = caught(lambda: end.collective(step, torch.ones(4, 2), tag="t", deadline_s=600))
    else:
        step = transfer([0], [1])
        error = caught(lambda: end.receive(step, None, tag="t", deadline_s=600))

    assert error is not None
    assert "the disk is full" in str(error)
    assert error.__cause__ is cause


def test_a_closed_backend_refuses_calls_and_closes_twice() -> None:
    backend, step = opened(2), only_step("P", "B")

    backend.close()
    backend.close()

    with pytest.raises(BoxingError, match="closed"):
        backend.communicator(0).collective(step, torch.ones(4, 2), tag="t", deadline_s=1)


def test_ranks_that_are_not_there_are_refused() -> None:
    backend = opened(2)
    outside = transfer([0], [5])

    with pytest.raises(BoxingError, match="rank 7 is not on this backend"):
        backend.communicator(7)
    with pytest.raises(BoxingError, match="rank 5, which is not on this backend"):
        backend.communicator(0).send(outside, torch.ones(4, 2), tag="t", deadline_s=1)
    with pytest.raises(BoxingError, match="cannot open"):
        backend.open([0, 1])
    assert backend.local_ranks() == (0, 1)


def test_many_groups_of_one_mesh_do_not_mix() -> None:
    mesh = Placement.grid((2, 2), ("x", "y"))
    logical = torch.arange(8.0).reshape(4, 2)
    source, target = NdSbp(P, S(1)), NdSbp(B, S(1))
    (step,) = route((4, 2), "float32", (mesh, source), (mesh, target)).steps
    before, after = shard(logical, mesh, source), shard(logical, mesh, target)
    backend = opened(4)

    results = run_threads(
        backend, 4, lambda rank, end: end.collective(step, before[rank], tag="t", deadline_s=5)
    )

    assert all(torch.equal(results[rank], after[rank]) for rank in range(4))


def test_a_backend_whose_ranks_are_threads_starts_one_process():
    backend = LocalBackend()

    (spec,) = backend.launch_specs(3, ["program", "argument"])

    assert spec.command == ("program", "argument")
    assert spec.ranks == (0, 1, 2)

"""Agreement and fingerprints: two ranks that differ are both named, before any data moves."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from sbp_core.boxing.backend import BoxingBackend, Communicator, Delivered
from sbp_core.boxing.router import route
from sbp_core.boxing.slices import sent_bytes
from sbp_core.boxing.step import BoxingStep
from sbp_core.errors import BoxingError
from sbp_core.placement import Placement
from sbp_core.sbp import B, NdSbp, P, S, Sbp
from sbp_torch.boxing.local import LocalBackend
from sbp_torch.boxing.processes import agreement
from sbp_torch.boxing.processes.agreement import agree, gather_texts
from sbp_torch.boxing.processes.fingerprint import Fingerprinted

Life = Callable[[Communicator], object]


def only_step(
    before: Sbp,
    after: Sbp,
    sources: list[int],
    targets: list[int],
    shape: tuple[int, ...] = (4, 2),
    dtype: str = "float32",
) -> BoxingStep:
    source, target = Placement(sources, ("x",)), Placement(targets, ("x",))
    (step,) = route(shape, dtype, (source, NdSbp(before)), (target, NdSbp(after))).steps
    return step


def run(backend: BoxingBackend, lives: Sequence[Life]) -> list[object]:
    """Run a life on each rank; return what it returned, or the BoxingError that it raised."""
    backend.open(range(len(lives)))

    def live(rank: int) -> object:
        try:
            return lives[rank](backend.communicator(rank))
        except BoxingError as error:
            return error

    with ThreadPoolExecutor(len(lives)) as pool:
        results = list(pool.map(live, range(len(lives))))
    backend.close()
    return results


def run_checked(*lives: Life) -> list[object]:
    return run(Fingerprinted(LocalBackend()), lives)


def reduce(shape: tuple[int, ...] = (4, 2), dtype: str = "float32", tag: str = "grad") -> Life:
    step = only_step(P, B, [0, 1], [0, 1], shape, dtype)
    values = torch.ones(shape, dtype=getattr(torch, dtype))
    return lambda end: end.collective(step, values, tag=tag, deadline_s=10.0)


def gather() -> Life:
    step = only_step(S(0), B, [0, 1], [0, 1])
    return lambda end: end.collective(step, torch.ones(2, 2), tag="grad", deadline_s=10.0)


def test_ranks_that_mean_the_same_agree() -> None:
    texts: list[object] = run(
        LocalBackend(), [lambda end: agree(end, [0, 1, 2], "plan", "a1b2", 10.0)] * 3
    )

    assert texts == [None] * 3


def test_every_value_is_named_with_the_ranks_that_have_it() -> None:
    lives: list[Life] = [
        lambda end: agree(end, [0, 1, 2], "plan", "c3d4" if end.rank == 2 else "a1b2", 10.0)
    ] * 3

    for error in run(LocalBackend(), lives):
        assert isinstance(error, BoxingError)
        assert "values of plan: ranks 0, 1 have a1b2, rank 2 has c3d4" in error.what
        assert "config differs between the processes" in error.todo


def test_long_values_that_differ_at_their_ends_only_are_no_agreement() -> None:
    lives: list[Life] = [
        lambda end: agree(end, [0, 1], "config", "x" * 500 + str(end.rank), 10.0)
    ] * 2

    for error in run(LocalBackend(), lives):
        assert isinstance(error, BoxingError) and "values of config" in error.what


def test_a_rank_that_ends_the_run_by_a_difference_waits_until_all_have_seen_it() -> None:
    backend, has_ended = LocalBackend(), threading.Event()

    def ends(end: Communicator) -> object:
        found = gather_texts(end, [0, 1], "b", tag="t", width_bytes=1, deadline_s=10.0)
        backend.fail(BoxingError("the texts differ"))
        has_ended.set()
        return found

    def comes_late(end: Communicator) -> object:
        receive = end.receive

        def late(*args: object, **kwargs: object) -> object:
            has_ended.wait(0.5)
            return receive(*args, **kwargs)  # type: ignore[arg-type]

        end.receive = late  # type: ignore[method-assign]
        return gather_texts(end, [0, 1], "a", tag="t", width_bytes=1, deadline_s=10.0)

    assert run(backend, [comes_late, ends]) == [{0: "a", 1: "b"}] * 2


class OnADevice(Communicator):
    """Takes messages, and answers with those of another rank; its device has no data."""

    rank, sent_bytes, device = 0, 0, "meta"

    def __init__(self) -> None:
        self.sent: list[torch.Tensor] = []

    def collective(self, *args: object, **kwargs: object) -> torch.Tensor:
        raise NotImplementedError

    def send(self, step: object, shard: torch.Tensor, **kwargs: object) -> Delivered:
        self.sent.append(shard)
        return Delivered()

    def receive(self, *args: object, **kwargs: object) -> torch.Tensor:
        return torch.tensor([ord("x")], dtype=torch.uint8)


def test_texts_go_where_the_transport_takes_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "tensor_text", lambda values: "x")
    end = OnADevice()

    gather_texts(end, [0, 1], "x", tag="t", width_bytes=1, deadline_s=1.0)

    assert [shard.device.type for shard in end.sent] == ["meta"]


def test_a_rank_alone_agrees_with_itself_and_long_texts_are_cut_alike() -> None:
    def both(end: Communicator) -> object:
        agree(end, [end.rank], "plan", "mine", 1.0)
        return gather_texts(end, [1, 0], "ä" * end.rank, tag="t", width_bytes=3, deadline_s=10.0)

    assert run(LocalBackend(), [both] * 2) == [{1: "ä", 0: ""}] * 2


def test_steps_that_match_give_what_they_give_without_fingerprints() -> None:
    out, back = only_step(B, B, [0], [1]), only_step(B, B, [1], [0])

    def live(end: Communicator) -> object:
        total = reduce()(end)
        assert isinstance(total, torch.Tensor)
        mine, theirs = (out, back) if end.rank == 0 else (back, out)
        for number in range(3):
            end.send(mine, total + number, tag=f"message {number}", deadline_s=10.0)
        parts = [
            end.receive(theirs, None, tag=f"message {number}", deadline_s=10.0).mean().item()
            for number in (2, 0, 1)
        ]
        assert end.sent_bytes == sent_bytes(
            only_step(P, B, [0, 1], [0, 1]), end.rank
        ) + 3 * sent_bytes(mine, end.rank)
        return parts

    assert run_checked(live, live) == [[4.0, 2.0, 3.0]] * 2


@pytest.mark.parametrize(
    ("other", "sign"),
    [
        (reduce(shape=(2, 2)), "float32[2, 2]"),
        (reduce(dtype="float64"), "float64[4, 2]"),
        (reduce(tag="loss"), "'loss'"),
        (gather(), "all-gather"),
    ],
)
def test_both_sides_of_a_mismatch_are_named_on_both(other: Life, sign: str) -> None:
    for error in run_checked(reduce(), other):
        text = str(error)
        assert isinstance(error, BoxingError)
        assert "ranks 0, 1 are at different boxing steps" in text
        assert "rank 0: 'grad', all-reduce" in text and "float32[4, 2]" in text
        assert "rank 1: " in text and sign in text
        assert "call 0 of the group" in text


def test_a_message_of_another_kind_is_refused_by_its_receiver() -> None:
    sent, wanted = only_step(B, B, [0], [1]), only_step(B, B, [0], [1], dtype="int32")

    def send(end: Communicator) -> object:
        return end.send(sent, torch.ones(4, 2), tag="acts", deadline_s=10.0)

    def receive(end: Communicator) -> object:
        return end.receive(wanted, None, tag="acts", deadline_s=10.0)

    _, error = run_checked(send, receive)

    text = str(error)
    assert "ranks 0, 1 are at different boxing steps" in text
    assert "rank 0: 'acts', transfer" in text and "float32[4, 2]" in text
    assert "rank 1: 'acts', transfer" in text and "int32[4, 2]" in text


def test_a_message_that_never_comes_is_told_with_those_that_came() -> None:
    step = only_step(B, B, [0], [1])

    def send(end: Communicator) -> object:
        return end.send(step, torch.ones(4, 2), tag="activations", deadline_s=10.0)

    def receive(end: Communicator) -> object:
        return end.receive(step, None, tag="gradients", deadline_s=0.2)

    _, error = run_checked(send, receive)

    text = str(error)
    assert "rank 1 awaits: 'gradients'" in text
    assert "rank 0 has sent, and no rank has received: 'activations'" in text


def test_threads_of_one_rank_may_receive_at_once() -> None:
    step, tags = only_step(B, B, [0], [1]), [f"message {number}" for number in range(20)]

    def send(end: Communicator) -> object:
        for number, tag in enumerate(tags):
            end.send(step, torch.full((4, 2), float(number)), tag=tag, deadline_s=10.0)
        return None

    def receive(end: Communicator) -> object:
        found: dict[str, float] = {}

        def some(mine: list[str]) -> None:
            for tag in mine:
                found[tag] = end.receive(step, None, tag=tag, deadline_s=10.0).mean().item()

        threads = [threading.Thread(target=some, args=(tags[start::4],)) for start in (3, 1, 2, 0)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return found

    assert run_checked(send, receive)[1] == {tag: float(i) for i, tag in enumerate(tags)}


def test_the_wrapper_is_the_backend_in_all_else() -> None:
    backend = Fingerprinted(LocalBackend())
    assert not backend.spans_processes
    assert backend.launch_specs(2, ["program"]) == LocalBackend().launch_specs(2, ["program"])

    backend.open([0, 1])
    assert backend.local_ranks() == (0, 1)
    assert backend.communicator(1) is backend.communicator(1)
    with pytest.raises(BoxingError, match="rank 7 is not on this backend"):
        backend.communicator(7)
    with pytest.raises(BoxingError, match="transfer step is no collective"):
        backend.communicator(0).collective(
            only_step(B, B, [0], [1]), torch.ones(4, 2), tag="t", deadline_s=1.0
        )
    backend.fail(ValueError("loss is not a number"))
    with pytest.raises(BoxingError, match="the surviving ranks cannot reach each other"):
        backend.survivors(1.0)
    with pytest.raises(BoxingError, match="loss is not a number"):
        reduce()(backend.communicator(0))
    backend.close()

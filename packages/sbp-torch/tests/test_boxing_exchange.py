"""A backend of several processes without its transport: exchanges, and how everything breaks once.

The transport here is a table of messages in one process. Ranks run one after the other, so that a
rank only finds what those before it have sent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import pytest
import torch
from no_control_store import NoControlStore

from sbp_core.boxing import BoxingStep, StepKind, route
from sbp_core.boxing.collective_call import CollectiveCall
from sbp_core.errors import BoxingError
from sbp_core.placement import Placement
from sbp_core.processes.connections import Connections
from sbp_core.processes.process_backend import ProcessBackend
from sbp_core.sbp import NdSbp
from sbp_torch.boxing.execute import apply_step, shard
from sbp_torch.boxing.processes.exchange import Await, ExchangeCommunicator, Finish
from sbp_torch.boxing.processes.packed_buffer import PackedBuffers

Table = dict[tuple[int, int, str], torch.Tensor]


class TableConnections(Connections):
    def __init__(self, table: Table) -> None:
        super().__init__(NoControlStore())
        self.table = table
        self.told: list[str] = []
        self.num_releases = 0

    def _announce(self, text: str) -> None:
        self.told.append(text)

    def _release(self) -> None:
        self.num_releases += 1


class TableCommunicator(ExchangeCommunicator[TableConnections]):
    def __init__(self, table: Table, rank: int) -> None:
        super().__init__(TableConnections(table), rank, torch.device("cpu"))

    def _collective(
        self, call: CollectiveCall, ranks: tuple[int, ...], shard: torch.Tensor, donate: bool
    ) -> Finish:
        return self._exchange(call, ranks, shard)

    def _post(self, call: CollectiveCall, receiver: int, values: torch.Tensor) -> Await:
        self._connections.table[self.rank, receiver, call.tag] = values
        return lambda: None

    def _collect(self, call: CollectiveCall, arriving: Mapping[int, torch.Tensor]) -> Await:
        return partial(self._fill, call, arriving)

    def _fill(self, call: CollectiveCall, arriving: Mapping[int, torch.Tensor]) -> None:
        for sender, values in arriving.items():
            message = self._connections.table.get((sender, self.rank, call.tag))
            if message is None:
                raise self._connections.call_failed(call, call.missing([sender]))
            assert message.is_contiguous() and message.shape == values.shape
            values.copy_(message)

    def _exchange_buffers(
        self, call: CollectiveCall, ranks: tuple[int, ...], buffers: PackedBuffers
    ) -> Await:
        for rank, part in zip(ranks, buffers.sent.split(list(buffers.sent_sizes)), strict=True):
            self._post(call, rank, part)
            self.sent_bytes += part.nbytes if rank != self.rank else 0
        chunks = buffers.received.split(list(buffers.received_sizes))
        # In the first of two rounds the others have not sent yet.
        with_message = {
            rank: chunk
            for rank, chunk in zip(ranks, chunks, strict=True)
            if (rank, self.rank, call.tag) in self._connections.table
        }
        return self._collect(call, with_message)


class TableBackend(ProcessBackend):
    def _connect(self, ranks: Sequence[int]) -> tuple[TableConnections, TableCommunicator]:
        communicator = TableCommunicator({}, ranks[0])
        return communicator._connections, communicator


def only_step(source: str, target: str, sources: list[int], targets: list[int]) -> BoxingStep:
    before, after = Placement(sources, ("x",)), Placement(targets, ("x",))
    ends = (before, NdSbp.parse(source)), (after, NdSbp.parse(target))
    (step,) = route((5, 3), "float32", *ends).steps
    return step


def shards_of(step: BoxingStep) -> dict[int, torch.Tensor]:
    return shard(torch.arange(15.0).reshape(5, 3), *step.source)


@pytest.mark.parametrize(
    ("source", "target"), [("S(0)", "B"), ("S(0)", "S(1)"), ("P", "S(0)"), ("P('max')", "S(1)")]
)
def test_an_exchange_makes_the_shards_that_the_step_itself_makes(source: str, target: str) -> None:
    ranks, table = [2, 0, 1], Table()
    step = only_step(source, target, ranks, ranks)
    shards, expected = shards_of(step), apply_step(step, shards_of(step))
    communicators = {rank: TableCommunicator(table, rank) for rank in ranks}

    for _ in range(2):
        results = {
            rank: end.collective(step, shards[rank], tag="t", deadline_s=1.0)
            for rank, end in communicators.items()
        }

    assert step.kind is not StepKind.ALL_REDUCE
    for rank in ranks:
        assert torch.equal(results[rank], expected[rank])
    assert sum(end.sent_bytes for end in communicators.values()) == 2 * step.size_bytes


@pytest.mark.parametrize(
    ("source", "target"),
    [("B", "B"), ("B", "S(1)"), ("S(0)", "B"), ("S(0)", "S(1)"), ("S(1)", "S(1)"), ("P", "S(0)")],
)
def test_messages_make_the_shards_that_a_transfer_makes(source: str, target: str) -> None:
    step, table = only_step(source, target, [0, 1], [1, 2]), Table()
    shards, expected = shards_of(step), apply_step(step, shards_of(step))
    communicators = {rank: TableCommunicator(table, rank) for rank in (0, 1, 2)}

    for rank, part in shards.items():
        given = part.clone()
        communicators[rank].send(step, given, tag="t", deadline_s=1.0)
        given.zero_()  # what was sent is a copy
    results = {
        rank: communicators[rank].receive(step, shards.get(rank), tag="t", deadline_s=1.0)
        for rank in expected
    }

    for rank, part in expected.items():
        assert torch.equal(results[rank], part)
    assert sum(end.sent_bytes for end in communicators.values()) == step.size_bytes


def test_the_time_to_wait_begins_when_the_result_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    step, left_s = only_step("S(0)", "S(0)", [0], [1]), []

    def collect(call: CollectiveCall, arriving: Mapping[int, torch.Tensor]) -> Await:
        return lambda: left_s.append(call.left_s)

    receiver = TableCommunicator(Table(), 1)
    monkeypatch.setattr(receiver, "_collect", collect)
    pending = receiver.begin_receive(step, None, tag="t", deadline_s=5.0)
    pending._call.end_s -= 60.0  # as if this rank had computed for a minute
    pending.wait()

    (left,) = left_s
    assert left > 1.0


def test_a_group_of_one_rank_keeps_its_shard() -> None:
    mesh = Placement([4], ("x",))
    step = BoxingStep(
        kind=StepKind.ALL_REDUCE,
        shape=(2,),
        dtype="float32",
        source=(mesh, NdSbp.parse("P")),
        target=(mesh, NdSbp.parse("B")),
        axes=(0,),
        size_bytes=0,
    )
    given = torch.ones(2)

    assert TableCommunicator({}, 4).collective(step, given, tag="t", deadline_s=1.0) is given


def test_a_receiver_that_sends_too_must_bring_its_shard() -> None:
    step = only_step("S(0)", "S(1)", [0, 1], [1, 2])

    with pytest.raises(BoxingError, match="gave no shard to receive"):
        TableCommunicator({}, 1).receive(step, None, tag="t", deadline_s=1.0)


def test_the_first_failure_is_told_once_and_fails_all_later_calls() -> None:
    step, end = only_step("B", "B", [0], [1]), TableCommunicator({}, 1)

    with pytest.raises(BoxingError, match="did not arrive: 0"):
        end.receive(step, None, tag="first", deadline_s=1.0)
    end._connections.fail(ValueError("something else"))
    with pytest.raises(
        BoxingError, match=r"'second' could not complete.*did not arrive: 0"
    ) as late:
        end.receive(step, None, tag="second", deadline_s=1.0)

    (told,) = end._connections.told
    assert "'first'" in told
    assert late.value.__cause__ is not None and "'first'" in str(late.value.__cause__)


def test_a_call_that_breaks_second_says_what_broke_first() -> None:
    connections = TableConnections({})
    call = CollectiveCall.begin(only_step("B", "B", [0], [1]), "mine", 1, 1.0)
    connections.fail(ValueError("loss is not a number"))

    error = connections.call_failed(call, call.missing([0]))

    assert "'mine' could not complete: ValueError: loss is not a number" in str(error)
    assert connections.told == ["ValueError: loss is not a number"]


def test_an_error_without_words_is_told_by_its_type() -> None:
    connections = TableConnections({})

    connections.fail(KeyboardInterrupt())

    assert connections.told == ["KeyboardInterrupt"]


def test_closed_connections_are_released_once_and_tell_of_no_failure() -> None:
    connections = TableConnections({})
    call = CollectiveCall.begin(only_step("B", "B", [0], [1]), "late", 1, 1.0)

    connections.close()
    connections.close()
    connections.fail(ValueError("too late"))

    assert connections.num_releases == 1 and connections.told == []
    with pytest.raises(BoxingError, match=r"'late' could not complete: .*closed"):
        connections.check_usable(call)


def test_a_backend_has_its_rank_while_it_is_open_and_opens_once() -> None:
    backend = TableBackend()
    backend.fail(ValueError("nobody hears this"))

    with pytest.raises(BoxingError, match="rank 3 does not run in this process"):
        backend.communicator(3)
    assert backend.local_ranks() == ()
    backend.open([3, 4])
    assert backend.local_ranks() == (3,)
    assert backend.communicator(3).rank == 3
    with pytest.raises(BoxingError, match="rank 4 does not run in this process"):
        backend.communicator(4)
    with pytest.raises(BoxingError, match="opened before"):
        backend.open([3, 4])


def test_a_backend_that_was_closed_does_not_open() -> None:
    backend = TableBackend()

    backend.close()

    with pytest.raises(BoxingError, match="opened before"):
        backend.open([0])

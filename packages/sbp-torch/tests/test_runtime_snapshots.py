"""Copies that snapshots make: in which order, by whom, in which memory, and what is not copied."""

from __future__ import annotations

import mmap
import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from sbp_core.boxing import itemsize
from sbp_core.compile import first_overwrites
from sbp_core.compile.actors import Compute, Instruction
from sbp_core.errors import RunError
from sbp_core.graph import Phase, Rate, Ref
from sbp_core.runtime import StatePiece, StateSlice
from sbp_torch.runtime.devices import HostCopy, RankDevice
from sbp_torch.runtime.store import StateStore
from sbp_torch.segments.codegen import telling_segment_function
from sbp_torch.testing.cases import CASES, assert_pieces, compile_case

#: Seconds after which a test gives up: none waits so long on the slowest machine.
_HANGS_S = 120.0


class ObservedDevice(RankDevice):
    """Notes the memory that it copies, and lets a test hold or refuse a copy."""

    def __init__(self) -> None:
        self.copied: list[int] = []
        self.threads: set[str] = set()
        self.held: dict[int, threading.Event] = {}
        self.refused: set[int] = set()

    def copy_aside(self, value: Tensor, since: Any, buffer: Tensor | None) -> HostCopy:
        if value.data_ptr() in self.held:
            assert self.held[value.data_ptr()].wait(_HANGS_S)
        if value.data_ptr() in self.refused:
            raise MemoryError("not enough memory")
        self.copied.append(value.data_ptr())
        self.threads.add(threading.current_thread().name)
        return super().copy_aside(value, since, buffer)


def _store(name: str, *, in_place: bool = True) -> tuple[StateStore, ObservedDevice]:
    store = StateStore(compile_case(name, in_place_states=in_place), range(4))
    store.device = device = ObservedDevice()
    store.load(CASES[name].step.states)
    return store, device


def _address(store: StateStore, part: tuple[int, str]) -> int:
    value = store.values[part[0]][part[1]]
    assert isinstance(value, Tensor)
    return value.data_ptr()


@pytest.mark.slow
def test_copies_are_made_in_the_order_in_which_updates_overwrite() -> None:
    store, device = _store("sharded states")
    told: list[tuple[int, int, str]] = []
    for part in store.plan.ranks:
        names = [name for order in part.orders.values() for name, _ in order]
        for place, actor in ((names.index(a.name), a) for a in part.actors if a.in_place):
            assert isinstance(actor, Compute)
            inside = [name for _, states in first_overwrites(actor).items() for name in states]
            outside = [name for name in actor.in_place if name not in inside]
            told += [(place, part.rank, name) for name in (*inside, *outside)]

    list(store.snapshot(0).pieces())

    assert len(device.copied) > 10
    for rank in range(4):
        mine = {_address(store, (r, n)): n for r, n in store.layout.overwritten if r == rank}
        found = [mine[address] for address in device.copied if address in mine]
        assert found == [name for _, r, name in sorted(told, key=lambda t: t[0]) if r == rank]
    assert device.threads == {"sbp snapshot"}


@pytest.mark.slow
def test_a_state_that_no_update_overwrites_is_not_copied() -> None:
    store, device = _store("sharded states", in_place=False)
    threads = set(threading.enumerate())

    pieces = list(store.snapshot(0).pieces())

    held = [value for values in store.values.values() for value in values.values()]
    assert all(any(piece.value is value for value in held) for piece in pieces)
    assert device.copied == []
    assert set(threading.enumerate()) == threads


def test_memory_of_a_released_snapshot_is_used_by_the_next() -> None:
    store, _ = _store("sharded states")
    addresses = []
    for index in range(3):
        with store.snapshot(index) as snapshot:
            values = [piece.value for piece in snapshot.pieces()]
            addresses.append({v.data_ptr() for v in values if isinstance(v, Tensor)})
    with store.snapshot(3) as one, store.snapshot(3) as other:
        both = [{p.value.data_ptr() for p in s.pieces() if p.shape} for s in (one, other)]

    assert addresses[0] == addresses[1] == addresses[2]
    assert both[0].isdisjoint(both[1])


@pytest.mark.parametrize("name", ["data parallel", "data and tensor parallel"])
def test_ranks_own_and_copy_parts_of_what_they_hold(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sbp_core.runtime.ownership.SHARE_BYTES", 64)
    store = StateStore(compile_case(name), compile_case(name).by_rank)
    states = CASES[name].step.states
    store.load(states)

    pieces = list(store.pieces())
    with store.snapshot(0) as snapshot:
        for part in store.layout.overwritten:
            before_overwrite = store.copier.before_overwrite(part[0])
            if before_overwrite is not None:
                before_overwrite(part[1])
        assert_pieces(pieces, states)
        for value in _tensors(store):
            value.zero_()
        assert_pieces(snapshot.pieces(), states)

    owned = {p.bounds for p in pieces if p.name == "up.weight"}
    assert len(owned) == len(store.values), "each rank owns a part"
    assert all(
        piece.value.untyped_storage().data_ptr()
        in {value.untyped_storage().data_ptr() for value in _tensors(store)}
        for piece in pieces
        if isinstance(piece.value, Tensor)
    ), "a copy"


def _tensors(store: StateStore) -> list[Tensor]:
    return [v for held in store.values.values() for v in held.values() if isinstance(v, Tensor)]


def test_an_update_makes_the_copy_that_it_needs_and_waits_for_no_other() -> None:
    store, device = _store("sharded states")
    first, *_, last = store.layout.overwritten
    opening = device.held[_address(store, first)] = threading.Event()
    snapshot = store.snapshot(0)

    before_overwrite = store.copier.before_overwrite(last[0])
    assert before_overwrite is not None
    before_overwrite(last[1])  # the thread is still at the first
    wanted = store.values[last[0]][last[1]].clone()
    store.values[last[0]][last[1]].zero_()
    opening.set()

    found = next(
        p for p in snapshot.pieces() if p.name == last[1] and _is_of(store, last, p.bounds)
    )
    assert torch.equal(found.value, wanted)


def _is_of(store: StateStore, part: tuple[int, str], bounds: object) -> bool:
    return (*part, bounds) in store.layout.owned


def test_when_all_is_copied_a_step_has_nothing_to_wait_for() -> None:
    store, _ = _store("sharded states")
    snapshot = store.snapshot(0)
    list(snapshot.pieces())
    store.close()  # waits for the thread

    assert store.copier.before_overwrite(0) is None


def test_a_copy_that_cannot_be_made_fails_the_snapshot_and_not_the_step() -> None:
    store, device = _store("sharded states")
    rank, name = next(iter(store.layout.overwritten))
    device.refused.add(_address(store, (rank, name)))
    snapshot = store.snapshot(7)

    before_overwrite = store.copier.before_overwrite(rank)
    if before_overwrite is not None:
        before_overwrite(name)
    with pytest.raises(RunError, match=f"after step 7 has no copy of '{name}': not enough memory"):
        list(snapshot.pieces())


class Event:
    """Of a copy by the device, which is made when a test says so."""

    def __init__(self) -> None:
        self.happened = threading.Event()

    def synchronize(self) -> None:
        assert self.happened.wait(_HANGS_S)


class AsynchronousDevice(RankDevice):
    """Copies when told to, as a stream of a GPU would; notes what later work has to follow."""

    def __init__(self) -> None:
        self.started: list[tuple[Tensor, Tensor, Event]] = []
        self.followed: list[Event] = []

    def copy_aside(self, value: Tensor, since: Any, buffer: Tensor | None) -> HostCopy:
        copy, event = torch.zeros_like(value), Event()
        self.started.append((copy, value, event))
        return HostCopy(copy, event)

    def follow(self, copy: HostCopy) -> None:
        self.followed.append(copy.done)

    def run(self) -> None:
        for copy, value, event in self.started:
            copy.copy_(value)
            event.happened.set()


def test_on_a_device_the_update_follows_copies_that_are_only_started() -> None:
    store, _ = _store("sharded states")
    store.copier.device = device = AsynchronousDevice()
    snapshot = store.snapshot(0)
    _wait_until(lambda: len(device.started) == len(store.layout.overwritten))

    for rank, name in store.layout.overwritten:
        before_overwrite = store.copier.before_overwrite(rank)
        assert before_overwrite is not None, "they are only started"
        before_overwrite(name)
    device.run()

    assert {id(event) for event in device.followed} == {id(event) for *_, event in device.started}
    pieces = [p for p in snapshot.pieces() if isinstance(p.value, Tensor)]
    assert sum(bool(piece.value.any()) for piece in pieces) > 3
    store.close()
    assert store.copier.before_overwrite(0) is None


def test_releasing_a_snapshot_ends_its_copies() -> None:
    store, device = _store("sharded states")
    first = next(iter(store.layout.overwritten))
    opening = device.held[_address(store, first)] = threading.Event()
    snapshot = store.snapshot(0)
    _wait_until(lambda: first in snapshot._begun)
    with ThreadPoolExecutor(1) as reader:
        reading = reader.submit(lambda: list(snapshot.pieces()))
        snapshot.release()
        opening.set()
        with pytest.raises(RunError, match="was released"):
            reading.result()
    # The copy that was under way when it was released leaves its memory to the next.
    _wait_until(lambda: store.copier._kept_bytes == _owned(store, first).nbytes)
    store.close()

    assert len(device.copied) <= 1


def _sizes(store: StateStore) -> dict[tuple[int, str], int]:
    return {part: _owned(store, part).nbytes for part in store.layout.overwritten}


def _owned(store: StateStore, part: tuple[int, str]) -> Tensor:
    value = store.layout.owned_part(part, store.values[part[0]][part[1]])
    assert isinstance(value, Tensor)
    return value


def _update(store: StateStore, part: tuple[int, str]) -> None:
    """Overwrite a state as a step would."""
    before_overwrite = store.copier.before_overwrite(part[0])
    if before_overwrite is not None:
        before_overwrite(part[1])
    store.values[part[0]][part[1]].fill_(-1.0)


def _wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + _HANGS_S
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.001)


def test_with_a_limit_the_thread_waits_until_what_it_has_copied_is_read() -> None:
    store, device = _store("sharded states")
    sizes = _sizes(store)
    most = max(sizes.values())
    snapshot = store.snapshot(0, limit_bytes=most)
    pieces = snapshot.pieces()

    for index, _ in enumerate(pieces):
        _wait_until(lambda: snapshot._is_full or not snapshot._is_awaited)
        assert index or len(device.copied) < len(sizes)
        assert snapshot._held_bytes + store.copier._kept_bytes <= most
        assert device.copied == [
            _address(store, part) for part in list(sizes)[: len(device.copied)]
        ]

    assert len(device.copied) == len(sizes)
    assert_pieces([*store.pieces()], CASES["sharded states"].step.states)
    with pytest.raises(RunError, match="the snapshot was read"):
        list(snapshot.pieces())


def test_an_update_waits_for_room_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("sbp_torch.runtime.snapshots.TOLD_S", 0.01)
    store, _ = _store("sharded states")
    sizes = _sizes(store)
    states = CASES["sharded states"].step.states
    *_, last = sizes
    snapshot = store.snapshot(4, limit_bytes=max(sizes.values()))
    _wait_until(lambda: snapshot._is_full)  # or the update would come first, and find room
    with ThreadPoolExecutor(1) as rank:
        updating = rank.submit(_update, store, last)
        _wait_until(lambda: bool(caplog.records))
        is_kept = not (store.values[last[0]][last[1]] == -1.0).any()
        assert not updating.done()

        found = [replace(p, value=torch.as_tensor(p.value).clone()) for p in snapshot.pieces()]
        updating.result(_HANGS_S)

    assert is_kept
    assert (store.values[last[0]][last[1]] == -1.0).all()
    assert_pieces(found, states)
    (record,) = caplog.records
    assert record.getMessage() == (
        "the update after step 4 waits until more of its checkpoint is written: copies of states "
        f"may take {max(sizes.values())} B (trainer.checkpoint.copy_bytes)"
    )


def test_an_update_for_which_others_wait_too_long_goes_beyond_the_limit(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store, _ = _store("sharded states")
    states = CASES["sharded states"].step.states
    snapshot = store.snapshot(4, limit_bytes=0, patience_s=0.01)

    for part in store.layout.overwritten:  # nobody reads
        _update(store, part)

    assert_pieces(snapshot.pieces(), states)
    (record,) = caplog.records
    assert re.search(
        r"has waited \d+ s for free space: copies now go beyond 0 B", record.getMessage()
    )


def test_what_has_no_room_is_read_where_it_is_and_its_update_waits() -> None:
    store, device = _store("sharded states")
    states = CASES["sharded states"].step.states
    snapshot = store.snapshot(0, limit_bytes=0)
    found = []
    with ThreadPoolExecutor(1) as rank:
        updating: list[Future[None]] = []
        for piece in snapshot.pieces():
            overwritten = store.layout.overwritten
            part = next((p for p in overwritten if _holds(store, p, piece.value)), None)
            if part is not None:
                updating.append(rank.submit(_update, store, part))
                assert not updating[-1].done()
            found.append(replace(piece, value=torch.as_tensor(piece.value).clone()))
        for one in updating:
            one.result(_HANGS_S)

    assert device.copied == []
    assert len(updating) == len(store.layout.overwritten)
    assert_pieces(found, states)
    assert all((_owned(store, part) == -1.0).all() for part in store.layout.overwritten)


def _holds(store: StateStore, part: tuple[int, str], value: object) -> bool:
    return isinstance(value, Tensor) and _owned(store, part).data_ptr() == value.data_ptr()


def test_the_end_waits_for_no_room() -> None:
    store, device = _store("sharded states")
    snapshot = store.snapshot(0, limit_bytes=0)

    store.close()

    assert_pieces(snapshot.pieces(), CASES["sharded states"].step.states)
    assert device.copied == []


def test_one_thread_copies_whatever_count_the_process_has_set() -> None:
    counts: list[int] = []

    class Counting(ObservedDevice):
        def copy_aside(self, value: Tensor, since: Any, buffer: Tensor | None) -> HostCopy:
            counts.append(torch.get_num_threads())
            return super().copy_aside(value, since, buffer)

    store, _ = _store("sharded states")
    store.device = Counting()
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        list(store.snapshot(0).pieces())
        store.close()
        with ThreadPoolExecutor(1) as later:
            counted = later.submit(torch.get_num_threads).result(_HANGS_S)
    finally:
        torch.set_num_threads(before)

    assert set(counts) == {1}
    assert counted == 2


def test_a_large_copy_has_pages_of_its_own() -> None:
    for count in (2**18, 2**18 + 3):
        value = torch.arange(count, dtype=torch.float32)

        copy = RankDevice().copy_aside(value, None, None).value

        assert copy.data_ptr() % mmap.PAGESIZE == 0
        assert torch.equal(copy, value)


def test_slices_are_what_pieces_yields_and_large_elements_come_first() -> None:
    for name in ("sharded states", "running statistics"):
        store = StateStore(compile_case(name), compile_case(name).by_rank)
        store.load(CASES[name].step.states)
        with store.snapshot(0) as snapshot:
            slices = snapshot.slices()
            pieces = [StateSlice(**_place(piece)) for piece in snapshot.pieces()]

        assert pieces == slices
        sizes = [itemsize(one.dtype) for one in slices]
        assert sizes == sorted(sizes, reverse=True)


def _place(piece: StatePiece) -> dict[str, Any]:
    return {key: getattr(piece, key) for key in ("name", "shape", "dtype", "bounds")}


def test_a_segment_tells_of_each_state_just_before_it_overwrites_it() -> None:
    def call(op: str, takes: str, makes: str) -> Instruction:
        return Instruction(op=op, args=tuple(map(Ref, takes.split())), outputs=(makes,), node=makes)

    actor = Compute(
        name="optimizer", stage=0, phase=Phase.OPTIMIZER, rate=Rate.STEP, thread="compute",
        inputs=("g",), reads=("v", "w"), writes=(("v", "b"), ("w", "d")), in_place=("v", "w"),
        instructions=(
            call("aten.mul_.Tensor", "v g", "a"),
            call("aten.add_.Tensor", "a g", "b"),
            call("aten.neg.default", "b", "c"),
            call("aten.copy_.default", "w c", "d"),
        ),
    )  # fmt: skip
    g, v, w = (torch.full((2,), value) for value in (3.0, 5.0, 7.0))
    told: list[tuple[str, float, float]] = []

    made = telling_segment_function(actor, 0, ())(
        [g, v, w], lambda name: told.append((name, v[0].item(), w[0].item()))
    )

    assert told == [("v", 5.0, 7.0), ("w", 18.0, 7.0)]
    assert [value[0].item() for value in made] == [18.0, -18.0]

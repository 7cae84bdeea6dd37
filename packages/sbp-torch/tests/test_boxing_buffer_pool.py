"""Memory that is used again: only when nobody holds it, and not without end."""

from __future__ import annotations

import gc
import threading

import torch

from sbp_torch.boxing import buffer_pool as module
from sbp_torch.boxing.buffer_pool import SMALLEST_BYTES, BufferPool

LIKE = torch.zeros(1)
SHAPE = (SMALLEST_BYTES, 2)


def test_memory_is_used_again_once_nobody_holds_it() -> None:
    pool = BufferPool()
    first = pool.empty(SHAPE, LIKE)
    address = first.data_ptr()

    del first
    again = pool.empty(SHAPE, LIKE)

    assert again.data_ptr() == address
    assert again.shape == SHAPE
    assert again.dtype == torch.float32


def test_a_view_keeps_the_memory_of_the_whole() -> None:
    pool = BufferPool()
    whole = pool.empty(SHAPE, LIKE).fill_(1.0)
    part = whole[3:5].detach().t()

    del whole
    gc.collect()
    other = pool.empty(SHAPE, LIKE).fill_(2.0)

    assert torch.equal(part, torch.ones(2, 2))
    assert other.data_ptr() + 3 * 2 * 4 != part.data_ptr()


def test_two_tensors_that_are_held_have_memory_of_their_own() -> None:
    pool = BufferPool()
    # Equal bytes, of which the pool must not mistake one for the other.
    one, other = pool.empty(SHAPE, LIKE), pool.empty(SHAPE, LIKE)
    first, second = one.data_ptr(), other.data_ptr()

    del one
    third = pool.empty(SHAPE, LIKE)

    assert first != second
    assert third.data_ptr() == first


def test_another_dtype_of_as_many_bytes_takes_the_same_memory() -> None:
    pool = BufferPool()
    address = pool.empty(SHAPE, LIKE).data_ptr()

    taken = pool.empty((SMALLEST_BYTES, 4), LIKE.to(torch.bfloat16))

    assert taken.data_ptr() == address
    assert taken.dtype == torch.bfloat16


def test_small_and_empty_tensors_are_left_to_the_allocator() -> None:
    pool = BufferPool()

    for shape in [(), (0, 5), (3, 3)]:
        assert pool.empty(shape, LIKE).shape == shape
    assert not pool._free


def test_what_nobody_uses_is_bounded(monkeypatch) -> None:
    monkeypatch.setattr(module, "_KEPT_BYTES", 2 * SMALLEST_BYTES)
    pool = BufferPool()
    held = [pool.empty((SMALLEST_BYTES,), LIKE.to(torch.uint8)) for _ in range(5)]

    held.clear()

    assert len(pool._free) == 2
    pool.clear()
    assert not pool._free


def test_threads_may_take_and_drop_at_the_same_time() -> None:
    pool, wrong = BufferPool(), []

    def work(value: int) -> None:
        for _ in range(100):
            taken = pool.empty(SHAPE, LIKE).fill_(value)
            if taken.min() != value or taken.max() != value:
                wrong.append(value)

    threads = [threading.Thread(target=work, args=(value,)) for value in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert not wrong
    assert len(pool._free) <= 8, "a thread holds two at most: it takes one, then drops the other"


def test_the_collector_may_give_a_block_back_while_one_is_looked_for() -> None:
    pool = BufferPool()
    many = [pool.empty(SHAPE, LIKE) for _ in range(30)]
    del many
    before = gc.get_threshold()
    try:
        for num_objects in range(1, 60):
            gc.collect(0)
            gc.disable()
            cycle: list[object] = [pool.empty(SHAPE, LIKE)]
            cycle.append(cycle)
            del cycle
            # The collector runs, and finds the cycle, when so many objects have been made.
            gc.set_threshold(num_objects)
            gc.enable()
            pool.empty((SMALLEST_BYTES, 1), LIKE)
    finally:
        gc.set_threshold(*before)
        gc.enable()

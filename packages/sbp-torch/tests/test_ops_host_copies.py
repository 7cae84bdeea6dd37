"""Copies of offloaded states: tensors of their own, and on a GPU those that have arrived."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sbp_torch.ops.host_copies import to_device, to_host, to_host_

_CPU = torch.device("cpu")


def _state() -> Tensor:
    return torch.arange(6.0).view(2, 3)


def test_a_fetched_state_is_a_copy_of_its_own() -> None:
    state = _state()

    made = to_device(state, device=_CPU)

    assert torch.equal(made, state)
    assert made.data_ptr() != state.data_ptr()


def test_a_stored_value_lies_in_memory_of_its_own_or_in_that_of_the_state() -> None:
    state, value = _state(), _state().neg()

    beside = to_host(state, value)

    assert torch.equal(state, _state())
    assert torch.equal(beside, value)
    assert beside.data_ptr() != value.data_ptr()
    assert to_host_(state, value) is state
    assert torch.equal(state, value)


@pytest.mark.parametrize("copy", [lambda s: to_device(s, device=_CPU), lambda s: to_host(s, s)])
def test_copies_lie_in_order(copy) -> None:  # type: ignore[no-untyped-def] # of two functions
    assert copy(_state().t()).is_contiguous()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_copies_to_and_from_pinned_memory_in_the_order_of_its_work() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    state = torch.zeros(1 << 22).pin_memory()

    for turn in range(20):
        fetched = to_device(state, device=device)
        assert fetched.device == device
        # Work that takes a while is on the default stream when the copy back is asked for.
        made = fetched + 1
        for _ in range(50):
            made = made * 1.0
        assert to_host_(state, made) is state
        # The host has waited for it.
        assert state[0] == state[-1] == turn + 1
    beside = to_host(state, torch.ones_like(made))
    assert beside.is_pinned() and not beside.is_cuda
    assert beside.sum() == len(beside)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_memory_of_what_was_fetched_is_free_again() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    state = torch.zeros(1 << 22).pin_memory()
    before = torch.cuda.memory_allocated(device)

    for _ in range(8):
        to_host_(state, to_device(state, device=device).add_(1))

    assert torch.cuda.memory_allocated(device) == before
    assert torch.cuda.max_memory_allocated(device) <= before + 3 * state.nbytes

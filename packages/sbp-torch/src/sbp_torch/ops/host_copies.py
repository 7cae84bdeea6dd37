"""Copies of offloaded states between the memory of the host and the device.

    sbp.to_device(state, device=...)   -> the state on the device
    sbp.to_host(state, value)          -> the value, in the memory of the host as the state is
    sbp.to_host_(state, value)         -> the state, which has the value now

Only plans name these, so PyTorch need not know them. On a GPU each direction has a stream of its
own, and the host waits for the copy: what an actor hands on is there, and what it gives back is
free. Its thread is there for nothing else, and the others go on.

    default stream     backward ...........  update 1    update 2
    to the device                    fetch 1     fetch 2
    to the host                                      store 1    store 2

On a CPU they are copies in its memory.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor


def to_device(state: Tensor, *, device: torch.device) -> Tensor:
    """Return a state on a device, in memory of its own and in order; it is there.

    Args:
        state: In the memory of the host.
        device: The kind of device: of those of a kind, the one that is current.
    """
    if device.type != "cuda" or not _is_real(state):
        where = device if _is_real(state) else state.device
        return torch.empty(state.shape, dtype=state.dtype, device=where).copy_(state)
    stream = _stream(torch.cuda.current_device(), "to the device")
    with torch.cuda.stream(stream):
        made = torch.empty(state.shape, dtype=state.dtype, device=stream.device)
        made.copy_(state, non_blocking=True)
        done = _stream_event(stream)
    done.synchronize()
    # Made on this stream, used on the default one: it must not be given away before.
    made.record_stream(torch.cuda.default_stream(stream.device))
    return made


def to_host(state: Tensor, value: Tensor) -> Tensor:
    """Return the new value of a state, in the memory of the host and in order; it is there."""
    if not (_is_real(state) and state.is_pinned()):
        return to_host_(torch.empty_like(state, memory_format=torch.contiguous_format), value)
    return to_host_(torch.empty(state.shape, dtype=state.dtype, pin_memory=True), value)


def to_host_(state: Tensor, value: Tensor) -> Tensor:
    """Write a value over a state in the memory of the host, and return this; it is there."""
    if not value.is_cuda or not _is_real(value):
        return state.copy_(value)
    stream = _stream(value.device.index, "to the host")
    # The value is put onto the default stream, and made when all that is there is done.
    stream.wait_event(torch.cuda.default_stream(value.device).record_event())
    with torch.cuda.stream(stream):
        state.copy_(value, non_blocking=True)
        done = _stream_event(stream)
    done.synchronize()
    return state


#: Those that plans name.
HOST_COPIES: dict[str, Callable[..., Tensor]] = {
    "sbp.to_device.default": to_device,
    "sbp.to_host.default": to_host,
    "sbp.to_host_.default": to_host_,
}


def _is_real(value: Tensor) -> bool:
    """Whether a tensor has data: plans are checked on tensors without."""
    return type(value) in (Tensor, torch.nn.Parameter)


@cache
def _stream(index: int, direction: str) -> Any:
    """Return the stream of a GPU for one direction."""
    return torch.cuda.Stream(torch.device("cuda", index))  # type: ignore[no-untyped-call] # torch leaves it untyped


def _stream_event(stream: Any) -> Any:
    """Return the moment after all work of a stream, which the host can wait for asleep."""
    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call] # torch leaves it untyped
    event.record(stream)
    return event

"""Copy offloaded states, which a plan keeps in host memory, to the device and back.

    sbp.to_device(state, device=...)   -> the state on the device
    sbp.to_host(state, value)          -> the value, in the memory of the host like the state
    sbp.to_host_(state, value)         -> the state, overwritten with the value

Only plans name these operators, so they are not registered with PyTorch. On a GPU, each direction
has its own stream, and the host waits for the copy: an actor then passes on a finished copy and
frees its input safely. The thread that waits serves only these copies; other threads continue.

    default stream     backward ...........  update 1    update 2
    to the device                    fetch 1     fetch 2
    to the host                                      store 1    store 2

On a CPU, these operators copy within its memory.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor


def to_device(state: Tensor, *, device: torch.device) -> Tensor:
    """Return a contiguous copy of a state on a device, after the copy is finished.

    Args:
        state: A state in the memory of the host.
        device: The kind of device; the current device of this kind is used.
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
    # This stream made it and the default stream uses it: its memory must not be reused before.
    made.record_stream(torch.cuda.default_stream(stream.device))
    return made


def to_host(state: Tensor, value: Tensor) -> Tensor:
    """Return a contiguous copy of a new state in the memory of the host, after it is finished."""
    if not (_is_real(state) and state.is_pinned()):
        return to_host_(torch.empty_like(state, memory_format=torch.contiguous_format), value)
    return to_host_(torch.empty(state.shape, dtype=state.dtype, pin_memory=True), value)


def to_host_(state: Tensor, value: Tensor) -> Tensor:
    """Overwrite a state in the memory of the host, and return it after the copy is finished."""
    if not value.is_cuda or not _is_real(value):
        return state.copy_(value)
    stream = _stream(value.device.index, "to the host")
    # The value is ready when all work that is now on the default stream is done.
    stream.wait_event(torch.cuda.default_stream(value.device).record_event())
    with torch.cuda.stream(stream):
        state.copy_(value, non_blocking=True)
        done = _stream_event(stream)
    done.synchronize()
    return state


#: The operators that plans name.
HOST_COPIES: dict[str, Callable[..., Tensor]] = {
    "sbp.to_device.default": to_device,
    "sbp.to_host.default": to_host,
    "sbp.to_host_.default": to_host_,
}


def _is_real(value: Tensor) -> bool:
    """Whether a tensor has data: plans are checked on fake tensors."""
    return type(value) in (Tensor, torch.nn.Parameter)


@cache
def _stream(index: int, direction: str) -> Any:
    """Return the stream of a GPU for one direction."""
    return torch.cuda.Stream(torch.device("cuda", index))  # type: ignore[no-untyped-call] # torch leaves it untyped


def _stream_event(stream: Any) -> Any:
    """Return an event after all work of a stream; the host sleeps while it waits for it."""
    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call] # torch leaves it untyped
    event.record(stream)
    return event

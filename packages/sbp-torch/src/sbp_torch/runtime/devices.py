"""`RankDevice`: the CPU or GPU of the ranks of a process; it copies tensors to and from the device.

A session uses a device only through `RankDevice`, so tests without a GPU can use a fake device. On
a GPU, work goes to the default stream of the device, which all threads share, and the host does not
wait for it:

    host             cut batch 1 | start step 1 | cut batch 2 | start step 2 | ...
    copying stream          batch 1 ->                batch 2 ->
    default stream                     step 1 ............... step 2 ............
    saving stream                                 copies aside ->   (before the update of step 2)

Source: NVIDIA, *CUDA C++ Programming Guide*, section "Asynchronous Concurrent Execution" (copies
overlap with kernels if the host's memory is page-locked and the streams differ).
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sbp_core.compile import PhysicalPlan
from sbp_core.errors import ConfigError

#: Rank -> for each micro-batch of a step, batch shards and scalars by name.
Fed = dict[int, list[dict[str, Any]]]


@dataclass(frozen=True, slots=True)
class HostCopy:
    """A copy of a tensor in host memory, complete or still being made.

    Args:
        value: The copy.
        done: The event after a copy by the device; None if the copy is complete.
    """

    value: Tensor
    done: Any = None

    def wait(self) -> Tensor:
        """Return the copy when it is complete."""
        if self.done is not None:
            self.done.synchronize()
        return self.value


class RankDevice:
    """The device of all ranks of a process. This class is the CPU, where nothing moves.

    Attributes:
        device: The `torch.device` of its tensors.
    """

    device = torch.device("cpu")

    def enter(self) -> None:
        """Make this the current device of the calling thread."""

    def put(self, value: Tensor) -> Tensor:
        """Return a tensor on the device, for the shard of a state that stays there."""
        return value

    def put_host(self, value: Tensor) -> Tensor:
        """Return a tensor in host memory from which copies are fast, for an offloaded state."""
        return value.contiguous()

    def put_batches(self, fed: Fed) -> Fed:
        """Return the inputs of a step with their tensors on the device."""
        return fed

    def fetch(self, value: Tensor) -> Tensor:
        """Return a tensor in host memory."""
        return value

    def now(self) -> Any:
        """Return an event after all work that was put onto the device so far; None: it is done."""

    def copy_aside(self, value: Tensor, since: Any, buffer: Tensor | None) -> HostCopy:
        """Copy a tensor to host memory. The caller sees to it that nothing overwrites it before.

        Args:
            value: The tensor.
            since: The event (`now`) after which the copy may begin.
            buffer: Memory for the copy: contiguous, of its shape and dtype; None for new memory.
        """
        return HostCopy((_memory_like(value) if buffer is None else buffer).copy_(value))

    def follow(self, copy: HostCopy) -> None:
        """Make all work that is put onto the device from now on wait for a copy."""


#: Size in bytes from which a copy gets memory pages of its own.
_OWN_PAGES_BYTES = 2**20


def _memory_like(value: Tensor) -> Tensor:
    """Return new host memory for a copy of a tensor.

    A large copy gets memory pages of its own. Otherwise, copies that are kept would fragment the
    memory that the allocator frees between them, which took twice the memory.
    """
    if value.nbytes < _OWN_PAGES_BYTES:
        return torch.empty(value.shape, dtype=value.dtype)
    pages = mmap.mmap(-1, value.nbytes)
    return torch.frombuffer(pages, dtype=value.dtype).view(value.shape)


def check_device(kind: str) -> None:
    """Check that plans for devices of a kind can run in this process.

    Args:
        kind: `cpu` or `cuda`.

    Raises:
        ConfigError: the plans are for GPUs, and PyTorch sees none.
    """
    if kind != "cuda" or torch.cuda.is_available():
        return
    built = "" if torch.version.cuda else f"torch {torch.__version__} is built without CUDA"
    raise ConfigError(
        "the plan is for GPUs, and PyTorch sees none",
        where=built,
        accepted="cluster=local cluster.device=cpu, or a machine with a GPU for every process",
        todo="plan it (sbp-plan) here, and run it where the GPUs are",
    )


class CudaDevice(RankDevice):
    """The GPU that is current in this process when the session starts.

    Raises:
        ConfigError: PyTorch sees no GPU.
    """

    def __init__(self) -> None:
        check_device("cuda")
        self.device = torch.device("cuda", torch.cuda.current_device())
        self._copying: Any = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call] # torch leaves it untyped
        self._saving: Any = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call] # as above

    def enter(self) -> None:
        """See `RankDevice.enter`."""
        torch.cuda.set_device(self.device)

    def put(self, value: Tensor) -> Tensor:
        """See `RankDevice.put`."""
        return value.to(self.device)

    def put_host(self, value: Tensor) -> Tensor:
        """See `RankDevice.put_host`; the memory is page-locked."""
        return torch.empty(value.shape, dtype=value.dtype, pin_memory=True).copy_(value)

    def put_batches(self, fed: Fed) -> Fed:
        """See `RankDevice.put_batches`; the default stream waits for the copies, the host does not.

        A tensor that two ranks or two micro-batches share is copied once.
        """
        default = torch.cuda.default_stream(self.device)
        copied: dict[int, tuple[Tensor, Tensor]] = {}  # by id; holds the keys, so ids stay valid

        def moved(value: Any) -> Any:
            if not torch.is_tensor(value) or value.device == self.device:
                return value
            if id(value) not in copied:
                pinned = value if value.is_pinned() else value.pin_memory()
                copied[id(value)] = value, pinned.to(self.device, non_blocking=True)
            return copied[id(value)][1]

        with torch.cuda.stream(self._copying):
            found = {
                rank: [{name: moved(value) for name, value in part.items()} for part in parts]
                for rank, parts in fed.items()
            }
        default.wait_stream(self._copying)
        for _, tensor in copied.values():
            # Made on the copying stream, used on the default stream: keep its memory until then.
            tensor.record_stream(default)
        return found

    def fetch(self, value: Tensor) -> Tensor:
        """See `RankDevice.fetch`; waits for the device."""
        return value.cpu()

    def now(self) -> Any:
        """See `RankDevice.now`."""
        return torch.cuda.default_stream(self.device).record_event()

    def copy_aside(self, value: Tensor, since: Any, buffer: Tensor | None) -> HostCopy:
        """See `RankDevice.copy_aside`; into page-locked memory, and the host does not wait.

        A tensor that is in host memory is copied at once.
        """
        if buffer is None:
            buffer = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
        if not value.is_cuda:
            return HostCopy(buffer.copy_(value))
        with torch.cuda.stream(self._saving):
            self._saving.wait_event(since)
            buffer.copy_(value, non_blocking=True)
        # If the state is replaced, its memory must not be reused before the copy is complete.
        value.record_stream(self._saving)
        return HostCopy(buffer, self._saving.record_event())

    def follow(self, copy: HostCopy) -> None:
        """See `RankDevice.follow`."""
        if copy.done is None:
            return
        torch.cuda.default_stream(self.device).wait_event(copy.done)


def device_of(plan: PhysicalPlan) -> RankDevice:
    """Return the device that a plan was made for.

    Raises:
        ConfigError: this machine has no such device, or the kind of device is unknown.
    """
    kinds = sorted({stage.device for stage in plan.stages})
    if kinds == ["cpu"]:
        return RankDevice()
    if kinds == ["cuda"]:
        return CudaDevice()
    raise ConfigError(
        f"the plan is for devices of kind {', '.join(kinds)}", accepted="cpu on all ranks, or cuda"
    )

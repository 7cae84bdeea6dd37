"""Where the tensors of a rank live, and how they get there: the CPU, or the GPU of its process.

Everything that a session asks of a device goes through `RankDevice`, so that tests without a GPU
reach all the rest with a device of their own. On a GPU work is put onto the device's default
stream, which all threads share, and the host does not wait for it:

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
from typing import Any, Protocol

import torch
from torch import Tensor

from sbp_core.compile import PhysicalPlan
from sbp_core.errors import ConfigError

#: Batch parts and scalars by name, of every micro-batch of a step, by rank.
Fed = dict[int, list[dict[str, Any]]]


@dataclass(frozen=True, slots=True)
class HostCopy:
    """A copy of a tensor in the memory of the host, made or under way.

    Args:
        value: The copy.
        done: Of a copy by the device: the event that follows it.
    """

    value: Tensor
    done: Any = None

    def wait(self) -> Tensor:
        """Return the copy, once it is made."""
        if self.done is not None:
            self.done.synchronize()
        return self.value


class RankDevice(Protocol):
    """The device of all ranks of a process.

    Attributes:
        device: That its tensors name.
    """

    device: torch.device

    def enter(self) -> None:
        """Make it the current device of this thread."""

    def put(self, value: Tensor) -> Tensor:
        """Return a tensor on the device: a part of a state, to stay there."""

    def put_host(self, value: Tensor) -> Tensor:
        """Return a tensor in the memory of the host, to stay there, from where copies are fast."""

    def put_batches(self, fed: Fed) -> Fed:
        """Return what ranks are fed with the tensors on the device."""

    def fetch(self, value: Tensor) -> Tensor:
        """Return a tensor in the memory of the host."""

    def now(self) -> Any:
        """Return the moment after all work that is put onto the device so far."""

    def copy_aside(self, value: Tensor, since: Any, buffer: Tensor | None) -> HostCopy:
        """Copy a tensor as it is at a moment, which nothing overwrites before the copy.

        Args:
            value: The tensor.
            since: The moment (`now`).
            buffer: Where the copy goes, of its shape and dtype, without gaps; None to take new
                memory.
        """

    def follow(self, copy: HostCopy) -> None:
        """Let all work that is put onto the device from now on come after a copy."""


class CpuDevice:
    """The CPU: nothing moves."""

    device = torch.device("cpu")

    def enter(self) -> None:
        """See `RankDevice.enter`."""

    def put(self, value: Tensor) -> Tensor:
        """See `RankDevice.put`."""
        return value

    def put_host(self, value: Tensor) -> Tensor:
        """See `RankDevice.put_host`; there is one memory."""
        return value.contiguous()

    def put_batches(self, fed: Fed) -> Fed:
        """See `RankDevice.put_batches`."""
        return fed

    def fetch(self, value: Tensor) -> Tensor:
        """See `RankDevice.fetch`."""
        return value

    def now(self) -> None:
        """See `RankDevice.now`: what was put is done."""

    def copy_aside(self, value: Tensor, since: Any, buffer: Tensor | None) -> HostCopy:
        """See `RankDevice.copy_aside`."""
        return HostCopy((_memory_like(value) if buffer is None else buffer).copy_(value))

    def follow(self, copy: HostCopy) -> None:
        """See `RankDevice.follow`: it is made."""


#: Bytes from which a copy has pages of its own.
_OWN_PAGES_BYTES = 2**20


def _memory_like(value: Tensor) -> Tensor:
    """Return new memory of the host for a copy of a tensor.

    A large one has pages of its own: between copies that are kept, what the allocator of the
    process frees of other tensors would be left in pieces, which take as much again.
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
        ConfigError: they are for GPUs, and PyTorch sees none.
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


class CudaDevice:
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

        A piece that two ranks or two micro-batches share is copied once.
        """
        default = torch.cuda.default_stream(self.device)
        copied: dict[int, tuple[Tensor, Tensor]] = {}  # by id; both are kept, so that ids hold

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
            # Made on the copying stream, used on the default one: it must not be given away before.
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

        What is in the memory of the host is copied there at once.
        """
        if buffer is None:
            buffer = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
        if not value.is_cuda:
            return HostCopy(buffer.copy_(value))
        with torch.cuda.stream(self._saving):
            self._saving.wait_event(since)
            buffer.copy_(value, non_blocking=True)
        # Whoever replaces the state lets go of its memory: it must not be given away before.
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
        ConfigError: this machine has none, or there is no such kind of device.
    """
    kinds = sorted({stage.device for stage in plan.stages})
    if kinds == ["cpu"]:
        return CpuDevice()
    if kinds == ["cuda"]:
        return CudaDevice()
    raise ConfigError(
        f"the plan is for devices of kind {', '.join(kinds)}", accepted="cpu on all ranks, or cuda"
    )

"""The GPU of this process through CuPy and torch.cuda: the only module that imports them.

torch is imported first: a process has one `libnccl.so.2`, the one that is loaded first, and torch
needs its own. Written for CuPy 14, whose unique ids are `bytes`.
"""

from __future__ import annotations

import contextlib
import importlib
import socket
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import torch

from sbp_boxing_nccl.nccl.device import NcclChannel, NcclDevice, StreamEvent
from sbp_core.errors import BoxingError

#: How to get what this backend needs.
_INSTALL = (
    'pip install "sbp-boxing-nccl[nccl]"'
    " for a torch of CUDA 13; cupy-cuda12x and mpi4py for one of CUDA 12"
)

#: torch.cuda, of which torch declares no types in part.
_CUDA: Any = torch.cuda

#: What `ncclCommGetAsyncError` says while a communicator is being made. CuPy has no name for it.
_IN_PROGRESS = 7


def load_device(index: int | None, local_rank: int) -> CupyDevice:
    """Return a GPU of this machine, ready for NCCL.

    Args:
        index: Number of the GPU among those that this process sees; None for `local_rank`, counted
            round if there are fewer GPUs.
        local_rank: Number of this process among those of its machine.

    Raises:
        BoxingError: there is no such GPU, no CuPy, no NCCL, or not one NCCL for torch and CuPy.
    """
    count = count_gpus(index)
    nccl = load_nccl()
    version = check_versions(_CUDA.nccl.version(), nccl.get_version())
    return CupyDevice(nccl, local_rank % count if index is None else index, version)


def count_gpus(index: int | None) -> int:
    """Return how many GPUs this process sees.

    Args:
        index: Number of one that must be among them, or None.

    Raises:
        BoxingError: there is none, or not that one.
    """
    count = int(_CUDA.device_count()) if _CUDA.is_available() else 0
    if not count:
        built = torch.version.cuda or "none: it is a build for CPUs"
        raise BoxingError(
            "boxing=nccl needs an NVIDIA GPU, and torch sees none",
            where=f"torch {torch.__version__}, CUDA {built}",
            todo="run on a machine with GPUs, or choose boxing=mpi, boxing=torch or boxing=local",
        )
    if index is not None and index >= count:
        raise BoxingError(
            f"there is no GPU {index}: this process sees {count}",
            accepted=", ".join(f"cuda:{number}" for number in range(count)),
        )
    return count


def load_nccl() -> Any:
    """Return the module `cupy.cuda.nccl`.

    Raises:
        BoxingError: CuPy is not installed, or finds no NCCL.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            nccl = importlib.import_module("cupy.cuda.nccl")
        except ImportError as error:
            raise BoxingError(
                f"boxing=nccl needs CuPy: {error}",
                todo=f"{_INSTALL} (yours: {torch.version.cuda})",
            ) from error
    if not nccl.available:
        said = " ".join(str(warning.message) for warning in caught).split()
        raise BoxingError(
            "boxing=nccl needs NCCL, and CuPy finds none",
            where=" ".join(said),
            todo="install the NCCL that torch was built with: the requirement of the torch wheel "
            "that begins with nvidia-nccl-",
        )
    return nccl


def check_versions(of_torch: tuple[int, ...], of_cupy: int) -> tuple[int, int, int]:
    """Return the version of NCCL that torch and CuPy agree on.

    Args:
        of_torch: What `torch.cuda.nccl.version` says; may be shorter or longer than three numbers.
        of_cupy: What `cupy.cuda.nccl.get_version` says.

    Raises:
        BoxingError: they are not the same: the process would have two NCCLs.
    """
    version = (of_cupy // 10000, of_cupy // 100 % 100, of_cupy % 100)
    if tuple(of_torch[:3]) != version:
        torchs, cupys = ".".join(map(str, of_torch)), ".".join(map(str, version))
        raise BoxingError(
            f"torch uses NCCL {torchs}, but CuPy has found NCCL {cupys}",
            accepted="one NCCL in the process",
            todo="import torch before cupy; if you do, make the two wheels use one library: "
            f'pip install "nvidia-nccl-cu{(torch.version.cuda or "13").split(".")[0]}=={torchs}", '
            "and remove any other libnccl.so.2 from LD_LIBRARY_PATH and LD_PRELOAD",
        )
    return version


class CupyEvent(StreamEvent):
    """A CUDA event of torch."""

    def __init__(self, event: torch.cuda.Event, device: torch.device) -> None:
        self._event: Any = event
        self._device = device

    @property
    def event(self) -> torch.cuda.Event:
        """The event of torch."""
        event: torch.cuda.Event = self._event
        return event

    def is_done(self) -> bool:
        """See `StreamEvent.is_done`."""
        return bool(self._event.query())

    def hold_back(self) -> None:
        """See `StreamEvent.hold_back`."""
        _CUDA.current_stream(self._device).wait_event(self._event)


class CupyChannel(NcclChannel):
    """A communicator of `cupy.cuda.nccl` and a stream of torch."""

    def __init__(self, nccl: Any, communicator: Any, device: torch.device) -> None:
        self._nccl = nccl
        self._communicator = communicator
        self._device = device
        self._lock = threading.Lock()
        self._ended = False
        # Communication first: others wait for it, and it needs few of the multiprocessors.
        self._stream = _CUDA.Stream(device, priority=-1)

    def wait_for(self, event: StreamEvent) -> None:
        """See `NcclChannel.wait_for`."""
        assert isinstance(event, CupyEvent), "the events of a device are its own"
        self._stream.wait_event(event.event)

    def all_reduce(self, sent: int, received: int, count: int, dtype: str, reduction: str) -> None:
        """See `NcclChannel.all_reduce`."""
        kind, operation = self._kind(dtype), self._operation(reduction)
        with _nccl_errors():
            self._communicator.allReduce(sent, received, count, kind, operation, self._pointer)

    def reduce_scatter(
        self, sent: int, received: int, count: int, dtype: str, reduction: str
    ) -> None:
        """See `NcclChannel.reduce_scatter`."""
        kind, operation = self._kind(dtype), self._operation(reduction)
        with _nccl_errors():
            self._communicator.reduceScatter(sent, received, count, kind, operation, self._pointer)

    def all_gather(self, sent: int, received: int, count: int, dtype: str) -> None:
        """See `NcclChannel.all_gather`."""
        with _nccl_errors():
            self._communicator.allGather(sent, received, count, self._kind(dtype), self._pointer)

    def send(self, values: int, count: int, dtype: str, peer: int) -> None:
        """See `NcclChannel.send`."""
        with _nccl_errors():
            self._communicator.send(values, count, self._kind(dtype), peer, self._pointer)

    def receive(self, values: int, count: int, dtype: str, peer: int) -> None:
        """See `NcclChannel.receive`."""
        with _nccl_errors():
            self._communicator.recv(values, count, self._kind(dtype), peer, self._pointer)

    def record(self) -> StreamEvent:
        """See `NcclChannel.record`."""
        return CupyEvent(self._stream.record_event(), self._device)

    def check(self) -> None:
        """See `NcclChannel.check`."""
        # The lock, as an abort in another thread frees what is asked here.
        with self._lock, _nccl_errors():
            if self._ended:
                raise RuntimeError("the communicator was aborted")
            self._communicator.check_async_error()

    def abort(self) -> None:
        """See `NcclChannel.abort`."""
        self._end()
        with _nccl_errors():
            self._communicator.abort()

    def destroy(self) -> None:
        """See `NcclChannel.destroy`."""
        self._end()
        with _nccl_errors():
            self._communicator.destroy()

    def _end(self) -> None:
        with self._lock:
            self._ended = True

    @property
    def _pointer(self) -> int:
        if self._ended:
            raise RuntimeError("the communicator was aborted")
        return int(self._stream.cuda_stream)

    def _kind(self, dtype: str) -> int:
        number: int = getattr(self._nccl, f"NCCL_{dtype.upper()}")
        return number

    def _operation(self, reduction: str) -> int:
        number: int = getattr(self._nccl, f"NCCL_{reduction.upper()}")
        return number


class CupyDevice(NcclDevice):
    """A GPU that torch and CuPy use together: streams and events of torch, NCCL of CuPy."""

    def __init__(self, nccl: Any, index: int, version: tuple[int, int, int]) -> None:
        self._nccl = nccl
        self.torch_device = torch.device("cuda", index)
        self.host = socket.gethostname()
        self.bus_id = str(importlib.import_module("cupy").cuda.Device(index).pci_bus_id)
        self.nccl_version = version
        self.use()

    def use(self) -> None:
        """See `NcclDevice.use`."""
        _CUDA.set_device(self.torch_device)

    def unique_id(self) -> bytes:
        """See `NcclDevice.unique_id`."""
        with _nccl_errors():
            return bytes(self._nccl.get_unique_id())

    def connect(self, size: int, unique_id: bytes, index: int) -> NcclChannel:
        """See `NcclDevice.connect`."""
        self.use()
        with _nccl_errors():
            communicator = self._nccl.NcclCommunicator(size, unique_id, index)
        return CupyChannel(self._nccl, communicator, self.torch_device)

    def record(self) -> StreamEvent:
        """See `NcclDevice.record`."""
        event = _CUDA.current_stream(self.torch_device).record_event()
        return CupyEvent(event, self.torch_device)

    def group_start(self) -> None:
        """See `NcclDevice.group_start`."""
        with _nccl_errors():
            self._nccl.groupStart()

    def group_end(self) -> None:
        """See `NcclDevice.group_end`."""
        with _nccl_errors():
            self._nccl.groupEnd()


@contextlib.contextmanager
def _nccl_errors() -> Iterator[None]:
    """Let codes of NCCL that CuPy has no name for, and raises as `KeyError`, be errors too."""
    try:
        yield
    except KeyError as error:
        if error.args != (_IN_PROGRESS,):
            raise RuntimeError(f"NCCL failed with code {error}") from error

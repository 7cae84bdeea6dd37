"""Call the GPU and NCCL, through CuPy and torch.cuda, for the other modules of the backend `nccl`.

The only module that imports CuPy. The other modules reach the GPU through the three classes here;
tests replace them by a device that needs no GPU. torch is imported first: a process has one
`libnccl.so.2`, the first that is loaded, and torch needs its own. Written for CuPy 14, whose unique
ids are `bytes`.

Tensors are passed as addresses, element counts and dtype names (`nccl_group.NATIVE`). Every method
may raise `RuntimeError` with the message of CUDA or NCCL.
"""

from __future__ import annotations

import contextlib
import importlib
import socket
import threading
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from sbp_core.errors import BoxingError

#: Advice how to install the libraries of this backend.
_INSTALL = (
    'pip install "sbp-boxing-nccl[nccl]"'
    " for a torch of CUDA 13; cupy-cuda12x and mpi4py for one of CUDA 12"
)

#: torch.cuda, whose types torch declares only in part.
_CUDA: Any = torch.cuda

#: Result of `ncclCommGetAsyncError` while a communicator is created. CuPy has no name for it.
_IN_PROGRESS = 7


@dataclass(slots=True, eq=False)
class StreamEvent:
    """An event on a stream: it occurs when all earlier work of the stream is done.

    Args:
        event: The event of torch.
        device: Device of torch's current stream.
    """

    event: Any
    device: torch.device

    def is_done(self) -> bool:
        """Return whether the event has occurred; does not wait."""
        return bool(self.event.query())

    def hold_back(self) -> None:
        """Make later work of torch's current stream wait for the event; the host continues."""
        _CUDA.current_stream(self.device).wait_event(self.event)


class NcclChannel:
    """One NCCL communicator and the stream that its work runs on, in the order of the calls.

    Used by one thread at a time, except `abort`. A call returns once its work is on the stream. The
    first call may block the host until all ranks have made it; `abort` unblocks it. `index` and
    `peer` count the ranks of the communicator from 0.

    Args:
        nccl: The module `cupy.cuda.nccl`.
        communicator: The communicator of CuPy.
        device: Device on which the stream is created.
    """

    def __init__(self, nccl: Any, communicator: Any, device: torch.device) -> None:
        self._nccl = nccl
        self._communicator = communicator
        self._device = device
        self._lock = threading.Lock()
        self._ended = False
        # High priority: other ranks wait for communication, and it needs few multiprocessors.
        self._stream = _CUDA.Stream(device, priority=-1)

    def wait_for(self, event: StreamEvent) -> None:
        """Make later work of this channel wait for an event; the host continues."""
        self._stream.wait_event(event.event)

    def all_reduce(self, sent: int, received: int, count: int, dtype: str, reduction: str) -> None:
        """Reduce `count` elements at `sent` over all ranks into `received`, on all of them."""
        self._call("allReduce", sent, received, count, self._code(dtype), self._code(reduction))

    def reduce_scatter(
        self, sent: int, received: int, count: int, dtype: str, reduction: str
    ) -> None:
        """Reduce chunks of `count` elements at `sent`, chunk i into `received` of rank i."""
        codes = self._code(dtype), self._code(reduction)
        self._call("reduceScatter", sent, received, count, *codes)

    def all_gather(self, sent: int, received: int, count: int, dtype: str) -> None:
        """Copy `count` elements at `sent` of rank i into chunk i at `received` of all ranks."""
        self._call("allGather", sent, received, count, self._code(dtype))

    def send(self, values: int, count: int, dtype: str, peer: int) -> None:
        """Send elements; the work is complete when the peer has received them."""
        self._call("send", values, count, self._code(dtype), peer)

    def receive(self, values: int, count: int, dtype: str, peer: int) -> None:
        """Receive elements."""
        self._call("recv", values, count, self._code(dtype), peer)

    def record(self) -> StreamEvent:
        """Return an event that occurs when all work so far is done."""
        return StreamEvent(self._stream.record_event(), self._device)

    def check(self) -> None:
        """Raise `RuntimeError` if NCCL has detected a failure since."""
        # The lock, because an abort in another thread frees the communicator.
        with self._lock, _nccl_errors():
            if self._ended:
                raise RuntimeError("the communicator was aborted")
            self._communicator.check_async_error()

    def abort(self) -> None:
        """Abort all work, and calls that block the host; the channel is unusable afterwards.

        May be called while another thread is inside a method.
        """
        with self._lock:
            self._ended = True
        with _nccl_errors():
            self._communicator.abort()

    def destroy(self) -> None:
        """Release the communicator; all ranks have to, without unfinished work."""
        with self._lock:
            self._ended = True
        with _nccl_errors():
            self._communicator.destroy()

    def _call(self, name: str, *arguments: int) -> None:
        """Put work on the stream, by a function of CuPy."""
        if self._ended:
            raise RuntimeError("the communicator was aborted")
        with _nccl_errors():
            getattr(self._communicator, name)(*arguments, int(self._stream.cuda_stream))

    def _code(self, name: str) -> int:
        """Return NCCL's code of a dtype or a reduction."""
        number: int = getattr(self._nccl, f"NCCL_{name.upper()}")
        return number


class NcclDevice:
    """The GPU of this process, which torch and CuPy use together.

    Args:
        nccl: The module `cupy.cuda.nccl`.
        index: Index of the GPU among the visible GPUs.
        version: Version of NCCL: (major, minor, patch).

    Attributes:
        torch_device: Device of its tensors.
        host: Name of the machine.
        bus_id: PCI bus id of the GPU, unique on the machine.
        nccl_version: See `version`.
    """

    def __init__(self, nccl: Any, index: int, version: tuple[int, int, int]) -> None:
        self._nccl = nccl
        self.torch_device = torch.device("cuda", index)
        self.host = socket.gethostname()
        self.bus_id = str(importlib.import_module("cupy").cuda.Device(index).pci_bus_id)
        self.nccl_version = version
        self.use()

    def use(self) -> None:
        """Make the calling thread use this GPU; each thread has to call it first."""
        _CUDA.set_device(self.torch_device)

    def unique_id(self) -> bytes:
        """Return a new unique id, by which the ranks of a communicator find each other."""
        with _nccl_errors():
            return bytes(self._nccl.get_unique_id())

    def connect(self, size: int, unique_id: bytes, index: int) -> NcclChannel:
        """Create a communicator of `size` ranks; waits for all of them, without a limit."""
        self.use()
        with _nccl_errors():
            communicator = self._nccl.NcclCommunicator(size, unique_id, index)
        return NcclChannel(self._nccl, communicator, self.torch_device)

    def record(self) -> StreamEvent:
        """Return an event that occurs when all work so far on torch's current stream is done."""
        event = _CUDA.current_stream(self.torch_device).record_event()
        return StreamEvent(event, self.torch_device)

    def group_start(self) -> None:
        """Begin a group: later calls of this thread, on any channels, start together."""
        with _nccl_errors():
            self._nccl.groupStart()

    def group_end(self) -> None:
        """End the group: start all calls since `group_start`."""
        with _nccl_errors():
            self._nccl.groupEnd()

    @contextlib.contextmanager
    def grouped(self) -> Iterator[None]:
        """Start the calls inside as one group, so that none of them waits for another."""
        self.group_start()
        try:
            yield
        finally:
            self.group_end()


@contextlib.contextmanager
def _nccl_errors() -> Iterator[None]:
    """Convert `KeyError`, which CuPy raises for unknown error codes of NCCL, to `RuntimeError`."""
    try:
        yield
    except KeyError as error:
        if error.args != (_IN_PROGRESS,):
            raise RuntimeError(f"NCCL failed with code {error}") from error


def load_device(index: int | None, local_rank: int) -> NcclDevice:
    """Return a GPU of this machine, ready for NCCL.

    Args:
        index: Index of the GPU among the visible GPUs; None for `local_rank`, modulo the number of
            GPUs.
        local_rank: Index of this process among the processes of its machine.

    Raises:
        BoxingError: there is no such GPU, no CuPy, no NCCL, or torch and CuPy have different NCCLs.
    """
    count = count_gpus(index)
    nccl = load_nccl()
    version = check_versions(_CUDA.nccl.version(), nccl.get_version())
    return NcclDevice(nccl, local_rank % count if index is None else index, version)


def count_gpus(index: int | None) -> int:
    """Return the number of visible GPUs.

    Args:
        index: Index of a GPU that must exist, or None.

    Raises:
        BoxingError: there is no GPU, or not this one.
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
    """Return the version of NCCL, which has to be the same for torch and CuPy.

    Args:
        of_torch: Result of `torch.cuda.nccl.version`; may have fewer or more than three numbers.
        of_cupy: Result of `cupy.cuda.nccl.get_version`.

    Raises:
        BoxingError: the versions differ: the process would have two NCCLs.
    """
    version = (of_cupy // 10000, of_cupy // 100 % 100, of_cupy % 100)
    if tuple(of_torch[:3]) != version:
        torchs, cupys = ".".join(map(str, of_torch)), ".".join(map(str, version))
        raise BoxingError(
            f"torch uses NCCL {torchs}, but CuPy has found NCCL {cupys}",
            accepted="one NCCL in the process",
            todo="import torch before cupy; if you did, make the two wheels use one library: "
            f'pip install "nvidia-nccl-cu{(torch.version.cuda or "13").split(".")[0]}=={torchs}", '
            "and remove any other libnccl.so.2 from LD_LIBRARY_PATH and LD_PRELOAD",
        )
    return version

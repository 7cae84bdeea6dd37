"""Finding a GPU, CuPy and NCCL, and what CuPy is called with, where there are none of them."""

import sys
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sbp_boxing_nccl.nccl import device as device_module
from sbp_core.errors import BoxingError


class Communicator:
    """What `cupy.cuda.nccl.NcclCommunicator` of CuPy 14 takes, by its documentation."""

    def __init__(self, ndev: int, commId: bytes, rank: int) -> None:  # noqa: N803
        self.calls: list[tuple[Any, ...]] = []
        self.first = (ndev, commId, rank)

    def allReduce(self, sendbuf, recvbuf, count, datatype, op, stream):  # type: ignore[no-untyped-def]  # noqa: N802
        self.calls.append(("allReduce", sendbuf, recvbuf, count, datatype, op, stream))

    def reduceScatter(self, sendbuf, recvbuf, recvcount, datatype, op, stream):  # type: ignore[no-untyped-def]  # noqa: N802
        self.calls.append(("reduceScatter", sendbuf, recvbuf, recvcount, datatype, op, stream))

    def allGather(self, sendbuf, recvbuf, count, datatype, stream):  # type: ignore[no-untyped-def]  # noqa: N802
        self.calls.append(("allGather", sendbuf, recvbuf, count, datatype, stream))

    def send(self, sendbuf, count, datatype, peer, stream):  # type: ignore[no-untyped-def]
        self.calls.append(("send", sendbuf, count, datatype, peer, stream))

    def recv(self, recvbuf, count, datatype, peer, stream):  # type: ignore[no-untyped-def]
        self.calls.append(("recv", recvbuf, count, datatype, peer, stream))

    def check_async_error(self) -> None:
        self.calls.append(("check_async_error",))

    def abort(self) -> None:
        self.calls.append(("abort",))

    def destroy(self) -> None:
        self.calls.append(("destroy",))


class Stream:
    """A stream of torch, without a GPU."""

    cuda_stream = 77

    def __init__(self, device: torch.device, priority: int) -> None:
        self.waited: list[Any] = []
        assert priority < 0, "communication comes first"

    def wait_event(self, event: Any) -> None:
        self.waited.append(event)

    def record_event(self) -> str:
        return "event of the stream"


#: Numbers of NCCL's own, in nccl.h.
CODES = {
    "NCCL_INT8": 0, "NCCL_UINT8": 1, "NCCL_INT32": 2, "NCCL_INT64": 4, "NCCL_FLOAT16": 6,
    "NCCL_FLOAT32": 7, "NCCL_FLOAT64": 8, "NCCL_BFLOAT16": 9, "NCCL_SUM": 0, "NCCL_MAX": 2,
    "NCCL_MIN": 3,
}  # fmt: skip


def fake_nccl(version: int = 22809, **more: Any) -> SimpleNamespace:
    started: list[str] = []
    return SimpleNamespace(
        available=True,
        started=started,
        NcclCommunicator=Communicator,
        get_version=lambda: version,
        get_unique_id=lambda: b"x" * 128,
        groupStart=lambda: started.append("start"),
        groupEnd=lambda: started.append("end"),
        **(CODES | more),
    )


def fake_cuda(num_gpus: int = 2, version: tuple[int, ...] = (2, 28, 9)) -> SimpleNamespace:
    chosen: list[torch.device] = []
    return SimpleNamespace(
        is_available=lambda: num_gpus > 0,
        device_count=lambda: num_gpus,
        nccl=SimpleNamespace(version=lambda: version),
        Stream=Stream,
        set_device=chosen.append,
        chosen=chosen,
    )


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A machine with two GPUs, CuPy and NCCL."""
    nccl, cuda = fake_nccl(), fake_cuda()
    gpu = lambda index: SimpleNamespace(pci_bus_id=f"0000:{index}B:00.0")  # noqa: E731
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=SimpleNamespace(Device=gpu)))
    monkeypatch.setitem(sys.modules, "cupy.cuda.nccl", nccl)
    monkeypatch.setattr(device_module, "_CUDA", cuda)
    return SimpleNamespace(nccl=nccl, cuda=cuda)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_this_machine_without_a_gpu_is_refused_with_what_else_there_is() -> None:
    with pytest.raises(BoxingError, match=r"^boxing=nccl needs an NVIDIA GPU") as caught:
        device_module.load_device(None, 0)

    assert torch.__version__ in str(caught.value)
    assert "boxing=mpi" in caught.value.todo


def test_without_cupy_the_error_says_what_to_install(
    machine: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cupy.cuda.nccl", None)

    with pytest.raises(BoxingError, match=r"^boxing=nccl needs CuPy") as caught:
        device_module.load_device(None, 0)

    assert 'pip install "sbp-boxing-nccl[nccl]"' in caught.value.todo


def test_without_nccl_the_error_tells_what_cupy_said(
    machine: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(_: str) -> Any:
        warnings.warn("nccl library could not be loaded: libnccl.so.2", stacklevel=1)
        return SimpleNamespace(available=False)

    monkeypatch.setattr(device_module.importlib, "import_module", load)

    with pytest.raises(BoxingError, match="CuPy finds none") as caught:
        device_module.load_device(None, 0)

    assert "libnccl.so.2" in str(caught.value)
    assert "nvidia-nccl-" in caught.value.todo


def test_two_nccls_in_one_process_are_refused_with_both_versions(
    machine: SimpleNamespace,
) -> None:
    machine.nccl.get_version = lambda: 23203

    with pytest.raises(BoxingError) as caught:
        device_module.load_device(None, 0)

    assert caught.value.what == "torch uses NCCL 2.28.9, but CuPy has found NCCL 2.32.3"
    assert "==2.28.9" in caught.value.todo


def test_a_version_of_more_numbers_is_compared_by_the_first_three() -> None:
    assert device_module.check_versions((2, 28, 9, 1), 22809) == (2, 28, 9)


@pytest.mark.parametrize(
    ("index", "local_rank", "chosen"), [(None, 0, 0), (None, 1, 1), (None, 3, 1), (0, 1, 0)]
)
def test_a_process_gets_the_gpu_that_is_named_or_the_one_of_its_number(
    machine: SimpleNamespace, index: int | None, local_rank: int, chosen: int
) -> None:
    device = device_module.load_device(index, local_rank)

    assert device.torch_device == torch.device("cuda", chosen)
    assert device.bus_id == f"0000:{chosen}B:00.0"
    assert device.nccl_version == (2, 28, 9)
    assert machine.cuda.chosen == [torch.device("cuda", chosen)]


def test_a_gpu_that_is_not_there_is_refused_with_those_that_are(machine: SimpleNamespace) -> None:
    with pytest.raises(BoxingError, match="no GPU 2") as caught:
        device_module.load_device(2, 0)

    assert caught.value.accepted == "cuda:0, cuda:1"


def test_cupy_is_called_with_addresses_counts_and_the_codes_of_nccl(
    machine: SimpleNamespace,
) -> None:
    device = device_module.load_device(1, 0)
    channel: Any = device.connect(4, device.unique_id(), 2)

    channel.all_reduce(10, 20, 5, "bfloat16", "max")
    channel.reduce_scatter(10, 20, 5, "float64", "min")
    channel.all_gather(10, 20, 5, "uint8")
    with device.grouped():
        channel.send(10, 5, "uint8", 3)
        channel.receive(20, 5, "int64", 1)
    channel.check()
    channel.abort()
    channel.destroy()

    communicator = channel._communicator
    assert communicator.first == (4, b"x" * 128, 2)
    assert communicator.calls == [
        ("allReduce", 10, 20, 5, 9, 2, 77),
        ("reduceScatter", 10, 20, 5, 8, 3, 77),
        ("allGather", 10, 20, 5, 1, 77),
        ("send", 10, 5, 1, 3, 77),
        ("recv", 20, 5, 4, 1, 77),
        ("check_async_error",),
        ("abort",),
        ("destroy",),
    ]
    assert machine.nccl.started == ["start", "end"]


def test_work_waits_for_the_event_that_is_given_and_none_other(machine: SimpleNamespace) -> None:
    device = device_module.load_device(0, 0)
    channel: Any = device.connect(1, device.unique_id(), 0)
    event: Any = object()

    channel.wait_for(device_module.StreamEvent(event, device.torch_device))

    assert channel._stream.waited == [event]
    assert channel.record().event == "event of the stream"


@pytest.mark.parametrize(("code", "raises"), [(7, False), (8, True)])
def test_codes_that_cupy_has_no_name_for_are_errors_but_for_work_in_progress(
    machine: SimpleNamespace, code: int, raises: bool
) -> None:
    device = device_module.load_device(0, 0)
    channel: Any = device.connect(1, device.unique_id(), 0)

    def check() -> None:
        raise KeyError(code)

    channel._communicator.check_async_error = check

    if raises:
        with pytest.raises(RuntimeError, match="NCCL failed with code 8"):
            channel.check()
    else:
        channel.check()

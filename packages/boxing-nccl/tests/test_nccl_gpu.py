"""NCCL through CuPy, on machines that have GPUs.

With one GPU: a communicator of one rank, and what does not depend on others: streams, events,
messages to oneself, abort, limits. With several: the conformance suite, one GPU a rank.
"""

import importlib
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_ranks import GpuRanks

from sbp_boxing_nccl.nccl import device as device_module
from sbp_boxing_nccl.nccl.bootstrap import release
from sbp_boxing_nccl.nccl.device import NcclChannel, NcclDevice
from sbp_boxing_nccl.nccl.nccl_group import NcclGroup, NcclWork, launch
from sbp_core.errors import BoxingError
from sbp_torch.testing.boxing import BoxingConformance, Job, Program, use_communicator

NUM_GPUS = torch.cuda.device_count()

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(NUM_GPUS == 0, reason="no CUDA device is visible"),
]


@pytest.fixture(scope="module")
def device() -> NcclDevice:
    try:
        return device_module.load_device(0, 0)
    except BoxingError as error:
        if "needs CuPy" in error.what:
            pytest.skip(str(error))
        raise


@pytest.fixture
def channel(device: NcclDevice) -> Iterator[NcclChannel]:
    """A communicator of one rank."""
    made = device.connect(1, device.unique_id(), 0)
    yield made
    made.abort()


def finish(work: NcclWork, limit_s: float = 30.0) -> None:
    end = time.monotonic() + limit_s
    while not work.is_done():
        assert time.monotonic() < end, "NCCL does not finish"
        time.sleep(1e-4)


def test_torch_and_cupy_use_one_nccl(device: NcclDevice) -> None:
    nccl = importlib.import_module("cupy.cuda.nccl")

    assert tuple(torch.cuda.nccl.version()[:3]) == device.nccl_version
    assert device_module.check_versions(torch.cuda.nccl.version(), nccl.get_version())


def test_the_gpu_names_itself(device: NcclDevice) -> None:
    domain, bus, rest = device.bus_id.split(":")

    assert int(domain, 16) >= 0 and int(bus, 16) >= 0 and "." in rest
    assert device.host


@pytest.mark.parametrize("reduction", ["sum", "max", "min"])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8]
)
def test_a_group_of_one_rank_reduces_every_native_dtype(
    device: NcclDevice, channel: NcclChannel, dtype: torch.dtype, reduction: str
) -> None:
    group = NcclGroup((0,), 0, channel, device)
    values = torch.arange(1000, device=device.torch_device).remainder(100).to(dtype)
    result = torch.full_like(values, 3)

    finish(group.all_reduce(result, values, reduction))

    assert torch.equal(result, values)


def test_a_group_of_one_rank_gathers_and_scatters(device: NcclDevice, channel: NcclChannel) -> None:
    group = NcclGroup((0,), 0, channel, device)
    values = torch.randn(1 << 20, device=device.torch_device)
    gathered, scattered = torch.zeros_like(values), torch.zeros_like(values)

    finish(group.all_gather(gathered, values))
    finish(group.reduce_scatter(scattered, values, "sum"))

    assert torch.equal(gathered, values)
    assert torch.equal(scattered, values)


@pytest.mark.parametrize("elements", [1, 1000, 10_000_000])
def test_a_message_to_oneself_arrives_if_both_ends_start_as_one(
    device: NcclDevice, channel: NcclChannel, elements: int
) -> None:
    values = torch.randn(elements, device=device.torch_device)
    result = torch.zeros_like(values)

    def start() -> None:
        with device.grouped():
            channel.send(values.data_ptr(), values.nbytes, "uint8", 0)
            channel.receive(result.data_ptr(), result.nbytes, "uint8", 0)

    finish(launch(device, channel, start, values, result))

    assert torch.equal(result, values)


def test_work_waits_for_its_input_and_torch_for_its_result(
    device: NcclDevice, channel: NcclChannel
) -> None:
    """Neither the host nor anything else waits in between."""
    group = NcclGroup((0,), 0, channel, device)
    values = torch.zeros(1 << 22, device=device.torch_device)
    result = torch.full_like(values, -1.0)
    torch.cuda.synchronize()

    torch.cuda._sleep(500_000_000)  # about 0.3 s, in which the stream of the channel is free
    values.fill_(7.0)
    work = group.all_reduce(result, values, "sum")
    early = work.event.is_done()
    work.event.hold_back()
    doubled = result * 2

    assert not early, "the work did not wait for its input"
    assert torch.equal(doubled, torch.full_like(doubled, 14.0))


def test_memory_that_the_caller_drops_lives_until_the_work_is_done(
    device: NcclDevice, channel: NcclChannel
) -> None:
    group = NcclGroup((0,), 0, channel, device)
    result = torch.empty(1 << 22, device=device.torch_device)
    torch.cuda.synchronize()

    torch.cuda._sleep(200_000_000)
    values = torch.full_like(result, 5.0)
    work = group.all_reduce(result, values, "sum")
    del values
    others = [torch.full_like(result, float(number)) for number in range(4)]
    finish(work)

    assert torch.equal(result, torch.full_like(result, 5.0))
    assert len(others) == 4


def test_several_channels_are_aborted_together_in_time(device: NcclDevice) -> None:
    channels = {str(n): device.connect(1, device.unique_id(), 0) for n in range(3)}
    values = torch.ones(1000, device=device.torch_device)
    for made in channels.values():
        finish(NcclGroup((0,), 0, made, device).all_reduce(values, values, "sum"))

    assert release(channels, device, 20.0, abort=True)


def test_several_channels_are_destroyed_in_time(device: NcclDevice) -> None:
    channels = {str(n): device.connect(1, device.unique_id(), 0) for n in range(3)}

    assert release(channels, device, 20.0, abort=False)


def test_a_receive_that_nobody_answers_is_ended_by_an_abort() -> None:
    """In a process of its own: NCCL may not let go of it."""
    said = run_script("stuck")

    assert "refused or aborted" in said


def test_connecting_to_a_rank_that_never_comes_ends_in_time() -> None:
    said = run_script("alone")

    assert "NCCL did not connect ranks [0, 1] within" in said


def run_script(name: str) -> str:
    script = Path(__file__).with_name("gpu_script.py")
    done = subprocess.run(
        [sys.executable, str(script), name],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.timeout(3600)
class TestNcclOnGpus(BoxingConformance):
    """With one GPU, what of the suite needs one rank; the rest says how many it needs."""

    name = "nccl"
    device = "cuda"
    rank_counts = tuple(count for count in (2, 4, 6, 8) if count <= NUM_GPUS) or (1,)

    @pytest.fixture(scope="class")
    def ranks(self) -> Iterator[GpuRanks]:
        ranks = GpuRanks(min(NUM_GPUS, 8))
        yield ranks
        ranks.close()

    @pytest.fixture(autouse=True)
    def _use_ranks(self, ranks: GpuRanks) -> None:
        self.processes = ranks

    def run_ranks(self, num_ranks: int, program: Program) -> Sequence[Any]:
        return self.run_backends(num_ranks, partial(use_communicator, program=program))

    def run_backends(self, num_ranks: int, job: Job) -> Sequence[Any]:
        if num_ranks > NUM_GPUS:
            pytest.skip(f"{num_ranks} GPUs are needed, {NUM_GPUS} are visible")
        return self.processes.run(num_ranks, job)

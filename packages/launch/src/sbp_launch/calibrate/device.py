"""How fast a rank computes, copies and starts operators, while all ranks do."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch

from sbp_launch.calibrate.job import Rates

#: Dtypes whose matrix multiplications are timed; half precision is that of GPUs.
_DTYPES = ("float32", "float64", "bfloat16")
_GPU_DTYPES = (*_DTYPES, "float16")

#: Seconds that one multiplication or copy takes at least, for the clock and the caches to matter
#: little, and most that all repetitions of it take where there is time.
_AT_LEAST_S, _AT_MOST_S = 0.02, 1.0

_LARGEST_SIDE = 16_384
_COPY_BYTES = 64 * 2**20
_LAUNCHES = 2_000
_REPETITIONS = 7


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what it was told."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure_rates(
    device: torch.device, ready: Callable[[], None], at_most_s: float = _AT_MOST_S
) -> Rates:
    """Measure one rank.

    Args:
        device: What it computes with.
        ready: Waits until all ranks have come here; called before each measurement.
        at_most_s: Seconds that the repetitions of each measurement may take; three are made anyway.
    """
    rates: dict[str, float] = {}
    for dtype in _GPU_DTYPES if device.type == "cuda" else _DTYPES:
        ready()
        rates[dtype] = _matmul_flop_per_s(device, getattr(torch, dtype), at_most_s)
    ready()
    copy_rate = _copy_bytes_per_s(device, at_most_s)
    ready()
    launch_s = _launch_s(device, at_most_s)
    return Rates(flop_per_s=rates, memory_bytes_per_s=copy_rate, launch_s=launch_s)


def _matmul_flop_per_s(device: torch.device, dtype: torch.dtype, at_most_s: float) -> float:
    side = 256
    while True:
        a = torch.rand(side, side, device=device).to(dtype)
        b = torch.rand(side, side, device=device).to(dtype)
        torch.mm(a, b)
        time_s = _once_s(device, lambda a=a, b=b: torch.mm(a, b))  # type: ignore[misc]
        if time_s >= _AT_LEAST_S or side >= _LARGEST_SIDE:
            break
        side *= 2
    return 2 * side**3 / _median_s(device, lambda: torch.mm(a, b), at_most_s)


def _copy_bytes_per_s(device: torch.device, at_most_s: float) -> float:
    source = torch.ones(_COPY_BYTES // 4, device=device)
    target = torch.zeros_like(source).fill_(2)
    return 2 * _COPY_BYTES / _median_s(device, lambda: target.copy_(source), at_most_s)


def _launch_s(device: torch.device, at_most_s: float) -> float:
    a, b = torch.ones(8, device=device), torch.ones(8, device=device)

    def launch() -> None:
        for _ in range(_LAUNCHES):
            torch.add(a, b)

    return _median_s(device, launch, at_most_s) / _LAUNCHES


def _median_s(device: torch.device, work: Callable[[], object], at_most_s: float) -> float:
    """Return the median time of some work, which was done before."""
    times: list[float] = []
    while len(times) < _REPETITIONS and (len(times) < 3 or sum(times) < at_most_s):
        times.append(_once_s(device, work))
    return median(times)


def _once_s(device: torch.device, work: Callable[[], object]) -> float:
    synchronize(device)
    start = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - start

"""How much longer large all-reduces take in steps than in a loop."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sbp_core.calibration import Calibration, Measurement
from sbp_launch.calibrate.large_all_reduces import in_steps, measure_large
from sbp_torch.boxing.local import LocalBackend
from sbp_torch.runtime.configs import ReferenceConfig
from sbp_torch.runtime.reference import ReferenceRuntime


@pytest.mark.parametrize(
    ("took_s", "stretch"),
    [(0.00511, 1.0), (0.01011, 2.0), (0.00011, 1.0), (0.5, 2.5)],
    ids=["as in a loop", "bytes take twice as long", "faster", "disturbed"],
)
def test_bytes_in_steps_are_compared_with_those_of_calls_that_follow_each_other(
    took_s: float, stretch: float
) -> None:
    # 10 us and 5 ms for 4 MB; 100 us to start.
    samples = [
        Measurement(
            backend="local", kind="all-reduce", group_size=2, shared_bytes=size,
            times_s=(1e-5 + size * 1.25e-9,),
        )
        for size in (1000, 10_000, 100_000, 1_000_000, 4_000_000)
    ]  # fmt: skip
    calibration = replace(Calibration.of(samples), boxing_launch_s=1e-4)

    found = in_steps(calibration, 2, {4_000_000: [took_s, 2.0, took_s, 3.0, took_s, 9.0, took_s]})

    assert found == pytest.approx(stretch, rel=1e-3)
    assert in_steps(calibration, 2, {}) == 1


@pytest.mark.slow
def test_steps_of_a_runtime_that_moves_data_itself_say_nothing_of_all_reduces() -> None:
    backend = LocalBackend()
    backend.open([0, 1])

    assert measure_large(backend, ReferenceRuntime(ReferenceConfig()), 2) == {}
    assert backend.local_ranks() == (0, 1)  # it stays open
    backend.close()

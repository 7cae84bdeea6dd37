"""What `sbp-calibrate` finds in whole steps: launches, and how much longer bytes take there."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sbp_core.calibration import Calibration, Measurement
from sbp_core.cluster import Cluster
from sbp_core.simulation import simulate
from sbp_launch.calibrate.launch_overhead import (
    SmallModel,
    in_steps,
    launches,
    make_plans,
    measure_large,
    measure_steps,
)
from sbp_torch.boxing.local import LocalBackend
from sbp_torch.runtime.configs import ReferenceConfig
from sbp_torch.runtime.reference import ReferenceRuntime


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_ranks", "time_s"),
    [(1, 10.0), (2, 10.0), pytest.param(2, 120.0, marks=pytest.mark.exhaustive)],
)
def test_launches_are_those_that_explain_the_measured_steps(num_ranks: int, time_s: float) -> None:
    size = SmallModel.within(time_s)
    nominal = Cluster.nominal(num_ranks)
    cluster = replace(nominal, device=replace(nominal.device, launch_s=1e-6))
    boxing_launch_s = 7e-5 if num_ranks > 1 else 0.0
    true = replace(
        cluster,
        device=replace(cluster.device, launch_s=3e-6, boxing_launch_s=boxing_launch_s),
    )
    plans = make_plans(num_ranks, [true], size)
    step_s = {name: simulate(plan).step_s for name, (plan,) in plans.items()}

    launch_s, found_boxing_launch_s = launches(cluster, step_s, size)

    assert set(step_s) == ({"apart", "together"} if num_ranks > 1 else {"apart"})
    assert launch_s == pytest.approx(3e-6, rel=1e-6)
    assert found_boxing_launch_s == pytest.approx(boxing_launch_s, rel=1e-6)


@pytest.mark.slow
def test_steps_that_are_faster_than_their_calls_leave_the_launches_of_a_loop() -> None:
    cluster = Cluster.nominal(2)

    found = launches(cluster, {"apart": 1e-9, "together": 1e-9})

    assert found == (cluster.device.launch_s, 0.0)


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
def test_steps_of_a_runtime_that_moves_data_itself_say_nothing_of_the_backend() -> None:
    backend = LocalBackend()
    backend.open([0, 1])

    assert measure_steps(backend, ReferenceRuntime(ReferenceConfig()), 2) == {}
    assert measure_large(backend, ReferenceRuntime(ReferenceConfig()), 2) == {}
    assert backend.local_ranks() == (0, 1)  # it stays open
    backend.close()


@pytest.mark.slow
def test_one_rank_has_operators_to_time_and_no_boxing() -> None:
    backend = LocalBackend()
    backend.open([0])

    found = measure_steps(backend, ReferenceRuntime(ReferenceConfig()), 1)

    assert list(found) == ["apart"]
    assert found["apart"] > 0
    backend.close()

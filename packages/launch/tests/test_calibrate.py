"""`sbp-calibrate`: what it measures, how the ranks agree, and the file that it leaves."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

import sbp_launch.conf
from sbp_core.boxing.step import StepKind
from sbp_core.calibration import CALL_KINDS as MEASURABLE
from sbp_core.calibration import Calibration, MeasuredCase, Measurement
from sbp_core.errors import ConfigError
from sbp_core.machine_memory import free_memory_bytes, total_memory_bytes
from sbp_core.operators import MeasuredOperator
from sbp_core.plugins import merge_settings
from sbp_launch.calibrate import measuring
from sbp_launch.calibrate.calibration import link_of, make_cluster, plain
from sbp_launch.calibrate.calibration_config import CALL_KINDS, CalibrateConfig, CalibrateRun
from sbp_launch.calibrate.calls import calls_of, cases_of, make_call
from sbp_launch.calibrate.job import CalibrationJob, CalibrationResult, Progress, Rates
from sbp_launch.calibrate.kept_measurements import KeptMeasurements
from sbp_launch.calibrate.measuring import CalibrationShards, RankMeasurer, Stopwatch, measure_rates
from sbp_launch.machine import describe_machine
from sbp_launch.settings.config import PluginChoice
from sbp_torch.boxing.local import LocalBackend

CONF = Path(sbp_launch.conf.__file__).parent / "calibrate.yaml"

RELU = MeasuredOperator(
    call="aten.relu.default(float32[2])->float32[2]",
    dtype="float32",
    flop=2.0,
    num_bytes=16,
    time_s=1e-6,
)
TINY = CalibrateConfig(ranks=2, sizes=(1024, 4096, 16_384), repetitions=2, time_s=60)


def job_of(config: CalibrateConfig, max_call_bytes: int = 2**40) -> CalibrationJob:
    return CalibrationJob(
        boxing=PluginChoice(name="local"),
        runtime=PluginChoice(name="reference"),
        device="cpu",
        settings=config,
        max_call_bytes=max_call_bytes,
    )


def on_ranks(num_ranks: int, work: Callable[[Any], Any]) -> list[Any]:
    """Call `work(communicator)` in a thread for every rank; return the results in rank order."""
    backend = LocalBackend()
    backend.open(range(num_ranks))
    results: list[Any] = [None] * num_ranks
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = work(backend.communicator(rank))
        except BaseException as error:
            errors.append(error)
            backend.fail(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    backend.close()
    if errors:
        raise errors[0]
    return results


def measure(
    job: CalibrationJob, tell: Callable[[Progress], None] = lambda progress: None
) -> list[Any]:
    """Measure on threads; return (samples, measurer) of every rank."""
    config = job.settings

    def work(communicator: Any) -> Any:
        watch = Stopwatch(communicator, config.ranks, torch.device("cpu"), config.deadline_s)
        measurer = RankMeasurer(job, watch, communicator.rank, tell, config.time_s)
        return measurer.run(), measurer

    return on_ranks(config.ranks, work)


def test_the_kinds_are_those_that_can_be_fitted() -> None:
    assert CALL_KINDS == MEASURABLE


def test_sizes_double_from_the_smallest_to_the_largest() -> None:
    sizes = CalibrateConfig().chosen_sizes

    assert sizes[0] == 1024
    assert sizes[-1] == 256 * 2**20
    assert all(large == 2 * small for small, large in pairwise(sizes))


def test_groups_are_those_along_the_axes_of_a_mesh() -> None:
    assert CalibrateConfig(ranks=12).chosen_group_sizes == (2, 3, 4, 6, 12)
    assert CalibrateConfig(ranks=1).chosen_group_sizes == ()
    assert CalibrateConfig(ranks=4, group_sizes=(3,)).chosen_group_sizes == (3,)


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ({"ranks": 0}, "ranks=0"),
        ({"ranks": 10**6}, "ranks=1000000 is more than"),
        ({"kinds": ()}, "leaves nothing to measure"),
        ({"repetitions": 0}, "repetitions=0"),
        ({"time_s": 0}, "time_s=0"),
        ({"kinds": ("gather",)}, "gather"),
        ({"sizes": (0,)}, "sizes"),
        ({"max_bytes": 10}, "max_bytes=10"),
        ({"group_sizes": (3,)}, "group_sizes"),
        ({"out": "."}, "no file"),
        ({"out": "no/such/folder/a.json"}, "no/such/folder is no folder"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(setting: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        CalibrateConfig(**setting)


def test_every_kind_is_measured_alone_and_with_all_ranks_at_work() -> None:
    cases = cases_of(CalibrateConfig(ranks=4))

    for kind in CALL_KINDS[:-1]:
        assert [(c.group_size, c.concurrent_groups) for c in cases if c.kind == kind] == [
            (2, 1),
            (2, 2),
            (4, 1),
        ]
    assert [c.concurrent_groups for c in cases if c.kind == "transfer"] == [1, 2, 4]


def test_one_rank_has_no_calls_to_measure() -> None:
    assert cases_of(CalibrateConfig(ranks=1)) == ()


@settings(derandomize=True, max_examples=60, deadline=None)
@given(st.integers(2, 8), st.integers(1, 2**22), st.sampled_from(CALL_KINDS))
def test_a_call_moves_what_its_kind_moves_of_the_size_asked_for(
    num_ranks: int, size: int, kind: str
) -> None:
    config = CalibrateConfig(ranks=num_ranks, kinds=(kind,))

    for case in cases_of(config):
        call = make_call(case, size, num_ranks)
        n, groups, shared = case.group_size, case.concurrent_groups, call.shared_bytes

        moved = {
            "all-reduce": 2 * (n - 1) * shared,
            "reduce-scatter": (n - 1) * shared,
            "all-gather": (n - 1) * shared,
            "all-to-all": shared - shared // n,
            "transfer": shared,
        }[kind]
        assert call.step.kind == StepKind(kind)
        assert call.step.size_bytes == groups * moved
        assert call.case == case
        # Rounded to what the ranks divide evenly.
        assert abs(shared - size) <= 0.05 * size + 16 * n**2


def test_the_calls_of_all_sizes_are_the_same_in_every_process() -> None:
    config = CalibrateConfig(ranks=4, max_bytes=2**16)

    assert list(calls_of(config)) == list(calls_of(config))


def test_the_primary_config_states_the_defaults() -> None:
    values = OmegaConf.to_container(OmegaConf.load(CONF))
    assert isinstance(values, dict)
    settings = {name: of for name, of in values.items() if name not in ("defaults", "hydra")}

    assert merge_settings(CalibrateConfig, settings) == CalibrateConfig()
    assert set(settings) == {field.name for field in fields(CalibrateConfig)}


def test_a_job_and_what_was_found_are_read_back(tmp_path: Path) -> None:
    job = job_of(replace(TINY, kinds=("transfer",), group_sizes=(2,)), 1234)
    sample = Measurement(
        backend="local", kind="transfer", group_size=2, shared_bytes=8, times_s=(0.5, 0.25)
    )
    rates = Rates(flop_per_s={"float32": 1e9}, memory_bytes_per_s=2e9, launch_s=1e-6)
    found = CalibrationResult(
        samples=(sample,), rates=rates, rounds=2, skipped="none", library="2.13"
    )

    job.save(tmp_path)
    found.save(tmp_path)

    assert CalibrationJob.load(tmp_path) == job
    assert CalibrationResult.load(tmp_path) == found


def test_progress_is_told_from_what_a_process_has_to_say() -> None:
    progress = Progress(what="round 1 of 2", done=3, of=7, left_s=1.5)

    assert Progress.of_line(progress.to_line()) == progress
    assert Progress.of_line("round 1 of 2") is None
    assert Progress.of_line(progress.to_line()[:-3]) is None


def test_the_slowest_rank_counts() -> None:
    def work(communicator: Any) -> list[float]:
        watch = Stopwatch(communicator, 3, torch.device("cpu"), 60)
        return watch.slowest([float(communicator.rank), -float(communicator.rank)])

    assert on_ranks(3, work) == [[2.0, 0.0]] * 3


def test_a_rank_without_a_part_has_no_shard_and_does_not_count() -> None:
    call = make_call(MeasuredCase(kind="all-reduce", group_size=2), 1024, 3)

    def work(communicator: Any) -> Any:
        watch = Stopwatch(communicator, 3, torch.device("cpu"), 60)
        shard = CalibrationShards(communicator.rank, torch.device("cpu")).of(call.step)
        assert (shard is None) == (communicator.rank == 2)
        span_s = watch.time(call.step, shard)
        return span_s, watch.durations([span_s])

    spans_s, times_s = zip(*on_ranks(3, work), strict=True)

    starts_s, ends_s = zip(*spans_s, strict=True)
    assert spans_s[2] == (0.0, 0.0)
    assert min(starts_s[:2]) > 0
    assert times_s == ([max(ends_s) - max(starts_s)],) * 3


def test_ranks_leave_a_meeting_when_all_have_come() -> None:
    def work(communicator: Any) -> tuple[float, float]:
        watch = Stopwatch(communicator, 3, torch.device("cpu"), 60)
        time.sleep(0.02 * communicator.rank)
        came_s = time.perf_counter()
        watch.barrier()
        return came_s, time.perf_counter()

    came_s, left_s = zip(*on_ranks(3, work), strict=True)

    assert min(left_s) >= max(came_s) + measuring._HEAD_START_S


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_all_ranks_measure_the_same_samples(num_ranks: int) -> None:
    # A machine that is busy takes long for the first call of each kind, and would skip large sizes.
    config = replace(TINY, ranks=num_ranks, time_s=3600)

    results = measure(job_of(config))

    first = results[0][0]
    assert all(samples == first for samples, _ in results)
    expected = [(call.case, call.shared_bytes) for level in calls_of(config) for call in level]
    assert [(sample.case, sample.shared_bytes) for sample in first] == expected
    assert all(len(sample.times_s) >= TINY.repetitions for sample in first)
    assert results[0][1].skipped == ""


def test_the_order_differs_from_round_to_round(monkeypatch: pytest.MonkeyPatch) -> None:
    orders: list[list[int]] = []
    shuffle = random.Random.shuffle

    def note(self: random.Random, order: list[int]) -> None:
        shuffle(self, order)
        orders.append(list(order))

    monkeypatch.setattr(random.Random, "shuffle", note)
    measure(job_of(replace(TINY, sizes=(1024, 2048), repetitions=2)))

    assert len(orders) == 4
    assert len(set(map(tuple, orders))) == 2
    assert all(order != sorted(order) for order in orders)


def test_a_short_call_is_repeated_more_often_than_a_long_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(measuring, "_SHORT_S", 1e3)

    samples, _ = measure(job_of(replace(TINY, kinds=("all-reduce",), repetitions=2)))[0]

    assert all(len(sample.times_s) == 2 * measuring._MOST_AT_ONCE for sample in samples)


def test_sizes_for_which_there_is_no_memory_are_left_out() -> None:
    samples, measurer = measure(job_of(TINY, max_call_bytes=5000))[0]

    assert {sample.shared_bytes for sample in samples} == {1024, 4096}
    assert measurer.skipped.startswith("16.4 kB and more: there is not enough memory")


def slow_by(pause_s: float) -> Callable[..., tuple[float, float]]:
    def wait(self: Stopwatch, step: Any, shard: Any, *, first: bool = False) -> tuple[float, float]:
        self.barrier()
        time.sleep(pause_s)
        return 1.0, 1.0 + pause_s

    return wait


def test_sizes_for_which_there_is_no_time_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Stopwatch, "time", slow_by(0.05))

    config = replace(TINY, kinds=("all-reduce",), time_s=0.3)
    samples, measurer = measure(job_of(config))[0]

    assert {sample.shared_bytes for sample in samples} == {1024}
    assert "longer than time_s=0.3" in measurer.skipped


def test_repetitions_end_when_the_time_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Stopwatch, "time", slow_by(0.02))

    config = replace(TINY, kinds=("all-reduce",), sizes=(1024,), time_s=0.5, repetitions=1000)
    _, measurer = measure(job_of(config))[0]

    assert 1 <= measurer.rounds < 100


@pytest.mark.parametrize(("time_s", "most"), [(60, 15), (0.36, 5)])
def test_short_calls_are_repeated_less_often_where_time_is_short(
    monkeypatch: pytest.MonkeyPatch, time_s: float, most: int
) -> None:
    monkeypatch.setattr(Stopwatch, "time", slow_by(0.002))

    config = replace(TINY, kinds=("all-reduce",), time_s=time_s, repetitions=1)
    samples, _ = measure(job_of(config))[0]

    assert most - 1 <= len(samples[0].times_s) <= most


@pytest.mark.slow
def test_progress_says_what_is_done_and_how_long_it_takes() -> None:
    told: list[Progress] = []

    measure(job_of(TINY), told.append)

    assert {progress.what for progress in told} == {
        "warming up",
        "round 1 of 2",
        "round 2 of 2",
    }
    left_s = [progress.left_s for progress in told if progress.what != "warming up"]
    assert all(0 <= left <= 60 for left in left_s)
    assert left_s == sorted(left_s, reverse=True)


@pytest.mark.slow
def test_rates_of_a_device_are_positive_and_all_ranks_are_waited_for() -> None:
    waits: list[int] = []

    rates = measure_rates(torch.device("cpu"), lambda: waits.append(1))

    assert set(rates.flop_per_s) == {"float32", "float64", "bfloat16"}
    assert min(*rates.flop_per_s.values(), rates.memory_bytes_per_s, rates.launch_s) > 0
    assert len(waits) == 5


def test_a_machine_is_described_without_its_name() -> None:
    described = describe_machine("2.13")

    assert set(described) == {"processor", "cores", "memory_bytes", "system", "python", "torch"}
    assert int(described["cores"]) >= 1
    assert 0 < free_memory_bytes() <= total_memory_bytes() == int(described["memory_bytes"])


def linear(latency_s: float, s_per_byte: float, at_once: int = 1) -> list[Measurement]:
    return [
        Measurement(
            backend="local",
            kind="transfer",
            group_size=2,
            concurrent_groups=at_once,
            shared_bytes=size,
            times_s=(latency_s + size * s_per_byte,),
        )
        for size in (2**power for power in range(10, 28))
    ]


@pytest.mark.parametrize("shared", [True, False])
def test_the_link_is_what_one_message_takes_and_shared_if_more_take_longer(shared: bool) -> None:
    samples = linear(1e-4, 1e-9) + linear(1e-4, 2e-9 if shared else 1e-9, at_once=2)

    link, is_shared = link_of(Calibration.of(samples), 2)

    assert link.latency_s == pytest.approx(1e-4, rel=0.05)
    assert link.bytes_per_s == pytest.approx(1e9, rel=0.05)
    assert is_shared == shared


@pytest.mark.parametrize("samples", [(), tuple(linear(1e-4, 1e-9))])
def test_a_cluster_has_the_ranks_and_rates_that_were_found(
    samples: tuple[Measurement, ...],
) -> None:
    run = CalibrateRun(
        boxing=PluginChoice(name="local"),
        runtime=PluginChoice(name="reference"),
        device="cpu",
        settings=TINY,
    )
    kept = Calibration.of([replace(sample, backend="mpi") for sample in linear(1e-4, 1e-9)])
    run = replace(run, kept=KeptMeasurements(calibrations={"mpi": kept}, operators=(RELU,)))
    rates = Rates(flop_per_s={"float32": 1e9}, memory_bytes_per_s=2e9, launch_s=1e-6)
    found = CalibrationResult(samples=samples, rates=rates, rounds=2, skipped="", library="2.13")

    cluster, held_out = make_cluster(run, found)

    assert cluster.num_devices == cluster.devices_per_node == 2
    assert cluster.device.flop_per_s == {"float32": 1e9}
    assert set(cluster.calibrations) == ({"local", "mpi"} if samples else {"mpi"})
    measured = cluster.calibrations["local"] if samples else cluster.device
    assert measured.operators == (RELU,)
    assert bool(held_out) == bool(samples)


@pytest.mark.parametrize(
    ("number", "text"),
    [(0.0123, "0.0123"), (9.806, "9.81"), (99.96, "100"), (115.64, "116"), (1031.2, "1,031")],
)
def test_rates_are_told_without_exponents(number: float, text: str) -> None:
    assert plain(number) == text

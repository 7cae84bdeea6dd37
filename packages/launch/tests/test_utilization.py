"""Model flop utilization: what is counted, and against which rates."""

from __future__ import annotations

from dataclasses import replace

import pytest
from trainable import plan_step, run_config, run_of

from sbp_aten.pass_options import PassOptions
from sbp_core.cluster import Cluster, Device
from sbp_core.passes import RecomputeOptions
from sbp_launch.planning.flow import Planned
from sbp_launch.planning.utilization import ModelWork, samples_of_step, speed_line
from sbp_launch.settings.config import PluginChoice
from sbp_launch.trainer.run_program import make_program

DEVICE = Device(memory_bytes=10**9, flop_per_s={"float32": 1e6}, memory_bytes_per_s=1e9)


def wide(micro_batches: int = 1, **passes: object) -> Planned:
    """Return the plan of three residual blocks, 8 samples a step."""
    config = run_config(batch_size=8, micro_batches=micro_batches)
    run = run_of(
        replace(
            config,
            model=PluginChoice(name="wide"),
            data=PluginChoice(name="rows"),
            compile=replace(config.compile, passes=PassOptions(**passes)),
        )
    )
    return plan_step(run, make_program(run))


@pytest.mark.slow
def test_matrix_products_of_forward_and_backward_are_counted() -> None:
    # A multiplication and an addition are 2; the gradient of a matrix takes as much as the product,
    # and that of its input, too, but for the first.
    weights = 6 * 32, 6 * (32 * 256), 32 * 4
    products = 2 * 8 * (2 * weights[0] + 3 * weights[1] + 3 * weights[2])

    work = ModelWork.of(wide().graph, DEVICE, 2)

    assert products < work.flop < 1.1 * products
    assert work.rank_s == pytest.approx(work.flop / 1e6)
    assert work.mfu(2.0) == pytest.approx(work.flop / 1e6 / 4.0)


@pytest.mark.slow
def test_micro_batches_change_little_and_recomputation_nothing() -> None:
    whole = ModelWork.of(wide().graph, DEVICE, 2).flop

    parts = ModelWork.of(wide(micro_batches=4).graph, DEVICE, 2).flop
    recompute = RecomputeOptions(modules=("blocks.*",))
    again = ModelWork.of(wide(recompute=recompute).graph, DEVICE, 2).flop

    assert parts == pytest.approx(whole, rel=0.01)
    assert again == whole


@pytest.mark.slow
def test_work_goes_by_the_rate_of_its_dtype() -> None:
    graph = wide().graph
    rates = {"float32": 2e6, "bfloat16": 8e6}

    fast = ModelWork.of(graph, replace(DEVICE, flop_per_s=rates), 2)
    other = ModelWork.of(graph, replace(DEVICE, flop_per_s={"float64": 4e6}), 2)

    assert fast.rank_s == pytest.approx(fast.flop / 2e6)
    unknown = replace(DEVICE, flop_per_s={"bfloat16": 8e6, "float64": 4e6})
    assert ModelWork.of(graph, unknown, 2).rank_s == pytest.approx(fast.flop / 4e6)  # the slowest
    assert other.rank_s == pytest.approx(other.flop / 4e6)


def test_it_is_told_with_what_it_rests_on() -> None:
    work = ModelWork(flop=8e9, rank_s=1.0, num_ranks=4)

    assert work.line(0.5, "local") == (
        "MFU 50.0% of the rates of cluster=local (forward and backward: 8 GFLOP a step)"
    )


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("micro_batches", [1, 4])
def test_a_plan_is_told_in_samples_of_all_micro_batches(micro_batches: int) -> None:
    graph = wide(micro_batches=micro_batches).graph
    cluster = replace(Cluster.nominal(2), device=DEVICE)
    work = ModelWork.of(graph, DEVICE, 2)

    line = speed_line(graph, cluster, 2, 2 * work.rank_s)
    fast = speed_line(graph, cluster, 2, 1e-3)

    assert samples_of_step(graph) == 8
    assert line.startswith(f"{8 / (2 * work.rank_s):.4g} samples/s, MFU 25.0% of the rates of ")
    assert fast.startswith("8,000 samples/s, MFU ")

"""The time of steps: what groups share, links, calibrations, and the sum over a route."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sbp_core.boxing import BoxingStep, StepKind, route
from sbp_core.boxing.price import (
    step_time,
    step_time_s,
    transfer_messages,
)
from sbp_core.boxing.slices import collective_bytes, transfer_bytes
from sbp_core.calibration import Calibration, Measurement
from sbp_core.cluster import Cluster, Device, Link
from sbp_core.cost import boxing_step_time_s
from sbp_core.placement import Placement
from sbp_core.sbp import NdSbp

FAST = Link(latency_s=1e-6, bytes_per_s=1e10)
SLOW = Link(latency_s=1e-5, bytes_per_s=1e9)
SHAPE = (16, 16)
SIZE = 16 * 16 * 4


def machine(
    devices_per_node: int, *, calibration: Calibration | None = None, bus: bool = False
) -> Cluster:
    return Cluster(
        name="test",
        num_devices=8,
        devices_per_node=devices_per_node,
        device=Device(
            memory_bytes=1, flop_per_s={"float32": 1.0}, memory_bytes_per_s=1.0, launch_s=7.0
        ),
        intra_node=FAST,
        inter_node=SLOW,
        intra_node_shared=bus,
        calibrations={} if calibration is None else {calibration.backend: calibration},
    )


def one_step(
    kind: StepKind,
    mesh: Placement,
    source: str,
    target: str,
    *,
    axes: tuple[int, ...] = (0,),
    after: Placement | None = None,
    shape: tuple[int, ...] = SHAPE,
) -> BoxingStep:
    made = BoxingStep(
        kind=kind,
        shape=shape,
        dtype="float32",
        source=(mesh, NdSbp.parse(source)),
        target=(after or mesh, NdSbp.parse(target)),
        axes=() if kind is StepKind.TRANSFER else axes,
        size_bytes=0,
    )
    counts = transfer_bytes if kind is StepKind.TRANSFER else collective_bytes
    return replace(made, size_bytes=counts(made))


def copies(senders: list[int], receivers: list[int]) -> BoxingStep:
    """Return the transfer of whole copies."""
    before, after = Placement(senders), Placement(receivers)
    return one_step(StepKind.TRANSFER, before, "B", "B", after=after)


PAIR, FOUR, SQUARE = Placement.grid((2,)), Placement.grid((4,)), Placement.grid((2, 2))
REDUCE_PAIR = one_step(StepKind.ALL_REDUCE, PAIR, "P", "B")


def linear(
    kind: str, seconds: float, s_per_byte: float, *, groups: int = 1, nodes: int = 1
) -> list[Measurement]:
    """Measurements of pairs of ranks that lie on a line."""
    return [
        Measurement(
            backend="torch",
            kind=kind,
            group_size=2,
            concurrent_groups=groups,
            num_nodes=nodes,
            shared_bytes=size,
            times_s=(seconds + s_per_byte * size,),
        )
        for size in (64, 256, 1024, 4096, 16384)
    ]


@pytest.mark.parametrize(
    ("kind", "source", "target", "algorithm", "rounds", "moved"),
    [
        (StepKind.ALL_REDUCE, "P", "B", "recursive doubling", 2, 2),
        (StepKind.ALL_GATHER, "S(0)", "B", "recursive doubling", 2, 3 / 4),
        (StepKind.REDUCE_SCATTER, "P", "S(0)", "recursive halving", 2, 3 / 4),
        (StepKind.ALL_TO_ALL, "S(0)", "S(1)", "Bruck", 2, 4 / 16),
    ],
)
def test_collectives_take_the_fastest_way(
    kind: StepKind, source: str, target: str, algorithm: str, rounds: int, moved: float
) -> None:
    found = step_time(one_step(kind, FOUR, source, target), machine(8))

    assert found.algorithm == algorithm
    assert found.time_s == pytest.approx(rounds * FAST.latency_s + moved * SIZE / FAST.bytes_per_s)


def test_groups_inside_nodes_are_not_slowed_by_other_nodes() -> None:
    step = one_step(StepKind.ALL_REDUCE, SQUARE, "B, P", "B, B", axes=(1,))

    assert step_time_s(step, machine(2)) == step_time_s(step, machine(8))


def test_groups_of_one_step_divide_the_link_between_their_nodes() -> None:
    pairs = one_step(StepKind.ALL_GATHER, SQUARE, "S(0), B", "B, B")
    alone = one_step(StepKind.ALL_GATHER, Placement([[0], [2]]), "S(0), B", "B, B")

    together_s, alone_s = (step_time_s(step, machine(2)) for step in (pairs, alone))

    assert alone_s == pytest.approx(SLOW.latency_s + SIZE / 2 / SLOW.bytes_per_s)
    assert together_s == pytest.approx(SLOW.latency_s + 2 * SIZE / 2 / SLOW.bytes_per_s)


def test_a_shared_memory_bus_slows_the_groups_of_a_node() -> None:
    step = one_step(StepKind.ALL_GATHER, SQUARE, "B, S(0)", "B, B", axes=(1,))

    assert step_time_s(step, machine(8, bus=True)) == pytest.approx(
        FAST.latency_s + 4 * SIZE / 2 / FAST.bytes_per_s
    )


def test_merged_axes_are_one_larger_group() -> None:
    merged = one_step(StepKind.ALL_REDUCE, SQUARE, "P, P", "B, B", axes=(0, 1))
    flat = one_step(StepKind.ALL_REDUCE, FOUR, "P", "B")

    assert step_time_s(merged, machine(8)) == step_time_s(flat, machine(8))


def test_uneven_groups_take_as_long_as_the_largest() -> None:
    mesh = Placement.grid((3, 2))
    step = one_step(StepKind.ALL_REDUCE, mesh, "S(0), P", "S(0), B", axes=(1,), shape=(4, 8))

    assert step_time_s(step, machine(8)) == pytest.approx(
        FAST.latency_s + 2 * 8 * 4 / FAST.bytes_per_s
    )


def test_a_local_step_takes_no_time() -> None:
    step = one_step(StepKind.LOCAL, FOUR, "B", "S(0)")

    assert step_time_s(step, machine(8)) == 0.0


def test_a_collective_of_one_rank_takes_no_time() -> None:
    step = one_step(StepKind.ALL_REDUCE, Placement.grid((1, 1)), "P, P", "B, B", axes=(0, 1))

    assert step_time_s(step, machine(8)) == 0.0


def test_a_transfer_takes_as_long_as_its_busiest_rank() -> None:
    step = copies([0], [1, 2, 4])

    expected = 2 * (FAST.latency_s + SIZE / FAST.bytes_per_s)
    expected += SLOW.latency_s + SIZE / SLOW.bytes_per_s

    assert transfer_messages(step).tolist() == [[SIZE, SIZE, SIZE]]
    assert step_time_s(step, machine(4)) == pytest.approx(expected)


def test_receivers_take_turns_among_the_copies() -> None:
    step = copies([0, 1], [2, 3])

    assert transfer_messages(step).tolist() == [[SIZE, 0], [0, SIZE]]
    assert step_time_s(step, machine(8)) == pytest.approx(FAST.latency_s + SIZE / FAST.bytes_per_s)


def test_messages_between_two_nodes_divide_their_link() -> None:
    found = step_time(copies([0, 1], [2, 3]), machine(2))

    assert found.time_s == pytest.approx(SLOW.latency_s + 2 * SIZE / SLOW.bytes_per_s)
    assert found.reason == "the busiest shared link"


def test_a_transfer_of_what_is_there_already_takes_no_time() -> None:
    assert step_time_s(copies([0, 1], [1]), machine(8)) == 0.0


def test_a_measured_call_takes_what_was_measured() -> None:
    calibration = Calibration.of(linear("all-reduce", 1e-3, 1e-6))
    found = step_time(REDUCE_PAIR, machine(8, calibration=calibration))

    assert found.time_s == pytest.approx(1e-3 + 1e-6 * SIZE)
    assert found.algorithm == "measured"
    assert found.is_whole_call


def test_the_slowest_of_measured_groups_counts() -> None:
    samples = [
        *linear("all-reduce", 1e-3, 1e-6),
        *linear("all-reduce", 2e-3, 2e-6, groups=2),
    ]
    # Of three rows the first group holds two.
    step = one_step(StepKind.ALL_REDUCE, SQUARE, "S(0), P", "S(0), B", axes=(1,), shape=(3, 64))

    cluster = machine(8, calibration=Calibration.of(samples))

    assert step_time_s(step, cluster) == pytest.approx(2e-3 + 2e-6 * 2 * 64 * 4)


def test_a_slower_group_counts_wherever_it_comes() -> None:
    # The pair across nodes is the slower one, and comes last.
    samples = [*linear("all-reduce", 1e-3, 1e-6), *linear("all-reduce", 9e-3, 1e-6, nodes=2)]
    mesh = Placement([[0, 1], [2, 4]])
    step = one_step(StepKind.ALL_REDUCE, mesh, "B, P", "B, B", axes=(1,))

    cluster = machine(2, calibration=Calibration.of(samples))

    assert step_time_s(step, cluster) == pytest.approx(9e-3 + 1e-6 * SIZE)


def test_groups_at_once_are_looked_up_as_such() -> None:
    samples = [*linear("all-reduce", 1e-3, 1e-6), *linear("all-reduce", 3e-3, 3e-6, groups=2)]
    cluster = machine(8, calibration=Calibration.of(samples))
    pairs = one_step(StepKind.ALL_REDUCE, SQUARE, "B, P", "B, B", axes=(1,))

    assert step_time_s(pairs, cluster) == pytest.approx(3e-3 + 3e-6 * SIZE)
    # On nodes of two ranks each pair is alone on its node.
    spread = machine(2, calibration=cluster.calibration)
    assert step_time_s(pairs, spread) == pytest.approx(1e-3 + 1e-6 * SIZE)


def test_links_speak_where_nothing_was_measured_between_nodes() -> None:
    calibration = Calibration.of(linear("all-reduce", 1e-3, 1e-6))

    found = step_time(REDUCE_PAIR, machine(1, calibration=calibration))

    assert found.time_s == step_time_s(REDUCE_PAIR, machine(1))
    assert not found.is_whole_call


def test_measured_messages_are_sent_one_after_the_other() -> None:
    calibration = Calibration.of(linear("transfer", 1e-3, 1e-6))

    found = step_time_s(copies([0], [1, 2, 3]), machine(8, calibration=calibration))

    assert found == pytest.approx(3 * (1e-3 + 1e-6 * SIZE))


def test_measured_transfers_between_nodes_are_of_their_own() -> None:
    samples = [*linear("transfer", 1e-3, 1e-6), *linear("transfer", 5e-3, 5e-6, nodes=2)]
    cluster = machine(1, calibration=Calibration.of(samples))

    assert step_time_s(copies([0], [1]), cluster) == pytest.approx(5e-3 + 5e-6 * SIZE)


def test_what_a_calibration_measured_is_not_counted_twice() -> None:
    calibration = Calibration.of(linear("all-reduce", 1e-3, 1e-6))
    measured, declared = machine(8, calibration=calibration), machine(8)

    measured_s = step_time_s(REDUCE_PAIR, measured)
    declared_s = step_time_s(REDUCE_PAIR, declared)
    assert boxing_step_time_s(REDUCE_PAIR, measured) == measured_s
    started = replace(measured, device=replace(measured.device, boxing_launch_s=3.0))
    assert boxing_step_time_s(REDUCE_PAIR, started) == pytest.approx(measured_s + 3.0)
    assert boxing_step_time_s(REDUCE_PAIR, declared) == pytest.approx(declared_s + 7.0 + SIZE)


def test_every_step_says_why_it_takes_its_time() -> None:
    found = route(SHAPE, "float32", (SQUARE, NdSbp.parse("P, S(0)")), (SQUARE, NdSbp.parse("B, B")))

    times = [step_time(step, machine(2)) for step in found.steps]

    assert [entry.step for entry in times] == list(found.steps)
    assert all(entry.reason for entry in times)


def test_a_route_takes_the_time_of_its_steps_together() -> None:
    cluster = machine(2)
    found = route(SHAPE, "float32", (SQUARE, NdSbp.parse("P, S(0)")), (SQUARE, NdSbp.parse("B, B")))

    total = sum(step_time_s(step, cluster) for step in found.steps)

    assert len(found.steps) > 1
    assert found.time_s(cluster) == pytest.approx(total)

"""The α-β time of steps: the formulas, the links, and the sum over a route."""

from __future__ import annotations

import pytest

from sbp_core.boxing import Route, StepKind, route
from sbp_core.boxing.price import route_time_s, step_time_s, transfer_messages
from sbp_core.placement import Cluster, Device, Link, Placement
from sbp_core.sbp import B, NdSbp, P, S, Sbp

FAST = Link(latency_s=1e-6, bytes_per_s=1e10)
SLOW = Link(latency_s=1e-5, bytes_per_s=1e9)
SHAPE = (16, 16)
SIZE = 16 * 16 * 4


def machine(devices_per_node: int) -> Cluster:
    return Cluster(
        name="test",
        num_devices=8,
        devices_per_node=devices_per_node,
        device=Device(memory_bytes=1, flop_per_s={"float32": 1.0}, memory_bytes_per_s=1.0),
        intra_node=FAST,
        inter_node=SLOW,
    )


def between(source: Sbp, target: Sbp, ranks: int = 4) -> Route:
    mesh = Placement.grid((ranks,))
    return route(SHAPE, "float32", (mesh, NdSbp(source)), (mesh, NdSbp(target)))


@pytest.mark.parametrize(
    ("source", "target", "rounds", "share"),
    [(P, B, 6, 4), (S(0), B, 3, 4), (P, S(0), 3, 4), (S(0), S(1), 3, 16)],
)
def test_collectives_cost_what_rings_cost(
    source: Sbp, target: Sbp, rounds: int, share: int
) -> None:
    (step,) = between(source, target).steps

    expected = rounds * (FAST.latency_s + SIZE / share / FAST.bytes_per_s)

    assert step_time_s(step, machine(8)) == pytest.approx(expected)


def test_a_group_across_nodes_takes_the_slow_link() -> None:
    (step,) = between(P, B).steps

    expected = 6 * (SLOW.latency_s + SIZE / 4 / SLOW.bytes_per_s)

    assert step_time_s(step, machine(2)) == pytest.approx(expected)


def test_groups_inside_nodes_are_not_slowed_by_other_nodes() -> None:
    mesh = Placement.grid((2, 2))
    (step,) = route(SHAPE, "float32", (mesh, NdSbp(B, P)), (mesh, NdSbp(B, B))).steps

    assert step_time_s(step, machine(2)) == step_time_s(step, machine(8))


def test_a_local_step_takes_no_time() -> None:
    (step,) = between(B, S(0)).steps

    assert step.kind is StepKind.LOCAL
    assert step_time_s(step, machine(8)) == 0.0


def test_a_transfer_takes_as_long_as_its_busiest_rank() -> None:
    before, after = Placement([0]), Placement([1, 2, 4])
    (step,) = route(SHAPE, "float32", (before, NdSbp(B)), (after, NdSbp(B))).steps

    expected = 2 * (FAST.latency_s + SIZE / FAST.bytes_per_s)
    expected += SLOW.latency_s + SIZE / SLOW.bytes_per_s

    assert transfer_messages(step) == ((0, 1, SIZE), (0, 2, SIZE), (0, 4, SIZE))
    assert step_time_s(step, machine(4)) == pytest.approx(expected)


def test_receivers_take_turns_among_the_copies() -> None:
    before, after = Placement([0, 1]), Placement([2, 3])
    (step,) = route(SHAPE, "float32", (before, NdSbp(B)), (after, NdSbp(B))).steps

    assert transfer_messages(step) == ((0, 2, SIZE), (1, 3, SIZE))
    assert step_time_s(step, machine(8)) == pytest.approx(FAST.latency_s + SIZE / FAST.bytes_per_s)


def test_a_route_takes_the_time_of_its_steps_together() -> None:
    mesh, cluster = Placement.grid((2, 2)), machine(2)
    found = route(SHAPE, "float32", (mesh, NdSbp(P, P)), (mesh, NdSbp(B, B)))

    total = sum(step_time_s(step, cluster) for step in found.steps)

    assert len(found.steps) > 1
    assert found.time_s(cluster) == route_time_s(found, cluster) == pytest.approx(total)

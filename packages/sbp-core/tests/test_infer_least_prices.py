"""Prices from below: what conversions take at least, all at once."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sbp_core.boxing import StepKind
from sbp_core.calibration import Measurement, calibrate
from sbp_core.cluster import Link, LinkLevel
from sbp_core.compile.bucket_price import Companions
from sbp_core.graph.ir import ITEMSIZE
from sbp_core.infer import LeastPrices
from sbp_core.infer.prices import Prices
from sbp_core.placement import Placement
from sbp_core.sbp import B, P, Partial, S
from sbp_core.testing.graphs import cluster

AXES = ("data", "context", "tensor")
MACHINE = cluster(num_devices=32, launch_s=3e-6)

MEASURED = calibrate(
    [
        Measurement(
            backend="x",
            kind="all-reduce",
            group_size=4,
            shared_bytes=size,
            times_s=(size * 1e-9,),
        )
        for size in (1 << 10, 1 << 20)
    ]
)

machines = st.builds(
    lambda per_node, near, far, latency_s, shared, groups: replace(
        MACHINE,
        devices_per_node=per_node,
        intra_node=Link(latency_s=latency_s, bytes_per_s=near),
        inter_node=Link(latency_s=2 * latency_s, bytes_per_s=far),
        intra_node_shared=shared,
        inter_node_shared=shared,
        groups=groups if per_node > 2 else (),
    ),
    st.sampled_from([2, 4, 8]),
    st.sampled_from([1e8, 3e9]),
    st.sampled_from([1e8, 1e9]),
    st.sampled_from([0.0, 1e-5]),
    st.booleans(),
    st.sampled_from(
        [
            (),
            (LinkLevel(name="pair", num_ranks=2, link=Link(latency_s=0.0, bytes_per_s=2e9)),),
        ]
    ),
)
meshes = st.sampled_from([(2, 2, 2), (4, 2, 2), (2, 4, 1), (3, 2, 2), (4, 2)])
extents = st.sampled_from([0, 1, 3, 8, 12, 16, 48, 64])
kinds = st.sampled_from(["sum", "sum", "max", "min"])


#: What a tensor could travel with, and how large buckets may be.
companions = st.one_of(
    st.none(),
    st.builds(
        lambda kinds, sizes: Companions(frozenset(kinds), tuple(sorted(sizes))),
        st.sets(st.sampled_from(list(StepKind)), min_size=1),
        st.lists(st.integers(4, 1 << 22), max_size=9),
    ),
)
bucket_bytes = st.sampled_from([None, 0, 1001, 1 << 16, 1 << 30])


@st.composite
def ends(draw, num_axes, num_dims):
    partial = Partial(draw(kinds))
    entries = st.sampled_from([B, partial, *map(S, range(num_dims))])
    return tuple(draw(entries) for _ in range(num_axes))


asked = given(st.data(), meshes, st.lists(extents, min_size=1, max_size=3), machines)


def assert_no_conversion_costs_less(data, shape, tensor, machine):
    mesh = Placement.grid(shape, AXES[: len(shape)])
    sources, targets = (
        [(0, data.draw(ends(len(shape), len(tensor)))) for _ in range(3)] for _ in range(2)
    )
    exact = Prices((mesh,), range(len(shape)), machine, data.draw(bucket_bytes))
    arguments = (tuple(tensor), "float32", sources, targets, data.draw(companions))

    prices = exact.table(*arguments)
    least = LeastPrices((mesh,), machine).table(*arguments)

    for row, bounds in zip(prices, least, strict=True):
        for (seconds, size), (least_s, least_bytes) in zip(row, bounds, strict=True):
            assert least_s <= seconds * (1 + 1e-9)
            assert least_bytes in (0, pytest.approx(size))


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@asked
def test_no_conversion_costs_less_and_none_moves_fewer_bytes(data, shape, tensor, machine):
    assert_no_conversion_costs_less(data, shape, tensor, machine)


@pytest.mark.exhaustive
@settings(max_examples=200, deadline=None)
@given(st.data(), meshes, st.lists(extents, min_size=1, max_size=5), machines)
def test_of_many_conversions_none_costs_less(data, shape, tensor, machine):
    assert_no_conversion_costs_less(data, shape, tensor, machine)


def test_bytes_are_exact_and_long_conversions_are_told_from_short_ones():
    machine = replace(MACHINE, devices_per_node=8, inter_node=Link(latency_s=0, bytes_per_s=1e8))
    mesh = Placement.grid((4, 4, 2), AXES)
    states = [
        *[(B, B, B), (S(0), S(0), S(0)), (S(1), S(0), S(0)), (S(0), S(1), S(0)), (S(2), B, S(1))],
        *[(P, P, P), (P, B, S(0)), (S(0), P, P), (S(0), B, P)],
    ]
    shape, states = (64, 64, 32), [(0, state) for state in states]

    exact = np.array(Prices((mesh,), range(3), machine).table(shape, "float32", states, states))
    least = np.array(LeastPrices((mesh,), machine).table(shape, "float32", states, states))

    assert least[..., 1] == pytest.approx(exact[..., 1])
    assert (least[..., 0] <= exact[..., 0] * (1 + 1e-9)).all()
    reached = [at for at, (_, state) in enumerate(states) if P not in state]
    shares = least[:, reached, 0] / np.maximum(exact[:, reached, 0], 1e-12)
    assert np.median(shares[shares > 0]) > 0.9


def test_what_travels_with_others_is_given_no_launches_and_latencies_of_its_own():
    machine = replace(MACHINE, device=replace(MACHINE.device, boxing_launch_s=1e-3))
    mesh = Placement.grid((2, 2, 2), AXES)
    least = LeastPrices((mesh,), machine)
    arguments = ((8, 8), "float32", [(0, (P, P, P))], [(0, (B, B, B))])

    alone, together = least.table(*arguments)[0][0], least.table(*arguments, object())[0][0]

    launches = machine.device.launch_s + machine.device.boxing_launch_s
    assert alone[0] >= together[0] + launches
    assert together[0] < launches
    assert alone[1] == together[1] == 2 * 7 * 64 * ITEMSIZE["float32"]


@pytest.mark.parametrize(
    ("machine", "tensor", "stage"),
    [
        (MACHINE, (8, 8), 1),
        (MACHINE, (), 0),
        (replace(MACHINE, calibrations={"x": MEASURED}), (8, 8), 0),
    ],
    ids=["to another placement", "of a scalar", "where it was measured"],
)
def test_nothing_is_said(machine, tensor, stage):
    meshes = tuple(Placement(ranks=list(range(at, at + 4)), axes=("data",)) for at in (0, 4))

    found = LeastPrices(meshes, machine).table(tensor, "float32", [(0, (P,))], [(stage, (B,))])

    assert np.array(found).tolist() == [[[0.0, 0.0]]]

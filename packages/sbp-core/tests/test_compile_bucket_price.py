"""What small tensors cost that travel together."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sbp_core.boxing import BoxingStep, StepKind, route
from sbp_core.compile.bucket_price import BucketPrices, Companions, most_bucket_bytes
from sbp_core.compile.packing import flat_step
from sbp_core.cost import boxing_step_time_s, copy_time_s
from sbp_core.placement import Placement
from sbp_core.sbp import B, NdSbp, P, S, Sbp
from sbp_core.testing.graphs import cluster

_PAIR = Placement.grid((2,), ("data",))
_DEVICE = replace(cluster().device, launch_s=2e-6, boxing_launch_s=1e-4, memory_bytes_per_s=1e10)
_MACHINE = replace(cluster(bytes_per_s=1e9, latency_s=1e-4), device=_DEVICE)
_KINDS = {
    StepKind.ALL_REDUCE: (P, B),
    StepKind.REDUCE_SCATTER: (P, S(0)),
    StepKind.ALL_GATHER: (S(0), B),
}


def _step(kind: StepKind, elements: int) -> BoxingStep:
    source, target = _KINDS[kind]
    return _between(source, target, elements)


def _between(source: Sbp, target: Sbp, elements: int) -> BoxingStep:
    ends = (_PAIR, NdSbp(source)), (_PAIR, NdSbp(target))
    (step,) = route((elements,), "float32", *ends).steps
    return step


def _companions(kind: StepKind, *sizes: int) -> Companions:
    return Companions(frozenset({kind}), tuple(sorted(sizes)))


@pytest.mark.parametrize("kind", [StepKind.ALL_REDUCE, StepKind.REDUCE_SCATTER])
def test_reductions_that_fill_a_bucket_cost_together_what_it_does(kind: StepKind) -> None:
    step = _step(kind, 256)
    limit = most_bucket_bytes(step, _MACHINE)
    number = limit // 1024
    prices = BucketPrices(_MACHINE)

    one_s = prices.step_time_s(step, _companions(kind, *[1024] * 2 * number))

    bucket = flat_step(kind, _PAIR, (0,), "float32", limit // 4)
    copies_s = copy_time_s(2 * limit, 1, _MACHINE.device)
    assert number * one_s == pytest.approx(boxing_step_time_s(bucket, _MACHINE) + copies_s)


@given(st.sampled_from([*_KINDS]), st.lists(st.integers(1, 1 << 18), min_size=1, max_size=20))
def test_all_that_could_travel_together_cost_no_more_than_their_buckets(
    kind: StepKind, halves: list[int]
) -> None:
    """However few or many they are; so what is proved with these prices is true of plans."""
    steps = [_step(kind, 2 * one) for one in halves]
    limit = most_bucket_bytes(steps[0], _MACHINE)
    prices, companions = BucketPrices(_MACHINE), _companions(kind, *(8 * one for one in halves))

    together_s = sum(prices.step_time_s(step, companions) for step in steps)

    small = [8 * one for one in halves if 8 * one <= limit]
    large_s = sum(
        boxing_step_time_s(step, _MACHINE)
        for step, one in zip(steps, halves, strict=True)
        if 8 * one > limit
    )
    rows = 2 if kind is StepKind.ALL_GATHER else 1
    buckets: list[int] = []
    for size in small:  # in turn, as the compiler forms them
        if buckets and buckets[-1] + size <= limit:
            buckets[-1] += size
        else:
            buckets.append(size)
    device = _MACHINE.device
    formed_s = sum(
        boxing_step_time_s(flat_step(kind, _PAIR, (0,), "float32", size // 4), _MACHINE)
        + copy_time_s(2 * size // rows, 1, device)
        for size in buckets
    )
    if kind is StepKind.ALL_GATHER:
        formed_s += copy_time_s(2 * sum(small), len(small), device)
    assert together_s <= (large_s + formed_s) * (1 + 1e-3)


def test_gathers_are_copied_out_of_the_bucket_one_by_one() -> None:
    kind = StepKind.ALL_GATHER
    step = _step(kind, 256)
    limit = most_bucket_bytes(step, _MACHINE)
    number = limit // 1024
    prices = BucketPrices(_MACHINE)

    one_s = prices.step_time_s(step, _companions(kind, *[1024] * 2 * number))

    bucket = flat_step(kind, _PAIR, (0,), "float32", limit // 4)
    copies_s = copy_time_s(limit, 1, _MACHINE.device)
    copies_s += copy_time_s(2 * limit, number, _MACHINE.device)
    assert number * one_s == pytest.approx(boxing_step_time_s(bucket, _MACHINE) + copies_s)


@given(
    st.sampled_from(list(_KINDS)),
    st.integers(1, 1 << 20),
    st.lists(st.integers(4, 1 << 24), max_size=20),
)
def test_no_tensor_costs_more_than_alone_nor_less_than_its_bytes(
    kind: StepKind, pairs: int, others: list[int]
) -> None:
    step = _step(kind, 2 * pairs)
    prices = BucketPrices(_MACHINE)

    time_s = prices.step_time_s(step, _companions(kind, 8 * pairs, *others))

    sent = (2 if kind is StepKind.ALL_REDUCE else 1) * 4 * pairs
    assert sent / _MACHINE.intra_node.bytes_per_s < time_s * (1 + 1e-9)
    assert time_s <= boxing_step_time_s(step, _MACHINE)


def test_what_goes_alone_costs_what_it_does_alone() -> None:
    kind = StepKind.ALL_REDUCE
    step = _step(kind, 256)
    alone_s = boxing_step_time_s(step, _MACHINE)
    large = _step(kind, most_bucket_bytes(step, _MACHINE))  # four times the bytes of a bucket
    many = _companions(kind, *[1024] * 10_000)

    assert BucketPrices(_MACHINE).step_time_s(step, many) < alone_s
    # Nothing goes with it: nothing could, others are too large, or there are no buckets.
    assert BucketPrices(_MACHINE).step_time_s(step, None) == alone_s
    assert BucketPrices(_MACHINE).step_time_s(step, _companions(kind, 1024, 1 << 30)) == alone_s
    assert BucketPrices(_MACHINE, 0).step_time_s(step, many) == alone_s
    other = _companions(StepKind.ALL_GATHER, *[1024] * 10_000)
    assert BucketPrices(_MACHINE).step_time_s(step, other) == alone_s
    # It is too large, or cut unevenly.
    assert BucketPrices(_MACHINE).step_time_s(large, many) == boxing_step_time_s(large, _MACHINE)
    uneven = _between(P, S(0), 7)
    gathered = _companions(uneven.kind, *[1024] * 10_000)
    assert BucketPrices(_MACHINE).step_time_s(uneven, gathered) == boxing_step_time_s(
        uneven, _MACHINE
    )

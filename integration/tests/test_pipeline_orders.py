"""The named schedules are those of `torch.distributed.pipelining`, action by action.

PyTorch's classes want stages on devices; here they get the numbers only, and are asked for the
order of each rank. Tried with PyTorch 2.13.
"""

from __future__ import annotations

from typing import Any

import pytest
from torch.distributed.pipelining import schedules

from sbp_core.errors import ConfigError
from sbp_core.pipeline import SCHEDULES, pipeline_schedule

LOOPED = {
    "interleaved": schedules.ScheduleInterleaved1F1B,
    "looped_bfs": schedules.ScheduleLoopedBFS,
    "zero_bubble": schedules.ScheduleInterleavedZeroBubble,
    "zbv": schedules.ScheduleZBVZeroBubble,
    "dualpipev": schedules.ScheduleDualPipeV,
}


def _their_orders(name: str, p: int, m: int, v: int) -> list[list[str]]:
    if name in ("gpipe", "1f1b"):
        single: Any = object.__new__(
            schedules.ScheduleGPipe if name == "gpipe" else schedules.Schedule1F1B
        )
        single._num_stages, single._n_microbatches = p, m
        orders = [_computations(single._get_pipeline_order()[rank]) for rank in range(p)]
        if name == "1f1b":
            # The table counts the last rank's forwards from 1; what runs counts them from 0.
            orders[-1] = [f"{p - 1}{kind}{k}" for k in range(m) for kind in "FB"]
        return orders
    looped: Any = object.__new__(LOOPED[name])
    looped.pp_group_size, looped._n_microbatches, looped._num_stages = p, m, p * v
    looped.num_stages, looped.n_local_stages, looped._stages = p * v, v, [None] * v
    looped.number_of_rounds = max(1, m // p)
    looped.microbatches_per_round = m // looped.number_of_rounds
    return [_computations(looped._calculate_single_rank_operations(rank)) for rank in range(p)]


def _computations(actions: list[Any]) -> list[str]:
    flat = [one for action in actions if action for one in (action.sub_actions or (action,))]
    return [str(one) for one in flat if one.is_compute_op]


CHUNKS = {"gpipe": (1,), "1f1b": (1,), "zbv": (2,), "dualpipev": (2,)}


def _is_defined(name: str, p: int, m: int) -> bool:
    """Tell what PyTorch's constructors refuse."""
    if name in ("interleaved", "zero_bubble"):
        return m % max(1, m // p) == 0
    return m >= {"1f1b": p, "dualpipev": 2 * p}.get(name, 1)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", *LOOPED])
def test_orders_are_those_of_pytorch(name: str) -> None:
    cases = [
        (p, m, v)
        for p in (1, 2, 3, 4, 5, 8)
        for m in (1, 2, 3, 4, 6, 8, 9, 12, 16, 24)
        for v in CHUNKS.get(name, (1, 2, 3, 4))
        if _is_defined(name, p, m)
    ]

    for p, m, v in cases:
        ours = pipeline_schedule(name, p, m, num_chunks=v)

        assert [[str(one) for one in order] for order in ours.orders] == _their_orders(
            name, p, m, v
        ), (p, m, v)


@pytest.mark.parametrize("name", ["interleaved", "zero_bubble", "dualpipev"])
def test_what_pytorch_refuses_is_refused(name: str) -> None:
    refused = [(p, m) for p in (2, 3, 4, 5) for m in range(1, 25) if not _is_defined(name, p, m)]

    assert refused
    for p, m in refused:
        with pytest.raises(ConfigError):
            pipeline_schedule(name, p, m)


def test_all_names_have_a_schedule() -> None:
    assert {pipeline_schedule(name, 2, 4).name for name in SCHEDULES} == set(SCHEDULES)

"""What a plan costs in figures, by collective and link."""

from __future__ import annotations

from dataclasses import replace

import pytest
from test_rows import _bytes_without_commit, found_plan

from sbp_core.cluster import LinkLevel
from sbp_core.memory import MemoryReport
from sbp_launch.explaining.plan_figures import figures_of, traffic


@pytest.mark.parametrize("name", ["replicated", "sharded", "pipeline"])
def test_traffic_is_all_bytes_but_those_of_the_commit(name: str) -> None:
    planned = found_plan(name)

    figures = figures_of(planned)

    assert sum(one.sent_bytes for one in figures.traffic) == _bytes_without_commit(planned.plan)
    assert {one.level for one in figures.traffic} == {0}
    assert figures.computing_s + figures.boxing_s <= figures.step_s * (1 + 1e-9)


def test_traffic_is_that_of_the_smallest_groups_that_hold_who_talks() -> None:
    planned = found_plan("pipeline of meshes")
    apart = replace(planned.settings.cluster, devices_per_node=2)

    assert {one.level for one in traffic(planned.plan, apart)} == {0, 1}
    one_each = replace(apart, devices_per_node=1)
    assert {one.level for one in traffic(planned.plan, one_each)} == {1}
    pairs = LinkLevel(name="rack", num_ranks=2, link=one_each.inter_node)
    assert {one.level for one in traffic(planned.plan, replace(one_each, groups=(pairs,)))} == {
        1,
        2,
    }


def test_the_fullest_rank_is_that_of_the_exact_memory() -> None:
    planned = found_plan("pipeline")
    assert isinstance(planned.memory, MemoryReport)

    figures = figures_of(planned)

    assert figures.fullest is not None and figures.fullest.peak == planned.memory.peak
    assert figures.fits
    assert not replace(figures, limit_bytes=figures.fullest.peak - 1).fits

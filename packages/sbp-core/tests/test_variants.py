"""The variants of a step: which requests are made of them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from sbp_core.errors import PlanError
from sbp_core.graph import LogicalGraph
from sbp_core.graph_variant import GraphFamily, GraphVariant
from sbp_core.placement import Placement
from sbp_core.planning import PlanRequest, requests_of
from sbp_core.testing.graphs import chain, cluster


@dataclass(frozen=True, kw_only=True)
class Family:
    """A family without recomputation and slices, some of whose graphs cannot be made."""

    micro_batches: tuple[int, ...]
    missing: frozenset[int] = frozenset()
    variant = GraphVariant()
    may_recompute = may_slice = False
    batch_size = 8

    def with_batch(self, batch_size: int) -> GraphFamily:
        raise NotImplementedError

    def graph(self, variant: GraphVariant) -> LogicalGraph:
        count = variant.num_micro_batches
        if count in self.missing:
            raise PlanError(f"no step of {count} micro-batches")
        return replace(chain(), num_micro_batches=count)


def request(family: Family | None) -> PlanRequest:
    mesh = Placement.grid((2,), ("data",))
    return PlanRequest(graph=chain(), mesh=mesh, cluster=cluster(num_devices=2), family=family)


def with_count(family: GraphFamily, count: int) -> list[GraphVariant]:
    return [replace(family.variant, num_micro_batches=count)]


def counts(family: Family) -> list[int]:
    found = list(requests_of(request(family), with_count))
    for asked, variant in found:
        assert variant is not None and asked.family is None
        assert asked.graph.num_micro_batches == variant.num_micro_batches
    return [asked.graph.num_micro_batches for asked, _ in found]


def test_each_variant_that_can_be_made_has_a_request() -> None:
    assert counts(Family(micro_batches=(1, 2, 4))) == [1, 2, 4]
    assert counts(Family(micro_batches=(1, 2, 4), missing=frozenset({1, 4}))) == [2]


def test_a_request_without_a_family_is_its_only_variant() -> None:
    asked = request(None)

    assert list(requests_of(asked, with_count)) == [(asked, None)]


def counted_first(family: GraphFamily, count: int) -> list[GraphVariant]:
    found = with_count(family, count)
    family.graph(found[0])
    return found


@pytest.mark.parametrize("variants", [with_count, counted_first])
def test_where_no_variant_can_be_made_the_first_error_is_raised(variants) -> None:
    family = Family(micro_batches=(2, 4), missing=frozenset({2, 4}))

    with pytest.raises(PlanError, match="no step of 2 micro-batches"):
        list(requests_of(request(family), variants))

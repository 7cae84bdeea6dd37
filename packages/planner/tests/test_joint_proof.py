"""Proofs that no assignment of tables costs less, and elimination that strikes values out."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sbp_core.infer import FORBIDDEN_S, Factor, total_cost
from sbp_planner.choice import prove as proofs
from sbp_planner.choice.moved_costs import MovedCosts, TableTerm
from sbp_planner.choice.prove import StruckBuckets, prove


def tables(seed, num_variables=6, num_tables=9):
    random = np.random.default_rng(seed)
    sizes = [int(random.integers(1, 4)) for _ in range(num_variables)]
    factors = [Factor((v,), random.random(size)) for v, size in enumerate(sizes)]
    for _ in range(num_tables):
        chosen = random.choice(num_variables, size=int(random.integers(2, 4)), replace=False)
        scope = tuple(int(v) for v in chosen)
        table = random.random([sizes[v] for v in scope])
        table[table > 0.9] = FORBIDDEN_S
        factors.append(Factor(scope, table))
    return sizes, factors


def cheapest(sizes, factors):
    return min(total_cost(factors, values) for values in product(*map(range, sizes)))


def scoped(factors):
    return [Factor(f.variables, np.where(f.table >= FORBIDDEN_S, np.inf, f.table)) for f in factors]


@settings(max_examples=60)
@given(st.integers(0, 10**6), st.sampled_from([0.0, 0.1]), st.sampled_from([1, 4, 1 << 16]))
def test_a_proof_finds_the_cheapest_whatever_it_starts_from(seed, gap, max_entries):
    sizes, factors = tables(seed)
    random = np.random.default_rng(seed)
    start = tuple(int(random.integers(size)) for size in sizes)
    least = cheapest(sizes, factors)

    with pytest.MonkeyPatch.context() as patch:
        # Tables so small that nothing is eliminated before values are struck out.
        patch.setattr(proofs, "_MAX_ENTRIES", (max_entries, 1 << 20))
        proof = prove(sizes, factors, start, gap=gap, deadline=float("inf"))

    assert proof.cost == pytest.approx(total_cost(factors, proof.values))
    if least < FORBIDDEN_S:
        assert proof.bound <= least * (1 + 1e-9)
        assert least * (1 - 1e-9) <= proof.cost <= least / (1 - gap) * (1 + 1e-9)
        assert proof.gap <= gap + 1e-9


def test_without_time_there_is_a_bound_all_the_same():
    sizes, factors = tables(3)

    proof = prove(sizes, factors, (0,) * len(sizes), deadline=0.0)

    assert -float("inf") < proof.bound <= cheapest(sizes, factors)


@settings(max_examples=40)
@given(st.integers(0, 10**6), st.integers(1, 40))
def test_what_is_struck_out_is_in_no_cheap_assignment(seed, max_entries):
    sizes, factors = tables(seed)
    buckets = StruckBuckets(sizes, scoped(factors))
    limit = float(np.median([total_cost(factors, v) for v in product(*map(range, sizes))]))

    buckets.eliminate_small(max_entries)
    costs = MovedCosts(buckets.sizes, [TableTerm(factor) for factor in buckets.merged()])
    costs.sweep()
    is_left = costs.strike(limit - buckets.constant)

    cheap = [v for v in product(*map(range, sizes)) if total_cost(factors, v) < limit]
    if limit < FORBIDDEN_S and is_left:
        allowed = {v: set(costs.kept[v].tolist()) for v in buckets.left}
        assert all(values[v] in allowed[v] for values in cheap for v in allowed)
    elif limit < FORBIDDEN_S:
        assert not cheap


@settings(max_examples=40)
@given(st.integers(0, 10**6), st.integers(1, 40))
def test_merged_and_eliminated_tables_cost_what_they_did(seed, max_entries):
    sizes, factors = tables(seed)
    buckets = StruckBuckets(sizes, scoped(factors))

    buckets.eliminate_small(max_entries)
    buckets.strike([np.arange(size) for size in buckets.sizes], buckets.merged())

    least = cheapest(sizes, factors)
    left = [range(size) if v in buckets.left else (0,) for v, size in enumerate(sizes)]
    found = {
        values: buckets.constant + total_cost(buckets.factors, values) for values in product(*left)
    }
    if least < FORBIDDEN_S:
        best = min(found, key=found.__getitem__)
        assert found[best] == pytest.approx(least)
        assert total_cost(factors, buckets.expanded(best)) == pytest.approx(least)

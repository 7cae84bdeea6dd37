"""What a step is brought into, for searches over all mesh axes at once."""

from dataclasses import replace
from itertools import product
from random import Random

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from plan_requests import request
from random_steps import random_request

from sbp_core.infer import FORBIDDEN_S, CostTables, Factor, joint_problem
from sbp_core.placement import Placement
from sbp_core.planning import PlanRequest
from sbp_core.testing.graphs import cluster, mlp
from sbp_planner.choice import evaluate
from sbp_planner.choice.moved_costs import MovedCosts, TableTerm
from sbp_planner.choice.prove import MiniBuckets
from sbp_planner.joint import search
from sbp_planner.joint.layers import repeated, tie
from sbp_planner.joint.lifetime import held
from sbp_planner.joint.lower import lower_step
from sbp_planner.joint.search import JointSearch, JointSettings


def posed(seed):
    return joint_problem(random_request(Random(seed)), from_axes=False)


def drawn(problem, random):
    return tuple(random.randrange(size) for size in problem.sizes)


@pytest.mark.slow
@settings(max_examples=25)
@given(st.integers(0, 10**6))
def test_the_choice_problem_costs_what_the_step_does(seed):
    problem, random = posed(seed), Random(seed)
    lowered = lower_step(problem)

    values = drawn(problem, random)

    cost = problem.cost(values)
    found = evaluate(lowered.choice, lowered.assignment(values)).cost
    assert found == (pytest.approx(cost) if cost < FORBIDDEN_S else float("inf"))
    assert lowered.values(lowered.assignment(values)) == values


def least_between(tables, values, num_own):
    """Return the cost of values of a step, with what stands between at its best."""
    best = float("inf")
    for between in product(*(range(size) for size in tables.sizes[num_own:])):
        at = (*values, *between)
        best = min(best, sum(float(f.table[tuple(at[v] for v in f.variables)])
                             for f in tables.factors))  # fmt: skip
    return best


@pytest.mark.slow
@settings(max_examples=25)
@given(st.integers(0, 10**6))
def test_tables_cost_what_the_step_does(seed):
    problem = posed(seed)
    tables = CostTables(problem, max_entries=1 << 20)
    values = drawn(problem, Random(seed))

    assert len(tables.sizes) == len(problem.sizes)
    assert least_between(tables, values, len(values)) == pytest.approx(problem.cost(values))


@pytest.mark.slow
@settings(max_examples=10)
@given(st.integers(0, 10**6))
def test_variables_between_cost_what_the_step_does(seed):
    problem = posed(seed)
    tables = CostTables(problem, max_entries=0)
    if np.prod([float(size) for size in tables.sizes[len(problem.sizes) :]]) > 500:
        assume(False)  # too many to look at all
    values = drawn(problem, Random(seed))

    found = least_between(tables, values, len(values))

    assert found == pytest.approx(problem.cost(values), abs=1e-12)


def random_tables(seed):
    random = np.random.default_rng(seed)
    sizes = [int(random.integers(1, 4)) for _ in range(5)]
    factors = [Factor((v,), random.random(size)) for v, size in enumerate(sizes)]
    for _ in range(6):
        scope = tuple(sorted(random.choice(5, size=int(random.integers(2, 4)), replace=False)))
        scope = tuple(int(v) for v in scope)
        table = random.random([sizes[v] for v in scope])
        table[table > 0.9] = FORBIDDEN_S
        factors.append(Factor(scope, table))
    return sizes, factors


def cheapest(sizes, factors):
    return min(
        sum(float(f.table[tuple(at[v] for v in f.variables)]) for f in factors)
        for at in product(*map(range, sizes))
    )


def scoped(factors):
    return [Factor(f.variables, np.where(f.table >= FORBIDDEN_S, np.inf, f.table)) for f in factors]


@settings(max_examples=40)
@given(st.integers(0, 10**6), st.sampled_from([1, 8, 10**6]))
def test_no_assignment_costs_less_than_the_bound(seed, max_entries):
    sizes, factors = random_tables(seed)
    least = cheapest(sizes, factors)
    terms = [TableTerm(factor) for factor in scoped(factors)]
    dual = MovedCosts(sizes, terms)
    before = dual.bound

    for _ in range(5):
        dual.sweep()
    climbed = dual.bound
    moved = [Factor(term.variables, term.table) for term in terms]
    eliminated = MiniBuckets(sizes, moved).bounded(max_entries)

    bound = least if least < FORBIDDEN_S else float("inf")
    assert before - 1e-9 <= climbed <= bound + 1e-9
    assert climbed - 1e-9 <= eliminated <= bound + 1e-9
    if max_entries == 10**6:
        assert eliminated == pytest.approx(bound)


def deep():
    mesh = Placement.grid((2,), ("data",))
    graph = mlp((16, 16, 16, 16, 16), batch=8)
    return joint_problem(PlanRequest(graph=graph, mesh=mesh, cluster=cluster()))


def test_equal_layers_are_one_variable():
    problem = deep()

    groups = repeated(problem)
    step = tie(problem)

    names = {variable: name for name, variable in problem.node_variable.items()}
    weights = [f"layers.{at}.mm" for at in range(4)]
    assert weights in [[names.get(v, "") for v in group] for group in groups]
    assert len(step.unary) < len(problem.unary) / 2


def test_a_tied_step_costs_what_its_layers_do():
    problem = deep()
    step, random = tie(problem), Random(0)
    tables = CostTables(step, max_entries=1 << 20)
    assert len(tables.sizes) == len(step.unary)

    for _ in range(20):
        values = [random.randrange(len(table)) for table in step.unary]
        found = sum(float(f.table[tuple(values[v] for v in f.variables)]) for f in tables.factors)
        wanted = problem.cost(step.expanded(values))
        assert found == pytest.approx(wanted, rel=1e-9)


def test_stages_that_price_conversions_apart_ask_for_them_in_one_group():
    mesh = Placement.grid((4, 2), ("pipe", "data"))
    graph = mlp((16,) * 9, batch=8)
    machine = cluster(num_devices=8)
    problem = joint_problem(PlanRequest(graph=graph, mesh=mesh, cluster=machine))

    step = tie(problem)

    asked = [
        (one.source, *((r.variable, r.targets.tobytes()) for r in one.requests))
        for one in step.groups
    ]
    assert len(set(asked)) == len(asked) < len(problem.groups) / 4
    random = Random(0)
    for _ in range(20):
        values = [random.randrange(len(table)) for table in step.unary]
        found = sum(float(table[at]) for table, at in zip(step.unary, values, strict=True))
        found += sum(group.cost(values) for group in step.groups)
        assert found == pytest.approx(problem.cost(step.expanded(values)), rel=1e-9)


def test_states_are_held_all_the_time_and_values_until_their_last_use():
    problem = joint_problem(request((2,), ("data",)), from_axes=False)

    found = held(problem, 1e9)

    graph = problem.work.graph
    whole = [0] * len(problem.unary)
    weight = problem.storage_variable["head.weight"]
    start, end = found.intervals[weight]
    assert (start, end) == (0, len(graph.nodes) + 1)
    # The parameter and the two states that share its variable.
    assert found.usages[weight][0] == 3 * graph.tensor("head.weight").size_bytes
    place = {node.name: at for at, node in enumerate(graph.nodes)}
    product = problem.node_variable["head.mm"]
    assert found.intervals[product][0] == place["head.mm"]
    assert found.peak_bytes(whole) > sum(
        graph.tensor(entry.name).size_bytes for entry in problem.work.inputs
    )


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(("gap", "count"), [(1e-15, 0), (1e-3, 1)])
def test_a_gap_of_rounding_alone_needs_no_integer_program(monkeypatch, gap, count):
    asked = request((2,), ("data",))
    problem = JointSearch(asked, JointSettings(planner="test"), 1e12, {})
    wanted = problem.cheapest()
    prove, solved = search.prove, []

    def nearly(*arguments, **more):
        proof = prove(*arguments, **more)
        return replace(proof, bound=proof.cost * (1 - gap))

    def noted(*arguments, **more):
        solved.append(arguments)
        return solve(*arguments, **more)

    solve = search.solve
    monkeypatch.setattr(search, "prove", nearly)
    monkeypatch.setattr(search, "solve", noted)
    found = problem.free()

    assert found.values == wanted.values
    assert found.bound_s == pytest.approx(wanted.bound_s)
    assert len(solved) == count

"""The choice solver equals the trying of everything, keeps to its time, and says what it proved."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from types import SimpleNamespace

import numpy as np
import pytest
from choice_problems import brute_force, problems
from hypothesis import given, settings
from hypothesis import strategies as st

from sbp_core.errors import SbpValueError
from sbp_planner.choice import ChoiceProblem, evaluate, solve, solver
from sbp_planner.choice.incumbent import Record
from sbp_planner.choice.iopddl.synthetic import transformer_problem
from sbp_planner.choice.large import large_search
from sbp_planner.choice.large.large_search import LargeSearch
from sbp_planner.choice.problem import Floats, Ints
from sbp_planner.choice.reduce import reduce_problem
from sbp_planner.choice.remaining_problem import RemainingProblem


@settings(max_examples=60, deadline=None)
@given(problems())
def test_a_small_problem_is_solved_as_by_trying_everything(problem: ChoiceProblem) -> None:
    best = brute_force(problem)

    solution = solve(problem, time_limit_s=30)

    assert solution.proved
    assert solution.cost == best
    assert solution.bound == best
    assert solution.infeasible == (best == inf)
    if solution.assignment is not None:
        assert evaluate(problem, solution.assignment).cost == best


@settings(max_examples=20, deadline=None)
@given(problems(memory=False))
def test_without_memory_all_the_same(problem: ChoiceProblem) -> None:
    solution = solve(problem, time_limit_s=30)

    assert (solution.cost, solution.proved) == (brute_force(problem), True)


@settings(max_examples=20, deadline=None)
@given(problems(max_nodes=5), st.data())
def test_a_start_is_never_made_worse(problem: ChoiceProblem, data: st.DataObject) -> None:
    start = [data.draw(st.integers(0, size - 1)) for size in problem.sizes]

    solution = solve(problem, time_limit_s=1e-9, start=start)

    assert solution.cost <= evaluate(problem, start).cost
    assert solution.bound <= brute_force(problem)


def test_a_problem_without_nodes_costs_nothing() -> None:
    solution = solve(ChoiceProblem(costs=[]))

    assert (solution.assignment, solution.cost, solution.proved) == ((), 0.0, True)


def test_a_negative_limit_allows_nothing() -> None:
    problem = ChoiceProblem(costs=[np.ones(2)], usages=[np.zeros(2, dtype=int)], usage_limit=-1)

    assert solve(problem).infeasible


def test_bytes_beyond_int64_are_told_from_those_that_fit() -> None:
    problem = ChoiceProblem(
        costs=[np.array([1.0, 5.0])], usages=[[10**30, 7]], intervals=[(0, 1)], usage_limit=7
    )

    assert solve(problem).assignment == (1,)


def test_a_limit_beyond_every_sum_is_none() -> None:
    problem = ChoiceProblem(costs=[np.array([1.0, 5.0])], usages=[[10**30, 7]], usage_limit=1e40)

    assert solve(problem).assignment == (0,)


def test_fractional_costs_are_proved_too() -> None:
    problem = ChoiceProblem(
        costs=[np.array([0.25, 0.1]), np.array([0.3, 0.7])],
        edges=[(0, 1)],
        edge_costs=[np.array([[0.0, 1e-3], [0.4, 0.5]])],
    )

    solution = solve(problem)

    assert solution.assignment == (0, 0)
    assert solution.cost == solution.bound == pytest.approx(0.55)


def test_a_settled_gap_ends_the_search_within_it() -> None:
    problem = transformer_problem(3, seed=1)

    exact = solve(problem, time_limit_s=30)
    near = solve(problem, time_limit_s=30, gap=0.1)

    assert near.proved
    assert near.bound <= exact.cost <= near.cost <= near.bound / 0.9 + 1


@pytest.mark.slow
def test_the_second_process_finds_what_the_first_does(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = transformer_problem(4, seed=2, slack=0.03)
    expected = solve(problem, time_limit_s=30)
    monkeypatch.setattr(solver, "_FEW_PAIRS", 0)

    solution = solve(problem, time_limit_s=60)

    assert expected.proved
    assert (solution.cost, solution.proved) == (expected.cost, True)


@pytest.mark.slow
def test_a_problem_without_edges_is_searched_too(monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(0)
    problem = ChoiceProblem(
        costs=[np.sort(random.integers(0, 1000, 4))[::-1].astype(float) for _ in range(25)],
        usages=[np.sort(random.integers(0, 1000, 4)) for _ in range(25)],
        usage_limit=9000,
    )
    expected = solve(problem, time_limit_s=30)
    monkeypatch.setattr(solver, "_FEW_PAIRS", -1)

    solution = solve(problem, time_limit_s=30)

    assert (solution.cost, solution.proved) == (expected.cost, True)


def test_each_way_to_search_has_a_turn_and_then_its_share_of_the_time() -> None:
    problem = transformer_problem(4, seed=3, slack=0.05)
    record = Record(problem, 100.0, 0.0, None)
    search = LargeSearch(record, RemainingProblem(reduce_problem(problem, inf), record), None)
    first = []
    for seconds in (4.0, 0.5, 0.5):
        first.append(search._drawn_way())
        search.seconds[first[-1]] = seconds

    drawn = np.bincount([search._drawn_way() for _ in range(1700)], minlength=3)

    assert first == [0, 1, 2]
    assert drawn * search.seconds == pytest.approx(np.full(3, 400), rel=0.3)


def test_messages_are_made_to_fit_long_before_they_have_settled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    problem = transformer_problem(6, seed=3, slack=0.05)
    record = Record(problem, 100.0, 0.0, None)
    part = RemainingProblem(reduce_problem(problem, inf), record)
    compact = part.compact
    held = np.bincount(compact.held_column, compact.held_bytes, len(compact.cost))
    most = np.array([own.argmax() for own in np.split(held, compact.first[1:-1])])
    found = LargeSearch(record, part, most)
    fitted, given_s, fits = found.whole.fitted, [], []

    def passed(until: float) -> None:
        given_s.append(until - 100.0)

    def fit(values: Ints, prices: Floats, until: float) -> Ints:
        fits.append(1)
        return most if len(fits) < 3 else fitted(values, prices, until)

    monkeypatch.setattr(found, "_pass_messages", passed)
    monkeypatch.setattr(large_search, "time", SimpleNamespace(monotonic=lambda: 100.0))
    monkeypatch.setattr(found.whole, "fitted", fit)
    monkeypatch.setattr(found.whole, "improve", lambda values, prices: values)
    assert not found.near.fits

    found._find_first(150.0)

    assert found.near.fits
    assert not found.whole.penalty.any()
    assert given_s == [1.5, 3.0, 6.0]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("limit_s", [0.01, 0.5])
def test_the_time_limit_holds(limit_s: float) -> None:
    problem = transformer_problem(40, seed=3, slack=0.02)

    solution = solve(problem, time_limit_s=limit_s)

    # What is ruled out is a search that goes on.
    assert solution.bound <= solution.cost


def test_progress_is_told_of_falling_costs_and_rising_bounds() -> None:
    told: list[tuple[float, float, float]] = []

    solve(transformer_problem(3, seed=4), progress=lambda *event: told.append(event))

    costs, bounds, seconds = zip(*told, strict=True)
    assert list(costs) == sorted(costs, reverse=True)
    assert list(bounds) == sorted(bounds)
    assert list(seconds) == sorted(seconds)


def test_settings_out_of_range_are_refused() -> None:
    problem = ChoiceProblem(costs=[np.zeros(1)])

    with pytest.raises(SbpValueError, match="time_limit_s is 0"):
        solve(problem, time_limit_s=0)
    with pytest.raises(SbpValueError, match="gap -1"):
        solve(problem, gap=-1)


def test_tied_nodes_take_one_strategy_index() -> None:
    problem = ChoiceProblem(
        costs=[np.array([0.0, 3.0]), np.array([4.0, 0.0]), np.array([1.0, 0.0])], ties=[(0, 1, 2)]
    )

    assert solve(problem).assignment == (1, 1, 1)
    assert solve(replace(problem, ties=[(0, 1), (1, 2)])).assignment == (1, 1, 1)

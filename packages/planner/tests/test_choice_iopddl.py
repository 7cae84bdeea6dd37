"""Instances of the contest: read, solved by the command, and refused with words if they are odd."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
from copy import deepcopy
from itertools import product
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sbp_core.errors import SbpValueError
from sbp_planner.choice import ChoiceProblem, evaluate, solve
from sbp_planner.choice.__main__ import main
from sbp_planner.choice.iopddl.instance import read_problem, write_assignment, write_problem
from sbp_planner.choice.iopddl.synthetic import transformer_problem

#: `example.json` of google/iopddl (Apache-2.0), with the optimum 445.
EXAMPLE = {
    "problem": {
        "name": "example",
        "nodes": {
            "intervals": [[30, 70], [40, 70], [50, 120], [110, 140], [110, 150]],
            "costs": [[15], [55, 65], [25, 45, 35], [85, 75], [95]],
            "usages": [[10], [25, 25], [15, 20, 15], [10, 10], [15]],
        },
        "edges": {
            "nodes": [[0, 1], [0, 2], [1, 3], [2, 4], [3, 4]],
            "costs": [[30, 40], [50, 10, 40], [90, 10, 20, 80], [60, 20, 30], [70, 60]],
        },
        "usage_limit": 50,
    }
}


def saved(folder: Path, data: object, name: str = "instance.json") -> Path:
    path = folder / name
    content = data if isinstance(data, bytes) else json.dumps(data).encode()
    path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    return path


@pytest.mark.parametrize("name", ["instance.json", "instance.json.gz"])
def test_the_command_prints_what_it_found_and_writes_the_assignment(tmp_path, capsys, name):
    path, out = saved(tmp_path, EXAMPLE, name), tmp_path / "assignment.json"

    status = main([str(path), "--time-limit", "20", "--out", str(out)])

    printed = dict(line.split(" ", 1) for line in capsys.readouterr().out.splitlines())
    assert status == 0
    assignment = json.loads(out.read_text())
    found = evaluate(read_problem(path), assignment)
    assert printed["cost"] == printed["bound"] == str(int(found.cost)) == "445"
    assert (printed["gap"], printed["proved"]) == ("0", "yes")
    assert float(printed["seconds"]) < 20


@pytest.mark.slow
def test_the_command_runs_as_a_module_and_prints_nothing_else(tmp_path):
    path = saved(tmp_path, EXAMPLE)

    run = subprocess.run(
        [sys.executable, "-m", "sbp_planner.choice", str(path)],
        capture_output=True,
        text=True,
        check=True,
    )

    words = [line.split()[0] for line in run.stdout.splitlines()]
    assert words == ["cost", "bound", "gap", "seconds", "proved"]
    assert "cost" in run.stderr


def test_the_command_says_that_nothing_is_allowed(tmp_path, capsys):
    data = deepcopy(EXAMPLE)
    data["problem"]["usage_limit"] = 10

    status = main([str(saved(tmp_path, data))])

    assert status == 1
    assert "infeasible" in capsys.readouterr().out


def test_large_costs_forbid_and_the_limit_may_lack(tmp_path):
    data = deepcopy(EXAMPLE)
    data["problem"]["nodes"]["costs"][1] = [10**18, 3 * 10**21]
    del data["problem"]["usage_limit"]

    problem = read_problem(saved(tmp_path, data))

    assert problem.usage_limit is None
    assert np.isinf(problem.costs[1]).all()
    assert problem.edge_costs[2].tolist() == [[90, 10], [20, 80]]


def test_costs_beyond_2_to_the_53_are_printed_with_all_their_digits(tmp_path, capsys):
    data = deepcopy(EXAMPLE)
    data["problem"]["nodes"]["costs"][0] = [10**17 + 1]
    data["problem"]["nodes"]["costs"][4] = [2**53 - 1]
    data["problem"]["edges"]["costs"][0] = [10**17 + 3, 10**17 + 5]
    out = tmp_path / "assignment.json"

    main([str(saved(tmp_path, data)), "--time-limit", "20", "--out", str(out)])

    nodes, edges = data["problem"]["nodes"], data["problem"]["edges"]
    chosen = json.loads(out.read_text())
    cost = sum(own[s] for own, s in zip(nodes["costs"], chosen, strict=True))
    for (u, v), table in zip(edges["nodes"], edges["costs"], strict=True):
        cost += table[chosen[u] * len(nodes["costs"][v]) + chosen[v]]
    printed = dict(line.split(" ", 1) for line in capsys.readouterr().out.splitlines())
    assert printed["cost"] == printed["bound"] == str(cost)
    assert cost != int(float(cost))


def test_fractions_of_costs_are_printed(tmp_path, capsys):
    data = deepcopy(EXAMPLE)
    data["problem"]["nodes"]["costs"][0] = [15.25]

    main([str(saved(tmp_path, data)), "--time-limit", "20"])

    assert "cost 445.25\nbound 445.25\n" in capsys.readouterr().out


def odd_instance(random: np.random.Generator) -> dict[str, Any]:
    """Return what a file may hold but rarely does: loops, equal edges, empty lives, no limit."""
    count = int(random.integers(0, 6))
    sizes = random.choice([1, 1, 2, 3], count).tolist()
    most = int(random.choice([0, 10, 10**9, 10**15]))
    pairs = random.integers(0, max(count, 1), (int(random.integers(0, 8)) if count else 0, 2))
    limit = [None, 0, 40, 2**60, 10**20][int(random.integers(0, 5))]

    def costs(number: int) -> list[int]:
        drawn = random.integers(0, most + 1, number).tolist()
        return [10**18 if random.random() < 0.2 else cost for cost in drawn]

    def usage() -> int:
        return int(random.choice([0, 3, int(random.integers(0, 20)), int(random.integers(2**60))]))

    return {
        "nodes": {
            "intervals": random.integers(0, 7, (count, 2)).tolist(),
            "costs": [costs(size) for size in sizes],
            "usages": [[usage() for _ in range(size)] for size in sizes],
        },
        "edges": {
            "nodes": pairs.tolist(),
            "costs": [costs(sizes[u] * sizes[v]) for u, v in pairs.tolist()],
        },
        **({} if random.random() < 0.3 else {"usage_limit": limit}),
    }


def least_cost(data: dict[str, Any]) -> float:
    """Return the least cost by the rules of the contest, of all assignments."""
    nodes, edges, limit = data["nodes"], data["edges"], data.get("usage_limit")
    best = inf
    for chosen in product(*(range(len(own)) for own in nodes["costs"])):
        costs = [own[s] for own, s in zip(nodes["costs"], chosen, strict=True)]
        for (u, v), table in zip(edges["nodes"], edges["costs"], strict=True):
            costs.append(table[chosen[u] * len(nodes["costs"][v]) + chosen[v]])
        lives = list(zip(nodes["usages"], chosen, nodes["intervals"], strict=True))
        held = [sum(own[s] for own, s, (a, b) in lives if a <= time < b) for time in range(7)]
        if max(costs, default=0) < 10**18 and (limit is None or max(held) <= limit):
            best = min(best, sum(costs))
    return best


def test_odd_files_are_solved_by_the_rules_of_the_contest(tmp_path):
    for seed in range(60):
        data = odd_instance(np.random.default_rng(seed))

        problem = read_problem(saved(tmp_path, {"problem": data}, f"{seed}.json.gz"))
        solution = solve(problem, time_limit_s=20)

        assert (solution.cost, solution.proved) == (least_cost(data), True), seed


def test_what_is_written_is_the_list_of_strategies(tmp_path):
    write_assignment(tmp_path / "out.json", (0, np.int64(2), 1))

    assert json.loads((tmp_path / "out.json").read_text()) == [0, 2, 1]


def without(*keys):
    data = deepcopy(EXAMPLE)
    inner = data
    for key in keys[:-1]:
        inner = inner[key]
    del inner[keys[-1]]
    return data


def with_value(value, *keys):
    data = deepcopy(EXAMPLE)
    inner = data
    for key in keys[:-1]:
        inner = inner[key]
    inner[keys[-1]] = value
    return data


@pytest.mark.slow(but=8)
@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"{", "is no JSON"),
        (b"\x1f\x8bnothing", "is no JSON"),
        ([], "the file is \\[\\]"),
        (without("problem"), "problem is missing"),
        (without("problem", "nodes"), "problem.nodes is missing"),
        (without("problem", "nodes", "usages"), "problem.nodes.usages is missing"),
        (with_value(3, "problem", "nodes", "costs"), "problem.nodes.costs is 3"),
        (with_value(["a"], "problem", "nodes", "costs", 1), "problem.nodes.costs\\[1\\]"),
        (with_value([30], "problem", "nodes", "intervals", 0), "problem.nodes.intervals\\[0\\]"),
        (with_value(["x"], "problem", "nodes", "usages", 0), "usages\\[0\\] is \\['x'\\]"),
        (with_value([0, 2**70], "problem", "nodes", "intervals", 0), "intervals\\[0\\]"),
        (with_value([-1], "problem", "nodes", "usages", 0), "usages\\[0\\] has -1"),
        (with_value([], "problem", "nodes", "costs", 0), "0 x 2"),
        (with_value([0, 9], "problem", "edges", "nodes", 0), "problem.edges.nodes\\[0\\]"),
        (with_value([0, 1, 2], "problem", "edges", "nodes", 0), "problem.edges.nodes\\[0\\]"),
        (with_value([1.0], "problem", "edges", "costs", 0), "problem.edges.costs\\[0\\]"),
        (with_value("much", "problem", "usage_limit"), "problem.usage_limit is 'much'"),
    ],
)
def test_what_cannot_be_meant_is_refused_with_file_and_key(tmp_path, capsys, data, words):
    path = saved(tmp_path, data)

    with pytest.raises(SbpValueError, match=words) as raised:
        read_problem(path)

    assert str(path) in str(raised.value)
    assert main([str(path)]) == 2
    assert str(path) in capsys.readouterr().err


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(SbpValueError, match=r"nowhere\.json cannot be read"):
        read_problem(tmp_path / "nowhere.json")


@pytest.mark.slow
def test_what_was_found_is_there_when_the_command_is_stopped(tmp_path):
    problem = transformer_problem(30, seed=3, slack=0.02)
    source, out = tmp_path / "problem.json", tmp_path / "out.json"
    write_problem(source, problem)
    command = [sys.executable, "-m", "sbp_planner.choice", str(source), "--out", str(out)]
    run = subprocess.Popen(
        [*command, "--time-limit", "100"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert run.stderr is not None
    # Until a first cost is told: it is above no bound, and no word.
    told = next(line for line in run.stderr if "cost inf" not in line)
    run.send_signal(signal.SIGTERM)
    printed, _ = run.communicate(timeout=60)

    assert run.returncode == 0
    found = evaluate(problem, json.loads(out.read_text()))
    assert found.feasible
    assert f"cost {int(found.cost)}\n" in printed
    assert found.cost <= float(told.split("cost ")[1].split()[0])


@pytest.mark.parametrize("name", ["problem.json", "problem.json.gz"])
def test_a_problem_that_is_written_is_read_again(tmp_path, name):
    problem = transformer_problem(2, seed=5)

    write_problem(tmp_path / name, problem)
    again = read_problem(tmp_path / name)

    assert (again.intervals, again.edges) == (problem.intervals, problem.edges)
    assert again.usage_limit == problem.usage_limit
    for ours, theirs in zip(
        (*problem.costs, *problem.edge_costs), (*again.costs, *again.edge_costs), strict=True
    ):
        np.testing.assert_array_equal(ours, theirs)


def test_what_a_file_cannot_say_is_refused(tmp_path):
    tied = ChoiceProblem(costs=[np.zeros(1)] * 2, usages=[[1], [1]], ties=[(0, 1)])

    with pytest.raises(SbpValueError, match="it has ties"):
        write_problem(tmp_path / "tied.json", tied)


@pytest.mark.parametrize("name", ["missing/best.json", "."])
def test_a_place_where_nothing_can_be_written_is_refused_before_anything_is_read(
    tmp_path, capsys, name
):
    with pytest.raises(SystemExit) as caught:
        main(["nothing.json", "--out", str(tmp_path / name)])

    assert caught.value.code == 2
    assert "folder" in capsys.readouterr().err

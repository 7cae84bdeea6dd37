"""Read and write choice problems in the JSON of the IOPDDL contest, and write their solutions.

A problem gives each node a strategy at least cost, within a memory limit over time.

    {"problem": {"name": ..., "usage_limit": bytes,                                   (may lack)
                 "nodes": {"intervals": [[0, 7], ...],     half-open; [0, 0] holds no memory
                           "costs":     [[12, 40], ...],   by strategy; 10^18 or more forbids
                           "usages":    [[64, 32], ...]},  bytes, by strategy
                 "edges": {"nodes":     [[0, 3], ...],
                           "costs":     [[0, 9, 9, 0], ...]}}}   row-major over both strategies

A solution is the list of strategy indices, `[0, 2, 1]`, alone on the last line, as the contest
requires.

Source: google/iopddl, `iopddl.cc` (`ReadProblem`) and `main.cc`; asplos-contest/2025, `IOPDDL.md`.
"""

from __future__ import annotations

import gzip
import json
import os
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from sbp_core.errors import SbpValueError
from sbp_core.serialize import open_file
from sbp_planner.choice.problem import ChoiceProblem, Floats

#: Costs of at least this forbid.
FORBIDDEN = 1e18

#: Larger whole numbers are rounded as float64.
_EXACT = 1 << 53


@dataclass(slots=True)
class Rounding:
    """The rounding errors of a file's costs as float64: whole numbers beyond 2^53.

    Attributes:
        nodes: The number to add, by node and strategy.
        edges: The number to add, by edge and index in its table, row by row.
    """

    nodes: dict[tuple[int, int], int] = field(default_factory=dict)
    edges: dict[tuple[int, int], int] = field(default_factory=dict)

    def of(self, problem: ChoiceProblem, assignment: Sequence[int]) -> int:
        """Return the rounding error in the cost of an assignment."""
        lost = sum(self.nodes.get(chosen, 0) for chosen in enumerate(assignment))
        if self.edges:
            for number, (u, v) in enumerate(problem.edges):
                width = len(problem.costs[v])
                place = assignment[u] * width + assignment[v]
                lost += self.edges.get((number, place), 0)
        return lost


def read_problem(path: Path, rounding: Rounding | None = None) -> ChoiceProblem:
    """Return the problem of a file, plain or gzipped; its first bytes tell which.

    Args:
        path: The file.
        rounding: Filled with the rounding errors of costs as float64.

    Raises:
        SbpValueError: If the file cannot be read, is no JSON, or lacks something.
    """
    rounding = Rounding() if rounding is None else rounding
    try:
        with open_file(path) as file:
            content = file.read()
        if content[:2] == b"\x1f\x8b":
            content = gzip.decompress(content)
        data = json.loads(content)
    except OSError as error:
        raise SbpValueError(
            f"{path} cannot be read: {error.strerror or error}", accepted="a file of JSON, or .gz"
        ) from error
    except (ValueError, EOFError, zlib.error) as error:
        raise SbpValueError(
            f"{path} is no JSON: {error}", accepted="an instance of the IOPDDL contest, or its .gz"
        ) from error
    if not isinstance(data, dict):
        raise _wrong(path, "the file", data, "an object with the key problem")
    problem = _get(data, "problem", dict, path)
    nodes = _get(problem, "nodes", dict, path, "problem.")
    edges = problem.get("edges", {"nodes": [], "costs": []})
    if not isinstance(edges, dict):
        raise _wrong(path, "problem.edges", edges, "an object with nodes and costs")
    of_nodes, of_edges = "problem.nodes.", "problem.edges."
    costs = _tables(
        _get(nodes, "costs", list, path, of_nodes), path, f"{of_nodes}costs", rounding.nodes
    )
    pairs = _get(edges, "nodes", list, path, of_edges)
    flat = _tables(
        _get(edges, "costs", list, path, of_edges), path, f"{of_edges}costs", rounding.edges
    )
    limit = problem.get("usage_limit")
    tables = _edge_tables(pairs, flat, costs, path)
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int | float)):
        raise _wrong(path, "problem.usage_limit", limit, "a number of bytes, or no such key")
    intervals = _get(nodes, "intervals", list, path, of_nodes)
    for i, interval in enumerate(intervals):
        if not isinstance(interval, list) or [type(value) for value in interval] != [int, int]:
            raise _wrong(path, f"{of_nodes}intervals[{i}]", interval, "[start, end]")
    usages = _get(nodes, "usages", list, path, of_nodes)
    for i, own in enumerate(usages):
        if not isinstance(own, list):
            raise _wrong(path, f"{of_nodes}usages[{i}]", own, "a list of bytes")
    return ChoiceProblem(
        costs=costs,
        usages=usages,
        intervals=intervals,
        edges=[(pair[0], pair[1]) for pair in pairs],
        edge_costs=tables,
        usage_limit=limit,
        name=str(path),
    )


def write_problem(path: Path, problem: ChoiceProblem) -> None:
    """Write a problem in the format of the contest, gzipped if the name ends in .gz.

    Costs are rounded to whole numbers.

    Raises:
        SbpValueError: If the problem has ties or no usages; the format cannot express these.
    """
    if problem.ties or problem.usages is None or problem.intervals is None:
        raise SbpValueError(
            "it has ties" if problem.ties else "it has no usages",
            where=problem.name,
            accepted="a problem with usages, and without ties",
        )

    def plain(table: Floats) -> list[int]:
        return [int(cost) for cost in np.rint(np.minimum(table, FORBIDDEN)).ravel()]

    data: dict[str, Any] = {
        "name": problem.name,
        "nodes": {
            "intervals": [list(interval) for interval in problem.intervals],
            "costs": [plain(cost) for cost in problem.costs],
            "usages": [own.tolist() for own in problem.usages],
        },
        "edges": {
            "nodes": [list(edge) for edge in problem.edges],
            "costs": [plain(cost) for cost in problem.edge_costs],
        },
    }
    if problem.usage_limit is not None:
        data["usage_limit"] = problem.usage_limit
    content = json.dumps({"problem": data}).encode()
    path.write_bytes(gzip.compress(content, 1) if path.suffix == ".gz" else content)


def write_assignment(path: Path, assignment: Sequence[int]) -> None:
    """Write the strategy index of each node as one JSON list, atomically."""
    text = json.dumps([int(strategy) for strategy in assignment]) + "\n"
    if path.exists() and not path.is_file():
        path.write_text(text)  # a pipe or a device, which cannot be replaced
        return
    beside = path.with_name(f"{path.name}.{os.getpid()}")
    with beside.open("x") as file:
        file.write(text)
    beside.replace(path)


def _get(data: dict[str, Any], key: str, kind: type[Any], path: Path, prefix: str = "") -> Any:
    words = "an object" if kind is dict else "a list"
    if key not in data:
        raise SbpValueError(
            f"{prefix}{key} is missing",
            where=str(path),
            accepted=f"{words}; the keys here are {', '.join(map(str, data)) or 'none'}",
        )
    if not isinstance(data[key], kind):
        raise _wrong(path, f"{prefix}{key}", data[key], words)
    return data[key]


def _wrong(path: Path, key: str, value: object, accepted: str) -> SbpValueError:
    return SbpValueError(f"{key} is {value!r:.80}", where=str(path), accepted=accepted)


def _tables(
    lists: list[Any], path: Path, key: str, lost: dict[tuple[int, int], int]
) -> list[Floats]:
    """Return the lists of costs as arrays, `inf` where forbidden; record rounding errors."""
    for i, own in enumerate(lists):
        if not isinstance(own, list):
            raise _wrong(path, f"{key}[{i}]", own, "a list of costs")
    # One conversion for all is many times faster than one for each.
    try:
        flat = np.array(list(chain.from_iterable(lists)), dtype=np.float64)
    except (TypeError, ValueError, OverflowError):
        for i, own in enumerate(lists):
            if not all(isinstance(value, int | float) for value in own):
                raise _wrong(path, f"{key}[{i}]", own, "a list of numbers") from None
        raise _wrong(path, key, "with a number too large", "numbers below 1e308") from None
    ends = np.cumsum([0, *map(len, lists)])
    for place in np.flatnonzero((np.abs(flat) > _EXACT) & (flat < FORBIDDEN)).tolist():
        number = int(np.searchsorted(ends, place, side="right")) - 1
        value = lists[number][place - int(ends[number])]
        if isinstance(value, int) and value != int(flat[place]):
            lost[number, place - int(ends[number])] = value - int(flat[place])
    flat[flat >= FORBIDDEN] = np.inf
    return [flat[a:b] for a, b in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True)]


def _edge_tables(
    pairs: list[Any], flat: list[Floats], costs: list[Floats], path: Path
) -> list[Floats]:
    if len(pairs) != len(flat):
        raise SbpValueError(
            f"problem.edges has {len(pairs)} nodes and {len(flat)} costs",
            where=str(path),
            accepted="as many of both",
        )
    tables = []
    for n, (pair, own) in enumerate(zip(pairs, flat, strict=True)):
        is_pair = isinstance(pair, list) and [type(node) for node in pair] == [int, int]
        if not is_pair or not all(0 <= node < len(costs) for node in pair):
            accepted = f"two nodes, each from 0 to {len(costs) - 1}"
            raise _wrong(path, f"problem.edges.nodes[{n}]", pair, accepted)
        shape = len(costs[pair[0]]), len(costs[pair[1]])
        if own.size != shape[0] * shape[1]:
            raise SbpValueError(
                f"problem.edges.costs[{n}], of nodes {pair}, has {own.size} entries",
                where=str(path),
                accepted=f"{shape[0]} x {shape[1]}, the strategies of the two nodes",
            )
        tables.append(own.reshape(shape))
    return tables

"""Repeated layers: variables of a step that mean the same in each of several equal blocks.

    blocks.0.mlp.up (v7)   blocks.1.mlp.up (v31)   blocks.2.mlp.up (v55)     one group: 7, 31, 55

Two variables are alike if their names differ in the number of the block alone, and they have the
same options. Blocks are told by `sbp_core.graph.block_of`, so any model that numbers its layers
has them, whatever these are called.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from sbp_core.infer import ConversionGroup, Request, StepProblem

#: The number of a block in a name: the first one behind a dot.
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


def repeated(problem: StepProblem) -> tuple[tuple[int, ...], ...]:
    """Return groups of variables that are alike, each of two or more.

    Args:
        problem: The step.
    """
    found: dict[Hashable, list[int]] = {}
    for node in problem.work.nodes:
        options = problem.parts[node.name]
        key: Hashable = ("node", _generic(node.name), node.op, options)
        found.setdefault(key, []).append(problem.node_variable[node.name])
    for name, variable in problem.storage_variable.items():
        key = ("storage", _generic(name), problem.storage_entries[name])
        group = found.setdefault(key, [])
        if variable not in group:
            group.append(variable)
    return tuple(tuple(group) for group in _disjoint(list(found.values())) if len(group) > 1)


def _generic(name: str) -> str:
    return _NUMBER.sub("*", name, count=1)


def _disjoint(groups: list[list[int]]) -> list[list[int]]:
    """Join groups that share a variable, such as those of a parameter and of its states."""
    of: dict[int, list[int]] = {}
    for group in groups:
        joined = list(dict.fromkeys(m for variable in group for m in of.get(variable, [variable])))
        for variable in joined:
            of[variable] = joined
    return list({id(group): group for group in of.values()}.values())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TiedStep:
    """A step in which variables that are alike are one variable, with the costs of all of them.

    Args:
        unary: Seconds of each value of each variable.
        start: A value of each.
        groups: The conversions; those of equal layers are one, that many times as costly.
        tied: For each variable of the step, that of this one.
    """

    unary: Sequence[NDArray[np.float64]]
    start: Sequence[int]
    groups: Sequence[ConversionGroup]
    tied: tuple[int, ...]

    def expanded(self, values: Sequence[int]) -> tuple[int, ...]:
        """Return the values of the variables of the step."""
        return tuple(int(values[of]) for of in self.tied)


def tie(problem: StepProblem) -> TiedStep:
    """Return a step with its equal layers decided alike.

    What it starts from is that of the first layer, unless layers that start apart are alike then.

    Args:
        problem: The step.
    """
    first = list(range(len(problem.unary)))
    for alike in repeated(problem):
        for variable in alike:
            first[variable] = alike[0]
    numbers = {variable: at for at, variable in enumerate(dict.fromkeys(first))}
    tied = tuple(numbers[variable] for variable in first)
    unary = [np.zeros(len(problem.unary[variable])) for variable in numbers]
    for variable, of in enumerate(tied):
        unary[of] = unary[of] + problem.unary[variable]
    # Equal layers share the tables of costs and the arrays of targets, so ids tell what is alike.
    counts: dict[tuple[object, ...], int] = {}
    found: dict[tuple[object, ...], ConversionGroup] = {}
    for group in problem.groups:
        requests = tuple(
            Request(tied[one.variable] if one.variable >= 0 else one.variable, one.targets)
            for one in group.requests
        )
        source = tied[group.source]
        key = (id(group.costs), source, *((one.variable, id(one.targets)) for one in requests))
        counts[key] = counts.get(key, 0) + 1
        if key not in found:
            found[key] = replace(group, source=source, requests=requests)
    groups = [
        replace(group, costs=counts[key] * group.costs) if counts[key] > 1 else group
        for key, group in found.items()
    ]
    start = [problem.start[variable] for variable in numbers]
    return TiedStep(unary=unary, start=start, groups=groups, tied=tied)


def untied(problem: StepProblem) -> TiedStep:
    """Return a step with every variable by itself, in the form of `tie`.

    Args:
        problem: The step.
    """
    return TiedStep(
        unary=problem.unary,
        start=problem.start,
        groups=problem.groups,
        tied=tuple(range(len(problem.unary))),
    )

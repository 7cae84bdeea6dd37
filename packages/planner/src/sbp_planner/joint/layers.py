"""Repeated layers: variables of a step that mean the same in each of several equal blocks.

    blocks.0.mlp.up (v7)   blocks.1.mlp.up (v31)   blocks.2.mlp.up (v55)     one group: 7, 31, 55

What stands inside a numbered block is alike if the names differ in the number of the block alone,
and the options are the same. What does not, such as the calls of a module that all blocks share, is
alike if it has the same operator and options, takes what is alike, and is taken by what is alike:
colours are refined by those of neighbours until no more of them appear. Names of blocks do not
matter, so any model that numbers its layers has them.

Source: Weisfeiler and Leman, "The reduction of a graph to canonical form", 1968 (refinement).
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
    for name, colour in _colours(problem).items():
        found.setdefault(("node", colour), []).append(problem.node_variable[name])
    for name, variable in problem.storage_variable.items():
        key = ("storage", _generic(name), problem.storage_entries[name])
        group = found.setdefault(key, [])
        if variable not in group:
            group.append(variable)
    return tuple(tuple(group) for group in _disjoint(list(found.values())) if len(group) > 1)


def _colours(problem: StepProblem) -> dict[str, Hashable]:
    """Return a colour for each node, equal for nodes that are alike."""
    graph, work = problem.work.graph, problem.work
    # Equal options are one object, which lives as long as the problem.
    colours: dict[str, Hashable] = {}
    others = []
    for node in work.nodes:
        options = id(problem.parts[node.name])
        is_numbered = _NUMBER.search(node.name) is not None
        name = _generic(node.name) if is_numbered else ""
        colours[node.name] = (name, node.op, node.phase, options)
        if not is_numbered:
            others.append(node)
    number = 0
    while len(set(colours.values())) > number:
        number = len(set(colours.values()))
        refined: dict[str, Hashable] = {}
        for node in others:
            taken = tuple(
                _generic(value) if (made := graph.producers.get(value)) is None
                else colours.get(made.name, made.op)
                for value in graph.tensor_inputs(node)
            )  # fmt: skip
            users = [
                colours.get(user.name, user.op)
                for value in node.outputs
                for user in graph.users[value]
            ]
            refined[node.name] = (colours[node.name], taken, frozenset(users))
        # Numbers for tuples, which would grow with every round.
        numbers: dict[Hashable, int] = {}
        for name, colour in refined.items():
            colours[name] = numbers.setdefault(colour, len(numbers))
    return colours


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


def tie(problem: StepProblem, groups: Sequence[ConversionGroup] | None = None) -> TiedStep:
    """Return a step with its equal layers decided alike.

    What it starts from is that of the first layer, unless layers that start apart are alike then.

    Args:
        problem: The step.
        groups: Its conversions, if they are to have other costs.
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
    for group in problem.groups if groups is None else groups:
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


def untied(problem: StepProblem, groups: Sequence[ConversionGroup] | None = None) -> TiedStep:
    """Return a step with every variable by itself, in the form of `tie`.

    Args:
        problem: The step.
        groups: Its conversions, if they are to have other costs.
    """
    return TiedStep(
        unary=problem.unary,
        start=problem.start,
        groups=problem.groups if groups is None else groups,
        tied=tuple(range(len(problem.unary))),
    )

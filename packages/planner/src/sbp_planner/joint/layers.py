"""Find repeated layers of a step, and tie them, so that a search decides equal layers alike.

    blocks.0.mlp.up (v7)   blocks.1.mlp.up (v31)   blocks.2.mlp.up (v55)     one group: 7, 31, 55

`sbp_core.infer.equal_layers` finds equal nodes. A step that was posed with its equal layers as
one (`joint_problem(tied=True)`) has little left to tie. A step that was posed layer by layer is
tied here, with the same meaning and cost.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import reduce

import numpy as np
from numpy.typing import NDArray

from sbp_core.infer import (
    ConversionGroup,
    ConversionRequest,
    StepProblem,
    generic_name,
    node_colours,
)

Table = NDArray[np.float64]


def repeated(problem: StepProblem) -> tuple[tuple[int, ...], ...]:
    """Return groups of variables that are alike, each of two or more.

    Args:
        problem: The step.
    """
    found: dict[Hashable, list[int]] = {}
    # Equal options are one object, alive as long as the problem.
    options = {name: id(parts) for name, parts in problem.parts.items()}
    for name, colour in node_colours(problem.work, options).items():
        found.setdefault(("node", colour), []).append(problem.node_variable[name])
    for name, variable in problem.storage_variable.items():
        key = ("storage", generic_name(name), problem.storage_entries[name])
        group = found.setdefault(key, [])
        if variable not in group:
            group.append(variable)
    # Groups that share a variable are merged, such as those of a parameter and of its states.
    of: dict[int, list[int]] = {}
    for group in found.values():
        joined = list(dict.fromkeys(m for variable in group for m in of.get(variable, [variable])))
        of.update(dict.fromkeys(joined, joined))
    disjoint = {id(group): group for group in of.values()}.values()
    return tuple(tuple(group) for group in disjoint if len(group) > 1)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TiedStep:
    """A step in which variables that are alike are one variable, with the costs of all of them.

    Args:
        unary: Seconds of each value of each variable.
        start: The starting value of each variable.
        groups: The conversions; equal layers share one, which costs as many times as much.
        tied: For each variable of the step, the tied variable.
    """

    unary: Sequence[Table]
    start: Sequence[int]
    groups: Sequence[ConversionGroup]
    tied: tuple[int, ...]

    def expanded(self, values: Sequence[int]) -> tuple[int, ...]:
        """Return the values of the variables of the step."""
        return tuple(int(values[of]) for of in self.tied)


def tie(
    problem: StepProblem, groups: Sequence[ConversionGroup] | None = None, *, tied: bool = True
) -> TiedStep:
    """Return a step in which equal layers are decided alike.

    It starts from the values of the first layer, unless layers that start differently coincide.

    Args:
        problem: The step.
        groups: Its conversions, to give them other costs; None for the problem's own.
        tied: Whether to tie; if false, every variable stays by itself.
    """
    groups = problem.groups if groups is None else groups
    if not tied:
        alone = tuple(range(len(problem.unary)))
        return TiedStep(unary=problem.unary, start=problem.start, groups=groups, tied=alone)
    first = list(range(len(problem.unary)))
    for alike in repeated(problem):
        for variable in alike:
            first[variable] = alike[0]
    numbers = {variable: at for at, variable in enumerate(dict.fromkeys(first))}
    found = tuple(numbers[variable] for variable in first)
    unary = [np.zeros(len(problem.unary[variable])) for variable in numbers]
    for variable, of in enumerate(found):
        unary[of] = unary[of] + problem.unary[variable]
    start = [problem.start[variable] for variable in numbers]
    return TiedStep(unary=unary, start=start, groups=_summed(groups, found), tied=found)


def _summed(groups: Sequence[ConversionGroup], tied: Sequence[int]) -> list[ConversionGroup]:
    """Return the conversions between tied variables, with equal layers in one group.

        cost = sum over groups g, and the distinct targets t that are asked for, of costs_g[s, t]

    If all groups have equal requests, their costs are added up beforehand. They may differ, as they
    do between the stages of a pipeline.

    Args:
        groups: The conversions between the variables of the step.
        tied: For each variable of the step, the tied variable.
    """
    # Equal layers share tables and arrays, so that most of them need not be compared.
    arrays: dict[int, tuple[object, ...]] = {}
    # For groups with equal requests: the requests of the first, and how often each table occurs.
    alike: dict[object, tuple[ConversionGroup, dict[int, tuple[Table, int]]]] = {}
    for group in groups:
        requests = tuple(
            ConversionRequest(
                tied[one.variable] if one.variable >= 0 else one.variable, one.targets
            )
            for one in group.requests
        )
        for one in requests:
            if id(one.targets) not in arrays:
                arrays[id(one.targets)] = one.targets.shape, one.targets.tobytes()
        asked = [(one.variable, arrays[id(one.targets)]) for one in requests]
        key = (tied[group.source], group.costs.shape, *asked)
        if key not in alike:
            alike[key] = replace(group, source=tied[group.source], requests=requests), {}
        times = alike[key][1]
        times[id(group.costs)] = group.costs, times.get(id(group.costs), (group.costs, 0))[1] + 1
    return [
        replace(first, costs=reduce(np.add, (n * of if n > 1 else of for of, n in times.values())))
        for first, times in alike.values()
    ]

"""Repeated layers: variables of a step that mean the same in each of several equal blocks.

    blocks.0.mlp.up (v7)   blocks.1.mlp.up (v31)   blocks.2.mlp.up (v55)     one group: 7, 31, 55

Two variables are alike if their names differ in the number of the block alone, and they have the
same options. Blocks are told by `sbp_core.graph.block_of`, so any model that numbers its layers
has them, whatever these are called.
"""

from __future__ import annotations

import re
from collections.abc import Hashable

from sbp_core.infer import StepProblem

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
        key = ("node", _generic(node.name), node.op, options)
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

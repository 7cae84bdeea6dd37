"""Estimate the memory of a step over time: how long each value is held, and its bytes by option.

    states        stored all the time, replaced in place; a state in host memory holds nothing, but
                  its copies are on the device during its update
    a value       from the node that makes it to its last user, at their places in the graph;
                  also through views, which hold nothing themselves

This estimates the shape of memory over the step. It leaves out boxed copies, gathers, micro-batches
in flight and the buffers of runtimes. The exact memory follows from the compiled plan
(`sbp_core.memory`), by which `joint.search` corrects the limit.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf, prod

import numpy as np
from numpy.typing import NDArray

from sbp_core.graph import ITEMSIZE, InputKind, Node, Phase, Rate, TensorType
from sbp_core.infer import StepProblem
from sbp_core.sbp import NdSbp, Sbp, local_shape
from sbp_core.signatures import Signature1d

#: Inputs that are stored from step to step.
_STATES = (InputKind.PARAMETER, InputKind.OPTIMIZER_STATE)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class VariableMemory:
    """The memory that the values of each variable hold.

    A *holding* is one block of memory with a lifetime.

    Args:
        variables: The variable of each holding: first those of the step in order; then variables of
            several equal layers again, once for each further layer.
        usages: For each holding, its bytes on the fullest rank for each value of its variable.
        intervals: For each holding, its first place in the graph, and the end.
        limit_bytes: The limit for the sum of all holdings at any place.
        inputs: The holding of each tensor input.
    """

    variables: tuple[int, ...]
    usages: tuple[NDArray[np.int64], ...]
    intervals: tuple[tuple[int, int], ...]
    limit_bytes: float
    inputs: Mapping[str, int]

    def within(self, limit_bytes: float) -> VariableMemory:
        """Return this memory under another limit."""
        return replace(self, limit_bytes=limit_bytes)

    def peak_bytes(self, values: Sequence[int]) -> int:
        """Return the most bytes that an assignment holds at any place."""
        return int(self.by_place(values).max(initial=0))

    def by_place(self, values: Sequence[int]) -> NDArray[np.int64]:
        """Return the bytes that an assignment holds at each place, int64 of shape (places,)."""
        places = max((end for _, end in self.intervals), default=0)
        change = np.zeros(places + 1, dtype=np.int64)
        for variable, usage, (start, end) in zip(
            self.variables, self.usages, self.intervals, strict=True
        ):
            held = usage[values[variable]]
            change[start] += held
            change[end] -= held
        found: NDArray[np.int64] = np.cumsum(change)
        return found


def held(problem: StepProblem, limit_bytes: float, in_flight: Sequence[int] = ()) -> VariableMemory:
    """Return the memory that the variables of a step hold, on the fullest rank of each stage.

    Each stage has a separate range of places, so the limit applies to each stage.

    Args:
        problem: The step.
        limit_bytes: Memory of one rank.
        in_flight: For each stage, the number of micro-batches whose saved activations it holds; one
            if omitted.
    """
    work = problem.work
    graph, num_stages = work.graph, len(work.placements)
    place = {node.name: at for at, node in enumerate(graph.nodes)}
    length = len(graph.nodes) + 1
    last = _last_uses(problem, place)
    variables = list(range(len(problem.unary)))
    usages = [np.zeros(len(table), dtype=np.int64) for table in problem.unary]
    intervals = [(0, 0)] * len(problem.unary)
    taken: set[int] = set()

    def holding(variable: int) -> int:
        """Return the holding of one more node or input that a variable decides."""
        if variable not in taken:
            taken.add(variable)
            return variable
        variables.append(variable)
        usages.append(np.zeros(len(problem.unary[variable]), dtype=np.int64))
        intervals.append((0, 0))
        return len(variables) - 1

    # Equal layers share their options, so equal ids mean equal options.
    known: dict[object, NDArray[np.int64]] = {}

    def sizes(
        alike: object,
        tensor: TensorType,
        options: Iterable[Sequence[Sbp]],
        mesh_shape: tuple[int, ...],
    ) -> NDArray[np.int64]:
        key = alike, tensor, mesh_shape
        if key not in known:
            every = [_bytes(tensor, sbp, mesh_shape) for sbp in options]
            known[key] = np.array(every, dtype=np.int64)
        return known[key]

    for node in work.nodes:
        stage = work.stages.nodes[node.name]
        if work.is_free(node):
            continue
        own, parts = holding(problem.node_variable[node.name]), problem.parts[node.name]
        mesh_shape, start = work.mesh_shape(stage), place[node.name]
        for at, value in enumerate(node.outputs):
            made = ([part.outputs[at] for part in option] for option in parts)
            more = sizes((id(parts), at), graph.tensor(value), made, mesh_shape)
            usages[own] = usages[own] + more
        end = max((last[value] for value in node.outputs), default=start) + 1
        waits = node.phase is Phase.FORWARD and graph.nodes[end - 1].phase is Phase.BACKWARD
        if waits and in_flight:
            usages[own] = usages[own] * in_flight[stage]
        intervals[own] = (stage * length + start, stage * length + end)
    inputs: dict[str, int] = {}
    for name in dict.fromkeys(problem.storage_owner[entry.name] for entry in work.inputs):
        inputs[name] = holding(problem.storage_variable[name])
    for entry in work.inputs:
        own = inputs[entry.name] = inputs[problem.storage_owner[entry.name]]
        stage = work.stages.inputs[entry.name]
        if entry.name in work.offloaded:
            continue
        tensor, mesh_shape = graph.tensor(entry.name), work.mesh_shape(stage)
        entries = problem.storage_entries[entry.name]
        usages[own] = usages[own] + sizes(id(entries), tensor, entries, mesh_shape)
        intervals[own] = (stage * length, (stage + 1) * length)
    assert num_stages * length >= max(end for _, end in intervals)
    return VariableMemory(
        variables=tuple(variables),
        usages=tuple(usages),
        intervals=tuple(intervals),
        limit_bytes=limit_bytes,
        inputs=inputs,
    )


def _stored_by_stage(problem: StepProblem, values: Sequence[int] | None = None) -> list[int]:
    """Return the bytes of the states of an assignment; of any assignment at least, without one."""
    work = problem.work
    by_stage = [0] * len(work.placements)
    for entry in work.inputs:
        if entry.kind in _STATES and entry.name not in work.offloaded:
            stage, options = work.stages.inputs[entry.name], problem.storage_entries[entry.name]
            if values is not None:
                options = (options[values[problem.storage_variable[entry.name]]],)
            tensor, mesh_shape = work.graph.tensor(entry.name), work.mesh_shape(stage)
            by_stage[stage] += min(_bytes(tensor, sbp, mesh_shape) for sbp in options)
    return by_stage


def waiting_bytes(problem: StepProblem, values: Sequence[int], in_flight: Sequence[int]) -> int:
    """Return the least bytes of states and values that wait for the backward phase.

    On the fullest rank, once each stage has as many micro-batches in flight as it may have. A value
    may be kept in the layout of its users, if that is smaller. Recomputed values and values that
    are made once a step do not wait; a view counts as its base.

    Args:
        problem: The step.
        values: The values of its variables.
        in_flight: For each stage, of how many micro-batches values wait.
    """
    work = problem.work
    graph = work.graph
    known: dict[object, int] = {}

    def size(value: str, sbp: Sequence[Sbp], stage: int) -> int:
        tensor, mesh_shape = graph.tensor(value), work.mesh_shape(stage)
        key = (tensor, tuple(sbp), mesh_shape)
        if key not in known:
            known[key] = _bytes(tensor, sbp, mesh_shape)
        return known[key]

    def chosen(node: Node) -> Sequence[Signature1d]:
        return problem.parts[node.name][values[problem.node_variable[node.name]]]

    by_stage = _stored_by_stage(problem, values)

    def kept_for(user: Node) -> float:
        """Return the most bytes that a user may need to be kept; below 0 if it needs none."""
        if user.phase is Phase.BACKWARD:
            return inf
        if not work.is_free(user):
            return -1
        return min((waits[made] for made in user.outputs if made in waits), default=-1)

    # For each value, the least bytes that are kept for the backward phase; none if it is not kept.
    waits: dict[str, int] = {}
    for node in reversed(work.nodes):
        if node.phase is not Phase.FORWARD or node.rate is not Rate.MICRO:
            continue
        stage = work.stages.nodes[node.name]
        for at, value in enumerate(node.outputs):
            taken: list[float] = []
            for user in graph.users[value]:
                if user.is_host or work.stages.nodes[user.name] != stage:
                    continue
                kept = kept_for(user)
                names = work.calls[user.name].tensor_names if kept >= 0 else ()
                for place, name in enumerate(names):
                    if name == value:
                        sbp = [part.inputs[place] for part in chosen(user)]
                        taken.append(min(kept, size(value, sbp, stage)))
            if taken:
                made = size(value, [part.outputs[at] for part in chosen(node)], stage)
                waits[value] = int(min(made, *taken))
                if not work.is_free(node):
                    by_stage[stage] += in_flight[stage] * waits[value]
    return max(by_stage)


def least_stored_bytes(problem: StepProblem) -> int:
    """Return the least bytes of the states of any assignment, on the fullest rank.

    Args:
        problem: The step.
    """
    return max(_stored_by_stage(problem))


def _last_uses(problem: StepProblem, place: dict[str, int]) -> dict[str, int]:
    """Return the place of the last use of each value; uses of a view count for its base, too."""
    work, graph = problem.work, problem.work.graph
    last: dict[str, int] = {}
    for node in reversed(work.nodes):
        for value in node.outputs:
            last.setdefault(value, place[node.name])
        if work.is_free(node):
            used = max((last[value] for value in node.outputs), default=place[node.name])
        else:
            used = place[node.name]
        for value in graph.tensor_inputs(node):
            last[value] = max(last.get(value, 0), used)
    return last


def _bytes(tensor: TensorType, sbp: Sequence[Sbp], mesh_shape: Sequence[int]) -> int:
    shape = local_shape(tensor.shape, NdSbp(*sbp), mesh_shape, (0,) * len(mesh_shape))
    return prod(shape) * ITEMSIZE[tensor.dtype]

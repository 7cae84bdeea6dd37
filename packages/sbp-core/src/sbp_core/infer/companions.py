"""Find tensors that could share a collective's flat buffer, a bucket, by the compiler's rules.

The search for a strategy prices the communication of such tensors together (`infer.problem`).

    gradients            values of the backward phase that only the optimizer uses
    new values           of states that are stored in shards, or whole while their updates are not
    parameters           of one block, gathered for their use in one phase
    results              of one node that one node takes, such as a sum and its divisor

The compiler lets any arguments of one node travel together. Arguments made by different nodes are
left out here, because one of them may be partial and another not.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from sbp_core.boxing.step import StepKind
from sbp_core.compile.bucket_price import Companions
from sbp_core.compile.levels import is_gathered_on_use
from sbp_core.graph.ir import LogicalGraph, Phase, block_of
from sbp_core.infer.stages import StageMap

_REDUCTIONS = frozenset({StepKind.ALL_REDUCE, StepKind.REDUCE_SCATTER})
_GATHERS = frozenset({StepKind.ALL_GATHER})

#: What tensors that travel together have in common.
_Group = tuple[object, ...]


class StepCompanions:
    """The tensors that each value of a step could travel with.

    Args:
        graph: The step.
        stages: Stages of its nodes and inputs.
        known: Companions in other steps on the same machine; equal ones become one object.
    """

    def __init__(
        self,
        graph: LogicalGraph,
        stages: StageMap,
        known: dict[tuple[frozenset[StepKind], tuple[int, ...]], Companions],
    ) -> None:
        self._graph, self._stages = graph, stages
        self._new_values = frozenset(graph.new_states.values())
        sizes: dict[_Group, list[int]] = defaultdict(list)
        for value in graph.types:
            if graph.is_tensor(value):
                for group in self._groups(value):
                    sizes[group].append(graph.tensor(value).size_bytes)
        self._found: dict[_Group, Companions] = {}
        for group, of in sizes.items():
            kinds = _REDUCTIONS if group[0] in ("gradient", "result") else _GATHERS
            key = kinds, tuple(sorted(of))
            self._found[group] = known.setdefault(key, Companions(*key))

    def of(self, value: str, phase: str = "") -> Companions | None:
        """Return the companions of a value; None if it travels alone.

        Args:
            value: Its name; the step need not have it.
            phase: The phase, for a parameter that is gathered for its use.
        """
        for group in self._groups(value) if value in self._graph.types else ():
            if group[0] != "parameter" or group[1] == phase:
                return self._found[group]
        return None

    def _groups(self, value: str) -> Iterator[_Group]:
        graph, node = self._graph, self._graph.producers.get(value)
        what = graph.tensor(value).dtype, graph.rate_of(value)
        users = [user for user in graph.users[value] if not user.is_host]
        if is_gathered_on_use(graph, value):
            phases = dict.fromkeys(user.phase for user in users)
            for phase in phases:
                if phase is not Phase.OPTIMIZER:
                    home = min(
                        self._stages.nodes[user.name] for user in users if user.phase is phase
                    )
                    yield "parameter", phase.value, block_of(value), home, *what
            return
        if node is None:
            return
        home = self._stages.nodes[node.name]
        is_late = all(user.phase is Phase.OPTIMIZER for user in users)
        if node.phase is Phase.OPTIMIZER and value in self._new_values:
            yield "new value", home, *what
        elif node.phase is Phase.BACKWARD and users and is_late:
            yield "gradient", home, *what
        elif len(node.outputs) > 1 and users:
            # The first user has them converted, and waits for all of them.
            yield "result", node.name, users[0].name, *what

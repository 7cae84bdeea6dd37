"""`OpCall`: an operator call with its tensor types, for which ways to shard it are derived."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sbp_core.graph.ir import Argument, TensorType

if TYPE_CHECKING:
    from sbp_core.graph.ir import LogicalGraph, Node


@dataclass(frozen=True, slots=True, kw_only=True)
class OpCall:
    """One call of an operator: its name, its arguments and the types of its tensors.

    Args:
        op: `aten.mm.default`.
        args, kwargs: Arguments; a tensor or host scalar is a `Ref`.
        inputs: Type of each tensor argument, in argument order (lists flattened).
        tensor_names: Name of each tensor argument, aligned with `inputs`.
        outputs: Type of each output.
        tags: Tags of the operator (`pointwise`, ...).
        where: Lines for error messages.
    """

    op: str
    args: tuple[Argument, ...]
    kwargs: Mapping[str, Argument] = field(default_factory=dict)
    inputs: tuple[TensorType, ...]
    tensor_names: tuple[str, ...]
    outputs: tuple[TensorType, ...]
    tags: tuple[str, ...] = ()
    where: tuple[str, ...] = ()

    @classmethod
    def of(cls, graph: LogicalGraph, node: Node) -> OpCall:
        """Return the call of a node of a graph."""
        names = graph.tensor_inputs(node)
        return cls(
            op=node.op,
            args=node.args,
            kwargs=node.kwargs,
            inputs=tuple(graph.tensor(name) for name in names),
            tensor_names=names,
            outputs=tuple(graph.tensor(name) for name in node.outputs),
            tags=node.tags,
            where=node.where(),
        )

"""Mixed precision of a step that was captured in float32: products in two bytes, the rest in four.

States stay float32, and are converted where they are used; `casts` then puts the conversions where
they cost least. Losses are not scaled: float16 needs that (`torch.amp.GradScaler`'s scaling is part
of a capture under autocast), bfloat16 does not.
"""

from __future__ import annotations

from dataclasses import replace
from enum import Enum, auto
from fnmatch import fnmatchcase

from sbp_aten.pass_options import MixedPrecision
from sbp_aten.passes.precision_lists import (
    FLOAT32_OUTPUTS,
    FULL_POINTWISE,
    LIKE,
    LOW,
    MOVING,
    TOLD,
)
from sbp_core.graph import (
    Argument,
    LogicalGraph,
    Node,
    Phase,
    Rate,
    Ref,
    Symbol,
    TensorType,
    drop_dead,
    map_refs,
    rename_outputs,
)
from sbp_core.passes import Writer

_FULL = "float32"


class _Way(Enum):
    """How an operator computes."""

    LOW = auto()
    FULL = auto()
    AS_GIVEN = auto()
    TOLD = auto()
    LIKE = auto()


def mixed_precision(graph: LogicalGraph, how: MixedPrecision | None = None) -> LogicalGraph:
    """Compute products in low precision, and what is delicate in float32, converting between.

    before: h = mm(x, w); s = _softmax(h)                                       all float32
    after:  xl = _to_copy(x, bfloat16); wl = _to_copy(w, bfloat16); hl = mm(xl, wl)
            h = _to_copy(hl, float32); s = _softmax(h)

    Which is which follows PyTorch's autocast (`precision_lists`). Values of float64 stay as they
    are. Losses, metrics and new states have the dtypes that they had.
    """
    return _Lowering(graph, how or MixedPrecision()).run()


class _Lowering:
    """The state of one run: what is written, and what values were converted to."""

    def __init__(self, graph: LogicalGraph, how: MixedPrecision) -> None:
        self.graph, self.how = graph, how
        self.writer = Writer(graph)
        self.converted: dict[tuple[str, str], Ref] = {}
        #: Values of low-precision operators that are float32 in any case.
        self.stays: set[str] = set()

    def run(self) -> LogicalGraph:
        for node in self.graph.nodes:
            if node.is_host:
                self.writer.nodes.append(node)
            else:
                self._write(node)
        outputs = tuple(
            rename_outputs([out], {out.value: self._full_result(out.value)})[0]
            for out in self.graph.outputs
        )
        nodes, types = tuple(self.writer.nodes), self.writer.types
        return drop_dead(self.graph.with_nodes(nodes, outputs=outputs, types=types))

    def _full_result(self, value: str) -> str:
        """Return a result of the graph in the dtype that it had."""
        before = self.graph.types[value]
        if before == self.writer.types[value]:
            return value
        assert isinstance(before, TensorType)
        return self._in(value, before.dtype, self.graph.producers[value]).name

    def _write(self, node: Node) -> None:
        way = self._way(node)
        if way is _Way.LIKE:
            dtype = self.graph.tensor(node.outputs[0]).dtype
            node = replace(node, kwargs={**node.kwargs, "dtype": Symbol("dtype", dtype)})
        elif way is _Way.TOLD:
            node = replace(node, kwargs={**node.kwargs, "dtype": Symbol("dtype", _FULL)})
        elif way is not _Way.AS_GIVEN:
            node = self._with_inputs(node, self.how.dtype if way is _Way.LOW else _FULL)
        if way in (_Way.LOW, _Way.AS_GIVEN):
            self._lower_outputs(node)
        self.writer.nodes.append(node)

    def _way(self, node: Node) -> _Way:
        """Return how a node computes."""
        if node.phase is Phase.OPTIMIZER or node.rate is Rate.STEP or self._is_kept(node):
            return _Way.FULL
        if node.kind in LOW or (node.kind in self.how.lower and node.kind not in LIKE):
            return _Way.LOW if self._is_full(node.outputs[0]) else _Way.FULL
        now = {self.writer.tensor(v).dtype for v in node.inputs() if self._is_full(v)}
        if now != {self.how.dtype}:
            return _Way.FULL
        if node.kind in LIKE:
            return _Way.LIKE
        if node.kind in TOLD and len(node.inputs()) == 1 and self._is_full(node.outputs[0]):
            return _Way.TOLD
        moves = node.kind in MOVING or "pointwise" in node.tags
        given = any(isinstance(part, Symbol) for part in (*node.args, *node.kwargs.values()))
        as_given = moves and node.kind not in FULL_POINTWISE and not self._converts(node)
        return _Way.AS_GIVEN if as_given and not (given and node.kind != "clone") else _Way.FULL

    def _converts(self, node: Node) -> bool:
        return node.kind == "_to_copy"

    def _is_kept(self, node: Node) -> bool:
        return any(
            node.kind == pattern or (node.module and fnmatchcase(node.module, pattern))
            for pattern in self.how.keep
        )

    def _is_full(self, value: str) -> bool:
        """Whether a value was a float32 tensor, and may be in low precision by now."""
        kind = self.graph.types.get(value)
        stays = value in self.stays
        return isinstance(kind, TensorType) and kind.dtype == _FULL and not stays

    def _lower_outputs(self, node: Node) -> None:
        for at, value in enumerate(node.outputs):
            if at in FLOAT32_OUTPUTS.get(node.kind, ()):
                self.stays.add(value)
            elif self._is_full(value):
                kind = self.graph.tensor(value)
                self.writer.types[value] = replace(kind, dtype=self.how.dtype)

    def _with_inputs(self, node: Node, dtype: str) -> Node:
        """Return the node with what was float32 in a dtype."""

        def change(ref: Ref) -> Argument:
            return self._in(ref.name, dtype, node) if self._is_full(ref.name) else ref

        kwargs = {key: map_refs(value, change) for key, value in node.kwargs.items()}
        return replace(node, args=map_refs(node.args, change), kwargs=kwargs)

    def _in(self, value: str, dtype: str, user: Node) -> Ref:
        """Return a value in a dtype, converted at most once."""
        kind = self.writer.tensor(value)
        if kind.dtype == dtype:
            return Ref(value)
        key = (value, dtype)
        if key not in self.converted:
            producer = self.graph.producers.get(value)
            # What crosses to the rate of steps is converted before it is summed.
            like = user if producer is None or user.rate is producer.rate else producer
            self.converted[key] = self.writer.call(
                like,
                "aten._to_copy.default",
                (Ref(value),),
                replace(kind, dtype=dtype),
                kwargs={"dtype": Symbol("dtype", dtype)},
                pointwise=True,
            )
        return self.converted[key]

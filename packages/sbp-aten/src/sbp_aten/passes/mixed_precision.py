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
    DTYPE_ARGUMENT,
    FLOAT32_OUTPUTS,
    FULL_POINTWISE,
    LIKE,
    LOW,
    MOVING,
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
from sbp_core.passes import GraphWriter

_FULL = "float32"


class _Precision(Enum):
    """The dtype in which an operator computes.

    LOW: inputs are cast to the low precision. FULL: inputs are cast to float32. AS_GIVEN: as the
    inputs are. DTYPE_ARGUMENT: the operator takes a `dtype` and casts inside. LIKE: a factory that
    would take its dtype from a tensor that is now in low precision; its old dtype is written out.
    """

    LOW = auto()
    FULL = auto()
    AS_GIVEN = auto()
    DTYPE_ARGUMENT = auto()
    LIKE = auto()


def mixed_precision(graph: LogicalGraph, how: MixedPrecision | None = None) -> LogicalGraph:
    """Compute products in low precision and numerically sensitive operators in float32.

    before: h = mm(x, w); s = _softmax(h)                                       all float32
    after:  xl = _to_copy(x, bfloat16); wl = _to_copy(w, bfloat16); hl = mm(xl, wl)
            h = _to_copy(hl, float32); s = _softmax(h)

    Which is which follows PyTorch's autocast (`precision_lists`). Values of float64 stay as they
    are. Losses, metrics and new states have the dtypes that they had.
    """
    return _Lowering(graph, how or MixedPrecision()).run()


class _Lowering:
    """Lowers one graph: the nodes written so far, and the casts among them."""

    def __init__(self, graph: LogicalGraph, how: MixedPrecision) -> None:
        self.graph, self.how = graph, how
        self.writer = GraphWriter(graph)
        self.converted: dict[tuple[str, str], Ref] = {}
        #: Values of low-precision operators that are float32 in any case.
        self.stays_float32: set[str] = set()

    def run(self) -> LogicalGraph:
        for node in self.graph.nodes:
            if node.is_host:
                self.writer.nodes.append(node)
            else:
                self._write(node)
        outputs = tuple(
            rename_outputs([out], {out.value: self._in_original_dtype(out.value)})[0]
            for out in self.graph.outputs
        )
        nodes, types = tuple(self.writer.nodes), self.writer.types
        return drop_dead(self.graph.with_nodes(nodes, outputs=outputs, types=types))

    def _in_original_dtype(self, value: str) -> str:
        """Return an output of the graph, cast back to the dtype that it had."""
        before = self.graph.types[value]
        if before == self.writer.types[value]:
            return value
        assert isinstance(before, TensorType)
        return self._cast(value, before.dtype, self.graph.producers[value]).name

    def _write(self, node: Node) -> None:
        precision = self._precision(node)
        if precision is _Precision.LIKE:
            dtype = self.graph.tensor(node.outputs[0]).dtype
            node = replace(node, kwargs={**node.kwargs, "dtype": Symbol("dtype", dtype)})
        elif precision is _Precision.DTYPE_ARGUMENT:
            node = replace(node, kwargs={**node.kwargs, "dtype": Symbol("dtype", _FULL)})
        elif precision is not _Precision.AS_GIVEN:
            node = self._cast_inputs(node, self.how.dtype if precision is _Precision.LOW else _FULL)
        if precision in (_Precision.LOW, _Precision.AS_GIVEN):
            self._lower_outputs(node)
        self.writer.nodes.append(node)

    def _precision(self, node: Node) -> _Precision:
        """Return the dtype in which a node computes."""
        if node.phase is Phase.OPTIMIZER or node.rate is Rate.STEP or self._is_excluded(node):
            return _Precision.FULL
        if node.kind in LOW or (node.kind in self.how.lower and node.kind not in LIKE):
            return _Precision.LOW if self._was_float32(node.outputs[0]) else _Precision.FULL
        now = {self.writer.tensor(v).dtype for v in node.inputs() if self._was_float32(v)}
        if now != {self.how.dtype}:
            return _Precision.FULL
        if node.kind in LIKE:
            return _Precision.LIKE
        if (
            node.kind in DTYPE_ARGUMENT
            and len(node.inputs()) == 1
            and self._was_float32(node.outputs[0])
        ):
            return _Precision.DTYPE_ARGUMENT
        moves = node.kind in MOVING or "pointwise" in node.tags
        given = any(isinstance(part, Symbol) for part in (*node.args, *node.kwargs.values()))
        as_given = moves and node.kind not in FULL_POINTWISE and not self._converts(node)
        return (
            _Precision.AS_GIVEN
            if as_given and not (given and node.kind != "clone")
            else _Precision.FULL
        )

    def _converts(self, node: Node) -> bool:
        return node.kind == "_to_copy"

    def _is_excluded(self, node: Node) -> bool:
        return any(
            node.kind == pattern or (node.module and fnmatchcase(node.module, pattern))
            for pattern in self.how.keep
        )

    def _was_float32(self, value: str) -> bool:
        """Whether a value was a float32 tensor, and may be in low precision by now."""
        kind = self.graph.types.get(value)
        stays_float32 = value in self.stays_float32
        return isinstance(kind, TensorType) and kind.dtype == _FULL and not stays_float32

    def _lower_outputs(self, node: Node) -> None:
        for at, value in enumerate(node.outputs):
            if at in FLOAT32_OUTPUTS.get(node.kind, ()):
                self.stays_float32.add(value)
            elif self._was_float32(value):
                kind = self.graph.tensor(value)
                self.writer.types[value] = replace(kind, dtype=self.how.dtype)

    def _cast_inputs(self, node: Node, dtype: str) -> Node:
        """Return the node with its float32 inputs cast to a dtype."""

        def change(ref: Ref) -> Argument:
            return self._cast(ref.name, dtype, node) if self._was_float32(ref.name) else ref

        kwargs = {key: map_refs(value, change) for key, value in node.kwargs.items()}
        return replace(node, args=map_refs(node.args, change), kwargs=kwargs)

    def _cast(self, value: str, dtype: str, user: Node) -> Ref:
        """Return a value in a dtype; all users share one cast."""
        kind = self.writer.tensor(value)
        if kind.dtype == dtype:
            return Ref(value)
        key = (value, dtype)
        if key not in self.converted:
            producer = self.graph.producers.get(value)
            # A value of every micro-batch that is used once a step is cast in every micro-batch,
            # before it is accumulated: the sum is taken in the dtype of its user.
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

"""Mixed precision for a step captured in float32: products in two bytes, other operators in four.

States stay float32, and are cast where they are used; `casts` then moves the casts to where they
cost least. Losses are not scaled: float16 needs that (the scaling of `torch.amp.GradScaler` is part
of a capture under autocast), bfloat16 does not.

The lists say which operators compute in low precision, in float32, or in the dtype of their inputs.
Source: PyTorch 2.13, docs "Automatic Mixed Precision package", section "Autocast Op Reference" for
CUDA, and aten/src/ATen/autocast_mode.h (`AT_FORALL_LOWER_PRECISION_FP`, `AT_FORALL_FP32`,
`AT_FORALL_FP32_SET_OPT_DTYPE`), translated from the operators that users call to the operators of a
captured step, including backward operators. Two differences, both towards float32: every reduction
and norm is in float32, and so is every operator not named here.
"""

from __future__ import annotations

from dataclasses import replace
from enum import Enum, auto
from fnmatch import fnmatchcase

from sbp_aten.pass_options import MixedPrecision
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

_ATTENTION = tuple(
    f"_scaled_dot_product_{name}_attention{suffix}"
    for name, suffix in (("flash", "_for_cpu"), ("flash", ""), ("efficient", ""), ("cudnn", ""))
)

#: Products: low precision saves most of their time, and they sum in float32 inside.
_LOW = frozenset(
    {"mm", "bmm", "addmm", "addbmm", "baddbmm", "mv", "addmv", "addr"}
    | {"convolution", "convolution_backward", "_convolution", "_grouped_mm"}
    | {"mkldnn_convolution", "cudnn_convolution"}
    | {*_ATTENTION, *(f"{name}_backward" for name in _ATTENTION)}
)

#: Outputs of low-precision operators that are always float32: the log-sum-exp of attention.
_FLOAT32_OUTPUTS = dict.fromkeys(_ATTENTION, (1,))

#: Pointwise operators that lose too much precision: fast growth or cancellation.
_FULL_POINTWISE = frozenset(
    {"acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p"}
    | {"reciprocal", "rsqrt", "sinh", "tan", "pow", "softplus", "softplus_backward"}
    | {"hinge_embedding_loss", "kl_div", "binary_cross_entropy", "log_sigmoid_forward"}
    | {"log_sigmoid_backward", "binary_cross_entropy_with_logits", "binary_cross_entropy_backward"}
    | {"smooth_l1_loss", "huber_loss", "mse_loss", "soft_margin_loss", "xlogy", "logaddexp"}
)

#: Operators that only move elements. Like pointwise ones, they compute in the dtype of their
#: inputs, and in float32 if dtypes differ.
_MOVING = frozenset(
    {"view", "_unsafe_view", "reshape", "t", "transpose", "permute", "unsqueeze", "squeeze"}
    | {"expand", "slice", "select", "split", "split_with_sizes", "chunk", "unbind", "alias"}
    | {"detach", "clone", "cat", "stack", "repeat", "flip", "roll", "constant_pad_nd", "narrow"}
    | {"index", "index_select", "gather", "slice_backward", "select_backward", "max_pool2d"}
    | {"max_pool2d_with_indices", "max_pool2d_with_indices_backward", "tril", "triu"}
    | {"pixel_shuffle", "pixel_unshuffle", "diagonal", "unfold"}
)

#: Reductions with an argument `dtype`, which makes them sum in float32.
_DTYPE_ARGUMENT = frozenset({"sum", "mean"})

#: Factories that use only the shape and dtype of their argument.
_LIKE = frozenset(
    {"ones_like", "zeros_like", "full_like", "empty_like", "rand_like", "randn_like"}
    | {"new_ones", "new_zeros", "new_full", "new_empty"}
)


_FULL = "float32"


class _Precision(Enum):
    """The dtype in which an operator computes.

    LOW: inputs are cast to the low precision. FULL: inputs are cast to float32. AS_GIVEN: inputs
    are not cast. DTYPE_ARGUMENT: the operator takes a `dtype` and casts inside. LIKE: a factory
    that would take its dtype from a tensor that is now in low precision; its old dtype is written
    out.
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

    The choice follows PyTorch's autocast (see the lists). Values of float64 are unchanged. Losses,
    metrics and new states keep their dtypes.
    """
    return _Lowering(graph, how or MixedPrecision()).run()


class _Lowering:
    """Lowers one graph: the nodes written so far, and the casts among them."""

    def __init__(self, graph: LogicalGraph, how: MixedPrecision) -> None:
        self.graph, self.how = graph, how
        self.writer = GraphWriter(graph)
        self.converted: dict[tuple[str, str], Ref] = {}
        #: Outputs of low-precision operators that are always float32.
        self.stays_float32: set[str] = set()

    def run(self) -> LogicalGraph:
        for node in self.graph.nodes:
            if node.is_host:
                self.writer.nodes.append(node)
            else:
                self._write(node)
        # Outputs of the graph are cast back to their dtypes.
        names: dict[str, str] = {}
        for out in self.graph.outputs:
            before = self.graph.types[out.value]
            if isinstance(before, TensorType) and before != self.writer.types[out.value]:
                producer = self.graph.producers[out.value]
                names[out.value] = self._cast(out.value, before.dtype, producer).name
        nodes, types = tuple(self.writer.nodes), self.writer.types
        outputs = rename_outputs(self.graph.outputs, names)
        return drop_dead(self.graph.with_nodes(nodes, outputs=outputs, types=types))

    def _write(self, node: Node) -> None:
        precision = self._precision(node)
        if precision is _Precision.LIKE:
            dtype = self.graph.tensor(node.outputs[0]).dtype
            node = replace(node, kwargs={**node.kwargs, "dtype": Symbol("dtype", dtype)})
        elif precision is _Precision.DTYPE_ARGUMENT:
            node = replace(node, kwargs={**node.kwargs, "dtype": Symbol("dtype", _FULL)})
        elif precision is not _Precision.AS_GIVEN:
            node = self._cast_inputs(node, self.how.dtype if precision is _Precision.LOW else _FULL)
        lowers = precision in (_Precision.LOW, _Precision.AS_GIVEN)
        for at, value in enumerate(node.outputs if lowers else ()):
            if at in _FLOAT32_OUTPUTS.get(node.kind, ()):
                self.stays_float32.add(value)
            elif self._was_float32(value):
                kind = self.graph.tensor(value)
                self.writer.types[value] = replace(kind, dtype=self.how.dtype)
        self.writer.nodes.append(node)

    def _precision(self, node: Node) -> _Precision:
        """Return the dtype in which a node computes."""
        kept = any(
            node.kind == pattern or (node.module and fnmatchcase(node.module, pattern))
            for pattern in self.how.keep
        )
        if kept or node.phase is Phase.OPTIMIZER or node.rate is Rate.STEP:
            return _Precision.FULL
        if node.kind in _LOW or (node.kind in self.how.lower and node.kind not in _LIKE):
            return _Precision.LOW if self._was_float32(node.outputs[0]) else _Precision.FULL
        now = {self.writer.tensor(v).dtype for v in node.inputs() if self._was_float32(v)}
        if now != {self.how.dtype}:
            return _Precision.FULL
        if node.kind in _LIKE:
            return _Precision.LIKE
        if (
            node.kind in _DTYPE_ARGUMENT
            and len(node.inputs()) == 1
            and self._was_float32(node.outputs[0])
        ):
            return _Precision.DTYPE_ARGUMENT
        moves = node.kind in _MOVING or "pointwise" in node.tags
        given = any(isinstance(part, Symbol) for part in (*node.args, *node.kwargs.values()))
        as_given = moves and node.kind not in _FULL_POINTWISE and node.kind != "_to_copy"
        return (
            _Precision.AS_GIVEN
            if as_given and not (given and node.kind != "clone")
            else _Precision.FULL
        )

    def _was_float32(self, value: str) -> bool:
        """Whether a value was a float32 tensor, and may be in low precision by now."""
        kind = self.graph.types.get(value)
        stays_float32 = value in self.stays_float32
        return isinstance(kind, TensorType) and kind.dtype == _FULL and not stays_float32

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
            # A value of each micro-batch with a user at rate step is cast in each micro-batch,
            # before it is accumulated: the sum is computed in the dtype of its user.
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

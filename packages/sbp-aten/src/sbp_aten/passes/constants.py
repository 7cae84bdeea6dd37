"""Constant folding: evaluate host arithmetic and tensor operators on values known before the step.

A value is known if it is computed from `full`, `arange` and similar factories by views and
arithmetic. It is kept as a NumPy array, with zero strides if all elements are equal, so that a
large `full` costs nothing here. NumPy rounds float32 and float64 as PyTorch does; floats of two
bytes are not folded.

Floats are kept in double precision, whatever their dtype: `full(1.1, float32)` is 1.1 here, which
becomes the nearest float32 when it runs. So folding commutes with running the whole step in
float64, which a proof of equivalence does. A value that would become another float32 by that is
left to the step.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sbp_aten.passes.simplify import may_have_gaps
from sbp_aten.traits import filled_with
from sbp_core.graph import (
    Argument,
    LogicalGraph,
    Node,
    Ref,
    Symbol,
    TensorType,
    drop_dead,
    rename_outputs,
    rename_uses,
)
from sbp_core.graph import map_refs as map_arguments

_Array = NDArray[Any]

#: Largest number of elements of a known value whose elements differ.
_MOST_ELEMENTS = 1 << 14

_DTYPES = frozenset({"float64", "float32", "int64", "int32", "bool"})


#: Device of a value that is unknown here: `ones_like(x)` is on the device of `x`.
_ELSEWHERE = Symbol("device", "that of a tensor")


@dataclass(frozen=True, slots=True)
class _Known:
    """A known value, its dtype, and its device; None for the default device.

    The array holds floats as float64; the value itself is rounded to the nearest of its dtype.
    """

    array: _Array
    dtype: str
    device: Symbol | None = None

    @property
    def number(self) -> bool | int | float | None:
        """The number that all elements are; None if they differ, or there are none."""
        if not self.array.size:
            return None
        first: bool | int | float = self.array.flat[0].item()
        if any(self.array.strides):
            # By bits: 0.0 and -0.0 are two numbers.
            bits = np.ascontiguousarray(self.array).reshape(-1, 1).view(np.uint8)
            if (bits != bits[0]).any():
                return None
        return first


def fold_constants(graph: LogicalGraph) -> LogicalGraph:
    """Evaluate values that are known before the step runs.

    before: a = arange(4); b = view(a, [4, 1]); m = ge(b, 0); n = host.mul(2, 0.5); y = mul(x, n)
    after:  y = mul(x, 1.0)                     m, where it is used: full([4, 1], True)

    A value whose elements are all equal becomes a `full` of its shape, except an `expand`, which
    would then allocate all of them. Random operators are never known.
    """
    return _Folding(graph).run()


class _Folding:
    """Folds the constants of one graph."""

    def __init__(self, graph: LogicalGraph) -> None:
        self.graph = graph
        self.numbers: dict[str, Argument] = {}
        self.known: dict[str, _Known] = {}
        self.made: dict[str, Node] = {}

    def run(self) -> LogicalGraph:
        # Nodes are in topological order, so each argument has been folded before its users:
        #
        #     number    a known host scalar: its node is dropped, users take the number
        #     known     a known tensor, as an array; in the graph a `full`, if possible
        #     names     a value that equals another value: users take the latter
        leaving = {out.value for out in self.graph.outputs}
        names: dict[str, str] = {}
        kept: list[Node] = []
        for old in self.graph.nodes:
            node = self._with_numbers(rename_uses(old, names))
            if node.is_host:
                number = _host_number(node)
                # An output must be made by a node.
                if number is not None and node.outputs[0] not in leaving:
                    self.numbers[node.outputs[0]] = number
                    continue
            same = self._neutral(node)
            if same is not None:
                names[node.outputs[0]] = same
                continue
            kept.append(self._folded(node))
            self.made |= dict.fromkeys(node.outputs, kept[-1])
        outputs = rename_outputs(self.graph.outputs, names)
        return drop_dead(self.graph.with_nodes(tuple(kept), outputs=outputs))

    def _with_numbers(self, node: Node) -> Node:
        """Return the node with known host scalars replaced by numbers."""
        if not any(value in self.numbers for value in node.inputs()):
            return node

        def change(ref: Ref) -> Argument:
            return self.numbers.get(ref.name, ref)

        kwargs = {key: map_arguments(value, change) for key, value in node.kwargs.items()}
        return replace(node, args=map_arguments(node.args, change), kwargs=kwargs)

    def _folded(self, node: Node) -> Node:
        """Remember a node's result if it is known; return a factory of it if that is simpler."""
        found = self._value(node)
        if found is None:
            return node
        self.known[node.outputs[0]] = found
        number = found.number
        # An unknown device cannot be written into a `full`.
        stays = not node.inputs() or node.kind == "expand" or found.device == _ELSEWHERE
        if stays or number is None:
            return node
        kind = self.graph.tensor(node.outputs[0])
        place = {} if found.device is None else {"device": found.device}
        return replace(
            node,
            op="aten.full.default",
            args=(kind.shape, number),
            kwargs={"dtype": Symbol("dtype", kind.dtype), **place},
            tags=(),
        )

    def _value(self, node: Node) -> _Known | None:
        """Return the result of a node, if it is known."""
        if len(node.outputs) != 1 or node.is_host:
            return None
        kind = self.graph.tensor(node.outputs[0])
        if kind.dtype not in _DTYPES:
            return None
        inputs = node.inputs()
        device: Symbol | None = node.kwargs.get("device")
        fill = filled_with(node)
        if node.kind == "arange":
            array = _arange(node, kind)
        elif node.op == "sbp.constant.default":  # of values and size
            array = np.array(node.args[0], dtype=_kept_as(kind)).reshape(kind.shape)
        elif fill is not None:
            array = _filled(fill, kind)
            # Factories that take their dtype or shape from a tensor do not read it.
            device = device or (_ELSEWHERE if inputs else None)
        elif inputs and all(value in self.known for value in inputs):
            array = self._computed(node, kind)
            # Tensors without dims on a CPU combine with tensors of any device.
            widest = max(inputs, key=lambda value: self.known[value].array.ndim)
            device = device or self.known[widest].device
        else:
            return None
        # If NumPy gives another type than PyTorch, the node is unchanged.
        if array is None or array.shape != kind.shape or array.dtype != _kept_as(kind):
            return None
        return _Known(array, kind.dtype, device)

    def _computed(self, node: Node, kind: TensorType) -> _Array | None:
        """Return the result of a view or of arithmetic on known values, if it is supported."""
        function = _FUNCTIONS.get(node.kind)
        if function is None or not node.op.startswith("aten.") or "out" in node.kwargs:
            return None
        # Such as `alpha` of an addition, or a rounding mode: it would change the result.
        if set(node.kwargs) - _ALLOWED.get(node.kind, frozenset()):
            return None
        args = map_arguments(node.args, lambda ref: self.known[ref.name])
        held = [part for part in args if isinstance(part, _Known)]
        if len(held) != len(node.inputs()):
            return None
        # NumPy and PyTorch have different type promotion rules, so nothing is left to promotion.
        if node.kind in _POINTWISE and {part.dtype for part in held} != {kind.dtype}:
            return None
        # With zero strides, all elements are one element in memory:
        #
        #     full([4096, 4096], 2.0)    array of 16.7 million elements, strides (0, 0), 8 bytes
        #     mul(that, 3.0)             computed on one element, then viewed as (4096, 4096) again
        arrays = [part.array for part in held]
        uniform = all(not any(array.strides) and array.size for array in arrays)
        if not uniform and max((array.size for array in arrays), default=0) > _MOST_ELEMENTS:
            return None
        values = [part.array if isinstance(part, _Known) else part for part in args]
        if node.kind in _LOOKS:
            return function(kind, *values)
        if uniform:
            values = [v[(0,) * v.ndim] if isinstance(v, np.ndarray) else v for v in values]
        if node.kind == "_to_copy" and (held[0].dtype, kind.dtype) == ("float32", "float64"):
            own = np.asarray(values[0]).astype("float32")
            if not np.array_equal(own, values[0], equal_nan=True):
                return None  # a float64 with the error of a float32
        with np.errstate(all="ignore"):
            made = function(kind, *values)
        return None if made is None else np.broadcast_to(made, kind.shape)

    def _neutral(self, node: Node) -> str | None:
        """Return the argument that a node returns because the other is neutral, such as `and` True.

        For `where`, return the branch that is always taken.
        """
        # where(True, a, b), mul(a, ones) and and(a, True) are all a, if `a` has the same type.
        tensors = [part.name for part in node.args if isinstance(part, Ref)]
        if len(tensors) != len(node.args) or node.kwargs or len(node.outputs) != 1:
            return None
        numbers = [self.known[v].number if v in self.known else None for v in tensors]
        made, choices = node.outputs[0], list[str]()
        if node.op == "aten.where.self" and isinstance(numbers[0], bool):
            choices = [tensors[1 if numbers[0] else 2]]
        elif node.op == "aten.mul.Tensor":
            choices = [tensors[1 - at] for at in (0, 1) if numbers[at] == 1]
        elif node.op in _AND:
            choices = [tensors[1 - at] for at in (0, 1) if numbers[at] is True]
        for value in choices:
            # Users may depend on the memory layout: a new value has no gaps, this one may have
            # some.
            gaps = may_have_gaps(self.made, value)
            if self.graph.types[value] == self.graph.types[made] and not gaps:
                return value
        return None


#: Operators for which True is neutral, if the other argument is a bool.
_AND = ("aten.bitwise_and.Tensor", "aten.logical_and.default")


def _host_number(node: Node) -> Argument:
    """Return the result of a host operator on numbers; None if an argument is not known."""
    function = _HOST.get(node.op)
    if function is None or node.kwargs:
        return None
    if not all(isinstance(part, int | float) for part in node.args):
        return None
    try:
        found = function(*node.args)
    except ArithmeticError:
        return None
    # A fractional power of a negative number is complex here; the step reports it.
    return found if isinstance(found, int | float) else None


_HOST: Mapping[str, Callable[..., Any]] = {
    "host.add": operator.add,
    "host.sub": operator.sub,
    "host.mul": operator.mul,
    "host.truediv": operator.truediv,
    "host.pow": operator.pow,
    "host.neg": operator.neg,
}

# Factories


def _kept_as(kind: TensorType) -> np.dtype[Any]:
    """Return the dtype of the array of a known value."""
    return np.dtype("float64" if kind.dtype == "float32" else kind.dtype)


def _filled(number: Argument, kind: TensorType) -> _Array | None:
    if not isinstance(number, bool | int | float):
        return None
    return np.broadcast_to(np.asarray(number).astype(_kept_as(kind)), kind.shape)


def _arange(node: Node, kind: TensorType) -> _Array | None:
    whole = all(type(part) is int for part in node.args)
    if not whole or not kind.dtype.startswith("int") or kind.shape[0] > _MOST_ELEMENTS:
        return None
    return np.arange(*node.args, dtype=kind.dtype)


# Views and arithmetic: functions of the result's type, and of the arguments in order

_Function = Callable[..., _Array | None]


def _reshaped(kind: TensorType, array: _Array, *_: Argument) -> _Array:
    # An array of zero strides would be copied in full by `reshape`.
    if not any(array.strides) and array.size:
        return np.broadcast_to(array[(0,) * array.ndim], kind.shape)
    return array.reshape(kind.shape)


def _expanded(kind: TensorType, array: _Array, *_: Argument) -> _Array:
    return np.broadcast_to(array, kind.shape)


def _transposed(_: TensorType, array: _Array, first: int = 0, second: int = -1) -> _Array:
    return np.swapaxes(array, first, second) if array.ndim > 1 else array


def _permuted(_: TensorType, array: _Array, dims: tuple[int, ...]) -> _Array:
    return array.transpose([dim % array.ndim for dim in dims])


def _converted(kind: TensorType, array: _Array) -> _Array | None:
    if array.dtype.kind == "f" and not kind.dtype.startswith("float"):
        return None
    return _fitting(kind, np.asarray(array).astype(_kept_as(kind)))


def _fitting(kind: TensorType, array: _Array) -> _Array | None:
    """Return an array, unless a number is too large for the dtype: `full` refuses it."""
    return array if np.array_equal(np.isinf(array.astype(kind.dtype)), np.isinf(array)) else None


def _pointwise(function: np.ufunc) -> _Function:
    """Return an operator that computes in the dtype of its result.

    A Python number is converted to that dtype, as in PyTorch.
    """

    def compute(kind: TensorType, *args: Any) -> _Array | None:
        if len(args) != function.nin:
            return None
        # 1 + 0.1 is 1.1 in double precision. For float32, it has to round to the float32 result;
        # else the value is left to the step.
        made: _Array = np.asarray(function(*(np.asarray(a).astype(_kept_as(kind)) for a in args)))
        own = np.asarray(function(*(np.asarray(part).astype(kind.dtype) for part in args)))
        if own.dtype.name != kind.dtype or made.dtype != _kept_as(kind):
            return None
        is_nearest = np.array_equal(made.astype(own.dtype), own, equal_nan=True)
        return _fitting(kind, made) if is_nearest else None

    return compute


def _comparison(function: np.ufunc) -> _Function:
    """Return an operator that compares integers."""

    def compute(_: TensorType, *args: Any) -> _Array | None:
        # Floats of two types would be compared after a promotion.
        integers = all(np.asarray(part).dtype.kind in "bi" for part in args)
        if len(args) != function.nin or not integers:
            return None
        made: _Array = np.asarray(function(*args))
        return made

    return compute


#: Keyword arguments that do not change the result.
_ALLOWED: Mapping[str, frozenset[str]] = {
    "_to_copy": frozenset({"dtype", "device", "layout"}),
    "clone": frozenset({"memory_format"}),
}

_POINTWISE: Mapping[str, _Function] = {
    "add": _pointwise(np.add),
    "bitwise_and": _pointwise(np.bitwise_and),
    "bitwise_not": _pointwise(np.bitwise_not),
    "bitwise_or": _pointwise(np.bitwise_or),
    "mul": _pointwise(np.multiply),
    "neg": _pointwise(np.negative),
    "sub": _pointwise(np.subtract),
}

_LOOKS: Mapping[str, _Function] = {
    **dict.fromkeys(("_unsafe_view", "reshape", "squeeze", "unsqueeze", "view"), _reshaped),
    **dict.fromkeys(("alias", "clone", "detach"), _reshaped),
    **dict.fromkeys(("t", "transpose"), _transposed),
    "expand": _expanded,
    "permute": _permuted,
}

_FUNCTIONS: Mapping[str, _Function] = {
    **_LOOKS,
    **_POINTWISE,
    "_to_copy": _converted,
    "eq": _comparison(np.equal),
    "ge": _comparison(np.greater_equal),
    "gt": _comparison(np.greater),
    "le": _comparison(np.less_equal),
    "logical_and": _comparison(np.logical_and),
    "logical_not": _comparison(np.logical_not),
    "logical_or": _comparison(np.logical_or),
    "lt": _comparison(np.less),
    "ne": _comparison(np.not_equal),
}

"""The logical graph: our own immutable IR of functional ATen ops on global shapes.

Values are named and typed; a node names its argument values through `Ref`. `sbp_torch.capture`
makes these graphs, `graph.serialize` writes them, `graph.spec` verifies them, passes rewrite them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from math import prod
from typing import Annotated, Any

from sbp_core.errors import GraphError, SbpValueError
from sbp_core.graph.primitives import ACCUMULATE
from sbp_core.serialize import JsonForm

#: Bytes of one element, by dtype name.
ITEMSIZE = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
    "complex64": 8, "complex128": 16,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorType:
    """A logical tensor: global shape and dtype name (`float32`, `int64`, ...)."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def size_bytes(self) -> int:
        """Bytes of the whole logical tensor."""
        return prod(self.shape) * ITEMSIZE[self.dtype]

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"


@dataclass(frozen=True, slots=True)
class ScalarType:
    """A number that lives on the host and is equal on every rank: `float`, `int` or `bool`."""

    dtype: str = "float"

    def __str__(self) -> str:
        return f"host {self.dtype}"


#: The type of a value of a graph: a tensor, or a number on the host.
ValueType = TensorType | ScalarType


@dataclass(frozen=True, slots=True)
class Ref:
    """The use of a value as an argument."""

    name: str

    def __repr__(self) -> str:
        return f"%{self.name}"


@dataclass(frozen=True, slots=True)
class Symbol:
    """An argument that is a name of the tensor library: `Symbol("dtype", "float32")`.

    `kind` is `dtype`, `device`, `layout` or `memory_format`.
    """

    kind: str
    name: str


_SYMBOLS = ("dtype", "device", "layout", "memory_format")


def _argument_to_json(argument: Any) -> Any:
    """Return a JSON value; `Ref` and `Symbol` become one-key objects."""
    if isinstance(argument, Ref):
        return {"ref": argument.name}
    if isinstance(argument, Symbol):
        return {argument.kind: argument.name}
    return tuple(map(_argument_to_json, argument)) if isinstance(argument, tuple) else argument


def _argument_from_json(value: Any) -> Any:
    """Read the result of `_argument_to_json`.

    Raises:
        SbpValueError: it is not an argument.
    """
    if isinstance(value, list):
        return tuple(map(_argument_from_json, value))
    if not isinstance(value, dict):
        return value
    kind, name = next(iter(value.items())) if len(value) == 1 else ("", None)
    if kind not in ("ref", *_SYMBOLS) or not isinstance(name, str):
        raise SbpValueError(
            f"an object with the keys {', '.join(value)}",
            accepted=f'{{"ref": NAME}}; also with {", ".join(_SYMBOLS)} in place of ref',
        )
    return Ref(name) if kind == "ref" else Symbol(kind, name)


#: An argument: number, string, bool, None, Ref, Symbol, or a tuple of arguments.
Argument = Annotated[Any, JsonForm(Any, _argument_to_json, _argument_from_json)]


class Phase(StrEnum):
    """The part of a training step that a node or an actor belongs to.

    Only actors have `WEIGHT_GRADIENT`: the part of the backward phase that no other part of the
    backward phase waits for, if a plan fires it separately (`compile.backward_parts`).
    """

    FORWARD = "forward"
    BACKWARD = "backward"
    WEIGHT_GRADIENT = "weight_gradient"
    OPTIMIZER = "optimizer"


#: The order of the phases within a step.
PHASE_ORDER = {phase: index for index, phase in enumerate(Phase)}


class Rate(StrEnum):
    """How often a node runs in a step: for each micro-batch, for each update, or once.

    `UPDATE` is for steps with several updates, each of which uses some of the micro-batches.
    """

    MICRO = "micro"
    UPDATE = "update"
    STEP = "step"


def repetitions(num_micro_batches: int, num_updates: int) -> Mapping[Rate, int]:
    """Return how often a node of each rate runs in one step.

    >>> repetitions(8, 2)[Rate.UPDATE]
    2
    """
    return {Rate.MICRO: num_micro_batches, Rate.UPDATE: num_updates, Rate.STEP: 1}


class InputKind(StrEnum):
    """The kind of a graph input. The first three are states, which outputs may replace."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    OPTIMIZER_STATE = "optimizer_state"
    BATCH = "batch"
    RNG = "rng"
    SCALAR = "scalar"

    @property
    def is_state(self) -> bool:
        """Whether the value outlives the step."""
        return self in (InputKind.PARAMETER, InputKind.BUFFER, InputKind.OPTIMIZER_STATE)


class OutputKind(StrEnum):
    """The kind of a graph output."""

    LOSS = "loss"
    METRIC = "metric"
    STATE = "state"


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphInput:
    """A graph input; its value has the same name.

    Args:
        name: Parameters and buffers have the module's own names; optimizer states are
            `<parameter>.<key>`, such as `head.weight.exp_avg`.
        kind: The kind of the input.
        of: For an optimizer state, the parameter it belongs to; else empty.
        stands_for: States that this one replaces because they are always equal (see
            `passes.tie_step_counters`).
    """

    name: str
    kind: InputKind
    of: str = ""
    stands_for: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphOutput:
    """A graph output: a value, and the loss, metric or state (by name) that it is."""

    name: str
    kind: OutputKind
    value: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One operator call.

    Args:
        name: Unique; `<module path>.<op>` with a number if needed.
        op: `aten.mm.default`, `host.mul`, `sbp.accumulate`, ...
        args, kwargs: In the operator's own order; tensors and host scalars as `Ref`.
        outputs: Names of the results, in order, including unused ones, but not results that the
            operator leaves out (`None`).
        phase, rate: When it runs.
        module: Path of the module that called it (of its forward node, for a backward node).
        source: `file:line` of the user's code.
        forward: For a backward node, a forward node of the same call; else empty.
        tags: Tags of the operator that signatures need: `pointwise`, `view`, `seeded`. Passes add
            their own: `slice:4` is one of four slices of an operator; `term` repeats the
            computation of another node for another divisor of the loss.
    """

    name: str
    op: str
    args: tuple[Argument, ...]
    kwargs: Mapping[str, Argument] = field(default_factory=dict)
    outputs: tuple[str, ...]
    phase: Phase = Phase.FORWARD
    rate: Rate = Rate.MICRO
    module: str = ""
    source: str = ""
    forward: str = ""
    tags: tuple[str, ...] = ()

    @property
    def is_host(self) -> bool:
        """Whether it computes host scalars only."""
        return self.op.startswith("host.")

    @property
    def kind(self) -> str:
        """The operator without namespace and overload: `mm`."""
        return self.op.split(".")[1]

    @property
    def num_slices(self) -> int:
        """The number of slices of the operator, of which this node is one; 1 if it is whole."""
        found = (tag.removeprefix("slice:") for tag in self.tags if tag.startswith("slice:"))
        return int(next(found, 1))

    def inputs(self) -> tuple[str, ...]:
        """Return the names of the values used, in argument order, with repetitions."""
        found: list[str] = []
        for argument in (*self.args, *self.kwargs.values()):
            if isinstance(argument, Ref):
                found.append(argument.name)
            elif isinstance(argument, tuple | list):
                found += [ref.name for ref in refs(argument)]
        return tuple(found)

    def where(self) -> tuple[str, ...]:
        """Return the lines that an error message puts after 'in'."""
        place = f"{self.source}, " if self.source else ""
        return (f"{place}op {self.op} of module {self.module or '(root)'!r} ({self.name})",)


def refs(argument: Argument) -> Iterator[Ref]:
    """Yield every `Ref` in an argument, in order."""
    if isinstance(argument, Ref):
        yield argument
    elif isinstance(argument, tuple | list):
        for part in argument:
            yield from refs(part)


def map_refs(argument: Argument, change: Callable[[Ref], Argument]) -> Argument:
    """Return the argument with every `Ref` replaced by `change(ref)`."""
    if isinstance(argument, Ref):
        return change(argument)
    if isinstance(argument, tuple | list):
        return tuple(map_refs(part, change) for part in argument)
    return argument


@dataclass(frozen=True, kw_only=True)
class LogicalGraph:
    """A whole training step (or an evaluation) as one functional graph.

    Args:
        name: The name in reports.
        inputs, outputs: Typed; see `GraphInput` and `GraphOutput`.
        nodes: In topological order.
        types: Type of every value.
        num_micro_batches: Micro-batches of one step; types are those of one micro-batch.
        num_updates: Updates of one step, each by equally many of its micro-batches in their order.
    """

    name: str
    inputs: tuple[GraphInput, ...]
    outputs: tuple[GraphOutput, ...]
    nodes: tuple[Node, ...]
    types: Mapping[str, ValueType]
    num_micro_batches: int = 1
    num_updates: int = 1

    @cached_property
    def repetitions(self) -> Mapping[Rate, int]:
        """How often a node of each rate runs in one step."""
        return repetitions(self.num_micro_batches, self.num_updates)

    @cached_property
    def producers(self) -> Mapping[str, Node]:
        """The node that makes each value (inputs have none)."""
        return {value: node for node in self.nodes for value in node.outputs}

    @cached_property
    def users(self) -> Mapping[str, tuple[Node, ...]]:
        """The nodes that use each value, in graph order."""
        found: dict[str, dict[str, Node]] = {value: {} for value in self.types}
        for node in self.nodes:
            for value in node.inputs():
                found[value][node.name] = node
        return {value: tuple(nodes.values()) for value, nodes in found.items()}

    @cached_property
    def input_kinds(self) -> Mapping[str, GraphInput]:
        """Each graph input by name."""
        return {entry.name: entry for entry in self.inputs}

    @cached_property
    def by_name(self) -> Mapping[str, Node]:
        """Each node by name."""
        return {node.name: node for node in self.nodes}

    @cached_property
    def new_states(self) -> Mapping[str, str]:
        """For each state that is replaced, the value that replaces it."""
        return {out.name: out.value for out in self.outputs if out.kind is OutputKind.STATE}

    @cached_property
    def carried(self) -> Mapping[str, str]:
        """New values of states that a micro-batch or an update passes to the next micro-batch."""
        if self.num_micro_batches == 1:
            return {}
        return {
            name: value
            for name, value in self.new_states.items()
            if self.rate_of(value) is not Rate.STEP
        }

    @cached_property
    def found(self) -> dict[object, object]:
        """A cache of results of functions of this graph object, such as its hash."""
        return {}

    @cached_property
    def loss(self) -> str:
        """The value that is the loss.

        Raises:
            GraphError: the graph has none.
        """
        for out in self.outputs:
            if out.kind is OutputKind.LOSS:
                return out.value
        raise GraphError(f"graph {self.name!r} has no loss", accepted="an output of kind 'loss'")

    def tensor(self, value: str) -> TensorType:
        """Return the type of a value that is a tensor."""
        found = self.types[value]
        assert isinstance(found, TensorType), f"{value} is a host scalar, not a tensor"
        return found

    def is_tensor(self, value: str) -> bool:
        """Whether a value is a tensor (else a host scalar)."""
        return isinstance(self.types[value], TensorType)

    def tensor_inputs(self, node: Node) -> tuple[str, ...]:
        """Return the tensors a node uses, in argument order, with repetitions."""
        return tuple(value for value in node.inputs() if self.is_tensor(value))

    def rate_of(self, value: str) -> Rate:
        """Return how often a value is made: inputs by kind, `sbp.accumulate` by its `rate`."""
        node = self.producers.get(value)
        if node is None:
            kind = self.input_kinds[value].kind
            changes = kind in (InputKind.BATCH, InputKind.RNG)
            return Rate.MICRO if changes else Rate.STEP
        # `sbp.accumulate(part, how, rate)`: `rate` is when the sum is passed on, by default once.
        return Rate(node.kwargs.get("rate", Rate.STEP)) if node.op == ACCUMULATE else node.rate

    def with_nodes(self, nodes: tuple[Node, ...], **changes: Any) -> LogicalGraph:
        """Return a copy with other nodes (and other fields), without types of removed values."""
        types = dict(changes.pop("types", self.types))
        inputs = changes.get("inputs", self.inputs)
        kept = {entry.name for entry in inputs} | {out for node in nodes for out in node.outputs}
        return replace(
            self, nodes=nodes, types={k: v for k, v in types.items() if k in kept}, **changes
        )


def block_of(module: str) -> str:
    """Return the block (a repeated part of a model) of a module, or of a value in it, by its path.

    >>> block_of("blocks.3.norm"), block_of("embed.tokens.weight"), block_of("")
    ('blocks.3', 'embed', '')
    """
    parts = module.split(".")
    for at, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: at + 1])
    return parts[0]

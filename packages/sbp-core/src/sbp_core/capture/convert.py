"""Turn a traced FX graph into our `LogicalGraph`: names, types, tags, host scalars.

FX stops here. Tuple results become several values of one node; symbols of torch (dtypes, devices)
become `Symbol`s; arithmetic on host numbers becomes `host.*` nodes.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from sbp_core._torch_compat import OpOverload, argument_types, is_mutable
from sbp_core.capture.trace import TracedStep
from sbp_core.errors import CaptureError
from sbp_core.graph.ir import (
    Argument,
    GraphInput,
    GraphOutput,
    InputKind,
    LogicalGraph,
    Node,
    OutputKind,
    Phase,
    Rate,
    Ref,
    ScalarType,
    Symbol,
    TensorType,
    ValueType,
)

#: Python operators on host numbers, by the name they get.
HOST_OPS = {
    operator.add: "add",
    operator.sub: "sub",
    operator.mul: "mul",
    operator.truediv: "truediv",
    operator.pow: "pow",
    operator.neg: "neg",
    pow: "pow",
}

_TAGS = {
    torch.Tag.pointwise: "pointwise",
    torch.Tag.nondeterministic_seeded: "seeded",
}


def to_logical(step: TracedStep, name: str) -> LogicalGraph:
    """Convert a traced step.

    Raises:
        CaptureError: a node is not functional ATen, or makes something that is no tensor.
    """
    return _Conversion(step, name).run()


class _Conversion:
    """The state of one conversion."""

    def __init__(self, step: TracedStep, name: str) -> None:
        self.step, self.name = step, name
        self.nodes: list[Node] = []
        self.types: dict[str, ValueType] = {}
        self.values: dict[fx.Node, Argument] = {}
        self.parts: dict[fx.Node, tuple[str, ...]] = {}
        self.taken: Counter[str] = Counter()
        self.forward_names: dict[int, str] = {}
        self.owners: dict[str, str] = {}

    def run(self) -> LogicalGraph:
        placeholders = iter(self.step.inputs)
        outputs: tuple[GraphOutput, ...] = ()
        for node in self.step.module.graph.nodes:
            if node.op == "placeholder":
                self._input(node, next(placeholders))
            elif node.op == "output":
                outputs = self._outputs(node)
            elif node.op == "call_function":
                self._call(node)
            else:
                raise CaptureError(
                    f"the captured graph holds a {node.op} node {node.target!r}",
                    accepted="parameters and buffers registered on the model",
                    todo="register constant tensors with register_buffer",
                )
        return LogicalGraph(
            name=self.name,
            inputs=self.step.inputs,
            outputs=outputs,
            nodes=tuple(self.nodes),
            types=self.types,
        )

    def _input(self, node: fx.Node, entry: GraphInput) -> None:
        value = node.meta["val"]
        scalar = entry.kind is InputKind.SCALAR
        self.types[entry.name] = ScalarType() if scalar else _tensor_type(value)
        self.values[node] = Ref(entry.name)
        self.owners[entry.name] = entry.of or entry.name
        self.taken[entry.name] += 1

    def _outputs(self, node: fx.Node) -> tuple[GraphOutput, ...]:
        flat = _leaves(node.args[0])
        found = []
        for part, (name, kind) in zip(flat, self.step.outputs, strict=True):
            value = self.values[part].name
            if kind is not OutputKind.STATE or value != name:
                found.append(GraphOutput(name=name, kind=kind, value=value))
        return tuple(found)

    def _call(self, node: fx.Node) -> None:
        if node.target is operator.getitem:
            whole, index = node.args
            assert isinstance(whole, fx.Node) and isinstance(index, int), "an op's result is taken"
            self.values[node] = Ref(self.parts[whole][index])
            return
        if node.target is torch.ops.aten._local_scalar_dense.default:
            source = self._argument(node.args[0])
            if isinstance(self.types[source.name], ScalarType):
                self.values[node] = source
                return
        op, tags = self._operator(node)
        note: Mapping[str, Any] = node.meta.get("custom", {}).get("sbp", {})
        host = op.startswith("host.")
        phase = Phase.OPTIMIZER if host else Phase(note.get("phase", "forward"))
        args = self._argument(tuple(node.args))
        kwargs = {key: self._argument(value) for key, value in node.kwargs.items()}
        kwargs.pop("pin_memory", None)
        name = self._name(op, phase, note, args)
        outputs = self._add_outputs(node, name)
        made = Node(
            name=name,
            op=op,
            args=args,
            kwargs=kwargs,
            outputs=outputs,
            phase=phase,
            rate=Rate.STEP if phase is Phase.OPTIMIZER else Rate.MICRO,
            module=note.get("module", ""),
            source=note.get("source", ""),
            forward=self._forward(note),
            tags=tags,
        )
        if phase is Phase.FORWARD and "id" in note:
            self.forward_names.setdefault(note["id"], name)
        self.nodes.append(made)

    def _forward(self, note: Mapping[str, Any]) -> str:
        """Return the first surviving forward node of the call that a backward node belongs to."""
        found = (self.forward_names.get(number) for number in note.get("forward", ()))
        return next((name for name in found if name), "")

    def _operator(self, node: fx.Node) -> tuple[str, tuple[str, ...]]:
        target: Any = node.target
        if target in HOST_OPS:
            return f"host.{HOST_OPS[target]}", ()
        if not isinstance(target, OpOverload):
            raise CaptureError(f"the captured graph calls {target!r}", accepted="ATen operators")
        if is_mutable(target):
            raise CaptureError(
                f"{target} still writes to its arguments after capture", accepted="functional ops"
            )
        if target is torch.ops.aten._local_scalar_dense.default:
            return "host.item", ()
        tags = tuple(text for tag, text in _TAGS.items() if tag in target.tags)
        if "seeded" in tags and _never_draws(node, target):
            tags = tuple(tag for tag in tags if tag != "seeded")
        return str(target), tags

    def _name(self, op: str, phase: Phase, note: Mapping[str, Any], args: Argument) -> str:
        kind = op.split(".")[1]
        if phase is Phase.OPTIMIZER:
            owner = next((o for ref in _refs(args) if (o := self.owners.get(ref.name))), "")
            base = (
                f"{owner}.update.{kind}" if owner and not op.startswith("host") else f"step.{kind}"
            )
        else:
            middle = ["grad"] if phase is Phase.BACKWARD else []
            base = ".".join([*filter(None, [note.get("module", "")]), *middle, kind])
            owner = ""
        self.taken[base] += 1
        name = base if self.taken[base] == 1 else f"{base}_{self.taken[base] - 1}"
        if owner:
            self.owners[name] = owner
        return name

    def _add_outputs(self, node: fx.Node, name: str) -> tuple[str, ...]:
        value = node.meta.get("val")
        if isinstance(value, tuple | list):
            names = tuple(f"{name}:{index}" for index in range(len(value)))
            for part, made in zip(value, names, strict=True):
                if part is not None:
                    self.types[made] = _tensor_type(part)
            self.parts[node] = names
            return tuple(made for made in names if made in self.types)
        if isinstance(value, torch.Tensor):
            self.types[name] = _tensor_type(value)
        else:
            self.types[name] = ScalarType()
        self.values[node] = Ref(name)
        return (name,)

    def _argument(self, value: Any) -> Argument:
        if isinstance(value, fx.Node):
            if value not in self.values:
                raise CaptureError(f"{value} is used as a whole although it makes several tensors")
            return self.values[value]
        if isinstance(value, tuple | list):
            return tuple(self._argument(part) for part in value)
        if isinstance(value, torch.dtype):
            return Symbol("dtype", str(value).removeprefix("torch."))
        if isinstance(value, torch.device):
            return Symbol("device", value.type)
        if isinstance(value, torch.layout):
            return Symbol("layout", str(value).removeprefix("torch."))
        if isinstance(value, torch.memory_format):
            return Symbol("memory_format", str(value).removeprefix("torch."))
        if value is None or isinstance(value, bool | int | float | str):
            return value
        raise CaptureError(f"an argument of type {type(value).__name__}: {value!r}")


def _never_draws(node: fx.Node, target: OpOverload) -> bool:
    """Whether a random op is asked for a dropout of zero, so that it is not random."""
    for index, name in enumerate(argument_types(target)):
        if name == "dropout_p":
            given = node.args[index] if index < len(node.args) else node.kwargs.get("dropout_p", 0)
            return isinstance(given, int | float) and given == 0
    return False


def _refs(argument: Argument) -> list[Ref]:
    if isinstance(argument, Ref):
        return [argument]
    if isinstance(argument, tuple):
        return [ref for part in argument for ref in _refs(part)]
    return []


def _tensor_type(value: Any) -> TensorType:
    if not isinstance(value, torch.Tensor):
        raise CaptureError(f"a captured op makes a {type(value).__name__}, not a tensor")
    return TensorType(tuple(int(n) for n in value.shape), str(value.dtype).removeprefix("torch."))


def _leaves(nested: Any) -> list[Any]:
    if isinstance(nested, tuple | list):
        return [leaf for part in nested for leaf in _leaves(part)]
    return [nested]

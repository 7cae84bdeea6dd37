"""Turn a traced FX graph into our `LogicalGraph`: names, types, tags, host scalars.

Later passes do not use FX. Tuple results become several values of one node; symbols of torch
(dtypes, devices) become `Symbol`s; arithmetic on host numbers becomes `host.*` nodes.
"""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from sbp_core.errors import CaptureError
from sbp_core.graph import (
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
    refs,
)
from sbp_torch._torch_compat import OpOverload, argument_types, is_mutable
from sbp_torch.graph_capture.diagnostics import check_call, shape_by_value, value_read
from sbp_torch.graph_capture.numbers import at_forward
from sbp_torch.graph_capture.step import DRAW, SEED
from sbp_torch.graph_capture.trace import TracedStep
from sbp_torch.ops.operators import asked_for

#: Python operators on host numbers, with their names in graphs.
HOST_OPS = {
    operator.add: "add",
    operator.sub: "sub",
    operator.mul: "mul",
    operator.truediv: "truediv",
    operator.pow: "pow",
    operator.neg: "neg",
    math.floor: "floor",
    torch.sym_float: "float",
    operator.mod: "mod",
    operator.abs: "abs",
    torch.sym_sqrt: "sqrt",
    pow: "pow",
    torch.sym_min: "min",
    torch.sym_max: "max",
}

#: The greatest number of elements of a constant that is written into the graph.
MAX_CONSTANT = 4096

_TAGS = {
    torch.Tag.pointwise: "pointwise",
    torch.Tag.nondeterministic_seeded: "seeded",
}


def to_logical(step: TracedStep, name: str) -> LogicalGraph:
    """Convert a traced step.

    Raises:
        CaptureError: a node is not functional ATen, or has a result that is no tensor.
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
        #: The forward node of each value of the backward phase.
        self.links: dict[str, str] = {}
        #: Module and source line of each forward node.
        self.places: dict[str, dict[str, str]] = {}
        #: The inputs of counter-based random ops, if there are any.
        self.counted: tuple[GraphInput, ...] = ()

    def run(self) -> LogicalGraph:
        placeholders = iter(self.step.inputs)
        outputs: tuple[GraphOutput, ...] = ()
        for node in self.step.module.graph.nodes:
            if node.op == "placeholder":
                entry = next(placeholders)
                scalar = entry.kind is InputKind.SCALAR
                kind = ScalarType() if scalar else _tensor_type(node.meta["val"])
                self.types[entry.name], self.values[node] = kind, Ref(entry.name)
                self.owners[entry.name] = entry.of or entry.name
                self.taken[entry.name] += 1  # nodes must not get the names of inputs
            elif node.op == "get_attr":
                self._constant(node)
            elif node.op == "output":
                outputs = self._outputs(node)
            elif node.op == "call_function":
                if not self._stands_for_another(node):
                    self._call(node)
            else:
                raise CaptureError(
                    f"the captured graph holds a {node.op} node {node.target!r}",
                    accepted="ATen operators on parameters, buffers and batch tensors",
                )
        return LogicalGraph(
            name=self.name,
            inputs=(*self.step.inputs, *self.counted),
            outputs=outputs,
            nodes=tuple(at_forward(self.nodes)),
            types=self.types,
        )

    def _constant(self, node: fx.Node) -> None:
        """Add a node for a constant tensor of the program, such as `torch.tensor(0.5)`."""
        value = self.step.constants[str(node.target)]
        if value.numel() > MAX_CONSTANT:
            raise CaptureError(
                f"the program makes a constant tensor of shape {tuple(value.shape)}",
                where=next(filter(None, (_note_of(user).get("source") for user in node.users)), ""),
                accepted=f"up to {MAX_CONSTANT} elements",
                todo="register it with register_buffer; if it is a parameter of a network that the "
                "loss calls, such as a teacher, make that a module of the model: "
                "nn.ModuleDict({'student': model, 'teacher': teacher})",
            )
        name = self._name("sbp.constant", Phase.FORWARD, {}, ())
        flat = value.detach().reshape(-1).tolist()
        dtype = Symbol("dtype", str(value.dtype).removeprefix("torch."))
        shape = tuple(value.shape)
        # Compared by `repr`, too, because 0.0 == -0.0.
        same = bool(flat) and all(part == flat[0] and repr(part) == repr(flat[0]) for part in flat)
        made = Node(
            name=name,
            op="aten.full.default" if same else "sbp.constant.default",
            args=(shape, flat[0]) if same else (tuple(flat), shape),
            kwargs={"dtype": dtype, "device": Symbol("device", value.device.type)},
            outputs=(name,),
        )
        self.types[name] = _tensor_type(value)
        self.values[node] = Ref(name)
        self.nodes.append(made)

    def _outputs(self, node: fx.Node) -> tuple[GraphOutput, ...]:
        flat = tree_leaves(node.args[0])
        found = []
        for part, (name, kind) in zip(flat, self.step.outputs, strict=True):
            value = self.values[part].name
            # A state that is returned unchanged is not replaced.
            if kind is not OutputKind.STATE or value != name:
                found.append(GraphOutput(name=name, kind=kind, value=value))
        return tuple(found)

    def _stands_for_another(self, node: fx.Node) -> bool:
        # Three targets make no node: the parts of a tuple, a host number that is read from a host
        # number, and PyTorch's copy of a constant, because each constant is already a new tensor.
        if node.target is operator.getitem:
            whole, index = node.args
            assert isinstance(whole, fx.Node) and isinstance(index, int), "an op's result is taken"
            self.values[node] = Ref(self.parts[whole][index])
            return True
        if node.target is torch.ops.aten._local_scalar_dense.default:
            source = self._argument(node.args[0])
            if isinstance(self.types[source.name], ScalarType):
                self.values[node] = source
                return True
        if node.target is torch.ops.aten.lift_fresh_copy.default:
            self.values[node] = self._argument(node.args[0])
            return True
        return False

    def _call(self, node: fx.Node) -> None:
        op, tags = self._operator(node)
        note = _note_of(node)
        host = op.startswith("host.")
        if op == "host.item" and note.get("phase") != Phase.OPTIMIZER:
            raise value_read(str(node.target), note.get("source", ""))
        leaves = tree_leaves(node.meta.get("val"))
        extents = [n for one in leaves if isinstance(one, torch.Tensor) for n in one.shape]
        if any(not isinstance(n, int) for n in extents):
            raise shape_by_value(str(node.target), note.get("source", ""))
        # Host numbers that forward uses are moved there at the end; see `at_forward`.
        phase = Phase.OPTIMIZER if host else Phase(note.get("phase", "forward"))
        source = note.get("source", "")
        for value in (*node.args, *node.kwargs.values()):
            if isinstance(value, complex):
                raise CaptureError(
                    f"the complex number {value!r} is an argument of {node.target}",
                    where=source,
                    accepted="real numbers, and complex tensors",
                    todo="write the op with real and imaginary parts; backward phases of real(), "
                    "imag() and angle() make such numbers: use torch.view_as_real instead",
                )
        if node.target is torch.ops.aten._linalg_check_errors.default:
            raise CaptureError(
                "an operator of torch.linalg looks at values: whether a matrix has an inverse, or "
                "a factor",
                where=source,
                accepted="operators that do not look",
                todo="take the variant that does not: torch.linalg.solve_ex, inv_ex, cholesky_ex; "
                "of parametrizations.orthogonal: orthogonal_map='matrix_exp' or 'householder'",
            )
        args = self._argument(tuple(node.args))
        kwargs = {key: self._argument(value) for key, value in node.kwargs.items()}
        kwargs.pop("pin_memory", None)
        if op.startswith("sbp.random_"):  # it takes the seed and the draw of the step
            self.counted = (
                GraphInput(name=SEED, kind=InputKind.SCALAR),
                GraphInput(name=DRAW, kind=InputKind.RNG),
            )
            self.types |= {SEED: ScalarType("int"), DRAW: ScalarType("int")}
            args = (args[0], Ref(SEED), Ref(DRAW), *args[3:])
        if "checkpoint" in note:
            tags = (*tags, "recompute", f"recompute:{note['checkpoint']}")
        # In this order: outputs are named after the node, links need the outputs, and a backward
        # node without a module gets module and source line of its forward node.
        name = self._name(op, phase, note, args)
        outputs = self._add_outputs(node, name)
        forward = self._forward(note, phase, args)
        self.links |= dict.fromkeys(outputs, forward)
        if forward and not note.get("module"):
            note = {**note, **self.places[forward]}
        check_call(node, note.get("source", ""))
        if phase is Phase.OPTIMIZER:
            module = self.owners.get(name, "").rpartition(".")[0]
            note = {**note, "module": module, "source": self.step.update_source}
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
            forward=forward,
            tags=tags,
        )
        if phase is Phase.FORWARD and "id" in note:
            # One call of the program may be traced to several nodes: the first represents it.
            self.forward_names.setdefault(note["id"], name)
            self.places[name] = {"module": made.module, "source": made.source}
        self.nodes.append(made)

    def _forward(self, note: Mapping[str, Any], phase: Phase, args: Argument) -> str:
        """Return the first surviving forward node of the call that a backward node belongs to.

        An operator of autograd between calls, such as the sum of two gradients, belongs to the call
        whose gradient is its argument.
        """
        if phase is not Phase.BACKWARD:
            return ""
        # `forward` of a note numbers the ops of the differentiated call, in order. Some of them
        # have no node in the graph: take the first that has one, else the forward node of an
        # argument.
        found = (self.forward_names.get(number) for number in note.get("forward", ()))
        # A value belongs to a forward node as its gradient, or as its result.
        given = [ref.name for ref in refs(args)]
        inherited = (self.links.get(n) or (n if n in self.places else "") for n in given)
        return next((name for name in (*found, *inherited) if name), "")

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
        if "seeded" in tags and "dropout_p" in (names := list(argument_types(target))):
            # A dropout of zero is not random.
            at = names.index("dropout_p")
            given = node.args[at] if at < len(node.args) else node.kwargs.get("dropout_p", 0)
            if isinstance(given, int | float) and given == 0:
                tags = tuple(tag for tag in tags if tag != "seeded")
        return str(target), tags

    def _name(self, op: str, phase: Phase, note: Mapping[str, Any], args: Argument) -> str:
        kind = op.split(".")[1]
        if phase is Phase.OPTIMIZER:
            # A node of the update belongs to the parameter of its first argument that has an
            # owner; results inherit the owner, so `w.update.mul_1` names the parameter.
            owner = next((o for ref in refs(args) if (o := self.owners.get(ref.name))), "")
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
            value = asked_for(node.target, node.args, node.kwargs, value)
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
        if isinstance(value, torch.device):
            return Symbol("device", value.type)
        if isinstance(value, torch.dtype | torch.layout | torch.memory_format):
            return Symbol(type(value).__name__, str(value).removeprefix("torch."))
        if isinstance(value, float):
            return float(value)  # converts NumPy's numbers, too
        if value is None or isinstance(value, bool | int | str):
            return value
        raise CaptureError(f"an argument of type {type(value).__name__}: {value!r}")


def _note_of(node: fx.Node) -> Mapping[str, Any]:
    found: Mapping[str, Any] = node.meta.get("custom", {}).get("sbp", {})
    return found


def _tensor_type(value: Any) -> TensorType:
    if not isinstance(value, torch.Tensor):
        raise CaptureError(f"a captured op makes a {type(value).__name__}, not a tensor")
    return TensorType(tuple(int(n) for n in value.shape), str(value.dtype).removeprefix("torch."))

"""Trace a whole training step to one functional FX graph, with notes on where each op came from.

Two passes of `make_fx`: the first runs the user's Python (forward, loss, `autograd.grad`, the real
`torch.optim` step) on fake tensors with all states swapped in; the second removes the mutations.
Learning rates and step counters are read as host numbers, exactly as the eager optimizer does, so
the graph computes what eager computes, bit for bit. `capture.convert` turns the result into our IR.
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

from sbp_core._torch_compat import (
    TorchDispatchMode,
    annotated,
    current_backward_node,
    fake_mode,
    functional_graph,
    last_forward_number,
    reparametrized,
    trace_graph,
)
from sbp_core.errors import CaptureError, SbpError
from sbp_core.graph.ir import GraphInput, InputKind, OutputKind, Phase

Loss = Callable[[nn.Module, Mapping[str, Tensor]], Tensor]

#: Optimizers whose states are all zero before the first step, which is how we create them.
ZERO_STATE_OPTIMIZERS = (torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD)


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedStep:
    """A functional FX graph and what its placeholders and outputs are, in order."""

    module: fx.GraphModule
    inputs: tuple[GraphInput, ...]
    outputs: tuple[tuple[str, OutputKind], ...]


class Notes(TorchDispatchMode):  # type: ignore[no-untyped-call] # torch leaves it untyped
    """Write beside every traced op its phase, module path, source line and forward op."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # torch leaves it untyped
        self.phase = Phase.FORWARD
        self.modules: list[str] = []
        self.forward_ops: dict[int, list[dict[str, Any]]] = {}
        self.num_ops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        note = self._note()
        with annotated({"sbp": note}):
            return func(*args, **(kwargs or {}))

    def _note(self) -> dict[str, Any]:
        self.num_ops += 1
        note: dict[str, Any] = {"id": self.num_ops, "phase": self.phase.value}
        if self.phase is Phase.FORWARD:
            note |= {"module": self.modules[-1] if self.modules else "", "source": _user_line()}
            self.forward_ops.setdefault(last_forward_number(), []).append(note)
        elif self.phase is Phase.BACKWARD:
            number = current_backward_node()
            origins = self.forward_ops.get(number, []) if number is not None else []
            if origins:
                note |= {key: origins[0][key] for key in ("module", "source")}
            note["forward"] = [origin["id"] for origin in origins]
        return note

    @contextmanager
    def during(self, phase: Phase) -> Iterator[None]:
        """Mark ops as belonging to a phase."""
        before, self.phase = self.phase, phase
        try:
            yield
        finally:
            self.phase = before

    @contextmanager
    def follow(self, model: nn.Module) -> Iterator[None]:
        """Keep track of the module that is running."""

        def enter(path: str) -> Callable[..., None]:
            return lambda *_: self.modules.append(path)

        def leave(*_: Any) -> None:
            self.modules.pop()

        handles = []
        for path, module in model.named_modules():
            handles.append(module.register_forward_pre_hook(enter(path)))
            handles.append(module.register_forward_hook(leave, always_call=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            self.modules.clear()


def _user_line() -> str:
    """Return `file:line` of the innermost frame that is neither torch's nor ours."""
    torch_folder = str(Path(torch.__file__).parent)
    our_folder = str(Path(__file__).parent.parent)
    frame = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename
        ours = name.startswith((torch_folder, our_folder, "<"))
        if not ours and "contextlib" not in name:
            return f"{_short(name)}:{frame.f_lineno}"
        if frame.f_back is None:
            break
        frame = frame.f_back
    return ""


def _short(path: str) -> str:
    """Return a path without the folders that only this machine has."""
    parts = Path(path).parts
    for marker in ("site-packages", "src"):
        if marker in parts:
            return "/".join(parts[len(parts) - parts[::-1].index(marker) :])
    return "/".join(parts[-2:])


def _group_settings(optimizer: torch.optim.Optimizer) -> list[str]:
    """Return the scalar input that each parameter group's learning rate becomes."""
    count = len(optimizer.param_groups)
    return ["lr"] if count == 1 else [f"lr.{index}" for index in range(count)]


def parameter_names(model: nn.Module) -> dict[int, str]:
    """Return the name of each parameter by `id`, tied parameters once."""
    return {id(parameter): name for name, parameter in model.named_parameters()}


def optimizer_states(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> dict[str, dict[str, Tensor]]:
    """Return the optimizer's states by parameter name and key; made if it has not stepped yet.

    Raises:
        CaptureError: the optimizer holds a parameter that the model does not have, or its states
            before the first step are not known.
    """
    names = parameter_names(model)
    held = [p for group in optimizer.param_groups for p in group["params"]]
    if any(id(parameter) not in names for parameter in held):
        raise CaptureError(
            "the optimizer holds a parameter that the model does not have",
            accepted="an optimizer over model.parameters()",
        )
    moving = [parameter for parameter in held if parameter.requires_grad]
    states = {names[id(p)]: dict(optimizer.state[p]) for p in moving if optimizer.state.get(p)}
    if len(states) < len(moving):
        damped = any(g.get("dampening") and g.get("momentum") for g in optimizer.param_groups)
        if damped or not isinstance(optimizer, ZERO_STATE_OPTIMIZERS):
            why = " with dampening" if damped else ""
            raise CaptureError(
                f"the states of {type(optimizer).__name__}{why} before its first step are unknown",
                accepted=", ".join(kind.__name__ for kind in ZERO_STATE_OPTIMIZERS),
                todo="take one step with it first, or choose one of these",
            )
        states = _zero_states(optimizer, held, names) | states
    return {
        name: {key: value for key, value in sorted(state.items()) if isinstance(value, Tensor)}
        for name, state in states.items()
    }


def _zero_states(
    optimizer: torch.optim.Optimizer, held: Sequence[Tensor], names: Mapping[int, str]
) -> dict[str, dict[str, Any]]:
    """Take a step on a copy to learn which states there are; they start at zero."""
    trial = copy.deepcopy(optimizer)
    trial.state = defaultdict(dict)
    twins = [p for group in trial.param_groups for p in group["params"]]
    for twin in twins:
        twin.grad = torch.zeros_like(twin) if twin.requires_grad else None
    trial.step()
    return {
        names[id(parameter)]: {
            key: torch.zeros_like(value) if isinstance(value, Tensor) else value
            for key, value in trial.state[twin].items()
        }
        for parameter, twin in zip(held, twins, strict=True)
        if twin.requires_grad
    }


class _Step:
    """The training step as a function of its states: what the first trace runs."""

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        optimizer: torch.optim.Optimizer | None,
        states: Mapping[str, Mapping[str, Tensor]],
    ) -> None:
        self.model, self.loss, self.optimizer = model, loss, optimizer
        self.parameters = [n for n, p in model.named_parameters() if p.requires_grad]
        frozen = [n for n, p in model.named_parameters() if not p.requires_grad]
        self.buffers = [name for name, _ in model.named_buffers()]
        self.names = [*self.parameters, *frozen, *self.buffers]
        self.state_keys = [(name, key) for name, keys in states.items() for key in keys]
        self.rates = _group_settings(optimizer) if optimizer is not None else []
        self.notes = Notes()

    def inputs(self, batch: Mapping[str, Tensor]) -> tuple[GraphInput, ...]:
        """Describe the arguments of `__call__`, in order."""
        kinds = dict.fromkeys(self.names, InputKind.PARAMETER)
        kinds |= dict.fromkeys(self.buffers, InputKind.BUFFER)
        return (
            *(GraphInput(name=name, kind=kind) for name, kind in kinds.items()),
            *(
                GraphInput(name=f"{name}.{key}", kind=InputKind.OPTIMIZER_STATE, of=name)
                for name, key in self.state_keys
            ),
            *(GraphInput(name=name, kind=InputKind.BATCH) for name in batch),
            *(GraphInput(name=name, kind=InputKind.SCALAR) for name in self.rates),
        )

    def __call__(
        self,
        tensors: list[Tensor],
        states: list[Tensor],
        batch: dict[str, Tensor],
        rates: list[Tensor],
    ) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """Return ([loss], new parameters and buffers, new optimizer states)."""
        held = dict(zip(self.names, tensors, strict=True))
        with self.notes:
            with torch.enable_grad(), self.notes.follow(self.model):
                leaves = {name: held[name].detach().requires_grad_() for name in self.parameters}
                with reparametrized(self.model, held | leaves):
                    loss = self.loss(self.model, batch)
                _check_loss(loss)
                if self.optimizer is None:
                    return [loss], [], []
                with self.notes.during(Phase.BACKWARD):
                    grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
            with torch.no_grad(), self.notes.during(Phase.OPTIMIZER):
                new_states = self._update(
                    held, dict(zip(leaves, grads, strict=True)), states, rates
                )
        return [loss.detach()], [held[name] for name in self.names], new_states

    def _update(
        self,
        held: Mapping[str, Tensor],
        grads: Mapping[str, Tensor | None],
        states: list[Tensor],
        rates: list[Tensor],
    ) -> list[Tensor]:
        """Run the user's own optimizer on the swapped-in tensors, in place."""
        assert self.optimizer is not None
        names = parameter_names(self.model)
        tensors: dict[str, dict[str, Tensor]] = defaultdict(dict)
        for (name, key), value in zip(self.state_keys, states, strict=True):
            tensors[name][key] = value
        twin = copy.copy(self.optimizer)
        twin.state = defaultdict(dict)
        twin.param_groups = []
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            members = []
            for parameter in group["params"]:
                name = names[id(parameter)]
                member = held[name]
                member.grad = grads.get(name)  # None: frozen
                kept = self.optimizer.state.get(parameter, {})
                numbers = {k: v for k, v in kept.items() if not isinstance(v, Tensor)}
                twin.state[member] = {**numbers, **tensors[name]}
                members.append(member)
            twin.param_groups.append({**group, "params": members, "lr": rate.item()})
        inspect.unwrap(type(twin).step)(twin)
        return [tensors[name][key] for name, key in self.state_keys]


def _check_loss(loss: object) -> None:
    if not isinstance(loss, Tensor) or loss.dim() != 0 or not loss.dtype.is_floating_point:
        what = (
            f"{loss.dtype} of shape {tuple(loss.shape)}"
            if isinstance(loss, Tensor)
            else type(loss).__name__
        )
        raise CaptureError(f"the loss is {what}", accepted="one floating number: a 0-d tensor")


def trace_step(
    model: nn.Module,
    loss: Loss,
    batch: Mapping[str, Tensor],
    optimizer: torch.optim.Optimizer | None,
) -> TracedStep:
    """Trace forward and loss and, with an optimizer, backward and update, as one FX graph.

    Raises:
        CaptureError: the step cannot be traced; says which line of the user's code stopped it.
    """
    states = optimizer_states(model, optimizer) if optimizer is not None else {}
    if optimizer is not None and any(g.get("fused") for g in optimizer.param_groups):
        raise CaptureError(
            f"{type(optimizer).__name__}(fused=True) cannot be captured",
            accepted="fused=False and foreach=False",
        )
    step = _Step(model, loss, optimizer, states)
    mode = fake_mode()
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}

    def fake(tensor: Tensor) -> Tensor:
        return mode.from_tensor(tensor.detach(), static_shapes=True)

    arguments = (
        [fake(tensors[name]) for name in step.names],
        [fake(states[name][key]) for name, key in step.state_keys],
        {name: fake(value) for name, value in batch.items()},
        [fake(torch.zeros((), dtype=torch.float64)) for _ in step.rates],
    )
    try:
        first = trace_graph(step, mode, arguments)
    except CaptureError:
        raise
    except SbpError as error:  # of the user's own model: it says itself what would be accepted
        raise CaptureError(
            f"{type(model).__name__} cannot be captured: {error.what}",
            where=(*error.where, _user_frame(error)),
            accepted=error.accepted,
            todo=error.todo,
        ) from error
    except Exception as error:
        raise CaptureError(
            f"{type(model).__name__} cannot be captured: {error}",
            where=_user_frame(error),
            todo="static shapes, no control flow on tensor values, no in-place change of inputs",
        ) from error
    kinds = [(entry.name, OutputKind.STATE) for entry in step.inputs(batch) if entry.kind.is_state]
    return TracedStep(
        module=_functional(first, len(arguments[0]) + len(arguments[1])),
        inputs=step.inputs(batch),
        outputs=(("loss", OutputKind.LOSS), *(kinds if optimizer is not None else ())),
    )


def _functional(first: fx.GraphModule, num_states: int) -> fx.GraphModule:
    """Remove the mutations of the first trace; states are cloned at the door, then not at all."""
    placeholders = [node.meta["val"] for node in first.graph.nodes if node.op == "placeholder"]

    def run(*values: Tensor) -> Any:
        states = [value.clone() for value in values[:num_states]]
        interpreter = fx.Interpreter(first)
        return interpreter.run(*states, *values[num_states:], enable_io_processing=False)

    second = functional_graph(run, placeholders)
    aten = torch.ops.aten
    for node in second.graph.nodes:
        if node.op != "call_function":
            continue
        copied = node.target is aten.clone.default and not node.kwargs
        if (copied and node.args[0].op == "placeholder") or node.target is aten.detach.default:
            node.replace_all_uses_with(node.args[0])
    second.graph.eliminate_dead_code()
    second.recompile()
    return second


def _user_frame(error: BaseException) -> str:
    """Return `file:line` of the deepest frame of the user's code in a traceback."""
    found = ""
    trace = error.__traceback__
    torch_folder = str(Path(torch.__file__).parent)
    our_folder = str(Path(__file__).parent.parent)
    while trace is not None:
        name = trace.tb_frame.f_code.co_filename
        if not name.startswith((torch_folder, our_folder, "<")) and "contextlib" not in name:
            found = f"{_short(name)}:{trace.tb_lineno}"
        trace = trace.tb_next
    return found

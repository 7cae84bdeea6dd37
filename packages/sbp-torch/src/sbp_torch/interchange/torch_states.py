"""Convert states of a session to the `state_dict()`s of PyTorch models and optimizers, and back.

A session uses the names of the graph: each parameter and buffer once, optimizer states as
`<parameter>.<key>`. A model's `state_dict()` has tied parameters under each of their names and
lacks non-persistent buffers; an optimizer's `state_dict()` numbers its parameters. So states are
converted for PyTorch by

    model.load_state_dict(to_model_state(session.state_dict(), model))
    optimizer.load_state_dict(to_optimizer_state(session.state_dict(), model, optimizer))

and back by `from_model_state` and `from_optimizer_state`.

>>> model = nn.Linear(2, 1)
>>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
>>> states = {"weight": torch.ones(1, 2), "bias": torch.zeros(1),
...           "weight.momentum_buffer": torch.ones(1, 2), "bias.momentum_buffer": torch.ones(1)}
>>> model.load_state_dict(to_model_state(states, model))
<All keys matched successfully>
>>> optimizer.load_state_dict(to_optimizer_state(states, model, optimizer))
>>> optimizer.state[model.bias]
{'momentum_buffer': tensor([1.])}
>>> back = from_model_state(model.state_dict(), model)
>>> back |= from_optimizer_state(optimizer.state_dict(), model, optimizer)
>>> back.keys() == states.keys()
True
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from sbp_core.errors import SbpLookupError, SbpValueError, unknown_name
from sbp_torch.graph_capture.step import model_tensors
from sbp_torch.graph_capture.update import AVERAGE
from sbp_torch.optim.combined import CombinedOptimizer

__all__ = [
    "copy_to_model",
    "from_model_state",
    "from_optimizer_state",
    "graph_names",
    "stored_names",
    "to_model_state",
    "to_optimizer_state",
]

#: End of the name under which `state_dict()` has the extra state of a module.
_EXTRA_STATE = "_extra_state"


def to_model_state(states: Mapping[str, Tensor], model: nn.Module) -> dict[str, Any]:
    """Return a mapping for `model.load_state_dict`.

    Args:
        states: Whole tensors by the graph's names, such as `Session.state_dict()`; optimizer states
            are left out.
        model: The one-device program; its parameters and buffers are not changed.

    Returns:
        Tensors under each name of `model.state_dict()`, after its hooks. Tied parameters share one
        tensor. Extra states of modules are the model's present ones.

    Raises:
        SbpLookupError: a state of the model is missing.
    """
    tensors = model_tensors(model)
    own = {id(tensor): name for name, tensor in tensors.items()}
    given = {
        f"model.{name}": states[name] if tensor.is_meta else states[name].to(tensor.device)
        for name, tensor in tensors.items()
        if name in states
    }
    # Hooks of modules may rename tensors, or compute new ones, so names alone are not enough.
    found: dict[str, Any] = functional_call(_StateDict(model), given, ())
    for value in found.values():
        if id(value) in own:
            raise unknown_name("state", own[id(value)], states)
    return dict(found)


def copy_to_model(states: Mapping[str, Tensor], model: nn.Module) -> None:
    """Give a model's parameters and buffers the values of states, in place.

    Args:
        states: Whole tensors by the graph's names.
        model: A model with the same names and shapes, and with values.

    Raises:
        SbpLookupError: a state of the model is missing.
        SbpValueError: a tensor has another shape, or the model has no values.
    """
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name, tensor in tensors.items():
        if name not in states:
            raise unknown_name("state", name, states)
        if tensor.is_meta or tensor.shape != states[name].shape:
            shape = "no values" if tensor.is_meta else f"shape {tuple(tensor.shape)}"
            raise SbpValueError(
                f"{name!r} of the model has {shape}",
                accepted=f"a tensor with values, of shape {tuple(states[name].shape)}",
            )
    with torch.no_grad():
        for name, tensor in tensors.items():
            tensor.copy_(states[name])


class _StateDict(nn.Module):
    """A module whose `forward` returns the `state_dict()` of a model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self) -> dict[str, Any]:
        """Return the model's `state_dict()`."""
        found: dict[str, Any] = self.model.state_dict(keep_vars=True)
        return found


def from_model_state(state: Mapping[str, Any], model: nn.Module) -> dict[str, Tensor]:
    """Return the states in a `model.state_dict()` under the graph's names.

    Args:
        state: The `state_dict()`.
        model: The model. It provides states that a `state_dict()` lacks: non-persistent buffers,
            and tensors that modules hold unregistered.

    Raises:
        SbpLookupError: a name is unknown, or missing.
        SbpValueError: tied parameters differ; or see `stored_names`.
    """
    names, wanted = graph_names(model), model.state_dict(keep_vars=True)
    for name in state:
        if name not in wanted:
            raise unknown_name("state of the model", name, wanted)
    found: dict[str, Tensor] = {}
    for name in stored_names(model):
        if name not in state:
            raise SbpLookupError(
                f"{name!r} is missing", accepted="every name of model.state_dict()"
            )
        known, value = names[name], state[name].detach()
        if known in found and not torch.equal(found[known], value):
            raise SbpValueError(
                f"{known!r} and {name!r} are one parameter in the model, and differ",
                todo="untie them in the model, or make them equal",
            )
        found[known] = value
    for name, tensor in model_tensors(model).items():
        found.setdefault(name, tensor.detach())
    return {name: value.clone() for name, value in found.items()}


def to_optimizer_state(
    states: Mapping[str, Tensor], model: nn.Module, optimizer: torch.optim.Optimizer
) -> dict[str, Any]:
    """Return a mapping for `optimizer.load_state_dict`.

    Args:
        states: Whole tensors by the graph's names, such as `Session.state_dict()`.
        model: The model, for the names of the parameters.
        optimizer: An optimizer of the model's parameters. It provides the settings, and states that
            are no tensors.

    Returns:
        `{"state": {number: {key: value}}, "param_groups": [...]}`, with copies of the tensors. For
        `optim.CombinedOptimizer`: `{"optimizers": [...]}`, with such a mapping for each. A moving
        average of a parameter (`ema`), which no optimizer keeps, is left out.
    """
    if isinstance(optimizer, CombinedOptimizer):
        return {
            "optimizers": [to_optimizer_state(states, model, one) for one in optimizer.optimizers]
        }
    settings = optimizer.state_dict()
    members = _members(model, optimizer)
    own: dict[int, dict[str, Any]] = {}
    for number, (name, parameter) in enumerate(members):
        held = dict(optimizer.state.get(parameter, {}))
        start = f"{name}."
        keys = {known.removeprefix(start): known for known in states if known.startswith(start)}
        given = {  # no optimizer knows the moving average of a parameter
            key: states[known]
            for key, known in keys.items()
            if "." not in key and (key != AVERAGE or key in held)
        }
        if held or given:
            plain = {key: value for key, value in held.items() if not isinstance(value, Tensor)}
            own[number] = plain
            for key, value in given.items():
                # On the device of the old state, else of its parameter; counters on the host.
                device = torch.device("cpu") if key == "step" else parameter.device
                if isinstance(held.get(key), Tensor):
                    device = held[key].device
                plain[key] = value.detach().clone().to(device)
    return {"state": own, "param_groups": settings["param_groups"]}


def from_optimizer_state(
    state: Mapping[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer
) -> dict[str, Tensor]:
    """Return the states in an `optimizer.state_dict()` under the graph's names.

    Args:
        state: `{"state": ..., "param_groups": ...}`; `{"optimizers": [...]}` of
            `optim.CombinedOptimizer`.
        model: The model, for the names of the parameters.
        optimizer: An optimizer of the same parameters, in the same order and groups.

    Raises:
        SbpValueError: the groups differ, or a tensor does not fit the shape of its parameter.
    """
    if isinstance(optimizer, CombinedOptimizer):
        several = state.get("optimizers", [state])
        if len(several) != len(optimizer.optimizers):
            raise SbpValueError(
                f"the states of {len(several)} optimizers", accepted=str(len(optimizer.optimizers))
            )
        parts = zip(optimizer.optimizers, several, strict=True)
        return {
            k: v for one, own in parts for k, v in from_optimizer_state(own, model, one).items()
        }
    members = _members(model, optimizer)
    given = [len(group["params"]) for group in state["param_groups"]]
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    if given != sizes:
        raise SbpValueError(
            f"the optimizer has groups of {sizes} parameters, and the state of {given}",
            accepted="the state of an optimizer over the same parameters",
        )
    order = [number for group in state["param_groups"] for number in group["params"]]
    found: dict[str, Tensor] = {}
    for number, (name, parameter) in zip(order, members, strict=True):
        for key, value in state["state"].get(number, {}).items():
            full = f"{name}.{key}"
            if not isinstance(value, Tensor):
                continue
            # Factored states have fewer dims than their parameter, or dims of extent 1.
            if value.dim() == parameter.dim() > 0 and any(
                n not in (1, extent) for n, extent in zip(value.shape, parameter.shape, strict=True)
            ):
                raise SbpValueError(
                    f"{full!r} has shape {tuple(value.shape)}",
                    accepted=f"the shape of its parameter, {tuple(parameter.shape)}",
                )
            found[full] = value.detach().clone()
    return found


def graph_names(model: nn.Module) -> dict[str, str]:
    """Return each name of a parameter, buffer or constant -> its name in the graph.

    Names are its path in the model, paths of tied parameters, and its name in `state_dict()`.

    Raises:
        SbpValueError: see `stored_names`.
    """
    found = model_tensors(model)
    known = {id(tensor): name for name, tensor in found.items()}
    every = (
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    )
    paths = {name: name for name in found} | {name: known[id(tensor)] for name, tensor in every}
    stored = stored_names(model)
    for name, state in stored.items():
        if paths.get(name, state) != state:
            raise SbpValueError(
                f"model.state_dict() calls {state!r} {name!r}, and {paths[name]!r} is another "
                "tensor of the model",
                accepted="a name that means one tensor",
            )
    return paths | stored


def stored_names(model: nn.Module) -> dict[str, str]:
    """Return each name of a tensor in `model.state_dict()` -> its name in the graph.

    Tensors are compared by identity, because wrappers such as `checkpoint_wrapper`, and hooks,
    rename them. Extra states of modules are left out.

    Raises:
        SbpValueError: a hook makes a tensor that is no tensor of the model.
    """
    known = {id(tensor): name for name, tensor in model_tensors(model).items()}
    stored = {
        name: value
        for name, value in model.state_dict(keep_vars=True).items()
        if isinstance(value, Tensor) and not name.endswith(_EXTRA_STATE)
    }
    for name, value in stored.items():
        if id(value) not in known:
            raise SbpValueError(
                f"{name!r} of model.state_dict() is no parameter or buffer of the model: a hook "
                "makes it of them",
                accepted="tensors of the model, under any name",
                todo="have the model itself take them, before it is trained: "
                "model.load_state_dict(states)",
            )
    return {name: known[id(value)] for name, value in stored.items()}


def _members(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[tuple[str, Tensor]]:
    """Return the parameters of an optimizer in its order, with their names.

    Raises:
        SbpLookupError: a parameter does not belong to the model.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    members = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for parameter in members:
        if id(parameter) not in names:
            raise SbpLookupError(
                f"the optimizer holds a parameter of shape {tuple(parameter.shape)} that the model "
                "does not have",
                accepted="an optimizer over model.parameters()",
            )
    return [(names[id(parameter)], parameter) for parameter in members]

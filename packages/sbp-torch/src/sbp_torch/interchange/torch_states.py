"""`state_dict()`s as PyTorch's own models and optimizers write and read them.

A session names states as the graph does: each parameter and buffer once, optimizer states as
`<parameter>.<key>`. A model's `state_dict()` has tied parameters under each of their names and
leaves non-persistent buffers out; an optimizer's numbers its parameters. So a user leaves with

    model.load_state_dict(to_model_state(session.state_dict(), model))
    optimizer.load_state_dict(to_optimizer_state(session.state_dict(), model, optimizer))

and comes back with `from_model_state` and `from_optimizer_state`.

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

Stability: provisional.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from sbp_core.errors import SbpLookupError, SbpValueError, unknown_name
from sbp_torch.capture.step import model_tensors
from sbp_torch.optim.combined import CombinedOptimizer

__all__ = [
    "from_model_state",
    "from_optimizer_state",
    "graph_names",
    "to_model_state",
    "to_optimizer_state",
]


def to_model_state(states: Mapping[str, Tensor], model: nn.Module) -> dict[str, Any]:
    """Return what `model.load_state_dict` takes.

    Args:
        states: Whole tensors by the graph's names, such as `Session.state_dict()`; those of
            optimizers are left out.
        model: The one-device program; its parameters and buffers are not changed.

    Returns:
        Tensors under each name of `model.state_dict()`, tied ones being one tensor; what modules
        keep as extra state is the model's own.

    Raises:
        SbpLookupError: a state of the model is missing.
    """
    names = graph_names(model)
    found: dict[str, Any] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if not isinstance(value, Tensor):
            found[name] = value  # extra state, which is no tensor of the graph
            continue
        known = names.get(name, name)
        if known not in states:
            raise unknown_name("state", known, states)
        found[name] = states[known].to(value.device)
    return found


def from_model_state(state: Mapping[str, Any], model: nn.Module) -> dict[str, Tensor]:
    """Return states by the graph's names, of what `model.state_dict()` returned.

    Args:
        state: Under the model's own names.
        model: Gives what a `state_dict()` leaves out: buffers that are not persistent, and tensors
            that modules hold unregistered.

    Raises:
        SbpLookupError: a name is unknown, or missing.
        SbpValueError: tied parameters differ.
    """
    names = graph_names(model)
    wanted = model.state_dict(keep_vars=True)
    for name in state:
        if name not in wanted:
            raise unknown_name("state of the model", name, wanted)
    found: dict[str, Tensor] = {}
    for name, own in wanted.items():
        if not isinstance(own, Tensor):
            continue
        if name not in state:
            raise SbpLookupError(
                f"{name!r} is missing", accepted="every name of model.state_dict()"
            )
        known, value = names.get(name, name), state[name].detach()
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
    """Return what `optimizer.load_state_dict` takes.

    Args:
        states: Whole tensors by the graph's names, such as `Session.state_dict()`.
        model: Names the parameters.
        optimizer: Over the model's parameters; gives settings, and states that are no tensors.

    Returns:
        `{"state": {number: {key: value}}, "param_groups": [...]}`, with copies of the tensors; of
        `optim.CombinedOptimizer` `{"optimizers": [...]}`, each so. A moving average of a parameter
        (`ema`), which no optimizer keeps, is left out.
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
        given = {
            key: value
            for key, value in _of_parameter(states, name).items()
            if key != _AVERAGE or key in held
        }
        if held or given:
            plain = {key: value for key, value in held.items() if not isinstance(value, Tensor)}
            own[number] = plain | {
                key: value.detach().clone().to(_device(key, held, parameter))
                for key, value in given.items()
            }
    return {"state": own, "param_groups": settings["param_groups"]}


#: Key of a parameter's moving average, which no optimizer knows (`capture.update`).
_AVERAGE = "ema"


def from_optimizer_state(
    state: Mapping[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer
) -> dict[str, Tensor]:
    """Return optimizer states by the graph's names, of what `optimizer.state_dict()` returned.

    Args:
        state: `{"state": ..., "param_groups": ...}`; `{"optimizers": [...]}` of
        `optim.CombinedOptimizer`.
        model: Names the parameters.
        optimizer: Over the same parameters, in the same order and groups.

    Raises:
        SbpValueError: the groups are others, or a tensor is of a parameter of another shape.
    """
    if isinstance(optimizer, CombinedOptimizer):
        return _from_several(state, model, optimizer)
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
            if isinstance(value, Tensor):
                _check_shape(f"{name}.{key}", value, parameter)
                found[f"{name}.{key}"] = value.detach().clone()
    return found


def _from_several(
    state: Mapping[str, Any], model: nn.Module, optimizer: CombinedOptimizer
) -> dict[str, Tensor]:
    """Return the states of each of several optimizers by the graph's names."""
    given = state.get("optimizers", [state])
    if len(given) != len(optimizer.optimizers):
        raise SbpValueError(
            f"the states of {len(given)} optimizers", accepted=str(len(optimizer.optimizers))
        )
    found: dict[str, Tensor] = {}
    for one, own in zip(optimizer.optimizers, given, strict=True):
        found |= from_optimizer_state(own, model, one)
    return found


def graph_names(model: nn.Module) -> dict[str, str]:
    """Return the graph's name of each parameter, buffer and constant, tied ones under each."""
    found = model_tensors(model)
    known = {id(tensor): name for name, tensor in found.items()}
    every = (
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    )
    return {name: name for name in found} | {name: known[id(tensor)] for name, tensor in every}


def _members(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[tuple[str, Tensor]]:
    """Return the parameters of an optimizer in its order, with their names.

    Raises:
        SbpLookupError: one is not the model's.
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


def _of_parameter(states: Mapping[str, Tensor], name: str) -> dict[str, Tensor]:
    """Return a parameter's states by key."""
    start = f"{name}."
    return {
        known.removeprefix(start): value
        for known, value in states.items()
        if known.startswith(start) and "." not in known.removeprefix(start)
    }


def _device(key: str, held: Mapping[str, Any], parameter: Tensor) -> torch.device:
    """Return where a state belongs: where it was, or with its parameter; counters on the host."""
    before = held.get(key)
    if isinstance(before, Tensor):
        return before.device
    return torch.device("cpu") if key == "step" else parameter.device


def _check_shape(name: str, value: Tensor, parameter: Tensor) -> None:
    # Factored states have fewer dims than their parameter, and no dim that it has not.
    if value.dim() == parameter.dim() > 0 and any(
        n not in (1, extent) for n, extent in zip(value.shape, parameter.shape, strict=True)
    ):
        raise SbpValueError(
            f"{name!r} has shape {tuple(value.shape)}",
            accepted=f"that of its parameter, {tuple(parameter.shape)}",
        )

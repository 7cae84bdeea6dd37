"""Clone the user's optimizer over other parameters, and refuse optimizers that cannot be cloned.

A clone has the settings and attributes of an optimizer, but other parameters and states: small
stand-ins, or the tensors of a trace.
"""

from __future__ import annotations

import copy
import inspect
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sbp_core.errors import CaptureError
from sbp_torch._torch_optim_compat import replaced_step, step_hooks
from sbp_torch.optim.combined import CombinedOptimizer

#: Settings of groups that choose an implementation of the update: we set them to the plain one.
PLAIN = {"foreach": False, "fused": False, "capturable": False, "differentiable": False}

#: Largest extent of a dim of small stand-ins.
SMALL = 3

Step = Callable[[torch.optim.Optimizer], Any]

#: Names that a subclass may define without changing the step of its parent.
_HARMLESS = {
    *("__annotations__", "__doc__", "__firstlineno__", "__init__", "__module__", "__qualname__"),
    *("__repr__", "__static_attributes__", "load_state_dict", "state_dict", "zero_grad"),
}

#: Files of the wrappers that PyTorch itself puts around steps: the profiler's, `no_grad`.
_WRAPPERS = "torch/optim/optimizer.py"
_CONTEXTS = "torch/utils/_contextlib.py"

#: Depth to which the attributes of an optimizer are searched.
_DEPTH = 6


def small_shape(shape: Sequence[int], most: int = SMALL) -> tuple[int, ...]:
    """Return the shape of a stand-in: every dim cut to `most`."""
    return tuple(min(extent, most) for extent in shape)


def kind_of(optimizer: torch.optim.Optimizer) -> type[torch.optim.Optimizer]:
    """Return the class that defines an optimizer's step: a parent, if subclasses add nothing."""
    kind = type(optimizer)
    while True:
        parent = kind.__base__
        if (
            len(kind.__bases__) > 1
            or parent in (None, torch.optim.Optimizer)
            or not issubclass(parent, torch.optim.Optimizer)
            or _unwrap(kind.step, _WRAPPERS) is not _unwrap(parent.step, _WRAPPERS)
            or any(hasattr(parent, name) for name in vars(kind).keys() - _HARMLESS - {"step"})
        ):
            return kind
        kind = parent


def is_known(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer steps by code of `torch.optim` or of `sbp_torch.optim`."""
    kind = kind_of(optimizer)
    torchs = getattr(torch.optim, kind.__name__, None) is kind
    return torchs or kind.__module__.startswith("sbp_torch.optim.")


def plain_step(optimizer: torch.optim.Optimizer) -> Step:
    """Return `step` of an optimizer's class without its wrapper for the profiler.

    Known optimizers also lose `no_grad`. Users' own decorators stay.
    """
    if is_known(optimizer):
        return _unwrap(kind_of(optimizer).step, _WRAPPERS, _CONTEXTS)
    return _unwrap(type(optimizer).step, _WRAPPERS)


def _unwrap(step: Any, *files: str) -> Step:
    """Return the function inside the wrappers that code of some files has put around a step."""
    while hasattr(step, "__wrapped__"):
        code = getattr(step, "__code__", None)
        if code is None or not code.co_filename.endswith(files):
            break
        step = step.__wrapped__
    return step  # type: ignore[no-any-return] # of any type, until here


def clone_of(
    optimizer: torch.optim.Optimizer, *, own_attributes: bool = False
) -> torch.optim.Optimizer:
    """Return an optimizer with the same settings and attributes, without parameters and states.

    Args:
        optimizer: Any optimizer; it is not changed.
        own_attributes: Copy the attributes, so that steps of the clone do not change the originals.
    """
    kind = type(optimizer)
    clone = kind.__new__(kind)
    clone.__dict__.update(vars(optimizer))
    clone.__dict__.pop("step", None)  # the wrapper of a scheduler
    if own_attributes:
        for name, value in attributes_of(optimizer).items():
            setattr(clone, name, _deep_copy(value))
    clone.state = defaultdict(dict)
    clone.param_groups = []
    return clone


def clone_over(
    optimizer: torch.optim.Optimizer, parameters_for: Callable[[list[Tensor]], list[Any]]
) -> torch.optim.Optimizer:
    """Return an optimizer with the same settings over other parameters, before its first step."""
    clone = clone_of(optimizer, own_attributes=not isinstance(optimizer, CombinedOptimizer))
    if isinstance(optimizer, CombinedOptimizer) and isinstance(clone, CombinedOptimizer):
        clone.optimizers = tuple(clone_over(one, parameters_for) for one in optimizer.optimizers)
        clone.param_groups = [group for one in clone.optimizers for group in one.param_groups]
        return clone
    clone.param_groups = [
        {**settings_of(group), "params": parameters_for(group["params"])}
        for group in optimizer.param_groups
    ]
    return clone


def settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of the settings of a group, without parameters."""
    return {key: _deep_copy(value) for key, value in group.items() if key != "params"}


def attributes_of(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the attributes of an optimizer that not every optimizer has."""
    return {
        name: value
        for name, value in vars(optimizer).items()
        if not name.startswith("_optimizer_") and name not in _COMMON_ATTRIBUTES
    }


#: Attributes of every optimizer, or set by schedulers; `defaults` counts as its own.
_COMMON_ATTRIBUTES = {
    *("_opt_called", "_step_count", "_warned_capturable_if_run_uncaptured"),
    *("_zero_grad_profile_name", "param_groups", "state", "step"),
}


def _deep_copy(value: Any) -> Any:
    try:
        return copy.deepcopy(value)
    except Exception:  # a handle of an external object, which cannot be copied
        return value


def check_capturable(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that does more in a step than running its `step` on groups and states.

    Raises:
        CaptureError: it has hooks; its step was replaced; or it keeps parameters, optimizers or
            states in places that no graph can capture.
    """
    name = type(optimizer).__name__
    for how in step_hooks(optimizer):
        raise CaptureError(
            f"{name} has a hook on its steps, by {how}",
            accepted="optimizers without hooks",
            todo="say in step() what the hook does; UpdateOptions clips gradients and averages",
        )
    if replaced_step(optimizer):
        raise CaptureError(
            f"the step of this {name} was set on the object",
            accepted="the step of its class",
            todo="override step in a subclass",
        )
    if isinstance(optimizer, CombinedOptimizer) and kind_of(optimizer) is not CombinedOptimizer:
        raise CaptureError(
            f"{name} is a CombinedOptimizer, but steps differently",
            accepted="CombinedOptimizer itself",
            todo="make it an optimizer of its own, over all parameters",
        )
    if is_known(optimizer):
        return
    check_states(optimizer)
    parameters = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for attribute, value in attributes_of(optimizer).items():
        if what := _reference(value, parameters, _DEPTH):
            raise CaptureError(
                f"{name}.{attribute} holds {what}",
                accepted="parameters in param_groups, and numbers and constants in attributes",
                todo="reach parameters through param_groups; step several optimizers with "
                "sbp_torch.optim.CombinedOptimizer; of one that wraps another, such as a "
                "lookahead, pass the inner one, and do the rest in the loop, between steps",
            )


def check_states(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that keeps states under keys that are not its parameters.

    Raises:
        CaptureError: it has such a key.
    """
    parameters = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for key in optimizer.state:
        if id(key) not in parameters:
            raise CaptureError(
                f"{type(optimizer).__name__} keeps a state under {key!r}, which is no parameter of "
                "its groups",
                accepted="states of parameters: self.state[parameter][key]",
                todo="keep it with each parameter",
            )


def _reference(value: Any, parameters: set[int], depth: int) -> str:
    """Describe a parameter, optimizer or module inside an attribute; return "" without one."""
    if isinstance(value, Tensor):
        return "a parameter" if id(value) in parameters else ""
    if isinstance(value, torch.optim.Optimizer | nn.Module):
        return f"{type(value).__name__}, which has parameters"
    if depth == 0 or isinstance(value, str | bytes | int | float | type):
        return ""
    if isinstance(value, dict):
        parts = [*value.keys(), *value.values()]
    elif isinstance(value, list | tuple | set | frozenset):
        parts = list(value)
    elif inspect.ismodule(value) or callable(value):
        return ""
    else:
        parts = list(getattr(value, "__dict__", {}).values())
    return next((what for part in parts if (what := _reference(part, parameters, depth - 1))), "")


def snapshot(value: Any, depth: int = _DEPTH) -> Any:
    """Return a comparable copy of a value, to detect later changes."""
    if isinstance(value, Tensor):
        plain = value.detach()
        return (id(value), plain.dtype, plain.shape, [] if plain.is_meta else plain.tolist())
    if depth == 0 or isinstance(value, str | bytes | int | float | complex | type) or value is None:
        return value
    if isinstance(value, dict):
        return {key: snapshot(part, depth - 1) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [snapshot(part, depth - 1) for part in value]
    if isinstance(value, set | frozenset):
        return set(value)
    if inspect.ismodule(value) or callable(value):
        return id(value)
    parts = getattr(value, "__dict__", {})
    return (id(value), {key: snapshot(part, depth - 1) for key, part in parts.items()})

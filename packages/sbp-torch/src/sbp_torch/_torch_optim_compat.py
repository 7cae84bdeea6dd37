"""Wrap the private parts of PyTorch's optimizers that we use, such as hooks of `step`.

Capture of optimizers uses it; see `_torch_compat`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from sbp_torch._torch_patches import replaced


def step_hooks(optimizer: torch.optim.Optimizer) -> list[str]:
    """Return the methods that registered an optimizer's step hooks, if any. Tried on 2.13."""
    found: dict[str, Mapping[int, Any]] = {
        "register_step_pre_hook": getattr(optimizer, "_optimizer_step_pre_hooks", {}),
        "register_step_post_hook": getattr(optimizer, "_optimizer_step_post_hooks", {}),
        "register_optimizer_step_pre_hook": _global_optimizer_pre_hooks,
        "register_optimizer_step_post_hook": _global_optimizer_post_hooks,
    }
    others = {
        name: [hook for hook in hooks.values() if not isinstance(hook, _StepTeller)]
        for name, hooks in found.items()
    }
    return [name for name, hooks in others.items() if hooks]


class _StepTeller:
    """A hook that reports the calls of an optimizer's step and changes nothing."""

    def __init__(self, tell: Callable[[torch.optim.Optimizer, bool], None]) -> None:
        self._tell = tell

    def __call__(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        parameters = [one for group in optimizer.param_groups for one in group["params"]]
        with torch._C.DisableTorchFunctionSubclass():
            has_gradients = any(one.grad is not None for one in parameters)
        self._tell(optimizer, has_gradients)


def tell_steps(
    optimizer: torch.optim.Optimizer, tell: Callable[[torch.optim.Optimizer, bool], None]
) -> Callable[[], None]:
    """Call a function before each call of `optimizer.step`.

    Capture ignores this hook. Tried on 2.13.

    Args:
        optimizer: The optimizer. A function given earlier is no longer called.
        tell: Is called with the optimizer, and whether any of its parameters has a gradient.

    Returns:
        A function that ends these calls.
    """
    hooks = getattr(optimizer, "_optimizer_step_pre_hooks", None)
    if hooks is None:
        return lambda: None  # it wraps another, which capture refuses
    for key in [key for key, hook in hooks.items() if isinstance(hook, _StepTeller)]:
        del hooks[key]
    return optimizer.register_step_pre_hook(_StepTeller(tell)).remove


def replaced_step(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `optimizer.step` was set on the object; the wrappers of schedulers do not count.

    Tried on 2.13.
    """
    step = vars(optimizer).get("step")
    while getattr(step, "_wrapped_by_lr_sched", False):
        step = getattr(step, "__wrapped__", None)
    return step is not None and step is not type(optimizer).step


def note_step(optimizer: torch.optim.Optimizer) -> None:
    """Mark an optimizer for schedulers as having taken a step, though nobody called its `step`.

    Without the mark, `scheduler.step()` warns. Tried on 2.13.
    """
    optimizer._opt_called = True  # type: ignore[attr-defined] # their wrapper of step sets it


def constructed_states(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], parameter: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Return the states that an optimizer of PyTorch makes when it is constructed.

    Only Adagrad makes any; since 2.13 it makes them in its first step. Tried on 2.11 and 2.13.

    Args:
        optimizer: Any optimizer.
        group: The settings of the parameter.
        parameter: Any shape, floating; may be on the `meta` device.
    """
    if type(optimizer) is not torch.optim.Adagrad or not _adagrad_constructs_states():
        return {}
    total = torch.full_like(parameter, group["initial_accumulator_value"])
    return {"step": torch.tensor(0.0), "sum": total}


@cache
def _adagrad_constructs_states() -> bool:
    return bool(torch.optim.Adagrad([torch.zeros(1)]).state)


def unprofiled() -> AbstractContextManager[None]:
    """Leave the profiler's ops out of optimizer steps: they are no part of the computation.

    Tried on 2.13.
    """
    return replaced(torch.autograd.profiler, record_function=lambda *_: nullcontext())

"""Decide at capture whether an optimizer may use PyTorch's fused kernel, by trying the kernel once.

A kernel takes a few steps on a small parameter, and so does the plain code of its optimizer:

    SGD, bfloat16, torch 2.13     of 131 elements 128 do not change, and 3 are updated

A kernel has different code for whole vectors and for the remainder, so there are enough elements
for both. The verdict on a kernel follows from its error:

    EQUAL       differs from the plain code by at most rounding in float32
    ROUNDED     differs from exact numbers by at most rounding in the dtype; plain code, which
                rounds each intermediate result to 16 bits, is less exact and drifts step by step
    WRONG       differs more
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from enum import Enum
from functools import cache
from typing import Any

import torch
from torch import Tensor, optim

from sbp_torch.graph_capture.optimizer_clones import kind_of
from sbp_torch.update_options import UpdateOptions

#: Elements of the parameter: whole vectors, of up to 64 elements each, and a remainder.
_NUMEL = 131

_STEPS = 3

#: Largest differences relative to the largest element: in units of rounding of float32 (or of the
#: dtype, if it is finer) for EQUAL, and of the dtype for ROUNDED.
_EQUAL_ULPS, _ROUNDED_ULPS = 64.0, 4.0

#: Settings under which each kernel is tried: kernels have special code for them.
_SETTINGS: Mapping[type[optim.Optimizer], Sequence[Mapping[str, Any]]] = {
    optim.Adagrad: ({}, {"lr_decay": 0.1, "weight_decay": 0.1, "maximize": True}),
    optim.Adam: ({}, {"amsgrad": True, "weight_decay": 0.1, "maximize": True}),
    optim.AdamW: ({}, {"amsgrad": True, "weight_decay": 0.1, "maximize": True}),
    optim.SGD: (
        {},
        {"momentum": 0.9, "maximize": True},
        {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    ),
}


class Verdict(Enum):
    """The verdict on a fused kernel; see the module."""

    EQUAL = "equal"
    ROUNDED = "rounded"
    WRONG = "wrong"


def takes_kernel(
    optimizer: optim.Optimizer,
    settings: Mapping[str, Any],
    options: UpdateOptions,
    dtype: torch.dtype,
    device: str | None,
) -> bool:
    """Whether a parameter is updated by the fused kernel of its optimizer.

    Settings of the optimizer take precedence: `fused=False`, a choice by `foreach`, and
    `fused=True` unless the kernel is wrong, which is warned of once. Without such a setting, the
    options may ask for the kernel, but only if it is equal to the plain code.

    Args:
        optimizer: Any optimizer.
        settings: Settings of the group of the parameter.
        options: See `UpdateOptions`.
        dtype: Dtype of the parameter.
        device: Kind of device that the step will run on; None if nothing will run. Only kernels of
            CPUs are tried; kernels of other devices are trusted.
    """
    kind: Any = kind_of(optimizer)  # mypy does not regard a class as hashable
    said = settings.get("fused")
    if kind not in _SETTINGS or said is False or options.fused is False:
        return False
    if said is None:
        is_free = settings.get("foreach") is None
        return is_free and bool(options.fused) and verdict(kind, dtype) is Verdict.EQUAL
    if device != "cpu" or verdict(kind, dtype) is not Verdict.WRONG:
        return True
    _warn(kind, dtype)
    return False


@cache
def verdict(kind: type[optim.Optimizer], dtype: torch.dtype) -> Verdict:
    """Try the fused kernel of an optimizer on the CPU, once per process: a few milliseconds."""
    fine = torch.finfo(torch.promote_types(dtype, torch.float32)).eps
    found = set()
    try:
        for settings in _SETTINGS[kind]:
            made = _run_steps(kind, settings, dtype, is_fused=True)
            plain = _run_steps(kind, settings, dtype)
            exact = _run_steps(kind, settings, dtype, computed_in=torch.float64)
            if _is_near(made, plain, _EQUAL_ULPS * fine):
                found.add(Verdict.EQUAL)
            elif _is_near(made, exact, _ROUNDED_ULPS * torch.finfo(dtype).eps):
                found.add(Verdict.ROUNDED)
            else:
                found.add(Verdict.WRONG)
    except (RuntimeError, TypeError):  # there is no kernel for this dtype
        return Verdict.WRONG
    return next(one for one in reversed(Verdict) if one in found)


def _run_steps(
    kind: type[optim.Optimizer],
    settings: Mapping[str, Any],
    dtype: torch.dtype,
    *,
    computed_in: torch.dtype | None = None,
    is_fused: bool = False,
) -> list[Tensor]:
    """Return a parameter and its states after a few steps on numbers of a dtype, [131] each.

    Args:
        kind: The optimizer.
        settings: Settings except the learning rate.
        dtype: Dtype of the numbers.
        computed_in: Dtype to which they are converted before the first step; None keeps `dtype`.
        is_fused: Whether to use the kernel instead of plain code.
    """
    places = torch.arange(_NUMEL, dtype=torch.float64, device="cpu")
    signs = 1.0 - 2.0 * (places % 2)

    def numbers(phase: float) -> Tensor:
        # Between 0.5 and 1.5, so that squares do not lose precision in float16.
        value = (signs * (1.0 + 0.5 * torch.sin(places + phase))).to(dtype)
        return value if computed_in is None else value.to(computed_in)

    # Independent of the caller's context, such as a model that is made on the device `meta`.
    with torch.device("cpu"), torch.no_grad():
        parameter = numbers(-1.0)
        optimizer: Any = kind([parameter], lr=0.1, fused=is_fused, **settings)  # type: ignore[call-arg] # all have a rate
        for step in range(_STEPS):
            parameter.grad = numbers(float(step))
            optimizer.step()
    states = optimizer.state[parameter]
    return [parameter, *(states[key] for key in sorted(states) if key != "step")]


def _is_near(made: Sequence[Tensor], wanted: Sequence[Tensor], tolerance: float) -> bool:
    """Whether tensors are equal up to a difference relative to the largest element of each."""
    pairs = [(one.double(), other.double()) for one, other in zip(made, wanted, strict=True)]
    # This form returns False for NaN, for which every comparison is false.
    return all(
        float((one - other).abs().max()) <= tolerance * float(other.abs().max())
        for one, other in pairs
    )


@cache
def _warn(kind: type[optim.Optimizer], dtype: torch.dtype) -> None:
    """Warn, once per process, that a kernel that the user asked for is wrong."""
    warnings.warn(
        f"the fused kernel of {kind.__name__} for {dtype} on CPUs computes other numbers than "
        f"{kind.__name__} in PyTorch {torch.__version__}; although the optimizer says fused=True, "
        "its plain code runs in the kernel's place",
        stacklevel=2,
    )

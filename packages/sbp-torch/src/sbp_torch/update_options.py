"""`UpdateOptions`: options of the update in a step: loss scaling, gradient clipping, averages."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from sbp_core.errors import SbpValueError

__all__ = ["UpdateOptions"]

#: Settings of parameter groups that schedules may change: the key, and the place in its value.
SETTINGS: Mapping[str, tuple[str, int | None]] = {
    "lr": ("lr", None),
    "weight_decay": ("weight_decay", None),
    "momentum": ("momentum", None),
    "beta1": ("betas", 0),
    "beta2": ("betas", 1),
}


def _check(name: str, value: float | None, low: float, high: float, accepted: str) -> None:
    # This form refuses NaN, for which every comparison is false.
    if value is not None and not low < value <= high:
        raise SbpValueError(f"{name}={value!r} is out of range", accepted=accepted)


@dataclass(frozen=True, slots=True, kw_only=True)
class LossScaling:
    """Scale the loss so that float16 gradients do not vanish, as `torch.amp.GradScaler` does.

    A step whose gradients overflow changes no state, and shrinks the scale.

    Args:
        init_scale: First scale, > 0.
        growth_factor: Factor by which the scale grows, > 1.
        growth_interval: Steps in a row without overflow after which the scale grows, >= 1.
        backoff_factor: Factor by which the scale shrinks after an overflow, in (0, 1).
    """

    init_scale: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000

    def __post_init__(self) -> None:
        most = 3.4e38  # float32
        _check("init_scale", self.init_scale, 0.0, most, "a float32 number > 0")
        _check("growth_factor", self.growth_factor, 1.0, most, "a finite number > 1")
        below = math.nextafter(1.0, 0.0)
        _check("backoff_factor", self.backoff_factor, 0.0, below, "a number between 0 and 1")
        _check("growth_interval", self.growth_interval, 0, 2**31 - 1, "an integer >= 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateOptions:
    """What happens to gradients and states, in this order, once a step.

    Args:
        loss_scaling: Scale the loss, unscale the gradients, skip steps that overflow.
        clip_norm: Largest norm of the gradients of all trained parameters, > 0
            (`clip_grad_norm_`).
        norm_type: Order of that norm, > 0; infinity for the largest absolute value.
        report_norm: Whether to report the norm as the metric `grad_norm` even without clipping.
        clip_value: Largest absolute value of an element, > 0 (`clip_grad_value_`).
        fused: Use PyTorch's fused kernels only where the optimizer has `fused=True` (None), also
            where `fused` is not set and the kernel computes the same (True), or nowhere (False).
        ema_decay: Keep an exponential moving average `<parameter>.ema` of every trained parameter,
            with this decay in [0, 1), which is also the scalar input `ema_decay` (`AveragedModel`
            with `get_ema_multi_avg_fn`: the first average is the parameter).
        scheduled: Settings of groups that are scalar inputs in addition to `lr`: `weight_decay`,
            `momentum`, `beta1`, `beta2`.
    """

    loss_scaling: LossScaling | None = None
    clip_norm: float | None = None
    norm_type: float = 2.0
    report_norm: bool = False
    clip_value: float | None = None
    fused: bool | None = None
    ema_decay: float | None = None
    scheduled: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        largest = float("inf")
        _check("clip_norm", self.clip_norm, 0.0, largest, "a number > 0")
        _check("norm_type", self.norm_type, 0.0, largest, "a number > 0")
        _check("clip_value", self.clip_value, 0.0, largest, "a number > 0")
        below = math.nextafter(1.0, 0.0)
        _check("ema_decay", self.ema_decay, -math.ulp(0.0), below, "a number in [0, 1)")
        for name in self.scheduled:
            if name not in SETTINGS:
                raise SbpValueError(
                    f"no setting {name!r} can be scheduled", accepted=", ".join(SETTINGS)
                )

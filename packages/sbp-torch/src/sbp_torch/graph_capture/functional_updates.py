"""Compute optimizer updates and gradient norms by functions of tensors that capture can trace.

Norms of gradients are roots of sums, which are added parameter by parameter in the order of the
model. Sharded gradients then need one all-reduce of one number, for every way of sharding.

Some updates of `torch.optim` cannot be traced: they branch on the number of the step, or read
numbers from tensors during the step. Here such branches are arithmetic on numbers, so one trace is
valid for every step. The number of the step, and everything computed from it alone, are host
numbers; if a step may be skipped, they are 0-d float64 tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from sbp_torch.graph_capture.optimizer_clones import kind_of
from sbp_torch.ops import fused_updates as _fused_ops  # noqa: F401 - registers sbp.fused_*


def wide(value: Tensor) -> Tensor:
    """Return a tensor in at least float32, because sums of squares overflow half precision."""
    return value.float() if value.dtype in (torch.float16, torch.bfloat16) else value


def total_norm(tensors: Iterable[Tensor], order: float) -> Tensor:
    """Return the norm of all elements of all tensors, a 0-d tensor.

    Args:
        tensors: Floating or complex tensors of any shapes; at least one.
        order: Order of the norm, > 0; infinity for the largest absolute value.
    """
    values = [tensor.abs() if tensor.is_complex() else wide(tensor) for tensor in tensors]
    if math.isinf(order):
        total = values[0].abs().amax()
        for value in values[1:]:
            total = torch.maximum(total, value.abs().amax())
        return total
    if order == 2.0:
        return add_all((value * value).sum() for value in values).sqrt()
    return add_all(value.abs().pow(order).sum() for value in values).pow(1.0 / order)


def add_all(parts: Iterable[Tensor]) -> Tensor:
    """Return the sum of tensors, added in their order."""
    first, *rest = parts
    for part in rest:
        first = first + part
    return first


#: A host number in a trace, or a 0-d tensor.
Number = Any

Settings = Mapping[str, Any]
States = Mapping[str, Tensor]


#: Key of the counts of lookups [v, 1] among the states that an update gets.
LOOKUPS = "lookups"

#: A parameter after its update, and its states that the update changes.
UpdateResult = tuple[Tensor, dict[str, Tensor]]

#: Updates a parameter: (settings of its group, parameter, gradient, states, number of this step).
UpdateFunction = Callable[[Settings, Tensor, Tensor, States, Number], UpdateResult]


def decays(amount: Number) -> bool:
    """Whether there may be weight decay: false only if the amount is the number zero."""
    return isinstance(amount, torch.SymFloat | Tensor) or bool(amount != 0)


def _minimum(left: Number, right: Number) -> Number:
    if isinstance(right, Tensor):
        return right.minimum(torch.zeros_like(right) + left)
    return torch.sym_min(left, right)  # type: ignore[no-untyped-call] # torch leaves it untyped


def _at_least(value: Number, low: float) -> Number:
    if isinstance(value, Tensor):
        return value.clamp(min=low)
    return torch.sym_max(value, low)  # type: ignore[no-untyped-call] # torch leaves it untyped


def _exceeds(value: Number, bound: float) -> Number:
    """Return 1 if a value is above a bound, else 0; a host number cannot be compared in a trace."""
    if isinstance(value, Tensor):
        return (value > bound).to(value.dtype)
    # A ramp that is steep enough for a step: it is between 0 and 1 only within 1e-300 of the bound.
    return _at_least(_minimum(1.0, (value - bound) * 1e300), 0.0)


def _ascending(settings: Settings, gradient: Tensor) -> Tensor:
    return -gradient if settings["maximize"] else gradient


def _decay(settings: Settings, p: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """Apply weight decay: to the parameter itself if decoupled, else to the gradient."""
    amount = settings["weight_decay"]
    if not decays(amount):
        return p, g
    if settings.get("decoupled_weight_decay"):
        return p * (1 - settings["lr"] * amount), g
    return p, g.add(p, alpha=amount)


def sgd(settings: Settings, p: Tensor, g: Tensor, states: States, step: Number) -> UpdateResult:
    """`torch.optim.SGD` with dampening: the first velocity is the first gradient, undampened.

    Source: torch 2.13, torch/optim/sgd.py, `_single_tensor_sgd`.
    """
    p, g = _decay(settings, p, _ascending(settings, g))
    first = 0.0 ** (step - 1.0)  # 0 ** 0 is 1 in the first step; later powers of 0 are 0
    part = first + (1.0 - first) * (1.0 - settings["dampening"])
    velocity = states["momentum_buffer"] * settings["momentum"]
    # Rounded once, as in PyTorch; only a number can be `alpha`.
    velocity = velocity + g * part if isinstance(part, Tensor) else velocity.add(g, alpha=part)
    g = g.add(velocity, alpha=settings["momentum"]) if settings["nesterov"] else velocity
    p = p.add(g, alpha=-settings["lr"])
    return p, {"momentum_buffer": velocity}


def adagrad(settings: Settings, p: Tensor, g: Tensor, states: States, step: Number) -> UpdateResult:
    """`torch.optim.Adagrad`.

    Source: torch 2.13, torch/optim/adagrad.py, `_single_tensor_adagrad`.
    """
    p, g = _decay(settings, p, _ascending(settings, g))
    rate = settings["lr"] / (1 + (step - 1.0) * settings["lr_decay"])
    total = states["sum"].addcmul(g, g)
    return p - g / (total.sqrt() + settings["eps"]) * rate, {"sum": total}


def _moments(settings: Settings, g: Tensor, states: States) -> dict[str, Tensor]:
    beta1, beta2 = settings["betas"]
    return {
        "exp_avg": states["exp_avg"].lerp(g, 1 - beta1),
        "exp_avg_sq": (states["exp_avg_sq"] * beta2).addcmul(g, g, value=1 - beta2),
    }


def nadam(settings: Settings, p: Tensor, g: Tensor, states: States, step: Number) -> UpdateResult:
    """`torch.optim.NAdam`, whose product of momenta is a tensor.

    Source: torch 2.13, torch/optim/nadam.py, `_single_tensor_nadam`.
    """
    beta1, beta2 = settings["betas"]
    lr, decay = settings["lr"], settings["momentum_decay"]
    p, g = _decay(settings, p, _ascending(settings, g))
    mu = beta1 * (1.0 - 0.5 * (0.96 ** (step * decay)))
    mu_next = beta1 * (1.0 - 0.5 * (0.96 ** ((step + 1.0) * decay)))
    product = states["mu_product"]
    product = product * (mu.to(product.dtype) if isinstance(mu, Tensor) else mu)
    exact = product.double()
    new = _moments(settings, g, states)
    denominator = (new["exp_avg_sq"] / (1 - beta2**step)).sqrt() + settings["eps"]
    of_gradient = ((1.0 - mu) * lr) / (1.0 - exact)
    of_average = (mu_next * lr) / (1.0 - exact * mu_next)
    p = p - g / denominator * of_gradient - new["exp_avg"] / denominator * of_average
    return p, {**new, "mu_product": product}


def radam(settings: Settings, p: Tensor, g: Tensor, states: States, step: Number) -> UpdateResult:
    """`torch.optim.RAdam`, which adapts only after the length rho of the average exceeds 5.

    Source: torch 2.13, torch/optim/radam.py, `_single_tensor_radam`.
    """
    beta1, beta2 = settings["betas"]
    p, g = _decay(settings, p, _ascending(settings, g))
    new = _moments(settings, g, states)
    correction = 1 - beta2**step
    longest = 2 / (1 - beta2) - 1
    rho = longest - 2 * step * (beta2**step) / correction
    adapts = _exceeds(rho, 5.0)
    # An average that never gets longer than 5 never adapts, so the quotient is not used.
    divisor = _at_least(longest - 4, 0.5) * _at_least(longest - 2, 0.5) * rho
    square = ((rho - 4) * (rho - 2) * longest) / divisor
    rectified = _at_least(square, 0.0) ** 0.5 * correction**0.5
    rate = (adapts * rectified + (1.0 - adapts)) * settings["lr"]
    denominator = (new["exp_avg_sq"].sqrt() + settings["eps"]) * adapts + (1.0 - adapts)
    mean = new["exp_avg"] / (1 - beta1**step)
    return p - mean / denominator * rate, new


def sparse_adam(
    settings: Settings, p: Tensor, g: Tensor, states: States, step: Number
) -> UpdateResult:
    """`torch.optim.SparseAdam`: Adam for the rows that were looked up; other rows stay as they are.

    Source: torch 2.13, torch/optim/_functional.py, `sparse_adam`.
    """
    beta1, beta2 = settings["betas"]
    g = _ascending(settings, g)
    is_looked_up = states[LOOKUPS] > 0
    old_mean, old_square = states["exp_avg"], states["exp_avg_sq"]
    mean = old_mean + (g - old_mean) * (1 - beta1)
    square = old_square + (g * g - old_square) * (1 - beta2)
    rate = settings["lr"] * (1 - beta2**step) ** 0.5 / (1 - beta1**step)
    new = p - mean / (square.sqrt() + settings["eps"]) * rate
    return torch.where(is_looked_up, new, p), {
        "exp_avg": torch.where(is_looked_up, mean, old_mean),
        "exp_avg_sq": torch.where(is_looked_up, square, old_square),
    }


def adafactor(
    settings: Settings, p: Tensor, g: Tensor, states: States, step: Number
) -> UpdateResult:
    """`torch.optim.Adafactor`.

    Source: torch 2.13, torch/optim/_adafactor.py, `_single_tensor_adafactor`.
    """
    eps, least = settings["eps"]
    eps = torch.finfo(p.dtype).eps if eps is None else eps
    g = _ascending(settings, g)
    share = step ** settings["beta2_decay"]
    root = p.numel() ** 0.5
    size = (total_norm([p], 2.0).double() / root).clamp(min=least)
    alpha = size * _minimum(settings["lr"], 1 / step**0.5)
    if decays(settings["weight_decay"]):
        p = p * (1 - settings["lr"] * settings["weight_decay"])
    new: dict[str, Tensor] = {}
    if g.dim() > 1:
        square = g * g
        for key, dim in (("row_var", -1), ("col_var", -2)):
            mean = square.sum(dim=dim, keepdim=True) / g.size(dim)
            new[key] = _blend(states[key], mean, share)
        rows = new["row_var"]
        typical = (rows.sum(dim=-2, keepdim=True) / g.size(-2)).clamp(min=eps)
        estimate = rows * new["col_var"] / typical
    else:
        new["variance"] = estimate = _blend(states["variance"], g * g, share)
    change = estimate.clamp(min=eps * eps).rsqrt() * g
    limit = (total_norm([change], 2.0).double() / (root * settings["d"])).clamp(min=1.0)
    return p - change * (alpha / limit), new


def _blend(old: Tensor, new: Tensor, share: Number) -> Tensor:
    change: Tensor = (new - old) * share
    return old + change


def fused_adam(
    settings: Settings, p: Tensor, g: Tensor, states: States, step: Number
) -> UpdateResult:
    """`torch.optim.Adam` and `AdamW` with `fused=True`."""
    keys = ["exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if settings["amsgrad"] else [])]
    mean, square, *largest = (states[key] for key in keys)
    beta1, beta2 = settings["betas"]
    own = {"beta1": beta1, "beta2": beta2}
    own |= {name: settings[name] for name in ("weight_decay", "eps", "maximize")}
    own["decoupled"] = settings["decoupled_weight_decay"]
    op: Any = torch.ops.sbp.fused_adam
    op = op.tensor_step if isinstance(step, Tensor) else op.default
    first, *new = op(p, g, mean, square, largest, step, settings["lr"], **own)
    return first, dict(zip(keys, new, strict=True))


def fused_sgd(
    settings: Settings, p: Tensor, g: Tensor, states: States, step: Number
) -> UpdateResult:
    """`torch.optim.SGD` with `fused=True`, from the second step on."""
    keys = ["momentum_buffer"] if "momentum_buffer" in states else []
    names = ("momentum", "dampening", "weight_decay", "nesterov", "maximize")
    own = {name: settings[name] for name in names}
    velocity = [states[key] for key in keys]
    first, *new = torch.ops.sbp.fused_sgd.default(p, g, velocity, settings["lr"], **own)
    return first, dict(zip(keys, new, strict=True))


def fused_adagrad(
    settings: Settings, p: Tensor, g: Tensor, states: States, step: Number
) -> UpdateResult:
    """`torch.optim.Adagrad` with `fused=True`."""
    op: Any = torch.ops.sbp.fused_adagrad
    op = op.tensor_step if isinstance(step, Tensor) else op.default
    own = {name: settings[name] for name in ("lr_decay", "weight_decay", "eps", "maximize")}
    first, total = op(p, g, states["sum"], step, settings["lr"], **own)
    return first, {"sum": total}


#: Optimizers whose own code cannot be traced under any settings.
UNTRACEABLE: Mapping[type, UpdateFunction] = {
    torch.optim.Adafactor: adafactor,
    torch.optim.NAdam: nadam,
    torch.optim.RAdam: radam,
    torch.optim.SparseAdam: sparse_adam,
}

#: Optimizers for which PyTorch has a fused kernel.
FUSED: Mapping[type, UpdateFunction] = {
    torch.optim.Adagrad: fused_adagrad,
    torch.optim.Adam: fused_adam,
    torch.optim.AdamW: fused_adam,
    torch.optim.SGD: fused_sgd,
}


def functional_update(
    optimizer: torch.optim.Optimizer,
    settings: Settings,
    *,
    fused: bool,
    may_skip: bool,
    stepped: bool,
) -> UpdateFunction | None:
    """Return the functional form of an optimizer's update; None if its own code is traced.

    Args:
        optimizer: Any optimizer.
        settings: Settings of the group.
        fused: Whether to use PyTorch's fused kernel; see `takes_kernel`.
        may_skip: Whether steps may be skipped, so that the number of the step is a tensor.
        stepped: Whether the parameter has been updated before.
    """
    kind = kind_of(optimizer)
    dampened = kind is torch.optim.SGD and settings["momentum"] and settings["dampening"]
    if dampened and not stepped:
        return sgd
    if fused:
        return FUSED[kind]
    if kind is torch.optim.Adagrad and may_skip:
        return adagrad
    return UNTRACEABLE.get(kind)

"""LAMB: Adam with a trust ratio (norm of the weights / norm of the step) for each parameter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sbp_torch.optim.settings import AT_LEAST_ZERO, FRACTION, check_setting, norm


class Lamb(torch.optim.Optimizer):
    """LAMB optimizer: scales Adam's step of each parameter to the parameter's norm.

    r = m/(1 - b1^t) / (sqrt(v/(1 - b2^t)) + eps) + weight_decay·p
    p = p - lr·(|p| / |r|)·r, the factor 1 if a norm is zero

    Args:
        params: Parameters or groups. Groups of norm weights and biases usually set `adapt=False`.
        lr: Learning rate, >= 0.
        betas: b1 and b2, decays of the mean m and the mean square v, each in [0, 1).
        eps: Term added to the divisor, >= 0.
        weight_decay: Decoupled weight decay, >= 0.
        adapt: Whether to multiply by |p| / |r|; without this factor, it is AdamW.
        capturable: Whether to keep and use the number of steps as a tensor on the device.

    Raises:
        SbpValueError: a setting is out of range.

    Source: You et al. 2020, Large Batch Optimization for Deep Learning, algorithm 2, with the
    identity as its function phi of the norm.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        adapt: bool = True,
        capturable: bool = False,
    ) -> None:
        for name, value in (("lr", lr), ("eps", eps), ("weight_decay", weight_decay)):
            check_setting(name, value, AT_LEAST_ZERO)
        for beta in betas:
            check_setting("betas", beta, FRACTION)
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**defaults, "adapt": adapt, "capturable": capturable})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override] # torch overloads it
        """Take one step.

        Args:
            closure: Computes the loss again.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._move(group, p, p.grad)
        return loss

    def _move(self, group: dict[str, Any], p: Tensor, g: Tensor) -> None:
        beta1, beta2 = group["betas"]
        state = self.state[p]
        if "step" not in state:
            device = p.device if group["capturable"] else None
            state["step"] = torch.zeros((), device=device)
            state["exp_avg"] = torch.zeros_like(p)
            state["exp_avg_sq"] = torch.zeros_like(p)
        state["step"] += 1
        step = state["step"] if group["capturable"] else state["step"].item()
        mean, square = state["exp_avg"], state["exp_avg_sq"]
        mean.lerp_(g, 1 - beta1)
        square.mul_(beta2).addcmul_(g, g, value=1 - beta2)
        root = (square / (1 - beta2**step)).sqrt() + group["eps"]
        change = mean / (1 - beta1**step) / root + p * group["weight_decay"]
        if group["adapt"]:
            of_p, of_change = norm(p), norm(change)
            known = (of_p > 0).logical_and(of_change > 0)
            change = change * torch.where(known, of_p / of_change, 1.0)
        p.sub_(change * group["lr"])

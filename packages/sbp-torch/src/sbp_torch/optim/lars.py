"""LARS: SGD with momentum whose rate for each parameter is scaled by its norm / gradient norm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from sbp_torch.optim.settings import AT_LEAST_ZERO, FRACTION, check_setting, norm


class Lars(torch.optim.Optimizer):
    """LARS optimizer: scales each gradient to its parameter's norm, then updates with momentum.

    t = trust·|p| / (|g| + weight_decay·|p| + eps), 1 if a norm is zero
    v = momentum·v + lr·t·(g + weight_decay·p);  p = p - v

    Args:
        params: Parameters or groups. Groups of norm weights and biases usually set `adapt=False`.
        lr: Learning rate, >= 0.
        momentum: Decay of the velocity v, in [0, 1).
        weight_decay: Weight decay, >= 0.
        trust: Trust coefficient, >= 0.
        eps: Term added to the divisor, >= 0.
        adapt: Whether to multiply by t; else the factor is 1.

    Raises:
        SbpValueError: a setting is out of range.

    Source: You, Gitman, Ginsburg 2017, Large Batch Training of Convolutional Networks,
    algorithm 1.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1.0,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust: float = 1e-3,
        eps: float = 1e-9,
        adapt: bool = True,
    ) -> None:
        settings: dict[str, float] = {"lr": lr, "weight_decay": weight_decay}
        settings |= {"trust": trust, "eps": eps}
        for name, value in settings.items():
            check_setting(name, value, AT_LEAST_ZERO)
        check_setting("momentum", momentum, FRACTION)
        super().__init__(params, {**settings, "momentum": momentum, "adapt": adapt})

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
            decay = group["weight_decay"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if "velocity" not in state:
                    state["velocity"] = torch.zeros_like(p)
                change = p.grad.add(p, alpha=decay)
                if group["adapt"]:
                    of_p, of_g = norm(p), norm(p.grad)
                    ratio = of_p * group["trust"] / (of_g + of_p * decay + group["eps"])
                    known = (of_p > 0).logical_and(of_g > 0)
                    change = change * torch.where(known, ratio, 1.0).to(p.dtype)
                velocity = state["velocity"].mul_(group["momentum"])
                p.sub_(velocity.add_(change, alpha=group["lr"]))
        return loss

"""Lion: an optimizer whose step is the learning rate times the sign of a momentum."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from sbp_torch.optim.settings import AT_LEAST_ZERO, FRACTION, check_setting


class Lion(torch.optim.Optimizer):
    """Lion optimizer: moves every element by the learning rate, by the sign of a momentum.

    c = b1·m + (1 - b1)·g;  p = p - lr·(sign(c) + weight_decay·p);  m = b2·m + (1 - b2)·g

    Args:
        params: Parameters or groups.
        lr: Learning rate, >= 0; a third to a tenth of the learning rate for AdamW.
        betas: b1 and b2, each in [0, 1).
        weight_decay: Decoupled weight decay, >= 0.

    Raises:
        SbpValueError: a setting is out of range.

    Source: Chen et al. 2023, Symbolic Discovery of Optimization Algorithms, program 1.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        check_setting("lr", lr, AT_LEAST_ZERO)
        check_setting("weight_decay", weight_decay, AT_LEAST_ZERO)
        for beta in betas:
            check_setting("betas", beta, FRACTION)
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

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
            lr, (beta1, beta2) = group["lr"], group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if "exp_avg" not in state:
                    state["exp_avg"] = torch.zeros_like(p)
                mean = state["exp_avg"]
                direction = mean.lerp(p.grad, 1 - beta1).sign_()
                p.mul_(1 - lr * group["weight_decay"]).add_(direction, alpha=-lr)
                mean.lerp_(p.grad, 1 - beta2)
        return loss

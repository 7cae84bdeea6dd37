"""Row-wise Adagrad: Adagrad with one sum of squares for each row of a table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from sbp_torch.optim.settings import AT_LEAST_ZERO, check_setting


class RowWiseAdagrad(torch.optim.Optimizer):
    """Row-wise Adagrad: all columns of a row share one sum of squared gradients.

    g = g + weight_decay p;  s = s + mean(g^2 over the row)
    p = p - lr / (1 + (t - 1) lr_decay) g / (sqrt(s) + eps)

    The state of a table [v, d] is s [v, 1], so it is as small as the number of rows. A parameter
    with one dim or none has a sum for each element, as in Adagrad.

    Args:
        params: Parameters or groups.
        lr: Learning rate, >= 0.
        lr_decay: Decay of the learning rate with the number t of the step, >= 0.
        weight_decay: Weight decay, >= 0; only for dense gradients.
        initial_accumulator_value: First value of s, >= 0.
        eps: Term added to the root, >= 0.

    Raises:
        SbpValueError: a setting is out of range.

    Source: Gupta, Bengio, Weston 2014, Training Highly Multiclass Classifiers, JMLR 15; and
    `facebookresearch/dlrm`, optim/rwsadagrad.py, whose rows of sparse gradients this repeats.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-2,
        lr_decay: float = 0.0,
        weight_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
    ) -> None:
        settings = {"lr": lr, "lr_decay": lr_decay, "eps": eps, "weight_decay": weight_decay}
        settings["initial_accumulator_value"] = initial_accumulator_value
        for name, value in settings.items():
            check_setting(name, value, AT_LEAST_ZERO)
        super().__init__(params, settings)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override] # torch overloads it
        """Take one step; sparse gradients update the rows that they have.

        Args:
            closure: Computes the loss again.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    first = group["initial_accumulator_value"]
                    shape = (*p.shape[:1], *(1 for _ in p.shape[1:]))
                    state["step"] = torch.zeros(())
                    state["sum"] = p.new_full(shape, first)
                state["step"] += 1
                rate = group["lr"] / (1 + (state["step"].item() - 1) * group["lr_decay"])
                if p.grad.is_sparse:
                    if group["weight_decay"]:
                        raise RuntimeError("weight_decay is not compatible with sparse gradients")
                    _update_rows(p, p.grad.coalesce(), state["sum"], rate, group["eps"])
                    continue
                grad = p.grad
                if group["weight_decay"] != 0:
                    grad = grad.add(p, alpha=group["weight_decay"])
                square = grad * grad
                if p.dim() > 1:
                    square = square.mean(dim=tuple(range(1, p.dim())), keepdim=True)
                total = state["sum"].add_(square)
                p.addcdiv_(grad, total.sqrt().add_(group["eps"]), value=-rate)
        return loss


def _update_rows(
    p: torch.Tensor, grad: torch.Tensor, total: torch.Tensor, rate: float, eps: float
) -> None:
    """Update the rows of a sparse gradient, each of which it has once."""
    rows, values = grad.indices()[0], grad.values()
    mean = (values * values).mean(dim=tuple(range(1, values.dim())), keepdim=True)
    new = total[rows] + mean
    total[rows] = new
    p[rows] = p[rows].addcdiv(values, new.sqrt().add_(eps), value=-rate)

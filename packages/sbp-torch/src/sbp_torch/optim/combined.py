"""Combine several optimizers into one, such as Muon for matrices and AdamW for the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from sbp_core.errors import SbpValueError


class CombinedOptimizer(torch.optim.Optimizer):
    """An optimizer that steps several independent optimizers.

    Args:
        optimizers: At least one optimizer; their parameters differ. The groups of this optimizer
            are their groups, in order: the same objects, so settings apply to both.

    Raises:
        SbpValueError: there are none, or two have the same parameter.
    """

    def __init__(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        self.optimizers = tuple(optimizers)
        groups = [group for one in self.optimizers for group in one.param_groups]
        held = [id(parameter) for group in groups for parameter in group["params"]]
        if not groups or len(set(held)) < len(held):
            what = "two of the optimizers hold one parameter" if groups else "no optimizers"
            raise SbpValueError(what, accepted="optimizers over different parameters")
        super().__init__([dict(group) for group in groups], {})
        self.param_groups = groups

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override] # torch overloads it
        """Take one step with each optimizer.

        Args:
            closure: Computes the loss again; it is called once for all optimizers.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for one in self.optimizers:
            one.step()
        return loss

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "optimizers": self.optimizers}

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients of all parameters."""
        for one in self.optimizers:
            one.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of each optimizer, in order."""
        return {"optimizers": [one.state_dict() for one in self.optimizers]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned.

        Raises:
            SbpValueError: it has another number of optimizers.
        """
        given = state_dict["optimizers"]
        if len(given) != len(self.optimizers):
            raise SbpValueError(
                f"the states of {len(given)} optimizers", accepted=str(len(self.optimizers))
            )
        for one, state in zip(self.optimizers, given, strict=True):
            one.load_state_dict(state)
        self.param_groups = [group for one in self.optimizers for group in one.param_groups]


def members(optimizer: torch.optim.Optimizer) -> tuple[torch.optim.Optimizer, ...]:
    """Return the optimizers that an optimizer combines; usually only itself."""
    if isinstance(optimizer, CombinedOptimizer):
        return tuple(part for one in optimizer.optimizers for part in members(one))
    return (optimizer,)

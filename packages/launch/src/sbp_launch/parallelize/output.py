"""What one parallel step returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from sbp_core.runtime import StepResult


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class StepOutput:
    """The loss of one batch, and what else was measured: equal on all ranks.

    `float(output)` and `output.item()` are the loss as a number; `f"{output:.3f}"` formats it.

    Args:
        loss: A 0-d tensor.
        metrics: 0-d tensors by name: those that the loss function returns, and those of the update,
            such as `grad_norm`.
    """

    loss: Tensor
    metrics: Mapping[str, Tensor]

    @classmethod
    def of(cls, result: StepResult) -> StepOutput:
        """Return what a session's step gave."""
        metrics = {name: value for name, value in result.outputs.items() if name != "loss"}
        return cls(loss=result.loss, metrics=metrics)

    def item(self) -> float:
        """Return the loss as a number."""
        return float(self.loss)

    def __float__(self) -> float:
        return float(self.loss)

    def __format__(self, form: str) -> str:
        return format(float(self.loss), form)

    def __repr__(self) -> str:
        numbers = {"loss": self.loss, **self.metrics}
        return f"StepOutput({', '.join(f'{k}={float(v):.6g}' for k, v in numbers.items())})"

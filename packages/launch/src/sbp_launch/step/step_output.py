"""`StepOutput`: the loss and metrics that a parallel step returns; usable like a float."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sbp_core.runtime import StepResult
from sbp_launch.step.missing_attributes import OF_OUTPUTS, missing_attribute


class ReadAsFloat(Real):
    """Calculates and compares like the float `float(self)`; results are plain floats.

    It equals that float and has the same hash. With tensors and arrays it acts as that float, too.
    """

    __slots__ = ()

    def item(self) -> float:
        """Return the number."""
        return float(self)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        made = torch.tensor(float(self), dtype=torch.float64).numpy()
        return made if dtype is None else made.astype(dtype)

    def __format__(self, form: str) -> str:
        return format(float(self), form)

    def __bool__(self) -> bool:
        return bool(float(self))

    def __int__(self) -> int:
        return int(float(self))

    def __trunc__(self) -> int:
        return math.trunc(float(self))

    def __floor__(self) -> int:
        return math.floor(float(self))

    def __ceil__(self) -> int:
        return math.ceil(float(self))

    def __round__(self, ndigits: int | None = None) -> Any:
        return round(float(self), ndigits)

    def __neg__(self) -> float:
        return -float(self)

    def __pos__(self) -> float:
        return float(self)

    def __abs__(self) -> float:
        return abs(float(self))

    def __hash__(self) -> int:  # type: ignore[override] # which numbers.Real leaves to its subclasses
        return hash(float(self))

    def __eq__(self, other: object) -> bool:
        return bool(float(self) == _plain(other))

    def __lt__(self, other: Any) -> Any:
        return float(self) < _plain(other)

    def __le__(self, other: Any) -> Any:
        return float(self) <= _plain(other)

    def __gt__(self, other: Any) -> Any:
        return float(self) > _plain(other)

    def __ge__(self, other: Any) -> Any:
        return float(self) >= _plain(other)

    def __add__(self, other: Any) -> Any:
        return float(self) + _plain(other)

    def __radd__(self, other: Any) -> Any:
        return other + float(self)

    def __sub__(self, other: Any) -> Any:
        return float(self) - _plain(other)

    def __rsub__(self, other: Any) -> Any:
        return other - float(self)

    def __mul__(self, other: Any) -> Any:
        return float(self) * _plain(other)

    def __rmul__(self, other: Any) -> Any:
        return other * float(self)

    def __truediv__(self, other: Any) -> Any:
        return float(self) / _plain(other)

    def __rtruediv__(self, other: Any) -> Any:
        return other / float(self)

    def __floordiv__(self, other: Any) -> Any:
        return float(self) // _plain(other)

    def __rfloordiv__(self, other: Any) -> Any:
        return other // float(self)

    def __mod__(self, other: Any) -> Any:
        return float(self) % _plain(other)

    def __rmod__(self, other: Any) -> Any:
        return other % float(self)

    def __pow__(self, other: Any) -> Any:
        return float(self) ** _plain(other)

    def __rpow__(self, other: Any) -> Any:
        return other ** float(self)


def _plain(value: Any) -> Any:
    return float(value) if isinstance(value, ReadAsFloat) else value


@dataclass(frozen=True, slots=True, kw_only=True, repr=False, eq=False)
class StepOutput(ReadAsFloat):
    """The loss and the metrics of one batch, equal on all ranks.

    It acts as the loss where a number is expected: `float(output)`, `f"{output:.3f}"`,
    `total += output`, `output < best`, `sum(outputs)`. The results are floats.

    Args:
        loss: A 0-d tensor.
        metrics: Tensors by name, usually 0-d: the metrics that the loss function returns, and
            metrics of the update, such as `grad_norm`.
    """

    loss: Tensor
    metrics: Mapping[str, Tensor]

    @classmethod
    def of(cls, result: StepResult) -> StepOutput:
        """Return the output for the result of a session's step."""
        metrics = {name: value for name, value in result.outputs.items() if name != "loss"}
        return cls(loss=result.loss, metrics=metrics)

    def detach(self) -> Tensor:
        """Return the tensor of the loss, which has no autograd history."""
        return self.loss.detach()

    if not TYPE_CHECKING:  # type checkers see only the real attributes

        def __getattr__(self, name: str) -> Any:
            return missing_attribute(self, name, OF_OUTPUTS)

    def __float__(self) -> float:
        return float(self.loss)

    def __repr__(self) -> str:
        shown = {"loss": self.loss, **self.metrics}
        return f"StepOutput({', '.join(f'{name}={_format(one)}' for name, one in shown.items())})"


def _format(value: Tensor) -> str:
    if value.numel() == 1:
        return f"{value.item():.6g}"
    return f"<{str(value.dtype).removeprefix('torch.')} of shape {tuple(value.shape)}>"

"""Where the samples of a batch lie, if not along dim 0 of each of its tensors.

before: x (time, samples, features)    as a loop has it, and its loss takes it
after:  x (samples, time, features)    as a step is captured, planned and fed
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from torch import Tensor, nn

from sbp_core.errors import SbpValueError
from sbp_torch.capture.batch import flatten_batch, rebuild_batch

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class SampleDims:
    """Moves the samples of batches to dim 0, and back.

    Args:
        given: The dim, >= 0, along which samples lie: by the names of `flatten_batch`, others
            having them along dim 0; or one for all tensors that have it, those of fewer dims having
            them along dim 0.
    """

    given: int | Mapping[str, int] = 0

    def of(self, name: str, tensor: Tensor) -> int:
        """Return the dim along which the samples of a tensor lie.

        Args:
            name: Of the tensor.
            tensor: As a loop has it.

        Raises:
            SbpValueError: the tensor has no such dim.
        """
        if isinstance(self.given, int):
            return self.given if tensor.dim() > self.given else 0
        dim = self.given.get(name, 0)
        if 0 < dim >= tensor.dim():
            raise SbpValueError(
                f"{name!r} of shape {tuple(tensor.shape)} has no dim {dim}, along which batch_dim "
                "says that its samples lie",
                accepted=f"a tensor of more than {dim} dims",
            )
        return dim

    def in_front(self, batch: T) -> T:
        """Return a batch of a loop with its samples along dim 0, as views.

        Raises:
            SbpValueError: a tensor has no such dim.
        """
        if not self.given:
            return batch
        moved = {
            name: tensor.movedim(dim, 0) if (dim := self.of(name, tensor)) else tensor
            for name, tensor in flatten_batch(batch).items()
        }
        return rebuild_batch(batch, moved)

    def moved_back(self, batch: T) -> T:
        """Return a batch as a loop had it: the tensors that `in_front` moved are contiguous."""
        if not self.given:
            return batch
        # Contiguous, because a loss may look at its batch by `view`.
        moved = {
            name: tensor.movedim(0, dim).contiguous() if (dim := self.of(name, tensor)) else tensor
            for name, tensor in flatten_batch(batch).items()
        }
        return rebuild_batch(batch, moved)

    def loss(self, loss: Callable[[nn.Module, Any], Any]) -> Callable[[nn.Module, Any], Any]:
        """Return a loss of batches with samples along dim 0, where `loss` takes those of a loop."""
        return partial(_on_moved_back, self, loss) if self.given else loss


def _on_moved_back(
    dims: SampleDims, loss: Callable[[nn.Module, Any], Any], model: nn.Module, batch: Any
) -> Any:
    return loss(model, dims.moved_back(batch))


def as_written(loss: object) -> object:
    """Return the loss that `SampleDims.loss` was given; another one as it is."""
    if isinstance(loss, partial) and loss.func is _on_moved_back:
        return loss.args[1]
    return loss

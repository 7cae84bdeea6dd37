"""Steps of plain PyTorch that are called as those of `parallelize`, to be compared with them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from sbp_torch.graph_capture import counted_random

Batch = dict[str, Tensor]

#: `parallelize` with its layout, or `plain`.
Start = Callable[..., Any]

#: Where gradients are near zero, Adam would make rounding errors of them large.
Adam = partial(torch.optim.Adam, eps=0.01)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """What came of a kind of training.

    Args:
        losses: Of all steps and evaluations, in their order.
        states: What `state_dict` of the model, of its optimizers, and of what a loop has beside
            them returns, by a name.
        num_forms: Of the first program; 1 in plain PyTorch.
    """

    losses: list[float]
    states: dict[str, Any]
    num_forms: int


class PlainStep:
    """A step of plain PyTorch, called as one of `parallelize`."""

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[[nn.Module, Any], Tensor],
        optimizer: torch.optim.Optimizer,
        count: list[int],
    ) -> None:
        self._model, self._loss, self._optimizer, self._count = model, loss, optimizer, count
        self.forms = (None,)

    def __enter__(self) -> PlainStep:
        return self

    def __exit__(self, *_: object) -> None:
        """Do nothing."""

    def __call__(self, batch: Any) -> float:
        self._optimizer.zero_grad()
        with counted_random(0, self._count[0]):
            loss = self._loss(self._model, batch)
        loss.backward()
        self._optimizer.step()
        self._count[0] += 1
        return loss.item()

    def evaluate(self, batch: Any) -> float:
        """Return the loss in evaluation mode."""
        modes = {module: module.training for module in self._model.modules()}
        self._model.eval()
        with torch.no_grad():
            loss = self._loss(self._model, batch)
        for module, mode in modes.items():
            module.training = mode
        return loss.item()

    def add_step(
        self,
        loss: Callable[[nn.Module, Any], Tensor],
        batch: Any,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> PlainStep:
        """Return the step of another loss, or of another optimizer."""
        return PlainStep(self._model, loss, optimizer or self._optimizer, self._count)

    def copy_to(self, *_: object) -> None:
        """Do nothing: the model is what is trained."""


def plain(
    model: nn.Module, loss: Any, batch: Any, optimizer: torch.optim.Optimizer, **_: Any
) -> PlainStep:
    """Return the step of plain PyTorch; it needs no padding."""
    return PlainStep(model, loss, optimizer, [0])


def made(model: Callable[[], nn.Module]) -> Any:
    """Return a seeded model in float64."""
    torch.manual_seed(0)
    return model().double()


def normal(index: int, *shape: int) -> Tensor:
    """Return random numbers that are the same in all processes."""
    generator = torch.Generator().manual_seed(index)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def found(
    step: Any, losses: list[float], model: nn.Module, *optimizers: Any, **more: Any
) -> Trained:
    """Return what came of a kind, where its `with` block is about to end; all processes call it."""
    for optimizer in optimizers:
        step.copy_to(model, optimizer)
    states = {"model": model, **{f"optimizer {at}": one for at, one in enumerate(optimizers)}}
    return Trained(
        losses=losses,
        states={name: copy.deepcopy(one.state_dict()) for name, one in (states | more).items()},
        num_forms=len(step.forms),
    )


def assert_equal(one: Trained, other: Trained) -> None:
    """See that losses and states are the same."""
    for what in ("losses", "states"):
        torch.testing.assert_close(getattr(one, what), getattr(other, what), rtol=0, atol=1e-12)

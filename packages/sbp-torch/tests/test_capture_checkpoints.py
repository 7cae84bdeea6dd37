"""Buffers under `torch.utils.checkpoint`, which PyTorch runs again in the backward phase."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - everybody's name for it
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from sbp_core.errors import CaptureError
from sbp_torch.graph_capture import capture


class Model(nn.Module):
    def __init__(self, act: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.act = act
        self.layer = nn.Linear(4, 3)
        self.register_buffer("run", torch.zeros(3))
        self.register_buffer("other", torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self, self.layer(x))


def assigns(model: Any, y: Tensor) -> Tensor:
    model.run = 0.9 * model.run + 0.1 * y.detach().mean(0)
    return y + model.run


def writes(model: Any, y: Tensor) -> Tensor:
    model.run.lerp_(y.detach().mean(0), 0.1)
    return y + model.run.clone()


def normalises(model: Any, y: Tensor) -> Tensor:
    return F.batch_norm(y, model.run, model.other, training=True)


def reads(model: Any, y: Tensor) -> Tensor:
    return F.batch_norm(y + model.run, model.run, model.other)


def captured(act: Callable[[Any, Tensor], Tensor]) -> None:
    capture(Model(act), lambda model, x: model(x).square().sum(), torch.randn(4, 4))


@pytest.mark.slow(but=3)
@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("change", [assigns, writes, normalises])
def test_a_checkpoint_that_changes_a_buffer_is_refused_as_pytorch_would_change_it_twice(
    change: Callable[[Any, Tensor], Tensor], *, use_reentrant: bool
) -> None:
    def under_checkpoint(act: Callable[[Any, Tensor], Tensor]) -> Callable[[Any, Tensor], Any]:
        return lambda m, y: checkpoint(lambda z: act(m, z), y, use_reentrant=use_reentrant)

    with pytest.raises(CaptureError, match=r"changes (the buffer 'run'|running)") as caught:
        captured(under_checkpoint(change))

    assert "test_capture_checkpoints.py:" in str(caught.value)
    captured(change)
    captured(under_checkpoint(reads))

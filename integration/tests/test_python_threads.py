"""`parallelize` in several threads of Python at once equals one after the other."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch
from torch import nn

from sbp_launch import parallelize

NUM_THREADS = 3


def trained(number: int) -> list[float]:
    """Return what a small model gives, in two forms of its step and one of evaluation."""
    generator = torch.Generator().manual_seed(number)
    model = nn.Sequential(nn.Linear(4, 8 + number), nn.Dropout(0.1), nn.Linear(8 + number, 2))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    batch = torch.randn(8, 4, generator=generator)

    with parallelize(
        model, lambda model, batch: model(batch).square().mean(), batch, optimizer, mesh=2
    ) as step:
        return [float(step(batch)), float(step(batch[:6])), float(step.evaluate(batch[:2]))]


def test_threads_that_parallelize_at_once_equal_one_after_the_other() -> None:
    wanted = [trained(number) for number in range(NUM_THREADS)]

    with ThreadPoolExecutor(NUM_THREADS) as threads:
        found = list(threads.map(trained, range(NUM_THREADS)))

    assert found == wanted

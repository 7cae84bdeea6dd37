"""Time guards: `[torchrun --nproc-per-node=2] python benchmarks/guard_time.py [LAYERS]`.

An encoder trains with `parallelize`. The measured time is that of everything before a step: the
guard compares the values that the program reads, values that the loop wrote are copied to states,
and processes vote. The time of the whole step is printed, too.
"""

from __future__ import annotations

import statistics
import sys
import time
from typing import Any

import torch
from torch import Tensor, nn

from sbp_launch import parallelize

_STEPS = 60
_WARM_UP = 10


def main(num_layers: int) -> None:
    """Print medians over the steps."""
    torch.manual_seed(0)
    layers = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layers, num_layers, enable_nested_tensor=False)
    optimizer = torch.optim.AdamW(model.parameters())
    batch = torch.randn(16, 32, 64)
    seconds: list[float] = []
    with parallelize(model, _loss, batch, optimizer, planner="manual/data_parallel") as step:
        measured = step._forms.before_step

        def timed(*arguments: Any) -> Any:
            begun_s = time.perf_counter()
            found = measured(*arguments)
            seconds.append(time.perf_counter() - begun_s)
            return found

        step._forms.before_step = timed  # type: ignore[method-assign]
        whole = [_timed(step, batch) for _ in range(_STEPS)][_WARM_UP:]
        if step.world.rank == 0:
            guard_s = statistics.median(seconds[_WARM_UP:])
            step_s = statistics.median(whole)
            print(
                f"{step.world.size} processes, {len(list(model.modules()))} modules, "
                f"{len(list(model.parameters()))} parameters: {guard_s * 1e3:.2f} ms before each "
                f"step of {step_s * 1e3:.1f} ms, {guard_s / step_s:.2%}"
            )


def _loss(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def _timed(step: Any, batch: Tensor) -> float:
    begun_s = time.perf_counter()
    step(batch)
    return time.perf_counter() - begun_s


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 12)

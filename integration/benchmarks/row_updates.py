"""Time a training step with tables of 0.1, 1 and 4 million rows: sbp by row, and PyTorch's sparse.

`python integration/benchmarks/row_updates.py [ROUNDS] [--dense] [--uniform]`. The model is Wide &
Deep (Cheng et al. 2016): a wide table of width 1 and a deep one, looked up once for each feature,
trained by Adagrad. Rows are looked up in proportion to 1 / n, as in click logs. With `--uniform`,
all rows are alike: then lookups miss the caches that hold the smallest table, in PyTorch, too. All
ways and sizes take turns in one process. Prints the median of each, its ratio to the smallest
table, and the time that the plan predicts. `--dense` adds the update of all rows. Nothing is
asserted, because machines differ. Losses are compared in float32: Adagrad divides gradients by
their own size, so rounding may grow to 1e-3 over many steps. In float64, losses agree to 1e-15.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from sbp_core.units import format_seconds
from sbp_launch import parallelize

ROWS = (100_000, 1_000_000, 4_000_000)
BATCH_SIZE, FEATURES, WIDTH, LEARNING_RATE, NUM_BATCHES = 1024, 8, 16, 1e-2, 4


class WideAndDeep(nn.Module):
    """A linear model of features, and an MLP of their embeddings."""

    def __init__(self, rows: int, *, sparse: bool) -> None:
        super().__init__()
        self.wide = nn.Embedding(rows, 1, sparse=sparse)
        self.deep = nn.Embedding(rows, WIDTH, sparse=sparse)
        self.mlp = nn.Sequential(
            nn.Linear(FEATURES * WIDTH, 64),
            nn.ReLU(),
            nn.Linear(64, 32),
            nn.ReLU(),
            nn.Linear(32, 1),
        )

    def forward(self, features: Tensor) -> Tensor:
        deep = self.mlp(self.deep(features).flatten(1)).squeeze(1)
        logits: Tensor = self.wide(features).sum(dim=(1, 2)) + deep
        return logits


def model_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return nn.functional.binary_cross_entropy_with_logits(model(batch["x"]), batch["y"])


def batch_of(rows: int, index: int, *, uniform: bool = False) -> dict[str, Tensor]:
    """Return a batch; row n is looked up in proportion to 1 / n, or all rows alike."""
    draw = torch.Generator().manual_seed(index)
    shares = torch.rand(BATCH_SIZE, FEATURES, generator=draw, dtype=torch.float64)
    features = (rows * shares if uniform else rows**shares - 1).long()
    return {"x": features, "y": torch.rand(BATCH_SIZE, generator=draw).round()}


def program(rows: int, *, sparse: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = WideAndDeep(rows, sparse=sparse)
    return model, torch.optim.Adagrad(model.parameters(), lr=LEARNING_RATE)


#: ZeRO-3 that does not gather tables.
_LOOKED_UP_IN_PLACE = {"use:wide.weight": "S(0)", "use:deep.weight": "S(0)"}

#: Takes a step of a batch; returns the loss.
Step = Callable[[dict[str, Tensor]], float]


def eager(rows: int, *, sparse: bool) -> Step:
    """Return a step of PyTorch."""
    model, optimizer = program(rows, sparse=sparse)

    def step(batch: dict[str, Tensor]) -> float:
        optimizer.zero_grad()
        loss = model_loss(model, batch)
        loss.backward()  # type: ignore[no-untyped-call] # torch leaves it untyped
        optimizer.step()
        return loss.item()

    return step


def planned(stack: ExitStack, rows: int, *, by_row: bool, **layout: Any) -> tuple[Step, float]:
    """Return a step of sbp, and its predicted time in seconds."""
    model, optimizer = program(rows, sparse=by_row)
    how = {"prove": False, "passes": {} if by_row else {"update_rows": None}}
    batch = batch_of(rows, 0)
    made = stack.enter_context(
        parallelize(model, model_loss, batch, optimizer, compile=how, **layout)
    )
    return lambda given: made(given).item(), float(made.strategy.report["predicted_step_s"])


def ways(stack: ExitStack, rows: int, *, dense: bool) -> dict[str, tuple[Step, float]]:
    """Return the ways to train with tables of so many rows, with their predicted times or 0."""
    two = {"mesh": 2}
    found = {
        "PyTorch, sparse=True": (eager(rows, sparse=True), 0.0),
        "sbp, by row, 1 rank": planned(stack, rows, by_row=True, mesh=1),
        "sbp, by row, data, 2 ranks": planned(
            stack, rows, by_row=True, planner="manual/data_parallel", **two
        ),
        "sbp, by row, ZeRO-3, 2 ranks": planned(
            stack, rows, by_row=True, planner="manual/zero", pins=_LOOKED_UP_IN_PLACE, **two
        ),
    }
    if dense:
        found["PyTorch, dense"] = (eager(rows, sparse=False), 0.0)
        found["sbp, all rows, 1 rank"] = planned(stack, rows, by_row=False, mesh=1)
    return found


def main(rounds: int = 30, *, dense: bool = False, uniform: bool = False) -> None:
    """Run all ways in turns and print their medians."""
    with ExitStack() as stack:
        sizes = {rows: ways(stack, rows, dense=dense) for rows in ROWS}
        times: dict[tuple[str, int], list[float]] = {}
        losses: dict[int, dict[str, list[float]]] = {rows: {} for rows in ROWS}
        # A few batches again and again: else a step touches pages of memory for the first time,
        # which takes the longer, the larger the table.
        for index in range(rounds + 2 * NUM_BATCHES):
            for rows, steps in sizes.items():
                batch = batch_of(rows, index % NUM_BATCHES, uniform=uniform)
                for name, (step, _) in steps.items():
                    begin = time.perf_counter()
                    loss = step(batch)
                    took = time.perf_counter() - begin
                    losses[rows].setdefault(name, []).append(loss)
                    if index >= 2 * NUM_BATCHES:
                        times.setdefault((name, rows), []).append(took)
        for name in sizes[ROWS[0]]:
            medians = [statistics.median(times[name, rows]) for rows in ROWS]
            predicted = [sizes[rows][name][1] for rows in ROWS]
            shown = "  ".join(f"{format_seconds(one):>9}" for one in medians)
            told = "  ".join(format_seconds(one) for one in predicted) if all(predicted) else "-"
            print(f"{name:<32} {shown}   x {medians[-1] / medians[0]:.2f}   predicted {told}")
    for rows, by_way in losses.items():
        first, *others = by_way.values()
        worst = max(abs(a - b) for other in others for a, b in zip(first, other, strict=True))
        print(f"{rows:>9,} rows: largest difference of a loss to PyTorch {worst:.2e}")


if __name__ == "__main__":
    given = [one for one in sys.argv[1:] if not one.startswith("--")]
    main(*map(int, given), dense="--dense" in sys.argv, uniform="--uniform" in sys.argv)

"""The program of `test_parallelize_survivors`: rank 1 of two ends, and rank 0 saves if it can.

It takes a folder and a planner; and `agent` if the agent of torchrun ends instead of rank 1.
"""

from __future__ import annotations

import os
import signal
import sys
import time

import torch
from torch import nn

from sbp_core.errors import SbpError
from sbp_launch import parallelize


def squares(model: nn.Module, given: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return a loss."""
    loss: torch.Tensor = model(given["x"]).square().sum()
    return loss


def main() -> None:
    """Take three steps, of which rank 1 begins two."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # by which a launcher ends those that are left
    folder, planner, *agent = sys.argv[1:]
    torch.manual_seed(0)
    model = nn.Linear(64, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    given = {"x": torch.ones(2, 64)}
    with parallelize(model, squares, given, optimizer, planner=planner) as step:
        try:
            for index in range(3):
                if index == 2 and step.world.rank == 1:
                    if not agent:
                        os._exit(3)
                    os.kill(os.getppid(), signal.SIGKILL)
                if index == 2 and agent:
                    time.sleep(2.0)  # until all know
                step(given)
        except SbpError:
            try:
                step.save(folder)
                print(f"saved behind step {step.steps_done}", flush=True)
            except SbpError as error:
                print(f"not saved: {error.what}", flush=True)
            raise


if __name__ == "__main__":
    main()

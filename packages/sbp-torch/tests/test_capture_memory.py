"""What a model makes of no input, such as masks, is captured without being computed."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest
import torch
from torch import Tensor, nn

from sbp_torch.graph_capture import capture

#: A model with masks of batch x time x time in both of its layers; prints by how many MB the peak
#: of the process grows while it is captured. Each mask of booleans has 67 MB, each bias 268 MB.
_PROGRAM = textwrap.dedent("""
    import resource
    import torch
    from torch import nn
    from sbp_torch.graph_capture import capture

    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

        def forward(self, x):
            batch, time, _ = x.shape
            place = torch.arange(time)
            for layer in self.layers:
                mask = (place[None, :] <= place[:, None]).expand(batch, time, time)
                bias = torch.zeros(batch, time, time).masked_fill(~mask, -1e9)
                y = layer(x)
                x = x + (y @ y.transpose(1, 2) + bias).softmax(-1) @ y
            return x

    def peak():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3

    model, batch = Masked(), {"x": torch.zeros(16, 2048, 8)}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = peak()
    capture(model, lambda model, batch: model(batch["x"]).pow(2).mean(), batch, optimizer)
    print(peak() - before)
""")


@pytest.mark.slow
def test_masks_of_batch_by_time_by_time_are_captured_in_little_memory() -> None:
    printed = subprocess.run(
        [sys.executable, "-c", _PROGRAM], check=True, capture_output=True, text=True
    ).stdout

    assert float(printed) < 150


class _Ranged(nn.Module):
    """Adds a tensor that is made of no input and has more bytes than stay real, and reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        big = torch.arange(2**18).view(512, 512).tril()
        big[0] = 1  # written to after it was made
        small = torch.arange(4)
        steps = [float(one) for one in small.numpy()]  # a small one can be looked at
        return self.scale * (x + big[: len(steps)].sum())


def test_large_constants_are_nodes_of_the_graph_and_small_ones_can_be_looked_at() -> None:
    model = _Ranged()

    graph = capture(model, lambda model, batch: model(batch["x"]), {"x": torch.ones(())})

    kinds = {node.kind for node in graph.nodes}
    assert {"arange", "tril"} <= kinds

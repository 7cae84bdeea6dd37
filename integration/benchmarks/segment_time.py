"""Time segments that run operator by operator, and segments that Inductor has compiled.

    python integration/benchmarks/segment_time.py [layers] [width] [steps]

Trains a GPT of the zoo's shape on one rank with the actor runtime, alternating `compile=eager` and
`compile=inductor`. Prints the median time of a step of each, their ratio, and the time of the first
step, in which everything is compiled. Inductor has its own cache of compiled code: set
TORCHINDUCTOR_CACHE_DIR to an empty folder to measure compilation itself.
"""

from __future__ import annotations

import statistics
import sys
import time

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - everybody's name for it

from sbp_actor_runtime import ActorConfig, ActorRuntime
from sbp_aten.passes import prepare_step
from sbp_core.compile import compile_plan
from sbp_core.infer import infer_strategy
from sbp_core.placement import Placement
from sbp_core.planning import PlanRequest
from sbp_core.units import format_seconds
from sbp_torch.boxing import LocalBackend
from sbp_torch.graph_capture import capture, initial_states
from sbp_torch.testing.programs import small_cluster

BATCH, TIME = 4, 64


class StepBlock(nn.Module):
    """Attention and a multilayer perceptron."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.norm1(x)).view(*x.shape[:2], 4, -1).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(*heads.chunk(3, -1), is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(x.shape))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.mse_loss(model(batch["x"]), batch["y"])


def main() -> None:
    given = [int(argument) for argument in sys.argv[1:]]
    layers, width, steps = given + [2, 128, 30][len(given) :]
    torch.set_num_threads(1)
    model = nn.Sequential(*[StepBlock(width) for _ in range(layers)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batch = {name: torch.randn(BATCH, TIME, width) for name in "xy"}
    graph = prepare_step(capture(model, loss, batch, optimizer))
    request = PlanRequest(
        graph=graph, mesh=Placement.grid((1,), ("data",)), cluster=small_cluster(1)
    )
    plan = compile_plan(graph, infer_strategy(request, planner="benchmark"))
    states = initial_states(model, optimizer)
    sessions, times = {}, {"eager": [], "inductor": []}
    for way in times:
        config = ActorConfig(compile=way, first_deadline_s=1800.0)
        sessions[way] = ActorRuntime(config).start(plan, states, LocalBackend())
        began = time.perf_counter()
        sessions[way].step(batch, {"lr": 1e-3})
        print(f"first step, {way}: {format_seconds(time.perf_counter() - began)}", flush=True)
    for turn in range(steps):
        for way, session in sessions.items():
            began = time.perf_counter()
            session.step(batch, {"lr": 1e-3 / (turn + 2)})
            times[way].append(time.perf_counter() - began)
    median = {way: statistics.median(seen) for way, seen in times.items()}
    for way, took_s in median.items():
        print(f"median step, {way}: {format_seconds(took_s)}")
    print(f"inductor / eager: {median['inductor'] / median['eager']:.2f}")
    for session in sessions.values():
        session.close()


if __name__ == "__main__":
    main()

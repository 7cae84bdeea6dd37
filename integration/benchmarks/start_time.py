"""Time the start of a small GPT on two processes over gloo, up to its first step, against DDP.

    python integration/benchmarks/start_time.py [--rounds 5] [--ways WAY ...] [--profile FILE]

In each round, every way starts two processes with one thread each. The output shows the processor
seconds of rank 0 by part, for the round with the least sum: unlike wall time, they do not depend on
other load of the machine. With --profile, rank 0 of the single given way writes a cProfile that
begins with the first call into sbp.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

#: Ways to start -> the planner of `parallelize`; None for DistributedDataParallel.
WAYS: Mapping[str, str | None] = {
    "ddp": None,
    "data_parallel": "manual/data_parallel",
    "propagate": "propagate",
}

VOCABULARY, CONTEXT, NUM_LAYERS, NUM_HEADS, HIDDEN = 8192, 128, 4, 4, 256


class _Marks:
    """The processor seconds of this process, by the part that ended."""

    def __init__(self) -> None:
        self._last = 0.0
        self.parts: dict[str, float] = {}

    def end(self, part: str) -> None:
        now = time.process_time()
        self.parts[part] = now - self._last
        self._last = now


def _gpt() -> Any:
    """Return a plain GPT of 7.4 million parameters."""
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm1, self.norm2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
            self.qkv, self.proj = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
            self.mlp = nn.Sequential(
                nn.Linear(HIDDEN, 4 * HIDDEN), nn.GELU(), nn.Linear(4 * HIDDEN, HIDDEN)
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            batch, time, _ = x.shape
            heads = self.qkv(self.norm1(x)).view(batch, time, 3, NUM_HEADS, -1).unbind(2)
            q, k, v = (part.transpose(1, 2) for part in heads)
            made = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.proj(made.transpose(1, 2).reshape(x.shape))
            out: torch.Tensor = x + self.mlp(self.norm2(x))
            return out

    class Gpt(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens = nn.Embedding(VOCABULARY, HIDDEN)
            self.positions = nn.Embedding(CONTEXT, HIDDEN)
            self.blocks = nn.Sequential(*(Block() for _ in range(NUM_LAYERS)))
            self.norm, self.head = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, VOCABULARY)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
            out: torch.Tensor = self.head(self.norm(self.blocks(x)))
            return out

    return Gpt()


def _loss(model: Any, batch: Mapping[str, Any]) -> Any:
    import torch

    logits = model(batch["tokens"]).flatten(0, 1)
    return torch.nn.functional.cross_entropy(logits, batch["targets"].flatten())


def _run_rank(way: str, profile: cProfile.Profile | None) -> dict[str, float]:
    """Start training in this process; return the processor seconds of each part."""
    marks = _Marks()
    marks.end("python")
    import torch

    torch.set_num_threads(1)
    marks.end("import torch")
    if WAYS[way] is not None:
        from sbp_launch import parallelize
    marks.end("imports")
    torch.manual_seed(0)
    model = _gpt()
    tokens = torch.randint(VOCABULARY, (8, CONTEXT + 1))
    batch = {"tokens": tokens[:, :-1].clone(), "targets": tokens[:, 1:].clone()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    marks.end("model, optimizer")
    if WAYS[way] is None:
        step = _ddp_step(model, batch, optimizer)
        marks.end("wrap")
    else:
        if profile:
            profile.enable()
        made = parallelize(model, _loss, batch, optimizer, planner=WAYS[way])
        marks.end("wrap")
        made.start()
        marks.end("start")

        def step() -> Any:
            return made(batch).loss

    float(step())
    if profile:
        profile.disable()
    marks.end("first step")
    float(step())
    marks.end("second step")
    return marks.parts


def _ddp_step(model: Any, batch: Mapping[str, Any], optimizer: Any) -> Any:
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, batch: Mapping[str, Any]) -> Any:
            return _loss(self.model, batch)

    dist.init_process_group("gloo", init_method="env://")
    own = {
        name: value.chunk(dist.get_world_size())[dist.get_rank()] for name, value in batch.items()
    }
    wrapped = DistributedDataParallel(Loss())

    def step() -> Any:
        optimizer.zero_grad()
        loss = wrapped(own)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def _start(way: str, profile: str) -> dict[str, float]:
    """Start both processes as torchrun would; return what rank 0 measured."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = []
    for rank in range(2):
        environment = {
            **os.environ,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "GROUP_RANK": "0",
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2",
            "TORCHELASTIC_RUN_ID": "start_time",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "OMP_NUM_THREADS": "1",
        }
        command = [
            sys.executable,
            __file__,
            "--rank",
            way,
            "--profile",
            profile if rank == 0 else "",
        ]
        ranks.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
    answers = [rank.communicate()[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        sys.exit(f"{way} failed")
    found: dict[str, float] = json.loads(answers[0])
    return found


def _sum(parts: Mapping[str, float]) -> float:
    """Return the processor seconds up to the first step's end."""
    return sum(value for part, value in parts.items() if part != "second step")


def main() -> None:
    """Print a line for each way."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ways", choices=WAYS, nargs="+", default=list(WAYS))
    parser.add_argument("--profile", default="")
    parser.add_argument("--rank", choices=WAYS, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.rank:
        profile = cProfile.Profile() if chosen.profile else None
        print(json.dumps(_run_rank(chosen.rank, profile)), flush=True)
        if profile:
            profile.dump_stats(chosen.profile)
        os._exit(0)  # the ranks exit without a shutdown of their process group
    rounds: dict[str, list[dict[str, float]]] = {way: [] for way in chosen.ways}
    for _ in range(chosen.rounds):
        for way, found in rounds.items():
            found.append(_start(way, chosen.profile))
    for way, found in rounds.items():
        best = min(found, key=_sum)
        parts = ", ".join(f"{part} {value:.2f}" for part, value in best.items())
        median = statistics.median(map(_sum, found))
        print(f"{way:14} {_sum(best):5.2f} s (median {median:.2f}) = {parts}", flush=True)


if __name__ == "__main__":
    main()

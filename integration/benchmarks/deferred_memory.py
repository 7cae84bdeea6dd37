"""Measure memory and time of a start, for a deferred model and for a model built as a whole.

    python integration/benchmarks/deferred_memory.py [--layers 8] [--ranks 4] [--local]

A GPT of 12.6 million parameters per layer (float32, 50 MB) is built, captured with AdamW, and
planned with every state sharded over the ranks. Then its states are made and cut: for rank 0, as in
one process of several, or with `--local` for all ranks, as in one process with threads. Each way
runs in a new process. Memory is the peak of the resident set minus that of the imports; time is
processor time.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

WAYS = ("deferred", "whole")


def main() -> None:
    """Print a line for each way, or run the way that is given."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--layers", type=int, default=8, help="transformer blocks")
    parser.add_argument("--ranks", type=int, default=4, help="ranks that share the states")
    parser.add_argument("--local", action="store_true", help="all ranks live in this process")
    parser.add_argument("--way", choices=WAYS, help="run this way here, instead of each in turn")
    options = parser.parse_args()
    if options.way:
        start(options)
        return
    print(f"{'':10} peak MB  after  build s  capture s  states s")
    for way in WAYS:
        subprocess.run([sys.executable, *sys.argv, "--way", way], check=True)


def start(options: argparse.Namespace) -> None:
    """Start until the first step could be taken, and print memory and time."""
    import torch
    from torch import Tensor, nn

    from sbp_aten.passes import prepare_step
    from sbp_core.compile import compile_plan
    from sbp_core.infer import infer_strategy
    from sbp_core.placement import Placement
    from sbp_core.planning import PlanRequest
    from sbp_core.plugins import discover
    from sbp_torch.deferred_init import deferred
    from sbp_torch.graph_capture import capture
    from sbp_torch.runtime import StateStore
    from sbp_torch.testing.programs import small_cluster

    torch.set_num_threads(1)
    plugins = discover()
    settings = {"hidden": 1024, "num_heads": 8, "num_layers": options.layers, "context": 64}
    imported, clock = _resident_bytes(), [time.process_time()]

    def build() -> nn.Module:
        model: nn.Module = plugins.make("model", "gpt", settings)
        return model

    made = deferred(build, 0, whole=options.way == "whole")
    clock.append(time.process_time())
    optimizer = torch.optim.AdamW(made.model.parameters(), lr=1e-3)
    batch = {name: torch.zeros(1, 64, dtype=torch.int64) for name in ("tokens", "targets")}

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        found: Tensor = model.loss(batch)  # type: ignore[operator]
        return found

    graph = prepare_step(capture(made.model, loss, batch, optimizer))
    clock.append(time.process_time())
    mesh = Placement.grid((options.ranks,), ("data",))
    request = PlanRequest(graph=graph, mesh=mesh, cluster=small_cluster(options.ranks))
    pins = {"batch": "B", "parameters": "S(0)", "optimizer_states": "S(0)"}
    plan = compile_plan(graph, infer_strategy(request, planner="benchmark", pins=pins))
    planned = time.process_time()
    store = StateStore(plan, range(options.ranks) if options.local else [0])
    store.load(made.states(optimizer))
    clock.append(time.process_time() - planned + clock[-1])

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - imported
    after = _resident_bytes() - imported
    took = [late - early for early, late in pairwise(clock)]
    print(f"{options.way:10} {peak / 1e6:7.0f} {after / 1e6:6.0f}", end="")
    print(f" {took[0]:8.2f} {took[1]:10.2f} {took[2]:9.2f}")


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text("ascii").split()[1])
    return pages * resource.getpagesize()


if __name__ == "__main__":
    main()

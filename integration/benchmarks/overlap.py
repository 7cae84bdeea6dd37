"""How far a data-parallel step hides its communication: two processes over a slowed link.

    python integration/benchmarks/overlap.py [ROUNDS] [--model gpt|dlrm|...]

The link is gloo's, and takes α + β·bytes longer (`delayed_link`); β is chosen so that computing
takes about 4, 2 and 1 times as long as all delays of a step. `compute` is the step on one device
with a rank's part of the batch, in both processes at once; `no delay` is the data-parallel step
over gloo as it is, so it has what gloo itself takes of the two cores. All take turns, so that what
else runs slows all of them. Prints the median step, its ratio to max(compute, communication), which
is to be at most 1.10, and to max(no delay, communication). Nothing is asserted.
"""

from __future__ import annotations

import argparse
import sys
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

# What makes models and processes is of `integration`, and of the comparison with peers.
sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent / "peers"))

import torch
from delayed_link import DelayedBackend
from matrix import Ours
from programs import LEARNING_RATE, MODELS, model_loss
from sbp_ways import machine, make_planner

from processes import run_ranks
from sbp_core import Placement
from sbp_core.boxing import BoxingBackend
from sbp_core.plugins import discover
from sbp_launch.compile_config import CompileConfig
from sbp_launch.planning import PlanSettings, capture_training, compiled
from sbp_torch.graph_capture import initial_states

RATIOS = (4, 2, 1)
LATENCY_S = 2e-4
WARM_UP_STEPS = 3


def start(
    name: str, num_ranks: int, overlap: bool, backend: BoxingBackend, stack: ExitStack
) -> Any:
    """Return a session of a model's data-parallel step."""
    registry: Any = discover(strict=True)
    model, ours = MODELS[name], Ours(preset="manual/data_parallel", boxing="torch")
    program = model.program(registry)
    optimizer = model.make_optimizer(program.parameters())
    settings = PlanSettings(
        mesh=Placement.grid((num_ranks,), ("data",)),
        cluster=machine("torch", num_ranks),
        compile=CompileConfig(overlap=overlap),
    )
    planner = make_planner(registry, ours)
    batch = _batch(name, num_ranks)
    captured = capture_training(program, model_loss, batch, optimizer, settings)
    graph, strategy = captured.planned(lambda graph: planner.plan(settings.request(graph)))
    plan = compiled(graph, strategy, settings).plan
    runtime = registry.make("runtime", "actor", {})
    return stack.enter_context(runtime.start(plan, initial_states(program, optimizer), backend))


def work(
    rank: int, backend: BoxingBackend, *, name: str, rounds: int, overlap: bool, compute_s: float
) -> list[tuple[float, float]]:
    """Time the steps of one process in turns: alone, without delay, and at each ratio.

    Args:
        compute_s: What delays are chosen by, the same in all processes.

    Returns:
        For each of these, the median seconds of a step, and those of all delays in it.
    """
    torch.set_num_threads(1)
    delayed, scalars = DelayedBackend(backend), {"lr": LEARNING_RATE}
    with ExitStack() as stack:
        alone = start(name, 1, False, discover(strict=True).make("boxing", "local"), stack)
        session = start(name, 2, overlap, delayed, stack)
        link = delayed.delayed[rank]
        session.step(_batch(name, 2), scalars)
        calls, moved_bytes = link.num_calls, link.moved_bytes
        links = [(0.0, 0.0), (0.0, 0.0)]
        for ratio in RATIOS:
            of_bytes_s = max(0.0, compute_s / ratio - calls * LATENCY_S)
            links.append((LATENCY_S, of_bytes_s / moved_bytes))
        found: list[list[float]] = [[] for _ in links]
        for _ in range(WARM_UP_STEPS + rounds):
            for index, (link.latency_s, link.s_per_byte) in enumerate(links):
                session_, ranks = (session, 2) if index else (alone, 1)
                batch = _batch(name, ranks)
                began = time.perf_counter()
                session_.step(batch, scalars)
                found[index].append(time.perf_counter() - began)
        delays = [latency_s * calls + s_per_byte * moved_bytes for latency_s, s_per_byte in links]
        return [
            (median(times[WARM_UP_STEPS:]), delay_s)
            for times, delay_s in zip(found, delays, strict=True)
        ]


def _batch(name: str, num_ranks: int) -> dict[str, Any]:
    whole = MODELS[name].batch_of(0)
    return {key: value[: len(value) * num_ranks // 2] for key, value in whole.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rounds", type=int, nargs="?", default=15, help="steps of each, >= 1")
    parser.add_argument("--model", choices=MODELS, default="gpt")
    options = parser.parse_args()
    given = {"name": options.model, "rounds": options.rounds}
    first = run_ranks(2, partial(work, **given, overlap=False, compute_s=0.0))
    guess_s = max(one[0][0] for one in first)
    for overlap in (False, True):
        ranks = run_ranks(2, partial(work, **given, overlap=overlap, compute_s=guess_s))
        (compute_s, _), (plain_s, _), *delayed = (max(both) for both in zip(*ranks, strict=True))
        print(
            f"{options.model}, overlap={overlap}: compute {compute_s * 1e3:.0f} ms, "
            f"no delay {plain_s * 1e3:.0f} ms"
        )
        for ratio, (step_s, link_s) in zip(RATIOS, delayed, strict=True):
            print(
                f"  {ratio}:1  communication {link_s * 1e3:4.0f} ms  step {step_s * 1e3:4.0f} ms  "
                f"{step_s / max(compute_s, link_s):.2f} of max(compute, communication)  "
                f"{step_s / max(plain_s, link_s):.2f} of max(no delay, communication)",
                flush=True,
            )


if __name__ == "__main__":
    main()

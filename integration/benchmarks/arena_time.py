"""Time a GPT training step: eager PyTorch, generated code, and generated code that writes an arena.

`nox -s benchmarks` or `python integration/benchmarks/arena_time.py [ROUNDS] [BATCH_SIZE ...]`. One
rank, one thread; the ways take turns. Prints the median of each way and its ratio to eager PyTorch,
in seconds that passed and in seconds that cores computed (which other programs disturb less), and
the page faults of a step: memory that the system had to hand out (and zero) anew. The largest batch
is measured twice: as the C library comes, and told by environment variables to keep what was freed.
Nothing is asserted: machines differ.
"""

from __future__ import annotations

import gc
import os
import resource
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack
from typing import Any

import torch
from step_time import LEARNING_RATE, Step, eager_step, make_program, model_loss

from sbp_aten.passes import prepare_step
from sbp_core import Cluster, Device, Link, Placement, PlanRequest, check, compile_plan
from sbp_core.infer import infer_strategy
from sbp_core.memory.arena import lay_out
from sbp_core.memory.report import arena_line
from sbp_core.plugins import discover
from sbp_core.units import format_bytes, format_seconds
from sbp_torch.capture import capture, initial_states
from sbp_torch.memory import predict

#: The last so large that activations are beyond the 32 MB up to which glibc keeps what was freed.
BATCH_SIZES = (1, 4, 16, 80)

#: Tell glibc to keep blocks of up to gigabytes, instead of giving them back to the system.
KEEPING = {"MALLOC_MMAP_THRESHOLD_": str(2**32), "MALLOC_TRIM_THRESHOLD_": str(2**36)}


def machine() -> Cluster:
    device = Device(memory_bytes=2**32, flop_per_s={"float32": 1e11}, memory_bytes_per_s=1e10)
    return Cluster(
        name="declared",
        num_devices=1,
        devices_per_node=1,
        device=device,
        intra_node=Link(latency_s=2e-5, bytes_per_s=5e9),
    )


def sbp_steps(registry: Any, data: Any, batch_size: int, stack: ExitStack) -> dict[str, Step]:
    model, optimizer = make_program(registry)
    graph = prepare_step(capture(model, model_loss, data.batch(0, batch_size), optimizer))
    mesh = Placement.grid((1,), ("data",))
    request = PlanRequest(graph=graph, mesh=mesh, cluster=machine())
    plan = compile_plan(graph, infer_strategy(request, planner="benchmark"))
    check(plan)
    plan = lay_out(plan, reads_at_once=True)
    print(f"  {predict(plan).lines()[2].strip()}")
    print(f"  {arena_line(plan.arenas)}")
    steps: dict[str, Step] = {}
    for name, arena in (("generated", False), ("generated, arena", True)):
        runtime = registry.make("runtime", "actor", {"arena": arena})
        backend = registry.make("boxing", "local", {})
        states = initial_states(model, optimizer)
        session = stack.enter_context(runtime.start(plan, states, backend))
        steps[name] = lambda batch, session=session: session.step(batch, {"lr": LEARNING_RATE})
    return steps


def measure(rounds: int, batch_size: int) -> None:
    registry: Any = discover(strict=True)
    data = registry.make("data", "stdlib", {})
    torch.set_num_threads(1)
    with ExitStack() as stack:
        steps: dict[str, Step] = {"eager": eager_step(registry)}
        steps |= sbp_steps(registry, data, batch_size, stack)
        times: dict[str, list[float]] = {name: [] for name in steps}
        cores: dict[str, list[float]] = {name: [] for name in steps}
        faults: dict[str, list[int]] = {name: [] for name in steps}
        gc.collect()
        gc.freeze()
        for index in range(rounds + 1):
            batch = data.batch(index, batch_size)
            for name, step in steps.items():
                faults_before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
                began, busy = time.perf_counter(), time.process_time()
                step(batch)
                took_s, busy_s = time.perf_counter() - began, time.process_time() - busy
                found = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults_before
                if index:  # the first round warms up
                    times[name].append(took_s)
                    cores[name].append(busy_s)
                    faults[name].append(found)
    page = resource.getpagesize()
    print(
        f"  {'way':17} {'median':>8} {'ratio':>5} {'computed':>9} {'ratio':>5} {'faults':>7} fresh"
    )
    for name in steps:
        passed, busy = statistics.median(times[name]), statistics.median(cores[name])
        many = statistics.median(faults[name])
        print(
            f"  {name:17} {format_seconds(passed):>8} "
            f"{passed / statistics.median(times['eager']):5.2f} {format_seconds(busy):>9} "
            f"{busy / statistics.median(cores['eager']):5.2f} {many:7.0f} "
            f"{format_bytes(many * page)}",
            flush=True,
        )


def main() -> None:
    rounds, *chosen = [int(text) for text in sys.argv[1:] if text != "--measure"] or [9]
    batch_sizes = chosen or BATCH_SIZES
    if "--measure" in sys.argv:
        measure(rounds, *batch_sizes)
        return
    comes: tuple[str, dict[str, str]] = ("as the C library comes", {})
    cases = [(size, comes) for size in batch_sizes]
    for size, (title, settings) in [*cases, (batch_sizes[-1], ("told to keep memory", KEEPING))]:
        print(f"batch of {size}, {title}", flush=True)
        command = [sys.executable, __file__, str(rounds), str(size), "--measure"]
        subprocess.run(command, env={**os.environ, **settings}, check=True)


if __name__ == "__main__":
    main()

"""Time a training step of the default GPT: plain eager PyTorch against sbp, in one interleaved run.

`nox -s benchmarks` or `python integration/benchmarks/step_time.py [ROUNDS]`. Prints the median of
each way and its ratio to eager PyTorch with one thread per core. Nothing is asserted, because
machines differ.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from importlib.resources import files
from typing import Any

import numpy as np
import torch
import yaml
from torch import Tensor, nn

from sbp_aten.passes import prepare_step
from sbp_core import Cluster, Device, Link, Placement, PlanRequest, check, compile_plan
from sbp_core.plugins import discover
from sbp_core.units import format_bytes, format_seconds
from sbp_torch.graph_capture import capture, initial_states

BATCH_SIZE, LEARNING_RATE = 16, 3e-4
WAYS = (
    ("manual/data_parallel", (2,), ("data",), 1),
    ("manual/data_parallel", (4,), ("data",), 1),
    ("manual/tensor_parallel", (2,), ("tensor",), 1),
    ("manual/data_tensor", (2, 2), ("data", "tensor"), 1),
    ("manual/zero", (2,), ("data",), 1),
    ("manual/pipeline", (2,), ("pipe",), 4),
)

Step = Callable[[dict[str, Tensor]], object]


def model_loss(model: nn.Module, batch: dict[str, Tensor]) -> Any:
    return model.loss(batch)  # type: ignore[operator] # a method of the zoo's models


def make_program(registry: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = registry.make("model", "gpt", {})
    return model, torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, foreach=False)


def eager_step(registry: Any) -> Step:
    model, optimizer = make_program(registry)

    def step(batch: dict[str, Tensor]) -> None:
        optimizer.zero_grad()
        model_loss(model, batch).backward()
        optimizer.step()

    return step


def machine(num_devices: int) -> Cluster:
    device = Device(memory_bytes=2**32, flop_per_s={"float32": 1e11}, memory_bytes_per_s=1e10)
    return Cluster(
        name="declared",
        num_devices=num_devices,
        devices_per_node=num_devices,
        device=device,
        intra_node=Link(latency_s=2e-5, bytes_per_s=5e9),
    )


def preset_planner(registry: Any, preset: str) -> Any:
    """Return the planner of one of sbp-planner's configs, such as `manual/zero`."""
    text = files("sbp_planner").joinpath(f"conf/planner/{preset}.yaml").read_text("utf-8")
    settings = yaml.safe_load(text)
    return registry.make("planner", settings.pop("name"), settings)


def sbp_step(registry: Any, way: tuple[Any, ...], data: Any, stack: ExitStack) -> tuple[Step, int]:
    preset, mesh_shape, axes, micro_batches = way
    model, optimizer = make_program(registry)
    micro = data.samples(np.arange(BATCH_SIZE // micro_batches))
    graph = prepare_step(capture(model, model_loss, micro, optimizer), micro_batches)
    planner = preset_planner(registry, preset)
    mesh = Placement.grid(mesh_shape, axes)
    strategy = planner.plan(PlanRequest(graph=graph, mesh=mesh, cluster=machine(mesh.size)))
    plan = compile_plan(graph, strategy)
    check(plan)
    runtime = registry.make("runtime", "actor", {})
    backend = registry.make("boxing", "local", {})
    session = stack.enter_context(runtime.start(plan, initial_states(model, optimizer), backend))
    return lambda batch: session.step(batch, {"lr": LEARNING_RATE}), plan.boxing_bytes


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 7
    registry: Any = discover(strict=True)
    data = registry.make("data", "stdlib", {})
    torch.set_num_threads(os.cpu_count() or 1)
    with ExitStack() as stack:
        steps: dict[str, Step] = {f"eager, {torch.get_num_threads()} threads": eager_step(registry)}
        moved: dict[str, int] = {}
        for way in WAYS:
            mesh = "x".join(map(str, way[1]))
            name = f"{way[0]}, {mesh} ranks"
            steps[name], moved[name] = sbp_step(registry, way, data, stack)
        times: dict[str, list[float]] = {name: [] for name in steps}
        for index in range(rounds + 1):
            for name, step in steps.items():
                batch = data.samples(index * BATCH_SIZE + np.arange(BATCH_SIZE))
                began = time.perf_counter()
                step(batch)
                if index:  # the first round warms up
                    times[name].append(time.perf_counter() - began)
    base = statistics.median(next(iter(times.values())))
    print(f"{'way':36} {'median':>9} {'fastest':>9} {'ratio':>6} {'bytes/step':>11}")
    for name, found in times.items():
        median = statistics.median(found)
        fast, size = format_seconds(min(found)), format_bytes(moved.get(name, 0))
        print(f"{name:36} {format_seconds(median):>9} {fast:>9} {median / base:6.2f} {size:>11}")


if __name__ == "__main__":
    main()

"""Time and memory of planning, compiling and checking a transformer for 4 to 4,096 ranks.

    python integration/benchmarks/thousand_ranks.py [--ranks 4 16 64 256 1024] [--layers 24]
        [--kind 3d|data|tensor|zero] [--types] [--overlap] [--profile compile|check|...]

`3d` is GPT-3's layout: pipeline stages of tensor groups, replicated over `data`; the other kinds
put all ranks on one mesh axis. Layers are repeated and their width is small, because the time
depends on the number of calls. Every size runs in its own process, so the peak of memory is its
own, including libraries and the captured graph. Times are CPU time of this process. Below the table
are the exponents of growth from the previous size: 1 is constant work for each rank.
"""

from __future__ import annotations

import argparse
import cProfile
import math
import multiprocessing
import pstats
import resource
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
import transformers
from torch import Tensor, nn

from sbp_aten.passes import prepare_step
from sbp_core.compile import PLAN, CompileOptions, PhysicalPlan, compile_plan
from sbp_core.graph import LogicalGraph
from sbp_core.infer import PinValue, infer_strategy
from sbp_core.placement import Placement
from sbp_core.plan_check import check
from sbp_core.planning import PlanRequest
from sbp_core.simulation import simulate
from sbp_torch.graph_capture import capture
from sbp_torch.testing.programs import small_cluster
from sbp_torch.update_options import UpdateOptions

_R = TypeVar("_R")

_COLUMNS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
_ROWS = ("o_proj", "down_proj")

_BATCH: Mapping[str, PinValue] = {"batch": {"data": "S(0)"}}
_TENSOR: Mapping[str, PinValue] = {
    **{f"*.{name}.weight": {"tensor": "S(0)"} for name in _COLUMNS},
    **{f"*.{name}.weight": {"tensor": "S(1)"} for name in _ROWS},
}
_PINS: Mapping[str, Mapping[str, PinValue]] = {
    "3d": {"batch": {"data": "S(0)", "tensor": "B"}, "parameters": {"data": "B"}, **_TENSOR},
    "data": {"batch": "S(0)", "parameters": "B"},
    "tensor": {"batch": "B", **_TENSOR},
    "zero": {"batch": "S(0)", "parameters": "S(0)", "optimizer_states": "S(0)"},
}


def mesh_of(kind: str, num_ranks: int) -> Placement:
    """Return the mesh of a kind: for 3d, 8 stages, tensor groups of 8, and the rest for data."""
    if kind != "3d":
        return Placement.grid((num_ranks,), ("tensor" if kind == "tensor" else "data",))
    tensor = min(8, num_ranks // 2)
    pipe = min(8, num_ranks // tensor)
    return Placement.grid((pipe, num_ranks // pipe // tensor, tensor), ("pipe", "data", "tensor"))


def _loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    loss: Tensor = model(**batch).loss
    return loss


def captured(num_layers: int, mesh: Placement) -> LogicalGraph:
    """Return the step of a model whose dims the mesh divides."""
    sizes = dict(zip(mesh.axes, mesh.mesh_shape, strict=True))
    # A head, and a slice of each matrix, for every rank of a tensor group.
    parts = max(8, sizes.get("tensor", 1))
    width = 4 * max(parts, sizes.get("data", 1) // 4)
    config = transformers.LlamaConfig(
        vocab_size=width,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=num_layers,
        num_attention_heads=parts,
        num_key_value_heads=parts,
        max_position_embeddings=16,
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    tokens = torch.zeros((max(4, sizes.get("data", 1)), 16), dtype=torch.int64)
    batch = {"input_ids": tokens, "labels": tokens.clone()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return capture(model, _loss, batch, optimizer, update=UpdateOptions(fused=True))


class _Clock:
    """Runs parts, and records their CPU seconds in this process."""

    def __init__(self, profiled: str) -> None:
        self.profiled = profiled
        self.times_s: dict[str, float] = {}

    def run(self, part: str, call: Callable[..., _R], *args: Any, **kwargs: Any) -> _R:
        profile = cProfile.Profile() if self.profiled == part else None
        start = time.process_time()
        made = profile.runcall(call, *args, **kwargs) if profile else call(*args, **kwargs)
        self.times_s[part] = time.process_time() - start
        if profile:
            pstats.Stats(profile).sort_stats("tottime").print_stats(25)
        return made


def measured(num_ranks: int, chosen: argparse.Namespace) -> Mapping[str, float]:
    """Return the times of each part for a number of ranks, and sizes of results."""
    mesh, clock = mesh_of(chosen.kind, num_ranks), _Clock(chosen.profile)
    graph = clock.run("capture", lambda: prepare_step(captured(chosen.layers, mesh), 8))
    cluster = small_cluster(mesh.size)
    request = PlanRequest(graph=graph, mesh=mesh, cluster=cluster, pins={})
    strategy = clock.run(
        "plan", infer_strategy, request, planner="benchmark", pins=_PINS[chosen.kind]
    )
    options = CompileOptions(overlap=chosen.overlap, cluster=cluster)
    plan = clock.run("compile", compile_plan, graph, strategy, options)
    report = clock.run("check", check, plan, types=chosen.types)
    clock.run("simulate", simulate, plan)
    if chosen.period:
        clock.run("period", lambda: report.period_s)
    sizes = _files(clock, plan) if chosen.files else {}
    return {
        **clock.times_s,
        **sizes,
        "actors": sum(len(part.actors) for part in plan.ranks),
        "links": len(plan.links),
        "firings": report.num_firings,
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def _files(clock: _Clock, plan: PhysicalPlan) -> Mapping[str, float]:
    """Write a plan, read it and hash it; return the size of its file."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "plan.json")
        clock.run("save", PLAN.write, plan, path)
        clock.run("load", PLAN.read, path)
        clock.run("hash", lambda: plan.hash)
        return {"file_mib": path.stat().st_size / 2**20}


def main() -> None:
    """Print a line for each number of ranks, and the exponents of growth between them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 16, 64, 256, 1024])
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--kind", choices=_PINS, default="3d")
    parser.add_argument("--types", action="store_true")
    parser.add_argument("--overlap", action="store_true")
    parser.add_argument("--period", action="store_true", help="also the period of steps")
    parser.add_argument("--files", action="store_true", help="also write, read and hash the plan")
    parser.add_argument("--profile", default="")
    chosen = parser.parse_args()
    before: tuple[int, Mapping[str, float]] | None = None
    for num_ranks in chosen.ranks:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            found = pool.apply(measured, (num_ranks, chosen))
        if before is None:
            print("   ranks", *(f"{name:>8}" for name in found))
        print(f"{num_ranks:8}", *(_number(value) for value in found.values()), flush=True)
        if before is not None:
            print("  growth", *_exponents(before, (num_ranks, found)), flush=True)
        before = num_ranks, found


def _number(value: float) -> str:
    return f"{value:8.2f}" if value < 100 else f"{value:8.0f}"


def _exponents(
    before: tuple[int, Mapping[str, float]], after: tuple[int, Mapping[str, float]]
) -> list[str]:
    more = math.log(after[0] / before[0])
    return [
        f"{math.log(value / before[1][name]) / more:8.2f}" if before[1][name] else f"{'':8}"
        for name, value in after[1].items()
    ]


if __name__ == "__main__":
    main()

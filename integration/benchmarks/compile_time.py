"""Time compiling a Llama-like training step, by part, and starting it.

    python integration/benchmarks/compile_time.py [--layers 32] [--mesh data|tensor] [--profile]

The width is small, because the time depends only on the number of calls; AdamW, four ranks. The
update is one fused call per parameter, as in the trainer, or all operators of the optimizer with
--no-fused. The strategy is inferred from a few pins; this inference is timed separately.

Then the plan is started.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
import transformers
from torch import Tensor, nn

from sbp_aten.passes import prepare_step
from sbp_core.compile import CompileOptions, PhysicalPlan, bucket, form_plan, lower, order_firings
from sbp_core.graph import LogicalGraph
from sbp_core.infer import PinValue, infer_strategy
from sbp_core.placement import Placement
from sbp_core.plan_check import check
from sbp_core.planning import PlanRequest
from sbp_core.plugins import discover
from sbp_torch.graph_capture import capture, initial_states
from sbp_torch.testing.programs import small_cluster
from sbp_torch.update_options import UpdateOptions

_R = TypeVar("_R")

_COLUMNS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
_ROWS = ("o_proj", "down_proj")

MESHES: Mapping[str, tuple[Placement, Mapping[str, PinValue]]] = {
    "data": (Placement.grid((4,), ("data",)), {"batch": "S(0)", "parameters": "B"}),
    "tensor": (
        Placement.grid((2, 2), ("data", "tensor")),
        {
            "batch": {"data": "S(0)", "tensor": "B"},
            **{f"*.{name}.weight": {"tensor": "S(0)"} for name in _COLUMNS},
            **{f"*.{name}.weight": {"tensor": "S(1)"} for name in _ROWS},
        },
    ),
}


def _loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    loss: Tensor = model(**batch).loss
    return loss


def _program(num_layers: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    config = transformers.LlamaConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
    )
    model = transformers.LlamaForCausalLM(config)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def _batch() -> dict[str, Tensor]:
    tokens = torch.randint(0, 97, (4, 16))
    return {"input_ids": tokens, "labels": tokens.clone()}


def _capture(model: nn.Module, optimizer: torch.optim.Optimizer, *, is_fused: bool) -> LogicalGraph:
    batch = _batch()
    return capture(model, _loss, batch, optimizer, update=UpdateOptions(fused=is_fused))


class _Clock:
    """Runs parts and records their times."""

    def __init__(self, is_profiled: bool) -> None:
        self.is_profiled = is_profiled
        self.times_s: dict[str, float] = {}

    def run(self, part: str, call: Callable[..., _R], *args: Any, **kwargs: Any) -> _R:
        profile = cProfile.Profile() if self.is_profiled else None
        start = time.perf_counter()
        made = profile.runcall(call, *args, **kwargs) if profile else call(*args, **kwargs)
        self.times_s[part] = time.perf_counter() - start
        print(f"{part:10} {self.times_s[part]:7.2f} s", flush=True)
        if profile:
            pstats.Stats(profile).sort_stats("tottime").print_stats(12)
        return made


def _print_start(plan: PhysicalPlan, states: Mapping[str, Tensor]) -> None:
    """Start a plan; print the time of the start, and of the first step."""
    registry = discover(strict=True)
    runtime: Any = registry.make("runtime", "actor", {})
    backend: Any = registry.make("boxing", "local", {})
    torch.set_num_threads(1)
    begin, busy_from = time.perf_counter(), time.process_time()
    with runtime.start(plan, dict(states), backend) as session:
        started, busy_to = time.perf_counter(), time.process_time()
        session.step(_batch(), {"lr": 1e-3})
        stepped = time.perf_counter()
    print(
        f"start {started - begin:.2f} s ({busy_to - busy_from:.2f} s computed), "
        f"first step {stepped - started:.2f} s",
        flush=True,
    )


def main() -> None:
    """Print the times of each part, of all parts that a given strategy needs, and of a start."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--mesh", choices=MESHES, default="tensor")
    parser.add_argument("--fused", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--boxing-thread", action="store_true")
    parser.add_argument("--profile", action="store_true")
    chosen = parser.parse_args()
    mesh, pins = MESHES[chosen.mesh]
    clock = _Clock(chosen.profile)
    model, optimizer = _program(chosen.layers)
    graph = clock.run("capture", _capture, model, optimizer, is_fused=chosen.fused)
    num_captured = len(graph.nodes)
    graph = clock.run("prepare", prepare_step, graph)
    request = PlanRequest(graph=graph, mesh=mesh, cluster=small_cluster(mesh.size), pins={})
    strategy = clock.run("infer", infer_strategy, request, planner="benchmark", pins=pins)
    options = CompileOptions(boxing_thread=chosen.boxing_thread)
    lowered = clock.run("lower", lower, graph, strategy)
    lowered = clock.run("buckets", bucket, graph, lowered, None)
    plan = clock.run("form", form_plan, graph, strategy, lowered, options)
    plan = clock.run("order", order_firings, plan)
    clock.run("check", check, plan)
    clock.run("hash", lambda: plan.hash)
    given_s = sum(time_s for part, time_s in clock.times_s.items() if part != "infer")
    num_actors = sum(len(part.actors) for part in plan.ranks)
    print(f"{num_captured} nodes captured, {len(graph.nodes)} prepared")
    print(f"{num_actors} actors, {len(plan.steps)} boxing steps")
    print(f"with a given strategy {given_s:.1f} s")
    _print_start(plan, initial_states(model, optimizer))


if __name__ == "__main__":
    main()

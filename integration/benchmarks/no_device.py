"""Time and memory of planning large models without a device and without data, by phase.

    python integration/benchmarks/no_device.py [llama-8b] [gpt3-175b]
        [--layers N] [--mesh 8 8] [--batch 64] [--context 4096] [--micro-batches 1]
        [--profile capture|passes|plan|compile|check|simulate|bound|memory]

`llama-8b` is Llama 3's 8 billion parameters with 64 x 4,096 tokens on 64 devices. `gpt3-175b` is
GPT-3 with sequences of 2,048 tokens on 1,024 devices, in stages of replicated tensor groups. Plans
follow from pins, so the times are those of phases that every planner needs.

Every model has its own process. Seconds are processor time, user and system (on an idle machine,
wall time, because planning has one thread). The peak of a phase is the peak of the process' whole
memory during the phase. The first line is the imports.
"""

from __future__ import annotations

import argparse
import cProfile
import multiprocessing
import pstats
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, TypeVar

_R = TypeVar("_R")

#: Pins of a plan: by pattern, the SBP on some axes.
_Pins = Mapping[str, Mapping[str, str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model, and its mesh and batch.

    Args:
        model: Name of one of our models.
        settings: Settings of the model.
        mesh: Ranks along the axes `pipe`, `data` and `tensor`; fewer numbers are the last axes.
        batch: Samples of a micro-batch.
        micro_batches: Micro-batches of a step.
        columns, rows: Ends of the names of layers whose weights are split by output, and by input.
    """

    model: str
    settings: Mapping[str, int]
    mesh: tuple[int, ...]
    batch: int
    micro_batches: int
    columns: tuple[str, ...]
    rows: tuple[str, ...]

    @property
    def axes(self) -> tuple[str, ...]:
        """The names of the axes of the mesh."""
        return ("pipe", "data", "tensor")[-len(self.mesh) :]

    @property
    def pins(self) -> _Pins:
        """The pins of the preset `manual/data_tensor`: tensor parallelism as Megatron's."""
        whole = {"data": "B", "tensor": "B"}
        columns, rows = {"tensor": "S(0)"}, {"tensor": "S(1)"}
        return {
            "batch": {"data": "S(0)", "tensor": "B"},
            "use:batch": {"data": "S(0)"},
            "activations": {"data": "S(0)"},
            **({"embed.positions": {"data": "B"}} if self.model == "gpt" else {}),
            "parameters": whole,
            "optimizer_states": whole,
            "gradients": {"data": "B"},
            "updates": {"data": "B"},
            **{f"*.{name}.*": columns for name in self.columns},
            **{f"*.{name}.weight*": rows for name in self.rows},
            **{f"use:*.{name}.weight": columns for name in self.columns},
            **{f"use:*.{name}.weight": rows for name in self.rows},
            **{f"*.{name}": {"tensor": "B"} for name in self.rows},
        }


_LLAMA = Case(
    model="llama",
    # Source: Grattafiori et al., "The Llama 3 herd of models", 2024, table 3.
    settings={
        "vocabulary": 128256,
        "context": 4096,
        "num_layers": 32,
        "num_heads": 32,
        "num_key_heads": 8,
        "hidden": 4096,
        "mlp_hidden": 14336,
    },
    mesh=(8, 8),
    batch=64,
    micro_batches=1,
    columns=("query", "key", "value", "gate", "up"),
    rows=("output", "down"),
)

CASES: Mapping[str, Case] = {
    "llama-8b": _LLAMA,
    "gpt3-175b": Case(
        model="gpt",
        # Source: Brown et al., "Language models are few-shot learners", 2020, table 2.1. Tokens are
        # 50,257, here rounded up as in Megatron.
        settings={
            "vocabulary": 50304,
            "context": 2048,
            "num_layers": 96,
            "num_heads": 96,
            "hidden": 12288,
        },
        mesh=(8, 16, 8),
        batch=16,
        micro_batches=16,
        columns=("qkv", "up"),
        rows=("proj", "down"),
    ),
}


class _Phases:
    """Runs phases, and prints time and memory of each."""

    def __init__(self, profiled: str) -> None:
        self.profiled = profiled
        self.peak_mb = 0.0
        self.cpu_s = 0.0

    def run(self, phase: str, call: Callable[..., _R], *args: Any, **kwargs: Any) -> _R:
        Path("/proc/self/clear_refs").write_text("5", "ascii")  # resets the peak
        profile = cProfile.Profile() if self.profiled == phase else None
        start = time.process_time()
        made = profile.runcall(call, *args, **kwargs) if profile else call(*args, **kwargs)
        took_s = time.process_time() - start
        peak_mb = _peak_bytes() / 1e6
        self.cpu_s += took_s
        self.peak_mb = max(self.peak_mb, peak_mb)
        print(f"  {phase:10} {took_s:8.2f} s {peak_mb:8.0f} MB", flush=True)
        if profile:
            pstats.Stats(profile).sort_stats("tottime").print_stats(30)
        return made


def _peak_bytes() -> int:
    lines = Path("/proc/self/status").read_text("ascii").splitlines()
    (found,) = (line.split()[1] for line in lines if line.startswith("VmHWM:"))
    return 1024 * int(found)


def _imports() -> None:
    pass


def planned(name: str, case: Case, profiled: str) -> None:
    """Run all phases for a case."""
    size = prod(case.mesh)
    shape = " x ".join(map(str, case.mesh))
    print(
        f"{name}: {case.settings['num_layers']} layers, {case.batch} x {case.settings['context']} "
        f"tokens in each of {case.micro_batches} micro-batches, {size} devices ({shape})",
        flush=True,
    )
    phases = _Phases(profiled)
    phases.run("imports", _imports)
    import torch

    from sbp_aten.passes import prepare_step
    from sbp_core.collection import collection_paused
    from sbp_core.compile import CompileOptions, compile_plan
    from sbp_core.infer import infer_strategy
    from sbp_core.memory import memory_bound, predict_memory
    from sbp_core.placement import Placement
    from sbp_core.plan_check import check
    from sbp_core.planning import PlanRequest
    from sbp_core.plugins import discover
    from sbp_core.simulation import simulate
    from sbp_torch.deferred_init import deferred
    from sbp_torch.graph_capture import capture
    from sbp_torch.update_options import UpdateOptions

    registry = discover()
    mesh = Placement.grid(case.mesh, case.axes, "cuda")
    cluster = registry.make("cluster", "local", {"mesh": list(case.mesh), "device": "cuda"})(size)

    def build() -> torch.nn.Module:
        made: torch.nn.Module = registry.make("model", case.model, dict(case.settings))
        return made

    with collection_paused():
        model = phases.run("build", deferred, build, 0).model
        shape = (case.batch, case.settings["context"])
        batch = {key: torch.zeros(shape, dtype=torch.int64) for key in ("tokens", "targets")}
        graph = phases.run(
            "capture",
            capture,
            model,
            lambda model, batch: model.loss(batch),
            batch,
            torch.optim.AdamW(model.parameters()),
            update=UpdateOptions(fused=True),
            device="cuda",
        )
        graph = phases.run("passes", prepare_step, graph, case.micro_batches)
        request = PlanRequest(graph=graph, mesh=mesh, cluster=cluster)
        strategy = phases.run(
            "plan", infer_strategy, request, planner="benchmark", pins=dict(case.pins)
        )
        plan = phases.run("compile", compile_plan, graph, strategy, CompileOptions(cluster=cluster))
        phases.run("check", check, plan, types=False)
        phases.run("simulate", simulate, plan)
        phases.run("bound", memory_bound, plan, graph)
        memory = phases.run("memory", predict_memory, plan)
    print(f"  {len(graph.nodes)} nodes, {len(plan.ranks[0].actors)} actors on rank 0")
    print(
        f"  memory of a rank {memory.peak / 1e9:.1f} GB; "
        f"planning took {phases.cpu_s:.1f} s and {phases.peak_mb:.0f} MB"
    )


def main() -> None:
    """Print the phases of each model."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", choices=[*CASES, []], default=list(CASES))
    parser.add_argument("--layers", type=int)
    parser.add_argument("--mesh", type=int, nargs="+")
    parser.add_argument("--batch", type=int, help="samples of a micro-batch")
    parser.add_argument("--context", type=int, help="tokens of a sample")
    parser.add_argument("--micro-batches", type=int)
    parser.add_argument("--profile", default="", help="phase whose calls are listed")
    chosen = parser.parse_args()
    for name in chosen.models:
        case = CASES[name]
        own = {"num_layers": chosen.layers, "context": chosen.context}
        settings = {**case.settings, **{key: value for key, value in own.items() if value}}
        case = replace(
            case,
            settings=settings,
            mesh=tuple(chosen.mesh or case.mesh),
            batch=chosen.batch or case.batch,
            micro_batches=chosen.micro_batches or case.micro_batches,
        )
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            pool.apply(planned, (name, case, chosen.profile))


if __name__ == "__main__":
    main()

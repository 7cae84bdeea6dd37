"""What a plan costs as a JSON value, for scripts that compare plans.

    {"planner": "ilp", "step_s": 0.0132, "samples_per_s": 606.0, "bound_s": 0.0132, "gap": 0.0,
     "memory": {"limit_bytes": ..., "ranks": {"0": {"peak_bytes": ..., "kinds": {...}}}}, ...}

Keys end in their units; what is not known is null. All of it is predicted.
"""

from __future__ import annotations

from typing import Any

from sbp_core.memory import MemoryReport, RankMemory
from sbp_launch.explaining.figures import Figures, figures_of
from sbp_launch.planning.flow import Planned
from sbp_launch.planning.utilization import ModelWork, samples_of_step


def figures_json(planned: Planned) -> dict[str, Any]:
    """Return what a plan costs."""
    figures, plan = figures_of(planned), planned.plan
    strategy, cluster = planned.strategy, planned.settings.cluster
    work = ModelWork.of(planned.graph, cluster.device, figures.num_ranks)
    samples = samples_of_step(planned.graph)
    return {
        "planner": strategy.planner,
        "cluster": cluster.name,
        "num_ranks": figures.num_ranks,
        "micro_batches": plan.num_micro_batches,
        "stages": [
            {
                "ranks": list(stage.rank_list),
                "mesh": dict(zip(stage.axes, stage.mesh_shape, strict=True)),
            }
            for stage in strategy.stages
        ],
        "step_s": figures.step_s,
        "period_s": planned.checked.period_s,
        "samples_per_s": samples / figures.step_s if samples and figures.step_s else None,
        "model_flop": work.flop,
        "mfu": work.mfu(figures.step_s) if figures.step_s else None,
        "computing_s": figures.computing_s,
        "boxing_s": figures.boxing_s,
        "bound_s": _number(strategy.report.get("bound_s")),
        "gap": _number(strategy.report.get("gap")),
        "sent_bytes": figures.sent_bytes,
        "traffic": _traffic(figures, planned),
        "memory": _memory(figures, planned.memory),
    }


def _traffic(figures: Figures, planned: Planned) -> list[dict[str, Any]]:
    levels = planned.settings.cluster.levels
    return [
        {
            "collective": one.kind.value,
            "within": levels[one.level].name,
            "calls": one.num_calls,
            "sent_bytes": one.sent_bytes,
            "time_s": one.time_s,
        }
        for one in figures.traffic
    ]


def _memory(figures: Figures, memory: MemoryReport | str) -> dict[str, Any]:
    if isinstance(memory, str):
        return {"limit_bytes": figures.limit_bytes, "ranks": None, "unknown": memory}
    return {
        "limit_bytes": figures.limit_bytes,
        "ranks": {str(number): _rank(rank) for number, rank in sorted(memory.ranks.items())},
    }


def _rank(rank: RankMemory) -> dict[str, Any]:
    return {
        "peak_bytes": rank.peak,
        "host_bytes": rank.host_peak,
        "kinds": {kind.value: size for kind, size in rank.kinds.items()},
    }


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None

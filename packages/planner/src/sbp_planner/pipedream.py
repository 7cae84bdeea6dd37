"""The command that cuts a model into pipeline stages, from a profile that PipeDream has written.

    python -m sbp_planner.pipedream graph.txt --topology 4 4 --bandwidth 1e10 1.25e9

Reads options and prints JSON; `sbp_planner.stages` makes the decisions.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from math import inf
from typing import Any

from sbp_core.errors import SbpError, SbpValueError
from sbp_core.output import standard_output
from sbp_planner.command_line import Parser, size_bytes
from sbp_planner.stages import (
    FlushedPlan,
    FlushedProblem,
    HierarchyPlan,
    HierarchyProblem,
    Infeasible,
    InFlightLimits,
    MachineLevel,
    Profile,
    WeightVersions,
    cut_flushed,
    cut_hierarchy,
    data_parallel,
    read_profile,
)

_EPILOG = """
levels are given innermost first, as to the optimizer that is released with PipeDream (-n, -b):
  --topology 4 2 --bandwidth 1e10 1.25e9    2 nodes with 4 devices each; 10 GB/s between the
                                            devices of a node, 1.25 GB/s between nodes

the JSON:
  feasible          whether there is a pipeline; if not: reason, todo, least_memory_bytes
  pipeline_s        time from one micro-batch (of the profile's size) to the next, in steady state
  data_parallel_s   the same for one stage with all devices; data_parallel_fits says of memory
  stages            in order: replicas, replicas_by_level (innermost first), compute_s, sync_s,
                    boundary_bytes and transfer_s (to the next stage), in_flight, memory_bytes,
                    nodes; pipeline_s is the largest max(compute_s, sync_s) / replicas or transfer_s
  in_flight         by stage: micro-batches that a device of the stage holds at most
  memory_bytes      by stage: parameters, by versions, and activations in flight, of a device
  search            how many order ideals were looked at, whether these were all, and a bound

with --micro-batches the pipeline is flushed: step_s is the time of a step, all devices of a stage
share each micro-batch, which compute_s and sync_s are of, and pipeline_s is the slowest stage or
transfer; parameters are there once.

Exit status: 0, also if no pipeline is feasible; 2 for bad input.
"""


@standard_output("python -m sbp_planner.pipedream")
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        arguments: Command line without the program; `sys.argv[1:]` if omitted.

    Returns:
        Exit code: 0, also if no pipeline is feasible; 2 for bad input.
    """
    try:
        options = _options(sys.argv[1:] if arguments is None else arguments)
        answer = _answer(options)
        sys.stdout.write(json.dumps(_whole(answer), indent=2) + "\n")
    except SbpError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return 0


def _whole(answer: Any) -> Any:
    """Return an answer with bytes as whole numbers where possible."""
    if isinstance(answer, dict):
        sizes = {key for key in answer if key.endswith("_bytes")}
        return {
            key: _integers(value) if key in sizes else _whole(value)
            for key, value in answer.items()
        }
    return [_whole(entry) for entry in answer] if isinstance(answer, list) else answer


def _integers(sizes: Any) -> Any:
    if isinstance(sizes, list):
        return [_integers(size) for size in sizes]
    return int(sizes) if isinstance(sizes, float) and sizes.is_integer() else sizes


def _options(words: Sequence[str]) -> argparse.Namespace:
    parser = Parser(
        prog="python -m sbp_planner.pipedream",
        description="Cut a profiled model into replicated pipeline stages, as PipeDream does.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("graph", help="profile: graph.txt of PipeDream's profiler")
    parser.add_argument(
        "--topology",
        type=int,
        nargs="+",
        required=True,
        metavar="N",
        help="components that each level joins, innermost level first",
    )
    parser.add_argument(
        "--bandwidth",
        type=float,
        nargs="+",
        required=True,
        metavar="BYTES_PER_S",
        help="of the link of one such component, level by level",
    )
    parser.add_argument(
        "--memory",
        type=size_bytes,
        metavar="BYTES",
        help="memory of one device, such as 1.6e10 or 16GB; no limit if left out",
    )
    parser.add_argument(
        "--straight", action="store_true", help="no replicas: each device is a stage"
    )
    parser.add_argument(
        "--idle",
        action="store_true",
        help="allow unused devices, the same number in each component, if this is faster or "
        "nothing else fits (by default all are used)",
    )
    parser.add_argument(
        "--versions",
        choices=[version.value for version in WeightVersions],
        default=WeightVersions.STASHED.value,
        help="versions of its parameters that a stage holds: as many as micro-batches in flight "
        "(stashed, the default), at most 2 (double, as in PipeDream-2BW), or 1 (single)",
    )
    parser.add_argument(
        "--micro-batches",
        type=int,
        metavar="M",
        help="flush the pipeline after M micro-batches, and minimise the time of that step: "
        "(M - 1) * slowest + sum",
    )
    parser.add_argument(
        "--schedule",
        choices=["1f1b", "gpipe"],
        default="1f1b",
        help="of a flushed pipeline: how many micro-batches are in flight (default 1f1b)",
    )
    parser.add_argument(
        "--max-ideals",
        type=int,
        metavar="N",
        help="about the most cuts to look at (by default, as many as take well under a minute)",
    )
    return parser.parse_args(words)


def _levels(options: argparse.Namespace) -> tuple[MachineLevel, ...]:
    if len(options.topology) != len(options.bandwidth):
        raise SbpValueError(
            f"--topology has {len(options.topology)} levels and --bandwidth "
            f"{len(options.bandwidth)}",
            accepted="one bandwidth for each level, innermost first",
        )
    for option, numbers in (("--topology", options.topology), ("--bandwidth", options.bandwidth)):
        if wrong := [number for number in numbers if not number > 0]:
            raise SbpValueError(
                f"{option} {wrong[0]:g}",
                accepted="at least 1 component in each level"
                if option == "--topology"
                else "bytes a second, above 0, for each level",
            )
    pairs = zip(options.topology, options.bandwidth, strict=True)
    return tuple(MachineLevel(components=n, bytes_per_s=rate) for n, rate in pairs)


def _answer(options: argparse.Namespace) -> dict[str, Any]:
    levels = _levels(options)
    profile = read_profile(options.graph)
    start = time.perf_counter()
    if options.micro_batches is None:
        found = _steady(options, levels, profile)
    else:
        found = _flushed(options, levels, profile)
    if found["feasible"]:
        found["search"]["seconds"] = round(time.perf_counter() - start, 3)
    whole = data_parallel(profile.graph, levels)
    found["data_parallel_s"] = whole.pipeline_s
    if options.micro_batches is None:  # replicas that share a micro-batch hold less
        found["data_parallel_memory_bytes"] = whole.memory_bytes
        found["data_parallel_fits"] = options.memory is None or whole.memory_bytes <= options.memory
    found["one_device_s"] = whole.stages[0].compute_s
    found["dropped"] = list(profile.dropped)
    return found


def _steady(
    options: argparse.Namespace, levels: tuple[MachineLevel, ...], profile: Profile
) -> dict[str, Any]:
    problem = HierarchyProblem(
        graph=profile.graph,
        levels=levels,
        memory_bytes=options.memory,
        replicate=not options.straight,
        idle=options.idle,
        versions=WeightVersions(options.versions),
        max_ideals=options.max_ideals,
    )
    plan = cut_hierarchy(problem)
    return _infeasible(plan) if isinstance(plan, Infeasible) else _feasible(plan)


def _flushed(
    options: argparse.Namespace, levels: tuple[MachineLevel, ...], profile: Profile
) -> dict[str, Any]:
    if options.idle:
        raise SbpValueError("--idle is not for flushed pipelines", todo="leave it out")
    limit = {} if options.max_ideals is None else {"max_ideals": options.max_ideals}
    problem = FlushedProblem(
        graph=profile.graph,
        levels=levels,
        micro_batches=options.micro_batches,
        in_flight=InFlightLimits.ALL if options.schedule == "gpipe" else InFlightLimits.STAGES,
        memory_bytes=inf if options.memory is None else options.memory,
        device_counts=(1,) if options.straight else None,
        **limit,
    )
    plan = cut_flushed(problem)
    if plan is None:
        reason = "no flushed pipeline on these devices fits"
        return _infeasible(Infeasible(reason=reason, todo="more memory, or more micro-batches"))
    stages = plan.stages
    keys = ("compute_s", "sync_s", "boundary_bytes", "transfer_s", "in_flight", "memory_bytes")
    return {
        "feasible": True,
        "step_s": plan.step_s,
        "pipeline_s": plan.slowest_s,
        "stages": [
            {
                "replicas": stage.devices,
                **{key: getattr(stage, key) for key in keys},
                "nodes": list(stage.blocks),
            }
            for stage in stages
        ],
        "in_flight": [stage.in_flight for stage in stages],
        "memory_bytes": [stage.memory_bytes for stage in stages],
        "search": _search(plan),
    }


def _search(plan: HierarchyPlan | FlushedPlan) -> dict[str, Any]:
    return {"ideals": plan.num_ideals, "all_ideals": plan.complete, "family": plan.family}


def _infeasible(plan: Infeasible) -> dict[str, Any]:
    return {
        "feasible": False,
        "reason": plan.reason,
        "todo": plan.todo,
        "least_memory_bytes": plan.least_memory_bytes,
        "least_memory_nodes": list(plan.blocks),
        "pipeline_s": None,
        "stages": [],
        "in_flight": [],
        "memory_bytes": [],
    }


def _feasible(plan: HierarchyPlan) -> dict[str, Any]:
    prices = plan.evaluation.stages
    return {
        "feasible": True,
        "pipeline_s": plan.evaluation.pipeline_s,
        "stages": [
            {
                "replicas": stage.num_replicas,
                "replicas_by_level": list(stage.replicas),
                "compute_s": price.compute_s,
                "sync_s": price.sync_s,
                "boundary_bytes": price.boundary_bytes,
                "transfer_s": price.transfer_s,
                "in_flight": price.in_flight,
                "memory_bytes": price.memory_bytes,
                "nodes": list(stage.blocks),
            }
            for stage, price in zip(plan.stages, prices, strict=True)
        ],
        "in_flight": [price.in_flight for price in prices],
        "memory_bytes": [price.memory_bytes for price in prices],
        "topology": [level.components for level in plan.levels],
        "search": {**_search(plan), "bound_s": plan.bound_s},
    }


if __name__ == "__main__":
    sys.exit(main())

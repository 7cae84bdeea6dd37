"""Random graphs under random strategies, where each rank is a process.

    torchrun --nproc-per-node 2 strategies.py [SEED [COUNT]]       over gloo
    mpiexec -n 2 python strategies.py [SEED [COUNT]]               over MPI

All processes draw the same graphs, strategies and options. Each runs its rank with the actor
runtime, twice, with equal results bit for bit, and all ranks with the reference runtime. Losses,
metrics and the shards of the rank must agree bit for bit on two ranks. On more ranks, libraries add
in other orders, so the tolerance is 1e-9 in float64, as for one device.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from hypothesis import HealthCheck, Phase, assume, given, seed, settings
from hypothesis import strategies as st

sys.path.append(str(Path(__file__).parent.parent / "packages" / "sbp-torch" / "tests"))

from random_plans import graphs, placements, random_values, strategies

from sbp_core.boxing import BoxingBackend
from sbp_core.compile import CompileOptions, PhysicalPlan, compile_plan
from sbp_core.graph import LogicalGraph
from sbp_core.plan_check import check
from sbp_core.plugins import discover
from sbp_launch.world import World
from sbp_torch.runtime import ReferenceSession, run_graph
from sbp_torch.runtime.configs import ReferenceConfig

_NUM_STEPS = 2
_REGISTRY = discover(strict=True)

Values = Mapping[str, torch.Tensor]

#: Returns a backend that is not yet open.
BackendMaker = Callable[[], BoxingBackend]


def compare(start: int, count: int, num_ranks: int, rank: int, make_backend: BackendMaker) -> int:
    """Compare `count` plans for a number of ranks; return how many have several updates per step.

    Raises:
        AssertionError: results differ.
    """
    asynchronous = 0

    # All processes must draw the same, so there is no database, no shrinking and no deadline.
    @seed(start)
    @settings(
        max_examples=count, database=None, deadline=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(st.data())
    def compare_one(data: st.DataObject) -> None:
        nonlocal asynchronous
        stages = data.draw(placements(data.draw(st.integers(1, 3))))
        assume({one for stage in stages for one in stage.rank_list} == set(range(num_ranks)))
        graph = data.draw(graphs(data.draw(st.integers(1, 4))))
        strategy = data.draw(strategies(graph, stages))
        options = CompileOptions(
            overlap=data.draw(st.booleans()),
            bucket_bytes=data.draw(st.sampled_from((None, 0, 64, 200))),
            piece_s=data.draw(st.sampled_from((2e-4, 0.0))),
        )
        plan = compile_plan(graph, strategy, options)
        check(plan)
        asynchronous += graph.num_updates > 1
        _compare(graph, plan, rank, make_backend, data.draw(st.integers(0, 9)))

    compare_one()
    return asynchronous


def _compare(
    graph: LogicalGraph, plan: PhysicalPlan, rank: int, make_backend: BackendMaker, number: int
) -> None:
    states, batches = random_values(graph, number)
    whole = {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}
    reference = ReferenceSession(plan, states, ReferenceConfig())
    runtime = _REGISTRY.make("runtime", "actor", {"deadline_s": 60.0})
    slots = [slot.name for slot in plan.by_rank[rank].slots if slot.name in states]
    found: list[list[Values]] = []
    for _ in range(2):
        with runtime.start(plan, states, make_backend()) as session:
            steps: list[Values] = [dict(session.step(whole, {}).outputs) for _ in range(_NUM_STEPS)]
            found.append([*steps, {name: session.shard(name, rank).clone() for name in slots}])
    wanted: list[Values] = [dict(reference.step(whole, {}).outputs) for _ in range(_NUM_STEPS)]
    wanted.append({name: reference.shard(name, rank) for name in slots})
    torch.testing.assert_close(*found, rtol=0, atol=0, equal_nan=True)
    tolerance = 0 if len(plan.ranks) == 2 else 1e-9
    torch.testing.assert_close(found[0], wanted, rtol=tolerance, atol=tolerance, equal_nan=True)
    expected = dict(states)
    for index in range(_NUM_STEPS):
        outputs, expected = run_graph(graph, expected, batches, {}, plan.staleness)
        torch.testing.assert_close(found[0][index], outputs, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(reference.state_dict(), expected, rtol=1e-9, atol=1e-9)


def main(start: int, count: int) -> None:
    """Run as one rank of those that torchrun or mpiexec has started."""
    world = World.of_environment()
    boxing = "mpi" if world.launcher == "mpiexec" else "torch"
    asynchronous = compare(
        start, count, world.size, world.rank, lambda: _REGISTRY.make("boxing", boxing)
    )
    if world.rank == 0:
        print(f"{count} plans of {world.size} ranks over {boxing}, {asynchronous} asynchronous")


if __name__ == "__main__":
    given_numbers = [int(text) for text in sys.argv[1:]]
    main(*(*given_numbers, *(0, 20)[len(given_numbers) :]))

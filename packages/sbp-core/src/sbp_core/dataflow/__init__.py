"""Networks of synchronous dataflow: what holds of them before they run.

An actor takes a fixed number of tokens from each edge that leads to it, works for a while, and puts
a fixed number onto each edge that leaves it (Lee and Messerschmitt 1987). So all that matters is
decided by the network alone, whatever its actors compute (Kahn 1974). In the order of use:

| module | says |
|---|---|
| `actor_network` | actors, edges with initial tokens and quotas, orders of processors |
| | and how often each actor fires in an iteration, or the cycle that contradicts itself |
| `expansion` | the firings of an iteration, and which waits for which: rates of one |
| `liveness` | that an iteration ends, or who waits for whom, and quotas that would be enough |
| `cycle_ratio` | Howard's algorithm on arrays |
| `timing` | when firings begin at the earliest, while a search changes waits; period, latency |
| `bounds` | the most tokens on an edge, and the most bytes of all edges, over all executions |
| `self_timed` | an executor in simulated time: the oracle of all others |

An actor may fire any number of times in an iteration, so a rate between micro-batch and step, such
as once every k-th micro-batch, is a number on an edge. Nothing here knows plans or tensors.
"""

from __future__ import annotations

from sbp_core.dataflow.actor_network import FlowActor, FlowEdge, Network, Seconds, repetitions
from sbp_core.dataflow.bounds import Peak, edge_bound, memory_bound
from sbp_core.dataflow.expansion import (
    Dependency,
    Expansion,
    FlowFiring,
    Reason,
    expand,
    waited_for,
)
from sbp_core.dataflow.liveness import check_live, cycle_lines, dead_cycle, sufficient_quotas
from sbp_core.dataflow.self_timed import Execution, SelfTimed, execute
from sbp_core.dataflow.timing import CriticalCycle, EarliestStarts, critical_cycle, latency

__all__ = [
    "CriticalCycle",
    "Dependency",
    "EarliestStarts",
    "Execution",
    "Expansion",
    "FlowActor",
    "FlowEdge",
    "FlowFiring",
    "Network",
    "Peak",
    "Reason",
    "Seconds",
    "SelfTimed",
    "check_live",
    "critical_cycle",
    "cycle_lines",
    "dead_cycle",
    "edge_bound",
    "execute",
    "expand",
    "latency",
    "memory_bound",
    "repetitions",
    "sufficient_quotas",
    "waited_for",
]

"""Analysis of synchronous dataflow networks (SDF): rates, deadlock and period.

An actor takes a fixed number of tokens from each of its input edges, works for a while, and puts a
fixed number on each of its output edges (Lee and Messerschmitt 1987). So these properties follow
from the network alone, whatever its actors compute (Kahn 1974). `sbp_core.compile` models plans as
such networks. In the order of use:

| module | content |
|---|---|
| `actor_network` | actors, edges with initial tokens and quotas, orders of processors |
| | and how often each actor fires in an iteration, or the cycle that contradicts itself |
| `expansion` | the firings of an iteration and their dependencies: all rates are one |
| `liveness` | whether an iteration ends, or the cycle of waits, and sufficient quotas |
| `cycle_ratio` | maximum cycle ratio by Howard's algorithm, on arrays |
| `timing` | earliest starts of firings, also while a search changes waits; period, latency |
| `self_timed` | an executor in simulated time: the oracle of all other modules |

An actor may fire any number of times in an iteration, so a rate between micro-batch and step, such
as once every k-th micro-batch, is a number on an edge. No module here knows plans or tensors.
"""

from __future__ import annotations

from sbp_core.dataflow.actor_network import FlowActor, FlowEdge, Network, Seconds, repetitions
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
    "Reason",
    "Seconds",
    "SelfTimed",
    "check_live",
    "critical_cycle",
    "cycle_lines",
    "dead_cycle",
    "execute",
    "expand",
    "latency",
    "repetitions",
    "sufficient_quotas",
    "waited_for",
]

"""Period and latency of a live network whose firings begin as early as they can.

    theorem    the period of an iteration is the maximum cycle ratio of the homogeneous network: the
               durations on a cycle of waits, divided by the iterations that it spans (Reiter 1968).
    theorem    an iteration by itself takes as long as the longest path of waits within it.

If some part of a network may run ahead of another for ever, over an edge without a quota, its
period is that of the slowest part.
"""

from __future__ import annotations

from dataclasses import dataclass

from sbp_core.dataflow.cycle_ratio import maximum_cycle_ratio
from sbp_core.dataflow.earliest import EarliestStarts
from sbp_core.dataflow.expansion import Dependency, Expansion, expand
from sbp_core.dataflow.liveness import check_live
from sbp_core.dataflow.network import Network, Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticalCycle:
    """The cycle of waits that an iteration cannot be faster than.

    Args:
        period_s: Time from one iteration to the next, in seconds; exact if no duration is a float.
        waits: Each for the firing that waits in the next one, the last for the first; none if
            nothing keeps iterations from being done all at once.
    """

    period_s: Seconds
    waits: tuple[Dependency, ...]


def critical_cycle(network: Network) -> CriticalCycle:
    """Return the period of a network, and what it comes from.

    Raises:
        SbpValueError: it is not live, or its rates are not consistent.
    """
    expansion = expand(network)
    start_s = _starts(expansion).start_s
    # From the waiting firing to the one waited for, so that a cycle reads as its words do.
    edges = list(zip(expansion.waiting, expansion.on, expansion.delay, strict=True))
    weights = [expansion.duration_s[node] for node in expansion.on]
    found = maximum_cycle_ratio(edges, weights, start_s)
    if found is None:
        return CriticalCycle(period_s=0, waits=())
    return CriticalCycle(period_s=found[0], waits=expansion.dependencies(found[1]))


def latency(network: Network) -> Seconds:
    """Return how long the first iteration takes by itself, in seconds.

    Raises:
        SbpValueError: the network is not live, or its rates are not consistent.
    """
    return _starts(expand(network)).end_s


def _starts(expansion: Expansion) -> EarliestStarts:
    """Return when each firing of the first iteration begins: the longest path of waits to it."""
    found = EarliestStarts(expansion)
    if not found.is_live:
        check_live(expansion.network)
    return found

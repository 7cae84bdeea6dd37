"""A compiled plan in simulated time: when every firing of a step begins and ends.

`network` unrolls a plan into firings and who waits for whom, once, and plays it as often as a
search changes its quotas or orders. The result has firings by rank and thread, busy time, the
step's time.

It is exact where times are: orders are static, so the network of a plan has one answer, and two
processes find the same. What the machine does besides (noise, a slow rank) is not in it.
"""

from sbp_core.simulation.network import FiringNetwork, Simulation, TimedFiring, simulate

__all__ = ["FiringNetwork", "Simulation", "TimedFiring", "simulate"]

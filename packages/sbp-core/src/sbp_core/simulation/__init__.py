"""Simulation of a compiled plan in time: begin and end of every firing of a step.

A firing is one execution of an actor (a segment of operators, or a boxing step). `network` expands
a plan into firings and their dependencies, once, and times it again whenever a search changes its
quotas or orders. The result has firings by rank and thread, busy time, and the step's time.

It is exact for the predicted times: orders are static, so the network of a plan has one result,
which is the same in all processes. Disturbances of a machine (noise, a slow rank) are not included.
"""

from sbp_core.simulation.network import FiringNetwork, Simulation, TimedFiring, simulate

__all__ = ["FiringNetwork", "Simulation", "TimedFiring", "simulate"]

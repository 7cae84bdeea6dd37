"""Describe the machine for which the costs of a plan are predicted, in lines for `sbp-plan`."""

from __future__ import annotations

from collections.abc import Iterator

from sbp_core.cluster import Cluster
from sbp_core.units import format_bytes, format_count, format_seconds


def machine_lines(cluster: Cluster) -> list[str]:
    """Return lines on the assumptions of a plan: devices, memory, links, measured boxing or not.

    Args:
        cluster: The cluster, with the devices that the plan was made for.
    """
    device = cluster.device
    devices = format_count(cluster.num_devices, f"{device.kind} device")
    memory = format_bytes(device.memory_bytes)
    lines = [f"priced for cluster {cluster.name}: {devices} with {memory} each"]
    if device.host_memory_bytes is not None and device.host_link is not None:
        rate = format_bytes(device.host_link.bytes_per_s)
        lines.append(
            f"  host memory of each: {format_bytes(device.host_memory_bytes)}, at {rate}/s"
        )
    if cluster.num_devices > 1:
        lines += _links(cluster)
    if cluster.calibration is not None:
        lines.append(f"  boxing as it was measured through {cluster.calibration.backend!r}")
    return lines


def _links(cluster: Cluster) -> Iterator[str]:
    """Yield the levels that messages between the devices pass, innermost first."""
    for level in cluster.levels:
        link, shared = level.link, " shared" if level.shared else ""
        yield (
            f"  in a {level.name} of {level.num_ranks}: {format_bytes(link.bytes_per_s)}/s{shared} "
            f"after {format_seconds(link.latency_s)}"
        )
        if level.num_ranks >= cluster.num_devices:
            return

"""Describe this machine in files of measured times: processor, cores, memory, but not its name."""

from __future__ import annotations

import platform
from pathlib import Path

from sbp_core.machine_memory import total_memory_bytes
from sbp_launch.clusters.local import usable_cores

_PROC = Path("/proc")


def describe_machine(library: str) -> dict[str, str]:
    """Return the description of this machine for a cluster file.

    Args:
        library: Version of torch.
    """
    return {
        "processor": _processor(),
        "cores": str(usable_cores()),
        "memory_bytes": str(total_memory_bytes()),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": library,
    }


def _processor() -> str:
    """Return the model of the processor."""
    try:
        lines = (_PROC / "cpuinfo").read_text("utf-8", "replace").splitlines()
    except OSError:
        lines = []
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return platform.processor() or platform.machine()

"""What kind of machine this is: cores and memory, but not its name."""

from __future__ import annotations

import os
import platform
from pathlib import Path

from sbp_core.machine_memory import total_memory_bytes

_PROC = Path("/proc")


def describe_machine(library: str) -> dict[str, str]:
    """Return what a reader of a cluster file should know of the machine.

    Args:
        library: Version of torch.
    """
    return {
        "processor": _processor(),
        "cores": str(num_cores()),
        "memory_bytes": str(total_memory_bytes()),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": library,
    }


def num_cores() -> int:
    """Return the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


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

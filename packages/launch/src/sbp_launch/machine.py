"""What kind of machine this is: cores and memory, but not its name."""

from __future__ import annotations

import os
import platform
from pathlib import Path

_PROC = Path("/proc")
_CGROUP = Path("/sys/fs/cgroup/memory.max")

#: Memory that is assumed where the system does not say how much there is.
_UNKNOWN_BYTES = 4 * 2**30


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


def total_memory_bytes() -> int:
    """Return the memory that the processes of this machine, or container, may use together."""
    known = [size for size in (_meminfo("MemTotal"), _container_bytes()) if size]
    return min(known, default=_UNKNOWN_BYTES)


def free_memory_bytes() -> int:
    """Return the memory that can be had without taking it from another program."""
    return min(_meminfo("MemAvailable") or total_memory_bytes() // 2, total_memory_bytes())


def _meminfo(name: str) -> int:
    """Return an entry of /proc/meminfo in bytes; 0 where there is none."""
    try:
        lines = (_PROC / "meminfo").read_text("ascii").splitlines()
    except OSError:
        return 0
    for line in lines:
        key, _, rest = line.partition(":")
        if key == name:
            return int(rest.split()[0]) * 1024
    return 0


def _container_bytes() -> int:
    """Return the memory limit of a container; 0 where there is none."""
    try:
        text = _CGROUP.read_text("ascii").strip()
    except OSError:
        return 0
    return int(text) if text.isdecimal() else 0


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

"""Read the memory of this machine or container, in total and free, such as for calibration."""

from __future__ import annotations

from pathlib import Path

__all__ = ["free_memory_bytes", "room_bytes", "total_memory_bytes"]

_PROC = Path("/proc")
_CGROUP = Path("/sys/fs/cgroup/memory.max")

#: Memory that is assumed if the system does not report its size.
_UNKNOWN_BYTES = 4 * 2**30


def total_memory_bytes() -> int:
    """Return the memory that all processes of this machine, or container, may use together."""
    known = [size for size in (_meminfo("MemTotal"), _container_bytes()) if size]
    return min(known, default=_UNKNOWN_BYTES)


def free_memory_bytes() -> int:
    """Return the memory that is available without taking it from another program."""
    return min(_meminfo("MemAvailable") or total_memory_bytes() // 2, total_memory_bytes())


def room_bytes() -> int | None:
    """Return the most memory that can be used: free memory and swap; None if unknown."""
    free = _meminfo("MemAvailable")
    return min(free, _container_bytes() or free) + _meminfo("SwapFree") if free else None


def _meminfo(name: str) -> int:
    """Return an entry of /proc/meminfo in bytes; 0 without one."""
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
    """Return the memory limit of a container; 0 without one."""
    try:
        text = _CGROUP.read_text("ascii").strip()
    except OSError:
        return 0
    return int(text) if text.isdecimal() else 0

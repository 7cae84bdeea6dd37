"""How the ranks of a backend are started: commands and environments, as values.

Starts nothing (`boxing.supervision.supervise` does).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from sbp_core.errors import SbpValueError


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchSpec:
    """One process to start, and the ranks that it stands for.

    Args:
        command: Program and arguments.
        ranks: The rank that the process is; several where their threads live in it, or where it is
            a launcher that starts their processes.
        environment: Variables that it gets whatever the environment says.
        defaults: Variables that it gets where the environment has none of the name.
        forwards_signals: Of a launcher: whether it passes SIGINT, SIGTERM and SIGHUP on to its
            ranks, and waits for them. Otherwise the ranks are sent them directly.
        failure_patterns: Regular expressions of lines by which a launcher names a rank that failed,
            the surest first; their group `rank` is its number.

    Raises:
        SbpValueError: there is no command, or no rank.
    """

    command: tuple[str, ...]
    ranks: tuple[int, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, str] = field(default_factory=dict)
    forwards_signals: bool = False
    failure_patterns: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.command or not self.ranks:
            raise SbpValueError(
                f"a launch of command {self.command} as ranks {self.ranks}",
                accepted="a program, and at least one rank",
            )

    @property
    def name(self) -> str:
        """How messages call it: `rank 3`, `ranks 0-3`."""
        first, last = self.ranks[0], self.ranks[-1]
        if len(self.ranks) == 1:
            return f"rank {first}"
        if self.ranks == tuple(range(first, last + 1)):
            return f"ranks {first}-{last}"
        return f"ranks {', '.join(map(str, self.ranks))}"


def one_process(num_ranks: int, command: Sequence[str]) -> tuple[LaunchSpec, ...]:
    """Return how to start one process that holds all ranks as threads."""
    return (LaunchSpec(command=tuple(command), ranks=tuple(range(num_ranks))),)


def thread_share(num_processes: int) -> dict[str, str]:
    """Return the environment variables that share this machine's cores among equal processes."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {"OMP_NUM_THREADS": str(max(1, (cores or 1) // num_processes))}

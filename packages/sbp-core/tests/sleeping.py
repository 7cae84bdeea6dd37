"""A process that sleeps, as the process of rank 1: for tests that stop and end it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from sbp_core.processes import membership
from sbp_core.processes.membership import Member, MemberState, state_of
from sbp_core.processes.waiting import wait_until

ME = Member.of_this_process(0)


@contextmanager
def sleeping() -> Iterator[subprocess.Popen[bytes]]:
    """Run a process that sleeps, and end it."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def member_of(process: subprocess.Popen[bytes]) -> Member:
    """Return a process as rank 1."""
    status = membership.status_of(process.pid)
    return replace(ME, rank=1, pid=process.pid, started=status[2] if status else 0)


def comes_to(member: Member, state: MemberState) -> bool:
    """Wait until a process is seen to do this; say whether it was."""
    return wait_until(
        lambda: state_of(member, ME) is state, 10.0, first_pause_s=1e-3, longest_pause_s=0.01
    )

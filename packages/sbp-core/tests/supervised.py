"""What tests of the supervisor start, and what they hear of it."""

import sys
import textwrap
from pathlib import Path

from sbp_core.boxing.backend import LaunchSpec
from sbp_core.processes.supervisor import Line

#: Seconds that a program sleeps which is to be ended.
LONG_S = 600

#: The letter for the state of the process whose id is in a file; none before the file is there.
STATE_OF = """
        from pathlib import Path
        def state():
            pid = Path("{path}").read_text() if Path("{path}").exists() else ""
            try:
                return pid and Path("/proc", pid, "stat").read_text().rpartition(")")[2].split()[0]
            except OSError:
                return "gone"
"""


def python(text: str, rank: int = 0, **environment: str) -> LaunchSpec:
    command = (sys.executable, "-c", textwrap.dedent(text))
    return LaunchSpec(command=command, ranks=(rank,), environment=environment)


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


class Heard:
    """What the processes wrote; calls `react` with each line."""

    def __init__(self, react=lambda line: None) -> None:
        self.lines: list[Line] = []
        self._react = react

    def __call__(self, line: Line) -> None:
        self.lines.append(line)
        self._react(line)

    @property
    def texts(self) -> list[str]:
        return [line.text for line in self.lines]

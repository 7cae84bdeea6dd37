"""What tests of the supervisor start, and what they hear of it."""

import sys
import textwrap

from sbp_core.boxing.supervision.launch_spec import LaunchSpec
from sbp_core.boxing.supervision.supervisor import Line


def python(text: str, rank: int = 0, **environment: str) -> LaunchSpec:
    command = (sys.executable, "-c", textwrap.dedent(text))
    return LaunchSpec(command=command, ranks=(rank,), environment=environment)


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

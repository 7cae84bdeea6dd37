"""Show how far a run is: the parts of a start one by one, then a bar, or plain lines in a file."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
)

from sbp_launch.speed import Speed


@contextmanager
def timed(console: Console, what: str) -> Iterator[None]:
    """Print `what`, and the seconds of the block behind it, on one line."""
    began = time.perf_counter()
    console.print(f"{what} ...", end="", highlight=False)
    try:
        yield
    except BaseException:
        console.print("")
        raise
    console.print(f" {time.perf_counter() - began:.1f} s", highlight=False)


class StepProgress:
    """Progress over a number of steps, with loss, speed and time left.

    On a terminal a bar that is redrawn; elsewhere a line every `log_every` steps, for the first
    step and for the last.
    """

    def __init__(self, console: Console, steps: int, log_every: int, speed: Speed) -> None:
        self.console, self.steps, self.log_every, self.speed = console, steps, log_every, speed
        self.bar: Progress | None = None
        if console.is_terminal:
            self.bar = Progress(
                TextColumn("training"),
                BarColumn(bar_width=None),
                MofNCompleteColumn(),
                TextColumn("{task.fields[news]}"),
                TimeElapsedColumn(),
                console=console,
            )
            self.task = self.bar.add_task("training", total=steps, news="")

    def __enter__(self) -> StepProgress:
        if self.bar is not None:
            self.bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.bar is not None:
            self.bar.stop()

    def advance(self, step: int, loss: float) -> None:
        """Report one finished step (counted from 1), which `speed` has timed."""
        news = f"loss {loss:.4f}  {self.speed.text()}"
        if step > 1:  # of the first step nothing follows for the others
            news += f"  {_long(self.speed.left_s(self.steps - step))} left"
        if self.bar is not None:
            self.bar.update(self.task, completed=step, news=news)
        elif step % self.log_every == 0 or step in (1, self.steps):
            self.console.print(f"step {step}/{self.steps}  {news}")


def _long(seconds: float) -> str:
    """Return a time that one waits for: 45 s, 48 min, 3.5 h."""
    if seconds < 600:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"

"""Progress output of a run: timed stages of its start, then a bar; without a terminal, lines."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from sbp_launch.run.speed import Speed


@contextmanager
def timed(console: Console, what: str) -> Iterator[None]:
    """Print `what`, and the seconds that the block took, on one line."""
    began = time.perf_counter()
    console.print(f"{what} ...", end="")
    try:
        yield
    except BaseException:
        console.print("")
        raise
    console.print(f" {time.perf_counter() - began:.1f} s")


class StepProgress:
    """Progress over the steps of a run, with loss, speed and remaining time.

    On a terminal, a bar is redrawn; elsewhere, a line is printed every `log_every` steps, for the
    first step that is run, and for the last one.

    Args:
        console: The console to print to.
        steps: Steps of the whole run; None if its budget is a time.
        log_every: Steps between two lines.
        speed: Speed of the steps.
        begun: Steps that were done before this run was resumed.
        hours: The time budget, in hours.
    """

    def __init__(
        self,
        console: Console,
        steps: int | None,
        log_every: int,
        speed: Speed,
        begun: int = 0,
        hours: float = 0.0,
    ) -> None:
        self.console, self.steps, self.log_every, self.speed = console, steps, log_every, speed
        self.begun, self.total_s = begun, hours * 3600
        self.bar: Progress | None = None
        if console.is_terminal:
            self.bar = Progress(
                TextColumn("training"),
                BarColumn(bar_width=None),
                TextColumn("{task.fields[count]}", style="progress.download"),
                TextColumn("{task.fields[news]}"),
                TimeElapsedColumn(),
                console=console,
            )
            total = self.total_s if steps is None else steps
            self.task = self.bar.add_task("training", total=total, count="", news="")

    def __enter__(self) -> StepProgress:
        if self.bar is not None:
            self.bar.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Leave the bar as it is; further output is printed below it."""
        if self.bar is not None:
            self.bar.stop()

    def advance(self, step: int, loss: float, train_s: float = 0.0) -> None:
        """Report a finished step.

        Args:
            step: Its number, counted from 1; `speed` has timed it.
            loss: Its loss.
            train_s: Seconds of training so far.
        """
        news = f"loss {loss:.4f}  {self.speed.text()}"
        if self.steps is None:
            news += f"  {_long(max(0.0, self.total_s - train_s))} left"
        elif step > self.begun + 1:  # the first step is slower, so it predicts nothing
            news += f"  {_long(self.speed.left_s(self.steps - step))} left"
        if self.bar is not None:
            done = train_s if self.steps is None else step
            self.bar.update(self.task, completed=done, count=self._count(step), news=news)
        elif step % self.log_every == 0 or step in (self.begun + 1, self.steps):
            self.say(step, news)

    def say(self, step: int, news: str) -> None:
        """Print a line about a step, above the bar if there is one."""
        self.console.print(f"step {self._count(step)}  {news}")

    def _count(self, step: int) -> str:
        return str(step) if self.steps is None else f"{step}/{self.steps}"


def _long(seconds: float) -> str:
    """Format a waiting time: 45 s, 48 min, 3.5 h."""
    if seconds < 600:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"

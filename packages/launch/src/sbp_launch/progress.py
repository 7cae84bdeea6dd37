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
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)


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
    """Progress over a number of steps, with loss and speed.

    On a terminal a bar that is redrawn; elsewhere a line every `log_every` steps.
    """

    def __init__(self, console: Console, steps: int, log_every: int, unit: str) -> None:
        self.console, self.steps, self.log_every, self.unit = console, steps, log_every, unit
        self.started = time.perf_counter()
        self.units = 0
        self.bar: Progress | None = None
        if console.is_terminal:
            self.bar = Progress(
                TextColumn("training"),
                BarColumn(),
                MofNCompleteColumn(),
                TaskProgressColumn(),
                TextColumn("{task.fields[news]}"),
                TimeElapsedColumn(),
                TextColumn("left"),
                TimeRemainingColumn(),
                console=console,
            )
            self.task = self.bar.add_task("training", total=steps, news="")

    def __enter__(self) -> StepProgress:
        if self.bar is not None:
            self.bar.start()
        self.started = time.perf_counter()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.bar is not None:
            self.bar.stop()

    def rate(self) -> float:
        """Return units (tokens or samples) a second since the start."""
        return self.units / max(1e-9, time.perf_counter() - self.started)

    def advance(self, step: int, loss: float, units: int) -> None:
        """Report one finished step (counted from 1)."""
        self.units += units
        news = f"loss {loss:.4f}  {self.rate():,.0f} {self.unit}/s"
        if self.bar is not None:
            self.bar.update(self.task, completed=step, news=news)
        elif step % self.log_every == 0 or step in (1, self.steps):
            spent = time.perf_counter() - self.started
            left = spent / step * (self.steps - step)
            self.console.print(f"step {step}/{self.steps}  {news}  {left:.0f} s left")

"""The metric sink of a run: opened by the process that speaks for it, closed however it ends."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import cast

from sbp_core.plugins import MetricSink, MetricSinkFactory
from sbp_launch.run.folder import writing
from sbp_launch.run.run import Run


@contextmanager
def metric_sink(run: Run, resumed_step: int = 0) -> Iterator[MetricSink]:
    """Open the chosen metric sink, and close it.

    Args:
        run: The run.
        resumed_step: The step behind which the run goes on; 0 for a new one.

    Raises:
        RunError: its file cannot be written; only if nothing else has failed before.
    """
    if not run.is_first:
        yield cast(MetricSinkFactory, run.registry.make("logger", "none"))(run.folder)
        return
    factory: MetricSinkFactory = run.make("logger")
    with writing(run.folder):
        sink = (
            factory(run.folder, resumed_step=resumed_step) if resumed_step else factory(run.folder)
        )
    try:
        yield sink
    except BaseException:
        with suppress(OSError):  # what it could not write it tries again
            sink.close()
        raise
    with writing(run.folder):
        sink.close()

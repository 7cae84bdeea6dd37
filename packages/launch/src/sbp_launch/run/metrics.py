"""Open and close the metric sink (plugin of kind `logger`) of a run, and translate its errors."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import cast

from sbp_core.errors import SbpError
from sbp_core.plugins import MetricSink, MetricSinkFactory
from sbp_launch.run.folder import writing
from sbp_launch.run.run import Run

#: Errors of networks that are a plain `OSError`.
_OF_NETWORKS = (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENETDOWN, errno.EHOSTDOWN)


@contextmanager
def metric_sink(run: Run, resumed_step: int = 0) -> Iterator[MetricSink]:
    """Open the chosen metric sink, and close it; processes other than the first get a null sink.

    Args:
        run: The run.
        resumed_step: The step from which the run is resumed; 0 for a new run.

    Raises:
        RunError, PluginError: see `calling_sink`; from closing only if nothing failed before.
    """
    if not run.is_first:
        yield cast(MetricSinkFactory, run.registry.make("logger", "none"))(run.folder)
        return
    factory: MetricSinkFactory = run.make("logger")
    with calling_sink(run, "__call__"):
        sink = (
            factory(run.folder, resumed_step=resumed_step) if resumed_step else factory(run.folder)
        )
    if not all(callable(getattr(sink, method, None)) for method in ("log", "close")):
        raise run.entry("logger").returned(sink, "a sink with log and close", by="__call__")
    try:
        yield sink
    except BaseException:
        with suppress(Exception):  # the first error is raised; closing may fail for the same reason
            sink.close()
        raise
    with calling_sink(run, "close"):
        sink.close()


@contextmanager
def calling_sink(run: Run, method: str) -> Iterator[None]:
    """Wrap a call of the metric sink in the `with` block: translate its errors.

    Raises:
        RunError: a file of the run folder cannot be written.
        PluginError: the sink raises another error, such as a network error.
    """
    with writing(run.folder):
        try:
            yield
        except SbpError:
            raise
        except Exception as error:
            # A builtin OSError may come from a file in the folder; libraries derive their own.
            if isinstance(error, OSError) and type(error).__module__ == "builtins":
                named = error.filename
                folder = run.folder.absolute()
                inside = not isinstance(named, str) or Path(named).absolute().is_relative_to(folder)
                is_of_network = isinstance(error, ConnectionError | TimeoutError)
                if inside and not is_of_network and error.errno not in _OF_NETWORKS:
                    raise
            raise run.entry("logger").raised(error, method) from error

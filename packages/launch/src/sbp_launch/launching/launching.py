"""Start the ranks of a run as its launcher says, and see to it that all of them end.

| the ranks are | what happens here |
|---|---|
| threads of this process | it trains |
| processes that were started already, of which this one is rank 0 | tells the others, and trains |
| processes that are not there yet | starts them, passes on what they write, and waits |
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import cast

from sbp_core.boxing import BoxingBackend, LaunchSpec
from sbp_core.errors import RunError, SbpError
from sbp_core.plugins import Launcher, LaunchRequest, PluginRegistry, StorageFactory
from sbp_core.processes import ExitReport, Line, supervise
from sbp_core.serialize import open_file
from sbp_launch.console import make_console
from sbp_launch.exit_codes import BAD_CONFIG, SIGNALS
from sbp_launch.launching.choice import has_threads, is_started
from sbp_launch.launching.logs import log_path
from sbp_launch.launching.meeting import Meeting, Told
from sbp_launch.launching.rank import run_rank
from sbp_launch.run.folder import resume_command
from sbp_launch.run.status import status_signals
from sbp_launch.run.stopping import SAVING, STARTING
from sbp_launch.settings.config import RunConfig
from sbp_launch.world import World

#: Seconds that ranks get to end by themselves when one has failed: those that wait for it are told
#: at once; one that captures or plans waits for nobody.
_GRACE_S = 2.0

#: Seconds that they get beyond that: one that computes, until it waits for the others; and to save
#: what is left.
_STEP_S, _SAVE_S = 30.0, 600.0

#: Lines of the log of a rank that failed which are shown.
_SHOWN_LINES = 12

#: Bytes from the end of a log in which they are looked for.
_SHOWN_BYTES = 2**16


def launch(
    config: RunConfig,
    registry: PluginRegistry,
    folder: Path,
    world: World,
    meeting: Meeting | None,
    *,
    of_sweep: bool = False,
) -> None:
    """Train on the ranks of a run, wherever they are.

    Args:
        config: Whose launcher is chosen.
        registry: The plugins.
        folder: Of the run, with its settings.
        world: Who started this process.
        meeting: With the other ranks, if there are some already.
        of_sweep: Whether further runs follow if this one fails.

    Raises:
        SbpError: the run failed.
        SystemExit: the ranks have said themselves why they ended.
    """
    if has_threads(config, registry):
        # Here and not above: a wrong setting is answered without waiting for torch.
        from sbp_launch.trainer.trainer import train

        train(config, registry, folder)
    elif is_started(config, world):
        if meeting is not None:
            meeting.tell(Told(folder=folder.absolute(), of_sweep=of_sweep))
        if code := run_rank(folder, world):
            raise SystemExit(code)
    else:
        _start(config, registry, folder)


def follow(meeting: Meeting, world: World) -> int:
    """Train, as another rank than 0, in each run that rank 0 tells of; return the exit code."""
    failed = 0
    while (told := meeting.receive()).folder is not None:
        code = run_rank(told.folder, world)
        if code and (not told.of_sweep or code > SIGNALS):
            return code
        failed = failed or code
    return told.code or failed


def rank_command(folder: Path) -> tuple[str, ...]:
    """Return the command of every rank of the run in a folder.

    It finds the modules that this process finds: the working folder only where this one does.
    """
    finds_here = "" in sys.path or str(Path.cwd()) in sys.path
    options = () if finds_here else ("-P",)
    width = str(make_console().width)
    return (
        sys.executable,
        *options,
        "-m",
        "sbp_launch.launching.rank",
        str(folder.absolute()),
        width,
    )


def _start(config: RunConfig, registry: PluginRegistry, folder: Path) -> None:
    """Start the ranks, and wait for them.

    Raises:
        ConfigError: they cannot be started so.
        RunError: one of them failed.
        SystemExit, KeyboardInterrupt: a signal ended them, or rank 0 has said why it ended.
    """
    num_ranks = prod(config.mesh)
    boxing, choice = config.boxing, config.launcher
    request = LaunchRequest(
        command=rank_command(folder),
        num_ranks=num_ranks,
        backend=cast(BoxingBackend, registry.make("boxing", boxing.name, boxing.settings)),
        folder=folder.absolute(),
    )
    launcher = cast(Launcher, registry.make("launcher", choice.name, choice.settings))
    specs: Sequence[LaunchSpec] = launcher.launch_specs(request)
    processes = "1 process" if num_ranks == 1 else f"{num_ranks} processes"
    sys.stdout.write(
        f"launcher {config.launcher.name}: {processes}, one a rank; what each writes is in "
        f"{log_path(folder, 0).parent}\n"
    )
    sys.stdout.flush()
    output = _Output()
    report = supervise(
        specs,
        grace_s=_GRACE_S,
        more_grace_s=output.more_grace_s,
        on_line=output.write,
        stops_gently=True,
        asking=status_signals(),
    )
    if report.stopped_by == signal.SIGINT:
        raise KeyboardInterrupt
    if report.stopped_by is not None:
        raise SystemExit(128 + report.stopped_by)
    if any(end.code == BAD_CONFIG for end in report.exits if 0 in end.spec.ranks):
        raise SystemExit(BAD_CONFIG)  # a setting, of which rank 0 has told
    error = report.error(quote=False)
    if error is not None:
        raise _with_checkpoint(_with_logs(error, report, folder), config, registry, folder)


class _Output:
    """Passes on what rank 0 writes, or a launcher; the other ranks have their logs.

    By that it knows what the run is at, and so how long those that are left of it may take to end.
    """

    def __init__(self) -> None:
        self._at = ""

    def write(self, line: Line) -> None:
        """Pass on a line."""
        if 0 not in line.spec.ranks:
            return
        if STARTING in line.text:
            self._at = STARTING
        elif SAVING in line.text:
            self._at = SAVING
        elif self._at == SAVING:
            self._at = ""  # it has said how that went
        sys.stdout.write(f"{line.text}\n")
        sys.stdout.flush()

    def more_grace_s(self) -> float:
        """Return how much longer the others get when a rank has failed."""
        return {STARTING: _STEP_S, SAVING: _SAVE_S}.get(self._at, 0.0)


def _with_checkpoint(
    error: RunError, config: RunConfig, registry: PluginRegistry, folder: Path
) -> RunError:
    """Return an error that says how to go on from the newest checkpoint, if there is one."""
    from sbp_launch.checkpoint import (
        newest_first,  # here: it takes a while, and only failures need it
    )

    try:
        choice = config.storage
        make = cast(StorageFactory, registry.make("storage", choice.name, choice.settings))
        names = newest_first(make(folder))
    except SbpError:
        return error  # which matters more
    if not names:
        return error
    return error.replaced(
        RunError, todo=f"{error.todo}\n  to go on from {names[0]}: {resume_command(folder)}"
    )


def _with_logs(error: RunError, report: ExitReport, folder: Path) -> RunError:
    """Return an error that quotes what the rank that failed first has written last."""
    cause = report.cause
    if cause is None:
        return error
    rank = cause.spec.ranks[0]
    if len(cause.spec.ranks) > 1 and cause.root_cause is not None:
        rank = int(cause.root_cause[0])
    path = log_path(folder, rank)
    try:
        with open_file(path) as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _SHOWN_BYTES))
            lines = file.read(_SHOWN_BYTES).decode("utf-8", "replace").splitlines()[-_SHOWN_LINES:]
    except OSError:
        return error
    quoted = "\n".join([f"{path}, which ends so:", *(f"    {line}" for line in lines)])
    return error.replaced(RunError, where=(*error.where, quoted))

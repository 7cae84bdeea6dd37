"""Choose the launcher of a run, start its ranks, and make sure that all of them end.

The launcher is checked against the boxing backend, the mesh, and how this process was started. A
choice of the user must fit; only `auto` is replaced:

| boxing connects | this process was started directly | by torchrun, mpiexec or srun |
|---|---|---|
| threads of one process | `threads` | refused, if they started several |
| processes | `spawn` | that launcher |

| the ranks are | action |
|---|---|
| threads of this process | train |
| processes that were started already, and this one is rank 0 | send orders to them, and train |
| processes that do not exist yet | start them, forward their output, and wait |
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path
from typing import cast

from sbp_core.boxing import BoxingBackend, LaunchSpec
from sbp_core.errors import ConfigError, RunError, SbpError
from sbp_core.plugins import PluginRegistry, StorageFactory
from sbp_core.processes import Launcher, LaunchRequest, Line, supervise
from sbp_core.serialize import open_file
from sbp_launch.console import make_console
from sbp_launch.exit_codes import BAD_CONFIG, SIGNALS
from sbp_launch.launching.rank import log_path, run_rank
from sbp_launch.launching.rendezvous import Rendezvous, RunOrder
from sbp_launch.run.folder import resume_command
from sbp_launch.run.status import status_signals
from sbp_launch.run.stopping import SAVING, STARTING
from sbp_launch.settings.config import ComposedConfig, PluginChoice, RunConfig
from sbp_launch.world import MPIEXEC, SLURM, THREADS, TORCHRUN, World

#: The option that leaves the choice to `choose_launcher`, and its result on this machine.
AUTO, SPAWN = "auto", "spawn"

#: For each launcher, the command that starts N ranks.
_COMMANDS = {
    TORCHRUN: "torchrun --nproc-per-node={} $(which sbp-train) ...",
    MPIEXEC: "mpiexec -n {} sbp-train ...",
    SLURM: "srun --ntasks={} sbp-train ...",
}


def choose_launcher(
    config: RunConfig, composed: ComposedConfig, registry: PluginRegistry, world: World
) -> RunConfig:
    """Return a run with its launcher chosen.

    Args:
        config: The run, with each config group checked.
        composed: The composed config, for messages.
        registry: The plugins.
        world: The launcher of this process, its rank, and the number of processes.

    Raises:
        ConfigError: the launcher does not fit the boxing backend, the mesh, or how this process was
            started.
    """
    boxing, asked = config.boxing.name, config.launcher.name
    groups = ("launcher", "boxing", "cluster")
    said = [line for group in groups for line in composed.overrides_of(group)]
    refusal = partial(ConfigError, where=said)
    is_between = _spans_processes(registry, "boxing", config.boxing)
    started = f"{world.launcher} has started {world.size} processes"
    name = asked
    if asked == AUTO and world.size == 1:
        fits = not world.is_alone and prod(config.mesh) == 1
        name = (world.launcher if fits else SPAWN) if is_between else THREADS
    elif asked == AUTO:
        name = world.launcher
    elif world.size > 1 and asked != world.launcher:
        raise refusal(
            f"launcher={asked} starts the ranks itself, and {started} already",
            accepted=f"launcher={world.launcher}, or no launcher",
            todo=f"leave out launcher={asked}, or start sbp-train without {world.launcher}",
        )
    choice = config.launcher if name == asked else PluginChoice(name=name)
    if _spans_processes(registry, "launcher", choice) != is_between:
        # One of the two is for processes, the other for threads.
        if world.size == 1 and name == THREADS:
            raise refusal(
                f"boxing={boxing} connects one process a rank, and launcher={name} runs all ranks "
                "in one process",
                accepted="launcher=spawn, torchrun, mpiexec or slurm with it; or boxing=local",
                todo=f"leave out launcher={name}, or set launcher=spawn",
            )
        starts = started if world.size > 1 else f"launcher={name} starts one process a rank"
        instead = "start one process: sbp-train ..."
        if world.size == 1:
            instead = f"leave out launcher={name}"
        raise refusal(
            f"{starts}, and boxing={boxing} connects the threads of one",
            accepted="boxing=torch or boxing=mpi, between processes",
            todo=f"add boxing={'mpi' if name == MPIEXEC else 'torch'}, or {instead}",
        )
    ranks = prod(config.mesh)
    # A single process started by Slurm may submit a job of many ranks.
    may_start = name == SLURM and world.size == 1
    if name == world.launcher != THREADS and world.size != ranks and not may_start:
        shape = ", ".join(map(str, config.mesh))
        example = f'"cluster.mesh=[{world.size}]" "cluster.axes=[data]"'
        raise refusal(
            f"{world.launcher} has started {world.size} process{'es' * (world.size != 1)}, and "
            f"cluster.mesh=[{shape}] has {ranks} rank{'s' * (ranks != 1)}",
            accepted="one process a rank",
            todo=f"{_COMMANDS[world.launcher].format(ranks)}, or a mesh of {world.size}, such as "
            f"{example}",
        )
    return replace(config, launcher=choice)


def is_started(config: RunConfig, world: World) -> bool:
    """Return whether the ranks of a run, whose launcher is chosen, have been started already."""
    return config.launcher.name == world.launcher != THREADS and world.size == prod(config.mesh)


def has_threads(config: RunConfig, registry: PluginRegistry) -> bool:
    """Return whether the ranks of a run, whose launcher is chosen, are threads of this process."""
    return not _spans_processes(registry, "launcher", config.launcher)


def _spans_processes(registry: PluginRegistry, kind: str, choice: PluginChoice) -> bool:
    config = registry.configure(kind, choice.name, choice.settings)
    return bool(getattr(config, "spans_processes", False))


#: Seconds that other ranks get to end by themselves after a rank has failed. Ranks that wait for it
#: are notified at once; a rank that captures or plans does not communicate.
_GRACE_S = 2.0

#: Further seconds: for a rank that computes, until it next communicates; and for saving the states
#: of the surviving ranks.
_STEP_S, _SAVE_S = 30.0, 600.0

#: Number of lines that are quoted from the log of a rank that failed.
_SHOWN_LINES = 12

#: Bytes at the end of a log in which these lines are searched.
_SHOWN_BYTES = 2**16


def launch(
    config: RunConfig,
    registry: PluginRegistry,
    folder: Path,
    world: World,
    meeting: Rendezvous | None,
    *,
    of_sweep: bool = False,
) -> None:
    """Train on the ranks of a run, wherever they are.

    Args:
        config: The run, with its launcher chosen.
        registry: The plugins.
        folder: The run folder, with the settings.
        world: The launcher of this process, its rank, and the number of processes.
        meeting: Connection to the other ranks, if they were started already.
        of_sweep: Whether further runs follow if this one fails.

    Raises:
        SbpError: the run failed.
        SystemExit: the run ended, and the ranks have printed the reason.
    """
    if has_threads(config, registry):
        # Imported here: a wrong setting is reported without waiting for torch.
        from sbp_launch.trainer.trainer import train

        train(config, registry, folder)
    elif is_started(config, world):
        if meeting is not None:
            meeting.broadcast(RunOrder(folder=folder.absolute(), of_sweep=of_sweep))
        if code := run_rank(folder, world):
            raise SystemExit(code)
    else:
        _start(config, registry, folder)


def follow(meeting: Rendezvous, world: World) -> int:
    """Train, as a rank other than 0, in each run that rank 0 announces; return the exit code."""
    failed = 0
    while (told := meeting.receive()).folder is not None:
        code = run_rank(told.folder, world)
        if code and (not told.of_sweep or code > SIGNALS):
            return code
        failed = failed or code
    return told.code or failed


def _start(config: RunConfig, registry: PluginRegistry, folder: Path) -> None:
    """Start the ranks, and wait for them.

    Raises:
        ConfigError: this launcher cannot start them.
        RunError: one of them failed.
        SystemExit, KeyboardInterrupt: a signal ended them, or rank 0 has printed why it ended.
    """
    num_ranks = prod(config.mesh)
    boxing, choice = config.boxing, config.launcher
    # With the import path of this process: the working folder only if it is there, too.
    finds_here = "" in sys.path or str(Path.cwd()) in sys.path
    python = (sys.executable, *([] if finds_here else ["-P"]), "-m", "sbp_launch.launching.rank")
    request = LaunchRequest(
        command=(*python, str(folder.absolute()), str(make_console().width)),
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
        raise SystemExit(BAD_CONFIG)  # an error of the settings, which rank 0 has printed
    error = report.error(quote=False)
    if error is None:
        return
    if (cause := report.cause) is not None:
        # Quote the end of the log of the rank that failed first.
        rank = cause.spec.ranks[0]
        if len(cause.spec.ranks) > 1 and cause.root_cause is not None:
            rank = int(cause.root_cause[0])
        path = log_path(folder, rank)
        with suppress(OSError), open_file(path) as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _SHOWN_BYTES))
            lines = file.read(_SHOWN_BYTES).decode("utf-8", "replace").splitlines()
            quoted = (f"    {line}" for line in lines[-_SHOWN_LINES:])
            text = "\n".join([f"{path}, which ends with:", *quoted])
            error = error.replaced(RunError, where=(*error.where, text))
    from sbp_launch.checkpoint import (
        newest_first,  # here: it takes a while, and only failures need it
    )

    with suppress(SbpError):  # the original error must be raised
        storage = config.storage
        make = cast(StorageFactory, registry.make("storage", storage.name, storage.settings))
        if names := newest_first(make(folder)):
            resume = f"to continue from {names[0]}: {resume_command(folder)}"
            error = error.replaced(RunError, todo=f"{error.todo}\n  {resume}")
    raise error


class _Output:
    """Forwards the output of rank 0, or of a launcher; the other ranks have their logs.

    From this output it knows the phase of the run, and so how long surviving ranks may take to end.
    """

    def __init__(self) -> None:
        self._at = ""

    def write(self, line: Line) -> None:
        """Forward a line of rank 0."""
        if 0 not in line.spec.ranks:
            return
        if STARTING in line.text:
            self._at = STARTING
        elif SAVING in line.text:
            self._at = SAVING
        elif self._at == SAVING:
            self._at = ""  # it has printed the result of saving
        sys.stdout.write(f"{line.text}\n")
        sys.stdout.flush()

    def more_grace_s(self) -> float:
        """Return how many more seconds the other ranks get after a rank has failed."""
        return {STARTING: _STEP_S, SAVING: _SAVE_S}.get(self._at, 0.0)

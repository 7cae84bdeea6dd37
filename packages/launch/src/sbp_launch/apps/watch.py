"""`sbp-watch RUN`: show what each rank of a running job is doing, as a live table.

It queries the socket of each process (`sbp_launch.run.status`); the cost for the run is to list its
registers (buffers between actors). The table shows registers that are full: their writer waits for
a credit, that is until the slowest reader frees a place.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text

from sbp_core.errors import ConfigError, SbpError
from sbp_core.output import standard_output
from sbp_launch.console import make_console, plain_table
from sbp_launch.exit_codes import INTERRUPTED, ended_by
from sbp_launch.run.folder import LOGS
from sbp_launch.run.status import ask

_HEAD = re.compile(r"rank (?P<rank>\d+), thread (?P<thread>[^:]+): (?P<rest>.*)")
_AT = re.compile(r"at (?P<actor>.*); (?P<done>\d+ of \d+) firings of the step are done")
_REGISTER = re.compile(r"    (?P<name>.+): (?P<alive>\d+) of (?P<quota>\d+), for (?P<user>.+)")

_COUNT = re.compile(r"  registers: (?P<count>\d+ of \d+) (is|are) full.*")

#: Largest number of full registers that are named for a thread.
_MOST = 4

#: Largest number of processes that are queried at once.
_MOST_AT_ONCE = 64


@standard_output("sbp-watch")
def main(argv: Sequence[str] | None = None) -> None:
    """Show a run until it ends; with `--once`, show it once.

    Exits with 0 if the run was there, 2 if there is none, 130 after Ctrl-C.
    """
    parser = argparse.ArgumentParser(
        prog="sbp-watch", description="Show what each rank is doing.", allow_abbrev=False
    )
    parser.add_argument("run", metavar="RUN", type=Path, help="the folder of the run")
    parser.add_argument("--once", action="store_true", help="print it once")
    parser.add_argument(
        "--every", type=float, default=1.0, metavar="SECONDS", help="seconds between updates"
    )
    given = parser.parse_args(argv)
    try:
        _watch(given.run, given.every, is_once=given.once)
    except SbpError as error:
        sys.exit(ended_by(error, "sbp-watch"))
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


def _watch(run: Path, every_s: float, *, is_once: bool) -> None:
    """Show a run until its processes end.

    Raises:
        ConfigError: no process of it runs here, or the interval is invalid.
    """
    if not 0.05 <= every_s <= 3600:
        raise ConfigError(f"--every {every_s:g}", accepted="0.05 to 3600 seconds")
    console = make_console()
    logs = run / LOGS
    sockets = sorted(logs.glob("status_*.sock"), key=_number)
    if not sockets:
        raise ConfigError(
            f"{run} {'is not running' if logs.is_dir() else 'is not the folder of a run'}",
            where="the command line",
            accepted="the folder of a running run, which has files logs/status_N.sock",
            todo="use the path that sbp-train prints after 'run folder:'",
        )
    if is_once:
        console.print(picture(sockets))
        return
    with Live(picture(sockets), console=console, auto_refresh=False) as live:
        while sockets := sorted(logs.glob("status_*.sock"), key=_number):
            live.update(picture(sockets), refresh=True)
            time.sleep(every_s)
    console.print("the run has ended")


def _number(path: Path) -> int:
    return int(path.stem.rpartition("_")[2])


def picture(sockets: Iterable[Path]) -> RenderableType:
    """Return a table of the status of the processes at some sockets, with their full registers."""
    table = plain_table()
    table.add_column("rank", justify="right", no_wrap=True)
    for name in ("at", "of the step", "does", "registers"):
        table.add_column(name, overflow="fold", no_wrap=name in ("of the step", "registers"))
    heads: list[Text] = []
    full: list[Text] = []

    def answer_of(path: Path) -> list[str] | Text:
        try:
            return ask(path)
        except SbpError as error:
            return Text(f"process {_number(path)}: {error.what}", style="red")

    with ThreadPoolExecutor(_MOST_AT_ONCE) as asking:  # a process that hangs takes seconds
        answers = list(asking.map(answer_of, sockets))
    for answer in answers:
        if isinstance(answer, Text):
            heads.append(answer)
            continue
        head, *lines = answer
        # Lines about the whole process, such as the number of steps.
        whole = [line for line in lines if not line.startswith(("rank ", " "))]
        heads.append(Text(" · ".join((head, *whole)), style="dim"))
        # The first line of each thread, and the lines that belong to it.
        starts = [(at, one) for at, one in enumerate(map(_HEAD.fullmatch, lines)) if one]
        ends = [at for at, _ in starts[1:]] + [len(lines)] * bool(starts)
        for (index, start), end in zip(starts, ends, strict=True):
            inside = lines[index + 1 : end]
            thread = "" if start["thread"] == "compute" else f", {start['thread']}"
            at = _AT.fullmatch(start["rest"])
            counts = [one["count"] for line in inside if (one := _COUNT.fullmatch(line))]
            table.add_row(
                f"{start['rank']}{thread}",
                at["actor"] if at else start["rest"],
                at["done"] if at else "",
                # Lines without an actor are lists: of boxing, of registers.
                inside[0].strip() if at and inside else "",
                "".join(f"{count} full" for count in counts),
            )
            # Only registers of several places: a single place is full whenever it is used.
            found = [one for line in inside if (one := _REGISTER.fullmatch(line))]
            found = [one for one in found if int(one["alive"]) >= int(one["quota"]) > 1]
            told = [
                f"{one['name']} {one['alive']}/{one['quota']} > {one['user']}"
                for one in found[:_MOST]
            ]
            told += [f"and {len(found) - _MOST} more"] if len(found) > _MOST else []
            full += [Text(f"  rank {start['rank']}: {one}") for one in told]
    if full:
        full.insert(0, Text("full registers, alive/quota > last reader:", style="bold"))
    return Group(*heads, *([table] if table.row_count else []), *full)


if __name__ == "__main__":
    main()

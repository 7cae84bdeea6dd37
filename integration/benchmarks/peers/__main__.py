"""Time sbp against PyTorch's own ways, on two processes of one thread each, or one of two threads.

    python integration/benchmarks/peers [--only TEXT] [--rounds N] [--starts N] [--apart]
        [--compile KEY=VALUE] [--passes KEY=VALUE] [--cluster BOXING=FILE] [--operators]
        [--json FILE] [--list]

Each comparison (`matrix.py`) has its own processes, which hold all its ways and run them in turns,
so other load of the machine affects all of them: ratios are within the same round. Other ways in
the same process affect the caches and memory of a step in unpredictable ways, which may cost half
of the step for large tensors. With `--apart`, each way shares its processes only with its peers.
`mpiexec` starts the processes, so that gloo and MPI can run in the same ones. The command fails if
a way computes other losses than its peer; a missed target is only printed, because machines differ.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
import yaml
from matrix import COMPARISONS, Comparison
from table import HEADER, Choice, Row, joined, lines, made_choices, rows, summary_lines

from sbp_core.processes import mpiexec_specs

RANK = Path(__file__).with_name("rank.py")

#: Seconds that a round and that the start of a comparison may take.
MOST_S = 20.0, 300.0


def run(
    name: str, comparison: Comparison, given: argparse.Namespace, settings: Sequence[Any]
) -> tuple[list[Row], list[Choice]]:
    """Run a comparison in new processes; return its rows, and the choices of `auto`."""
    with tempfile.TemporaryDirectory() as folder:
        operators = str(Path(folder) / "operators.json") if given.operators else ""

        def ranks_of(part: Comparison) -> list[Any]:
            told = [*settings, operators, list(part.ours)]
            starts = range(given.starts)
            return joined([_start(name, part, given.rounds, start, told) for start in starts])

        if operators:
            # In separate processes, so that the memory of other ways is not affected.
            none = replace(comparison, peers={}, ours={})
            _start(name, none, 0, 0, [*settings, operators, []])
        if not given.apart:
            ranks = ranks_of(comparison)
            return rows(name, comparison, ranks), made_choices(comparison, ranks)
        made: list[Row] = []
        merged: list[dict[str, Any]] = [{} for _ in range(comparison.num_ranks)]
        for way, ours in comparison.ours.items():
            part = replace(comparison, ours={way: ours})
            ranks = ranks_of(part)
            made += [row for row in rows(name, part, ranks) if not (made and row.is_peer)]
            merged = [{**one, **other} for one, other in zip(merged, ranks, strict=True)]
        return made, made_choices(comparison, merged)


def _start(
    name: str, comparison: Comparison, rounds: int, rotation: int, settings: Sequence[Any]
) -> list[Any]:
    with tempfile.TemporaryDirectory() as folder:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        numbers = [str(rounds), str(rotation), folder, str(store.port)]
        given = [name, *numbers, *map(json.dumps, settings)]
        command, environment = [sys.executable, str(RANK), *given], {}
        if comparison.num_ranks > 1:
            (spec,) = mpiexec_specs(comparison.num_ranks, command)
            command, environment = list(spec.command), {**spec.defaults, **spec.environment}
            environment["OMP_NUM_THREADS"] = "1"
        else:
            environment["OMP_NUM_THREADS"] = str(os.cpu_count())
        most_s = MOST_S[0] * rounds + MOST_S[1]
        subprocess.run(command, env={**os.environ, **environment}, check=True, timeout=most_s)
        files = [Path(folder) / f"{rank}.json" for rank in range(comparison.num_ranks)]
        return [json.loads(file.read_text("utf-8")) for file in files]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="peers", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", default="", help="comparisons whose names have this text")
    parser.add_argument("--rounds", type=int, default=15, help="timed steps of each way")
    parser.add_argument(
        "--starts",
        type=int,
        default=1,
        help="times that all processes are started, the ways in another order each time",
    )
    parser.add_argument(
        "--operators",
        action="store_true",
        help="measure what operators take, however a step is cut, and plan and predict with that",
    )
    parser.add_argument(
        "--apart", action="store_true", help="each way in processes of its own, beside its peers"
    )
    parser.add_argument("--json", type=Path, help="where the rows go, too")
    parser.add_argument(
        "--compile", action="append", default=[], metavar="KEY=VALUE", help="of CompileConfig"
    )
    parser.add_argument(
        "--passes", action="append", default=[], metavar="KEY=VALUE", help="of PassOptions"
    )
    parser.add_argument(
        "--cluster",
        action="append",
        default=[],
        metavar="BOXING=FILE",
        help="what is planned for over torch or mpi: a file of sbp-calibrate",
    )
    parser.add_argument("--list", action="store_true", help="say what there is to compare")
    return parser.parse_args()


def main() -> None:
    given = arguments()
    settings: list[Any] = [
        {key: yaml.safe_load(value) for key, _, value in (one.partition("=") for one in every)}
        for every in (given.compile, given.passes, given.cluster)
    ]
    chosen = {name: found for name, found in COMPARISONS.items() if given.only in name}
    if given.list:
        print("\n".join(chosen))
        return
    print(HEADER)
    made, choices = [], []
    for name, comparison in chosen.items():
        found, chose = run(name, comparison, given, settings)
        made += found
        choices += chose
        print("\n".join([*lines(found), *map(str, chose)]), flush=True)
        if given.json is not None:
            given.json.write_text(json.dumps([asdict(row) for row in made], indent=1), "utf-8")
    if choices:
        print("\n".join(summary_lines(made, choices)))


if __name__ == "__main__":
    main()

"""The matrix on real processes, one for each rank: every cell uses `parallelize`.

The command calls `attempt_on_ranks`, which starts this module as each rank of a world. A world runs
all cells of its size, one after the other. Each rank also runs plain PyTorch, and compares the
losses and its own shards with it.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from math import prod
from typing import Any

from models.layouts import LAYOUTS
from models.programs import PROGRAMS
from models.trial import Outcome, batches, cluster, make, storage_dtype, truth, worst_shard
from sbp_core.plugins import discover
from sbp_core.processes import Line, supervise
from sbp_launch import parallelize
from sbp_torch.graph_capture import UpdateOptions

#: Seconds for all cells of one world.
_TIMEOUT_S = 3600.0

#: A cell: program, layout, dtype.
Cell = tuple[str, str, str]


def attempt_on_ranks(cells: Sequence[Cell], boxing: str, num_steps: int) -> Iterator[Outcome]:
    """Run cells on processes and compare them; errors become outcomes, too.

    Args:
        cells: The cells, in any order.
        boxing: A boxing backend for several processes: `torch`, `mpi`.
        num_steps: Steps of each cell, >= 2: bytes of the first step are not counted, because the
            ranks also compare their plans then.
    """
    worlds: dict[int, list[Cell]] = {}
    for cell in cells:
        worlds.setdefault(prod(LAYOUTS[cell[1]].mesh), []).append(cell)
    backend: Any = discover(strict=True).make("boxing", boxing, {})
    for size, own in worlds.items():
        lines: list[Line] = []
        arguments = json.dumps({"cells": own, "steps": num_steps})
        command = [sys.executable, "-m", "models.ranks", arguments]
        specs = backend.launch_specs(size, command)
        ended = supervise(specs, timeout_s=_TIMEOUT_S, on_line=lines.append)
        found: dict[Cell, list[dict[str, Any]]] = {cell: [] for cell in own}
        for line in lines:
            if line.text.startswith('{"cell"'):
                said = json.loads(line.text)
                found[tuple(said["cell"])].append(said["outcome"])
        error = str(ended.error() or "")
        for cell, outcomes in found.items():
            yield _joined(cell, outcomes, size, error)


def _joined(cell: Cell, ranks: list[dict[str, Any]], size: int, error: str) -> Outcome:
    """Return the outcome of a cell from the results of its ranks."""
    names = dict(zip(("program", "layout", "dtype"), cell, strict=True))
    errors = [one["error"] for one in ranks if one["error"]]
    if errors or len(ranks) < size:
        what = errors[0] if errors else f"{len(ranks)} of {size} ranks came to its end: {error}"
        return Outcome(**names, error=what)
    return Outcome(
        **names,
        loss_error=max(one["loss_error"] for one in ranks),
        state_error=max(one["state_error"] for one in ranks),
        predicted_bytes=ranks[0]["predicted_bytes"],
        counted_bytes=sum(one["counted_bytes"] for one in ranks),
        compile_s=max(one["compile_s"] for one in ranks),
        run_s=max(one["run_s"] for one in ranks),
    )


def run_cell(cell: Cell, num_steps: int) -> Outcome:
    """Run a cell as one rank of a world, and compare the losses and shards of this rank."""
    name, layout_name, dtype_name = cell
    program, layout, dtype = PROGRAMS[name], LAYOUTS[layout_name], storage_dtype(dtype_name)
    model, optimizer = make(program, dtype)
    given = list(batches(program, num_steps, dtype))
    began = time.perf_counter()
    step = parallelize(
        model,
        program.loss,
        given[0],
        optimizer,
        mesh=dict(zip(layout.axes, layout.mesh, strict=True)),
        planner={
            "name": "manual",
            "pins": layout.pins(program),
            "stage_patterns": program.stages if "pipe" in layout.axes else (),
        },
        cluster=cluster(prod(layout.mesh)),
        micro_batches=layout.micro_batches,
        update=UpdateOptions(),
        compile={
            "autocast": "bfloat16" if dtype_name == "bfloat16" else "",
            "passes": {"recompute": {"modules": program.blocks if layout.recompute else ()}},
        },
    )
    compile_s = time.perf_counter() - began
    with step:
        backend: Any = vars(step.session)["backend"]
        communicators = [backend.communicator(rank) for rank in step.session.local_ranks]
        began = time.perf_counter()
        losses = [step(given[0]).item()]
        before = sum(one.sent_bytes for one in communicators)
        losses += [step(batch).item() for batch in given[1:]]
        sent = sum(one.sent_bytes for one in communicators) - before
        run_s = time.perf_counter() - began
        expected = truth(name, dtype_name, layout.micro_batches, num_steps)
        state_error = worst_shard(step.plan, step.session, expected)
    pairs = list(zip(losses, expected.losses, strict=True))
    return Outcome(
        program=name,
        layout=layout_name,
        dtype=dtype_name,
        loss_error=max(abs(a - b) / abs(b) for a, b in pairs),
        state_error=state_error,
        predicted_bytes=step.plan.boxing_bytes * (num_steps - 1),
        counted_bytes=sent,
        compile_s=compile_s,
        run_s=run_s,
    )


def main() -> None:
    """Run the cells of the command line as one rank; print a line of JSON for each."""
    told = json.loads(sys.argv[1])
    for cell in told["cells"]:
        try:
            outcome = run_cell(tuple(cell), told["steps"])
        except Exception as error:
            program, layout, dtype = cell
            text = f"{type(error).__name__}: {error}"
            outcome = Outcome(program=program, layout=layout, dtype=dtype, error=text)
        sys.stdout.write(json.dumps({"cell": cell, "outcome": asdict(outcome)}) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()

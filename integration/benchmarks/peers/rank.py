"""One process of a comparison: it makes all ways, runs them in turns, and writes the results.

    python rank.py COMPARISON ROUNDS ROTATION FOLDER PORT OPTIONS PASSES CLUSTERS OPERATORS

Every round runs every way once, each time beginning with another way; all ranks begin together. It
writes `FOLDER/RANK.json`: for each way the seconds until the end of its first step, the seconds of
each later round, the processor time, the first losses, the bytes sent per step, and the prediction.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from matrix import COMPARISONS, Comparison
from programs import MODELS
from sbp_ways import Setting, measured_calls, sbp_step
from torch_ways import Step

from sbp_aten.pass_options import PassOptions
from sbp_core.operators import MeasuredOperator
from sbp_core.plugins import discover, merge_settings
from sbp_core.serialize import dump, load, parse, read_text
from sbp_core.simulation import simulate

#: Number of rounds that are not timed.
WARM_UP = 2

#: Number of losses that are compared: that of the initial states, and those after updates.
NUM_LOSSES = 3


def measure(
    comparison: Comparison, rounds: int, rotation: int, setting: Setting, stack: ExitStack
) -> dict[str, dict[str, Any]]:
    """Run all ways of a comparison on this rank.

    Args:
        comparison: The comparison.
        rounds: Timed steps of each way.
        rotation: Three times as many of our ways move to the end of the starting order, because the
            place of a way's memory matters, and it depends on the ways before it.
        setting: The common setting of all ways.
        stack: Closes the sessions.
    """
    model, store = setting.model, setting.store
    found: dict[str, dict[str, Any]] = {}
    steps: dict[str, Step] = {}
    first = model.batch_of(0)
    ours = list(comparison.ours)
    by = 3 * rotation % len(ours)
    for name in (*comparison.peers, *ours[by:], *ours[:by]):
        began = time.perf_counter()
        sent_bytes, predicted_s = 0, None
        if name in comparison.peers:
            steps[name] = comparison.peers[name](model, setting.registry)
        else:
            steps[name], plan = sbp_step(comparison.ours[name], name, setting, stack=stack)
            sent_bytes, predicted_s = plan.boxing_bytes, simulate(plan).step_s
        losses = [steps[name](first)]
        start_s = time.perf_counter() - began
        found[name] = {
            "start_s": start_s,
            "times": [],
            "cpu": [],
            "losses": losses,
            "sent": sent_bytes,
            "predicted_s": predicted_s,
        }
    gc.collect()
    gc.freeze()
    names = list(steps)
    for index in range(1, rounds + WARM_UP):
        batch = model.batch_of(index)
        for turn in range(len(names)):
            name = names[(turn + index) % len(names)]
            if store is not None:
                dist.barrier()
            began, began_cpu = time.perf_counter(), time.process_time()
            loss = steps[name](batch)
            elapsed_s = time.perf_counter() - began
            cpu_s = time.process_time() - began_cpu
            if index < NUM_LOSSES:
                found[name]["losses"].append(loss)
            if index >= WARM_UP:
                found[name]["times"].append(elapsed_s)
                found[name]["cpu"].append(cpu_s)
    for way in found.values():
        way["losses"] = [None if loss is None else float(loss) for loss in way["losses"]]
    return {name: found[name] for name in (*comparison.peers, *comparison.ours)}


def known_calls(
    setting: Setting, comparison: Comparison, file: Path
) -> tuple[MeasuredOperator, ...]:
    """Return the times of the calls of a step: from a file, or measured if there is none yet."""
    if file.exists():
        return load(parse(read_text(file)), tuple[MeasuredOperator, ...])
    found = measured_calls(setting, comparison.num_ranks)
    if not dist.is_initialized() or dist.get_rank() == 0:
        file.write_text(json.dumps(dump(found, tuple[MeasuredOperator, ...])), encoding="utf-8")
    return found


def main() -> None:
    name, rounds, rotation, folder, port, *settings = sys.argv[1:]
    options, passes, clusters, operators, ways = map(json.loads, settings)
    comparison = COMPARISONS[name]
    comparison = replace(comparison, ours={way: comparison.ours[way] for way in ways})
    rank, store = 0, None
    if comparison.num_ranks > 1:
        rank = int(os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ.get("PMI_RANK") or 0)
        store = dist.TCPStore("127.0.0.1", int(port), is_master=False)
        own = dist.PrefixStore("peers", store)
        dist.init_process_group("gloo", store=own, rank=rank, world_size=comparison.num_ranks)
    torch.set_num_threads(1 if store is not None else os.cpu_count() or 1)
    with ExitStack() as stack:
        setting = Setting(
            model=MODELS[comparison.model],
            registry=discover(strict=True),
            store=store,
            options=options,
            passes=merge_settings(PassOptions, passes),
            clusters=clusters,
        )
        if operators:
            setting = replace(setting, operators=known_calls(setting, comparison, Path(operators)))
        found: Mapping[str, Any] = {}
        if ways:
            found = measure(comparison, int(rounds), int(rotation), setting, stack)
    (Path(folder) / f"{rank}.json").write_text(json.dumps(found), encoding="utf-8")
    if store is not None:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

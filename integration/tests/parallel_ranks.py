"""The program of `test_parallelize_processes`: it runs as one rank of two, or with two threads.

Each process trains a model of the zoo by `parallelize` and by plain PyTorch, compares losses and
its own shards, and prints what it found as a line of JSON.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent.parent))

from programs import MODEL, batch, expected_shard, loss_of, make_optimizer, registry

from sbp_core.errors import SbpError
from sbp_core.runtime import local_samples
from sbp_launch import parallelize
from sbp_launch.parallel import ParallelStep
from sbp_launch.world import World
from sbp_torch.deferred_init import deferred

NUM_STEPS, BATCH_SIZE = 3, 8

LAYOUTS: dict[str, dict[str, Any]] = {
    "sharded states": {"planner": "manual/zero", "update": {"clip_norm": 0.1}},
    "pipeline": {"planner": "manual/pipeline", "mesh": {"pipe": 2}, "micro_batches": 4},
    "own batches": {"planner": "manual/data_parallel", "micro_batches": 2, "batch_is": "local"},
    "tensor parallel": {"planner": "manual/tensor_parallel", "mesh": {"tensor": 2}},
    "sharded optimizer": {"planner": "manual/zero1"},
}

#: Those that every change is tested with; all of them take longer.
QUICK = ("sharded states", "pipeline", "own batches")


def make_model() -> nn.Module:
    """Return the seeded model: a GPT of one layer, in float64."""
    torch.manual_seed(0)
    model = registry().make("model", "gpt", {**MODEL, "num_layers": 1})
    assert isinstance(model, nn.Module)
    return model.double()


def eager_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, index: int, clip_norm: float | None = None
) -> float:
    """Take a step of plain PyTorch on the whole batch; return its loss."""
    optimizer.zero_grad()
    loss = loss_of(model, batch(index, BATCH_SIZE))
    loss.backward()
    if clip_norm is not None:
        nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
    optimizer.step()
    return loss.item()


def deviation(step: Any, model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    """Return how far any shard of this process is from the one-device program."""
    whole = dict(model.named_parameters())
    for name, parameter in model.named_parameters():
        whole |= {f"{name}.{key}": value for key, value in optimizer.state[parameter].items()}
    worst = 0.0
    for rank in step.session.local_ranks:
        for slot in step.plan.by_rank[rank].slots:
            if slot.name not in whole or slot.sbp is None:
                continue
            found = step.session.shard(slot.name, rank)
            wanted = expected_shard(step.plan, rank, slot.name, whole[slot.name].detach())
            assert found.shape == wanted.shape, slot.name
            if found.numel():
                worst = max(worst, (found - wanted).abs().max().item())
    return worst


def own_part(step: Any, given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return what this process has to give of a whole batch."""
    samples = local_samples(step.plan, step.session.local_ranks)
    return {
        name: torch.cat([value[span.start : span.stop] for span in samples])
        for name, value in given.items()
    }


def trained(name: str) -> dict[str, Any]:
    """Train by a layout; return losses, an evaluation, a sum of all states, and deviations."""
    layout = LAYOUTS[name]
    made = deferred(make_model, seed=0)
    eager = make_model()
    eager_optimizer = make_optimizer(eager)
    losses, worst = [], 0.0
    is_local = layout.get("batch_is") == "local" and World.of_environment().size == 2
    example = batch(0, BATCH_SIZE // 2 if is_local else BATCH_SIZE)
    with parallelize(
        made, loss_of, example, make_optimizer(made.model), **{"mesh": 2, **layout}
    ) as step:
        for index in range(NUM_STEPS):
            given = batch(index, BATCH_SIZE)
            losses.append(step(own_part(step, given) if is_local else given).item())
            wanted = eager_step(eager, eager_optimizer, index, **layout.get("update", {}))
            worst = max(worst, abs(losses[-1] - wanted))
        worst = max(worst, deviation(step, eager, eager_optimizer))
        given = batch(100, 6)
        if is_local:
            first = 3 * step.data_parallel_rank
            given = {name: value[first : first + 3] for name, value in given.items()}
        evaluated = step.evaluate(given).item()
        states = step.state_dict()
        elsewhere = step.state_dict(to=1)
        is_there = bool(elsewhere) == (1 in step.session.local_ranks)
    return {
        "losses": [value.hex() for value in losses],
        "evaluated": evaluated.hex(),
        "states": {key: float(value.double().sum()).hex() for key, value in states.items()},
        "worst": worst,
        "states where they go": is_there,
    }


def started_differently(rank: int) -> dict[str, Any]:
    """Make the model with other values on each rank; return with which ones training begins."""
    torch.manual_seed(rank)
    model = nn.Linear(3, 2)
    own = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with parallelize(model, square, {"x": torch.zeros(2, 3)}, optimizer) as step:
        found = step.model_state_dict()
    torch.manual_seed(0)
    first = nn.Linear(3, 2).state_dict()
    return {
        "differs": any(not torch.equal(own[name], first[name]) for name in own),
        "begins with those of rank 0": all(torch.equal(found[name], first[name]) for name in found),
    }


def refusals(rank: int) -> dict[str, str]:
    """Return what is said of programs that differ between the ranks."""
    said = {}
    for what, layers, seed in (("other code", 1 + rank, 0), ("other settings", 1, rank)):
        model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(layers)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = parallelize(model, square, {"x": torch.zeros(2, 3)}, optimizer, seed=seed)
        try:
            with step:
                said[what] = "started"
        except SbpError as error:
            said[what] = str(error)
    return said


def different_batches(rank: int) -> str:
    """Return what is said where each rank loads other samples, and calls them the whole batch."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        with parallelize(model, square, {"x": torch.zeros(2, 3)}, optimizer) as step:
            step({"x": torch.full((2, 3), float(rank))})
    except SbpError as error:
        return str(error)
    return "trained"


def different_evaluations(rank: int) -> str:
    """Return what is said where each rank evaluates another number of samples."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    given = {"x": torch.zeros(2, 3)}
    try:
        with parallelize(model, square, given, optimizer, batch_is="local") as step:
            step.evaluate(given)
            step.evaluate({"x": torch.zeros(2 + rank, 3)})
    except SbpError as error:
        return str(error)
    return "evaluated"


def without_update(step: Any, given: dict[str, torch.Tensor]) -> None:
    """Take a step that changes nothing."""
    with step.no_update():
        step(given)


#: What rank 0 calls where rank 1 takes a step: by what messages call it.
CALLS: dict[str, Callable[[Any, dict[str, torch.Tensor], Path], object]] = {
    "step.state_dict()": lambda step, given, folder: step.state_dict(),
    "step.model_state_dict()": lambda step, given, folder: step.model_state_dict(),
    "step.evaluate(batch)": lambda step, given, folder: step.evaluate(given),
    "step(batch) inside step.no_update()": lambda step, given, _: without_update(step, given),
    "step.save(folder, wait=True)": lambda step, given, folder: step.save(folder),
    "step.load(path)": lambda step, given, folder: step.load(folder),
    "step.load_state_dict(states)": lambda step, given, _: step.load_state_dict({}),
}


def on_rank_0_alone(rank: int, call: str, folder: Path, *, at_the_end: bool = False) -> str:
    """Return what is said where only rank 0 makes a call, and rank 1 trains on, or is through."""
    model = nn.Linear(64, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    given = {"x": torch.zeros(2, 64)}
    try:
        with parallelize(model, square, given, optimizer, planner="manual/data_parallel") as step:
            step(given)
            if rank == 0:
                CALLS[call](step, given, folder)
            if not at_the_end:
                step(given)
    except SbpError as error:
        return str(error)
    return "trained"


def damaged(rank: int, folder: Path) -> dict[str, Any]:
    """Load checkpoints of which one is damaged where only rank 1 reads; return what is said."""
    given = {"x": torch.ones(2, 64)}

    def started() -> ParallelStep:
        torch.manual_seed(0)
        model = nn.Linear(64, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return parallelize(model, square, given, optimizer, planner="manual/zero")

    def said(call: Callable[[], object]) -> str:
        try:
            call()
        except SbpError as error:
            return str(error)
        return ""

    newest = folder / "step-00000002"
    with started() as step:
        for _ in range(2):
            step(given)
            step.save(folder)
        own = newest
        if rank == 1:  # as on a disk of its own
            own = Path(shutil.copytree(newest, folder / "copy" / newest.name))
            (own / "manifest.json").write_text("{}")
        step.state_dict()  # both are here
        found: dict[str, Any] = {"manifest": said(lambda: step.load(own))}
        if rank == 1:
            path = newest / "rank-00001.safetensors"
            path.write_bytes(path.read_bytes()[:-1] + b"?")
        before = step.state_dict()
        found["load"] = said(lambda: step.load(newest))
        after = step.state_dict()
        found["kept"] = all(torch.equal(after[name], before[name]) for name in before)
    with started() as step:
        found["load first"] = said(lambda: step.load(newest))
        found["step"] = said(lambda: step(given))
        step.load(folder)
        found["goes on behind"] = step.steps_done
        found["losses"] = [float(step(given)) for _ in range(2)]
    return found


def square(model: nn.Module, given: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return a loss."""
    loss: torch.Tensor = model(given["x"]).square().sum()
    return loss


def main() -> None:
    """Run all of it as one rank, which takes a folder and names of layouts; print it."""
    rank = World.of_environment().rank
    found: dict[str, Any] = {name: trained(name) for name in sys.argv[2:]}
    found["damaged"] = damaged(rank, Path(sys.argv[1]))
    found["started differently"] = started_differently(rank)
    found["refusals"] = {**refusals(rank), "other batches": different_batches(rank)}
    found["refusals"]["other evaluations"] = different_evaluations(rank)
    alone = Path(sys.argv[1]) / "alone"
    found["on rank 0 alone"] = {call: on_rank_0_alone(rank, call, alone) for call in CALLS}
    last = next(call for call in CALLS if "save" in call)
    found["at the end"] = {last: on_rank_0_alone(rank, last, alone, at_the_end=True)}
    print(json.dumps({"rank": rank, **found}), flush=True)


if __name__ == "__main__":
    main()

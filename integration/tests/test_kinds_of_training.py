"""Kinds of training by `parallelize` equal plain PyTorch: losses, weights, buffers, moments."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import kinds_of_training
import pytest
import torch
from kinds_in_plain_pytorch import Trained, assert_equal, plain
from kinds_of_training import KINDS
from kinds_with_two_networks import gan, gan_of_the_example
from programs import registry

from sbp_core.boxing import BoxingBackend
from sbp_core.errors import CaptureError
from sbp_core.processes import Line, supervise
from sbp_launch import MicroBatches, parallelize

LAYOUTS = {
    "sharded states": {"mesh": 4, "planner": "manual/zero"},
    "data parallel": {"mesh": 2, "planner": "manual/data_parallel"},
    "inferred": {"mesh": (2, 2), "planner": "propagate"},
}

#: Forms of the first program, where there are others than the first.
NUM_FORMS = {"padding to the longest": 2, "curriculum": 3, "KL annealing": 2}


@cache
def by_plain_pytorch(kind: str) -> Trained:
    return KINDS[kind](plain)


def assert_trains_as_plain_pytorch(kind: str, layout: str) -> None:
    found = KINDS[kind](partial(parallelize, **LAYOUTS[layout]))

    assert_equal(found, by_plain_pytorch(kind))
    assert found.num_forms == NUM_FORMS.get(kind, found.num_forms)


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_of_training_equals_plain_pytorch(kind: str) -> None:
    assert_trains_as_plain_pytorch(kind, "sharded states")


@pytest.mark.slow
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "sharded states"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_of_training_equals_plain_pytorch_on_other_layouts(kind: str, layout: str) -> None:
    assert_trains_as_plain_pytorch(kind, layout)


def test_images_that_are_made_anew_change_the_running_statistics_alone() -> None:
    """What `docs/how-to/kinds-of-training.md` says of the example of PyTorch."""
    found, wanted = gan(plain), gan_of_the_example()

    models = found.states["model"], wanted.states["model"]
    buffers = {name for name in models[0] if "running" in name or "num_batches" in name}
    seen_twice = {name for name in buffers if name.startswith("generator")}
    assert seen_twice == {name for name in buffers if not torch.equal(*(m[name] for m in models))}
    for model in models:
        for name in seen_twice:
            del model[name]
    assert_equal(found, wanted)


def test_a_hidden_state_of_another_size_is_told_with_the_samples_of_a_micro_batch() -> None:
    model = kinds_of_training.LanguageModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    words = torch.zeros(8, 3, dtype=torch.long)

    with pytest.raises(CaptureError, match=r"hidden size(.|\n)*needs 4 rows"):
        parallelize(
            model,
            lambda model, batch: model(batch).square().mean(),
            words,
            optimizer,
            micro_batches=MicroBatches(2, loss="mean_of_micro_batches"),
        )


@cache
def ranks_of(boxing: str, count: int, planner: str, kinds: tuple[str, ...]) -> Mapping[int, Any]:
    """Run kinds as processes; return what each rank says of each kind."""
    backend: Any = registry().make("boxing", boxing, {})
    assert isinstance(backend, BoxingBackend)
    lines: list[Line] = []
    command = [sys.executable, str(Path(kinds_of_training.__file__)), planner, *kinds]
    ended = supervise(backend.launch_specs(count, command), timeout_s=280, on_line=lines.append)
    assert ended.error() is None, "\n".join(map(str, lines))
    found: dict[int, dict[str, str]] = {rank: {} for rank in range(count)}
    for line in lines:
        if line.text.startswith("{"):
            one = json.loads(line.text)
            found[one["rank"]][one["kind"]] = one["said"]
    return found


def assert_ranks_train_as_plain_pytorch(
    boxing: str, count: int, planner: str, kinds: tuple[str, ...]
) -> None:
    found = ranks_of(boxing, count, planner, kinds)

    assert found == {rank: dict.fromkeys(kinds, "") for rank in range(count)}


@pytest.mark.slow
def test_kinds_of_training_on_two_processes_equal_plain_pytorch() -> None:
    kinds = ("Wasserstein GAN", "averages and best weights")
    assert_ranks_train_as_plain_pytorch("torch", 2, "manual/zero", kinds)


@pytest.mark.slow
@pytest.mark.parametrize("planner", ["manual/zero", "manual/data_parallel"])
@pytest.mark.parametrize("boxing", ["torch", "mpi"])
def test_every_kind_of_training_on_two_processes(boxing: str, planner: str) -> None:
    assert_ranks_train_as_plain_pytorch(boxing, 2, planner, tuple(KINDS))


@pytest.mark.slow
def test_a_kind_of_training_on_four_processes() -> None:
    kinds = ("actor and critic",)
    assert_ranks_train_as_plain_pytorch("torch", 4, "manual/zero", kinds)

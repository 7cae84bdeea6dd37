"""A margin softmax over split classes equals one device, and ranks send nothing of their number."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from programs import registry

from sbp_launch import parallelize
from sbp_torch import counted_random

#: Classes that no number of ranks here divides.
NUM_CLASSES = 37

#: Softmaxes in parts, over however few classes.
IN_PARTS = {"split_classes": {"when": "always", "min_classes": 2}}

#: Half of 64 classes, as many of each of 4 groups. With the small scale, no gradient of a sampled
#: centre is so small that rounding drops its update.
SAMPLED = {"num_classes": 64, "sample_rate": 0.5, "sample_groups": 4, "margin_scale": 4.0}

ARCFACE, COSFACE, COMBINED = (1.0, 0.5, 0.0), (1.0, 0.0, 0.35), (1.1, 0.3, 0.2)


def trains_like_one_device(
    settings: dict[str, object], num_ranks: int, planner: str, momentum: float
) -> None:
    """Take four steps on ranks and on one device, with equal losses and states."""
    torch.manual_seed(0)
    settings = {"width": 2, "num_classes": NUM_CLASSES, "head": "margin", **settings}
    model = registry().make("model", "resnet", settings).double()
    twin = copy.deepcopy(model)
    optimizer, own = (
        torch.optim.SGD(one.parameters(), lr=0.05, momentum=momentum) for one in (model, twin)
    )
    num_classes = settings["num_classes"]
    data = registry().make("data", "images", {"num_classes": num_classes, "image_size": 8})
    batches = [
        {name: one.double() if name == "images" else one for name, one in part.items()}
        for part in (data.samples(torch.arange(8).numpy() + 8 * step) for step in range(4))
    ]

    with parallelize(
        model,
        lambda model, batch: model.loss(batch),
        batches[0],
        optimizer,
        mesh=num_ranks,
        planner=planner,
        compile={"passes": IN_PARTS},
    ) as step:
        for index, batch in enumerate(batches):
            before = model.fc.weight.detach().clone()
            loss = step(batch).loss
            with counted_random(0, index):
                wanted = twin.loss(batch)
            own.zero_grad()
            wanted.backward()
            own.step()

            assert loss.item() == pytest.approx(wanted.item(), rel=1e-9)
            torch.testing.assert_close(model.state_dict(), twin.state_dict(), rtol=1e-9, atol=1e-9)
            if "sample_rate" in settings and not momentum:
                changed = (model.fc.weight != before).any(dim=1)
                assert changed.sum() == 32, "other centres than those of the sample have changed"
                assert changed[batch["labels"]].all()


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("margins", [ARCFACE, COSFACE, COMBINED])
def test_a_margin_head_of_split_classes_trains_like_one_device(
    margins: tuple[float, float, float], num_ranks: int
) -> None:
    trains_like_one_device({"margins": [*margins]}, num_ranks, "manual/class_parallel", 0.9)


@pytest.mark.slow
@pytest.mark.parametrize("planner", ["manual/class_parallel", "propagate"])
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_a_margin_head_of_sampled_classes_trains_like_one_device(
    num_ranks: int, planner: str
) -> None:
    trains_like_one_device(SAMPLED, num_ranks, planner, 0.0)


@pytest.mark.slow
def test_groups_of_sampled_classes_need_not_fit_the_ranks() -> None:
    trains_like_one_device(SAMPLED, 3, "manual/class_parallel", 0.9)


def sent_bytes(folder: Path, settings: dict[str, object], num_classes: int, num_ranks: int) -> int:
    """Return the bytes that `sbp-plan` says all ranks send in a step."""
    overrides = [
        "model=resnet",
        *(f"model.{name}={value}" for name, value in ({"width": 4} | settings).items()),
        f"model.num_classes={num_classes}",
        "trainer.batch_size=16",
        "planner=manual/class_parallel",
        f"cluster.mesh=[{num_ranks}]",
        "cluster.axes=[classes]",
        f"figures={num_classes}.json",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "sbp_launch.apps.plan", *overrides],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found: int = json.loads((folder / f"{num_classes}.json").read_text("utf-8"))["sent_bytes"]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize(
    "settings",
    [{"head": "linear"}, {"head": "margin"}, {"head": "margin", "sample_rate": 0.5, "width": 32}],
)
def test_what_ranks_send_does_not_grow_with_classes(
    settings: dict[str, object], num_ranks: int, tmp_path: Path
) -> None:
    few, many = (sent_bytes(tmp_path, settings, count, num_ranks) for count in (4096, 65536))

    assert few == many

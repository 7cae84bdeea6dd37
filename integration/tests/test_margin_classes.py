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

#: Classes that no number of ranks here divides.
NUM_CLASSES = 37

#: Softmaxes in parts, over however few classes.
IN_PARTS = {"split_classes": {"when": "always", "min_classes": 2}}

ARCFACE, COSFACE, COMBINED = (1.0, 0.5, 0.0), (1.0, 0.0, 0.35), (1.1, 0.3, 0.2)


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("margins", [ARCFACE, COSFACE, COMBINED])
def test_a_margin_head_of_split_classes_trains_like_one_device(
    margins: tuple[float, float, float], num_ranks: int
) -> None:
    torch.manual_seed(0)
    settings = {"width": 2, "num_classes": NUM_CLASSES, "head": "margin", "margins": [*margins]}
    model = registry().make("model", "resnet", settings).double()
    twin = copy.deepcopy(model)
    optimizer, own = (
        torch.optim.SGD(one.parameters(), lr=0.05, momentum=0.9) for one in (model, twin)
    )
    data = registry().make("data", "images", {"num_classes": NUM_CLASSES, "image_size": 8})
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
        planner="manual/class_parallel",
        compile={"passes": IN_PARTS},
    ) as step:
        for batch in batches:
            loss = step(batch).loss
            wanted = twin.loss(batch)
            own.zero_grad()
            wanted.backward()
            own.step()

            assert loss.item() == pytest.approx(wanted.item(), rel=1e-9)
            torch.testing.assert_close(model.state_dict(), twin.state_dict(), rtol=1e-9, atol=1e-9)


def sent_bytes(folder: Path, head: str, num_classes: int, num_ranks: int) -> int:
    """Return the bytes that `sbp-plan` says all ranks send in a step."""
    settings = [
        "model=resnet",
        "model.width=4",
        f"model.head={head}",
        f"model.num_classes={num_classes}",
        "trainer.batch_size=16",
        "planner=manual/class_parallel",
        f"cluster.mesh=[{num_ranks}]",
        "cluster.axes=[classes]",
        f"figures={num_classes}.json",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "sbp_launch.apps.plan", *settings],
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
@pytest.mark.parametrize("head", ["linear", "margin"])
def test_what_ranks_send_does_not_grow_with_classes(
    head: str, num_ranks: int, tmp_path: Path
) -> None:
    few, many = (sent_bytes(tmp_path, head, count, num_ranks) for count in (4096, 65536))

    assert few == many

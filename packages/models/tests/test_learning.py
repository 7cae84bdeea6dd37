"""Every model learns something of its data set in a few steps."""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from sbp_models import bert, clicks, dlrm, gpt, images, llama, moe, resnet, t5, text, vit
from sbp_models.configs import (
    BertConfig,
    ClicksConfig,
    DlrmConfig,
    GptConfig,
    ImagesConfig,
    LlamaConfig,
    MoeConfig,
    ResnetConfig,
    StdlibConfig,
    T5Config,
    VitConfig,
)

#: What makes the model and the data; steps; the part of the first loss that must not be left.
CASES: dict[str, tuple[Callable[[], Any], Callable[[], Any], int, float]] = {
    "resnet": (
        lambda: resnet.Resnet(ResnetConfig(width=8)),
        lambda: images.build(ImagesConfig(image_size=16)),
        15,
        0.8,
    ),
    "vit": (
        lambda: vit.Vit(VitConfig(image_size=16, num_layers=2, hidden=64)),
        lambda: images.build(ImagesConfig(image_size=16)),
        30,
        0.6,
    ),
    "dlrm": (
        lambda: dlrm.Dlrm(DlrmConfig()),
        lambda: clicks.Clicks(ClicksConfig()),
        60,
        0.9,
    ),
    "gpt": (lambda: gpt.Gpt(GptConfig(num_layers=1, hidden=64)), lambda: stdlib("next"), 25, 0.7),
    "llama": (
        lambda: llama.Llama(LlamaConfig(num_layers=1, hidden=64)),
        lambda: stdlib("next"),
        25,
        0.7,
    ),
    "moe": (
        lambda: moe.Moe(MoeConfig(num_layers=1, hidden=64, mlp_hidden=64)),
        lambda: stdlib("next"),
        25,
        0.7,
    ),
    "bert": (
        lambda: bert.Bert(BertConfig(num_layers=1, hidden=64)),
        lambda: stdlib("masked"),
        25,
        0.7,
    ),
    "t5": (
        lambda: t5.T5(T5Config(num_layers=1, hidden=64, mlp_hidden=128)),
        lambda: stdlib("continue"),
        25,
        0.7,
    ),
}


def stdlib(task: Any) -> text.ByteText:
    return text.build_stdlib(StdlibConfig(context=32, task=task))


def spread(data: Any, count: int, split: str) -> npt.NDArray[np.int64]:
    """Return the numbers of so many samples of a split, evenly spread over it."""
    return np.linspace(0, data.num_samples(split) - 1, count).astype(np.int64)


@pytest.mark.slow(but=3)
@pytest.mark.parametrize("name", CASES)
def test_a_few_steps_lower_the_loss_on_samples_that_were_not_seen(name: str) -> None:
    make_model, make_data, steps, part = CASES[name]
    torch.manual_seed(0)
    model, data = make_model(), make_data()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    held = data.samples(spread(data, 64, "validation"), "validation")

    with torch.no_grad():
        before = model.loss(held).item()
    numbers = spread(data, 64 * steps, "train").reshape(64, steps).T
    for step in range(steps):
        optimizer.zero_grad()
        model.loss(data.samples(numbers[step])).backward()
        optimizer.step()
    with torch.no_grad():
        after = model.loss(held).item()

    assert after < part * before

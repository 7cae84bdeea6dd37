"""Which data fit which model, said of their configs alone."""

from __future__ import annotations

from typing import Any

import pytest

from sbp_core.errors import ConfigError
from sbp_core.plugins import ChecksCombination
from sbp_models import plugin
from sbp_models.configs import (
    BertConfig,
    ClicksConfig,
    DlrmConfig,
    GptConfig,
    HfConfig,
    ImagesConfig,
    LlamaConfig,
    MoeConfig,
    ResnetConfig,
    StdlibConfig,
    T5Config,
    TextConfig,
    VitConfig,
)

FITS: list[tuple[Any, Any]] = [
    (GptConfig(), StdlibConfig()),
    (GptConfig(context=64), TextConfig(path="x", context=64)),
    (GptConfig(vocabulary=300), StdlibConfig(context=8)),
    (LlamaConfig(), StdlibConfig(task="causal_lm")),
    (MoeConfig(), StdlibConfig()),
    (BertConfig(), StdlibConfig(task="masked")),
    (BertConfig(), TextConfig(path="x", task="masked_lm")),
    (T5Config(), StdlibConfig(task="continue", context=1000)),
    (ResnetConfig(), ImagesConfig(image_size=64)),
    (VitConfig(image_size=64), ImagesConfig(image_size=64, num_classes=3)),
    (DlrmConfig(), ClicksConfig(bag=3)),
    (DlrmConfig(rows=(5, 5)), ClicksConfig(rows=(5, 4))),
    (HfConfig(kind="gpt2"), StdlibConfig()),
    (HfConfig(kind="bert", task="masked_lm"), StdlibConfig(task="masked")),
    (HfConfig(kind="t5", task="seq2seq_lm"), StdlibConfig(task="continue")),
    (HfConfig(kind="vit", task="image_classification"), ImagesConfig(image_size=224)),
]

MISFITS: list[tuple[Any, Any, str, str]] = [
    (GptConfig(), ImagesConfig(), "model=gpt learns from a text, and data=images", "data=stdlib"),
    (MoeConfig(), ClicksConfig(), "model=moe learns from a text", "data=text"),
    (VitConfig(), StdlibConfig(), "model=vit learns from images, and data=stdlib", "data=images"),
    (DlrmConfig(), ImagesConfig(), "model=dlrm learns from clicks", "data=clicks"),
    (GptConfig(), StdlibConfig(task="masked"), "data.task=masked", "data.task=next"),
    (BertConfig(), StdlibConfig(), "data.task=next asks for", "data.task=masked"),
    (T5Config(), TextConfig(path="x"), "data.task=next asks for", "data.task=continue"),
    (GptConfig(vocabulary=100), StdlibConfig(), "model.vocabulary=100", ">= 256"),
    (BertConfig(vocabulary=256), StdlibConfig(task="masked"), "model.vocabulary=256", ">= 257"),
    (GptConfig(), StdlibConfig(context=129), "data.context=129", "1 to 128"),
    (VitConfig(), ImagesConfig(image_size=64), "data.image_size=64", "data.image_size=32"),
    (ResnetConfig(), ImagesConfig(channels=1), "data.channels=1", "data.channels=3"),
    (VitConfig(), ImagesConfig(num_classes=11), "data.num_classes=11", "1 to 10"),
    (DlrmConfig(), ClicksConfig(num_dense=3), "data.num_dense=3", "data.num_dense=13"),
    (
        DlrmConfig(rows=(5, 5)),
        ClicksConfig(rows=(5, 6)),
        "data.rows=[5, 6]",
        "one feature for each table",
    ),
    (
        DlrmConfig(rows=(5, 5)),
        ClicksConfig(rows=(5,)),
        "data.rows=[5]",
        "one feature for each table",
    ),
    (HfConfig(kind="gpt2"), ImagesConfig(), "model.kind=gpt2", "data=stdlib"),
    (
        HfConfig(kind="gpt2", overrides={"vocab_size": 99}),
        StdlibConfig(),
        "model.overrides.vocab_size=99",
        ">= 256",
    ),
    (
        HfConfig(kind="vit", task="image_classification", overrides={"image_size": 16}),
        ImagesConfig(),
        "data.image_size=32",
        "data.image_size=16",
    ),
]


@pytest.mark.parametrize(("model", "data"), FITS)
def test_data_that_fit_are_taken(model: ChecksCombination, data: object) -> None:
    model.check_combination({"data": data})


@pytest.mark.parametrize(("model", "data", "says", "accepted"), MISFITS)
def test_data_that_do_not_fit_are_refused(
    model: ChecksCombination, data: object, says: str, accepted: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        model.check_combination({"data": data})

    assert says in caught.value.what
    assert accepted in caught.value.accepted


@pytest.mark.parametrize("name", sorted(plugin.sbp_models()))
def test_every_model_is_asked_and_passes_over_data_that_it_does_not_know(name: str) -> None:
    config = plugin.sbp_models()[name].config
    made = HfConfig(kind="gpt2") if config is HfConfig else config()

    assert isinstance(made, ChecksCombination)
    made.check_combination({"data": object()})
    made.check_combination({})


@pytest.mark.parametrize("task", ["nxt", "image_classification", ""])
def test_a_task_that_is_none_is_refused(task: str) -> None:
    with pytest.raises(ConfigError, match=f"task={task} is not a task for text") as caught:
        StdlibConfig(task=task)

    assert "next, masked, continue" in caught.value.accepted

from typing import Any

import pytest

from sbp_core.errors import ConfigError
from sbp_core.plugins import merge_settings
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

#: Settings that no model or data set can have, with how the refusal begins.
REFUSED: list[tuple[type, dict[str, Any], str]] = [
    (LlamaConfig, {"hidden": 0}, "hidden=0 is too small"),
    (LlamaConfig, {"num_heads": 3}, "num_heads=3 does not divide hidden=128"),
    (LlamaConfig, {"num_key_heads": 3}, "num_key_heads=3 does not divide num_heads=8"),
    (LlamaConfig, {"hidden": 24, "num_heads": 8}, "num_heads=8 makes heads of the odd width 3"),
    (LlamaConfig, {"norm_epsilon": -1.0}, "norm_epsilon=-1.0 is negative"),
    (MoeConfig, {"num_heads": 3}, "num_heads=3 does not divide hidden=128"),
    (MoeConfig, {"top_k": 5}, "top_k=5 is more than num_experts=4"),
    (MoeConfig, {"capacity": -0.5}, "capacity=-0.5 is negative"),
    (BertConfig, {"num_heads": 3}, "num_heads=3 does not divide hidden=128"),
    (BertConfig, {"dropout": 1.0}, "dropout=1.0 is no fraction"),
    (T5Config, {"num_buckets": 30}, "num_buckets=30 cannot be spread"),
    (T5Config, {"max_distance": 32}, "num_buckets=32 cannot be spread"),
    (T5Config, {"start": 256}, "start=256 is no token"),
    (ResnetConfig, {"width": 0}, "width=0 is too small"),
    (ResnetConfig, {"label_smoothing": 1.5}, "label_smoothing=1.5 is no fraction"),
    (VitConfig, {"patch_size": 5}, "patch_size=5 does not divide image_size=32"),
    (VitConfig, {"num_heads": 5}, "num_heads=5 does not divide hidden=128"),
    (VitConfig, {"drop_path": -0.1}, "drop_path=-0.1 is no fraction"),
    (ImagesConfig, {"noise": -1.0}, "noise=-1.0 is negative"),
    (ImagesConfig, {"noise": float("nan")}, "noise=nan is negative or no number"),
    (ImagesConfig, {"seed": -1}, "seed=-1 is negative"),
    (DlrmConfig, {"rows": ()}, "rows=[] names no sizes"),
    (DlrmConfig, {"rows": (3, 0)}, "rows=[3, 0] names no sizes"),
    (DlrmConfig, {"bottom": (0,)}, "bottom=[0] names no sizes"),
    (ClicksConfig, {"bag": 0}, "bag=0 is too small"),
    (HfConfig, {"kind": ""}, "kind is empty"),
    (HfConfig, {"kind": "gpt2", "context": 0}, "context=0 is too small"),
]


@pytest.mark.parametrize("key", ["vocabulary", "context", "num_layers", "num_heads", "hidden"])
def test_a_setting_of_the_model_that_is_not_positive_is_refused_by_name(key: str) -> None:
    with pytest.raises(ConfigError, match=f"^{key}=0"):
        GptConfig(**{key: 0})


def test_heads_that_do_not_divide_the_width_are_refused_with_those_that_do() -> None:
    with pytest.raises(ConfigError) as caught:
        GptConfig(num_heads=5, hidden=12)

    assert caught.value.what == "num_heads=5 does not divide hidden=12"
    assert caught.value.accepted == "num_heads among 1, 2, 3, 4, 6, 12"


@pytest.mark.parametrize("config", [StdlibConfig, lambda **given: TextConfig(path="x", **given)])
def test_a_context_or_seed_of_the_data_that_cannot_be_is_refused(config: type) -> None:
    with pytest.raises(ConfigError, match=r"^context=0"):
        config(context=0)
    with pytest.raises(ConfigError, match=r"^seed=-1"):
        config(seed=-1)


def test_an_empty_path_is_refused_with_what_to_set() -> None:
    with pytest.raises(ConfigError) as caught:
        TextConfig(path="")

    assert "data.path=FILE_OR_FOLDER" in caught.value.todo


def test_a_refused_setting_is_named_by_its_whole_key() -> None:
    with pytest.raises(ConfigError, match=r"^model\.num_heads=5 does not divide hidden=256"):
        merge_settings(GptConfig, {"num_heads": 5}, key="model")


@pytest.mark.parametrize(("config", "settings", "begin"), REFUSED)
def test_what_cannot_be_is_refused_by_name_with_what_can(
    config: type, settings: dict[str, Any], begin: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        config(**settings)

    assert caught.value.what.startswith(begin)
    assert caught.value.accepted


def test_a_depth_without_a_network_is_refused_with_those_that_have_one() -> None:
    with pytest.raises(ConfigError, match=r"^model\.depth is 20") as caught:
        merge_settings(ResnetConfig, {"depth": 20}, key="model")

    assert caught.value.accepted == "18, 34, 50, 101, 152"

import pytest

from sbp_core.errors import ConfigError
from sbp_core.plugins import merge_settings
from sbp_models.configs import GptConfig, StdlibConfig, TextConfig


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

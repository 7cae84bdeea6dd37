import subprocess
import sys
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor, nn

from sbp_core.errors import ConfigError
from sbp_core.plugins import merge_settings
from sbp_models.configs import HfConfig
from sbp_models.hf import HfModel, build
from sbp_torch.kinds import LanguageModel
from sbp_torch.testing.model import ModelConformance

PRESETS = ["gpt2", "llama", "mixtral", "bert", "t5", "vit"]

#: What makes each preset smaller yet.
TINY: dict[str, dict[str, Any]] = {
    "gpt2": {"vocab_size": 13, "n_embd": 8, "n_layer": 1, "n_head": 2},
    "llama": {
        "vocab_size": 13,
        "hidden_size": 8,
        "intermediate_size": 12,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    },
    "bert": {
        "vocab_size": 13,
        "hidden_size": 8,
        "intermediate_size": 12,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    },
    "t5": {
        "vocab_size": 13,
        "d_model": 8,
        "d_kv": 4,
        "d_ff": 12,
        "num_layers": 1,
        "num_heads": 2,
    },
    "vit": {
        "image_size": 8,
        "hidden_size": 8,
        "intermediate_size": 12,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    },
}
TINY["mixtral"] = {**TINY["llama"], "num_local_experts": 3}


def needs_transformers() -> Any:
    return pytest.importorskip("transformers")


def preset(name: str, overrides: Mapping[str, Any] | None = None, **more: Any) -> HfConfig:
    text = files("sbp_models.conf").joinpath("model", "hf", f"{name}.yaml").read_text("utf-8")
    settings = yaml.safe_load(text)
    settings.pop("defaults", None)  # of Hydra: which data fit a model
    assert settings.pop("name") == "hf"
    settings["overrides"] |= overrides or {}
    return merge_settings(HfConfig, {**settings, **more})


def tiny(name: str, **overrides: Any) -> HfModel:
    needs_transformers()
    torch.manual_seed(0)
    return build(preset(name, TINY[name] | overrides))


def some_batch(name: str, batch_size: int = 4) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    if name == "vit":
        images = torch.randn(batch_size, 3, 8, 8, generator=generator)
        return {"images": images, "labels": torch.arange(batch_size) % 10}
    return {
        key: torch.randint(0, 13, (batch_size, 6), generator=generator)
        for key in ("tokens", "targets")
    }


class HfConformance(ModelConformance):
    name = ""

    @pytest.fixture(autouse=True)
    def _library(self) -> None:
        needs_transformers()

    def make_model(self) -> nn.Module:
        # The load-balancing loss is no mean over samples.
        more = {"output_router_logits": False} if self.name == "mixtral" else {}
        # Traced, the library gives SDPA another mask, which moves the last digit.
        own = preset(self.name, TINY[self.name] | more, context=6, attention="eager")
        return build(own)

    def make_batch(self, batch_size: int) -> Mapping[str, Tensor]:
        return some_batch(self.name, batch_size)


class TestHfGpt2(HfConformance):
    name = "gpt2"
    vocabulary = 13


@pytest.mark.slow
class TestHfMixtral(HfConformance):
    name = "mixtral"
    vocabulary = 13


@pytest.mark.exhaustive
class TestHfLlama(HfConformance):
    name = "llama"
    vocabulary = 13


@pytest.mark.exhaustive
class TestHfBert(HfConformance):
    name = "bert"


@pytest.mark.exhaustive
class TestHfT5(HfConformance):
    name = "t5"


@pytest.mark.exhaustive
class TestHfVit(HfConformance):
    name = "vit"


@pytest.mark.parametrize("name", PRESETS)
def test_a_few_steps_on_one_batch_lower_the_loss(name: str) -> None:
    model, batch = tiny(name), some_batch(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2)

    losses = []
    for _ in range(25):
        optimizer.zero_grad()
        loss = model.loss(batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())

    assert losses[-1] < 0.7 * losses[0]


def test_the_loss_is_the_library_s_own_though_targets_are_shifted_already() -> None:
    model = tiny("gpt2")
    tokens = some_batch("gpt2")["tokens"]

    loss = model.loss({"tokens": tokens[:, :-1], "targets": tokens[:, 1:]})

    torch.testing.assert_close(loss, model.network(input_ids=tokens, labels=tokens).loss)


def test_a_decoder_is_given_the_targets_as_by_the_library() -> None:
    model, batch = tiny("t5"), some_batch("t5")

    loss = model.loss(batch)

    own = model.network(input_ids=batch["tokens"], labels=batch["targets"]).loss
    torch.testing.assert_close(loss, own)


def test_a_load_balancing_loss_is_added_by_its_weight() -> None:
    model, batch = tiny("mixtral", router_aux_loss_coef=0.5), some_batch("mixtral")

    whole = model.loss(batch)

    result = model.network(input_ids=batch["tokens"])
    own = nn.functional.cross_entropy(result.logits.flatten(0, 1), batch["targets"].flatten())
    torch.testing.assert_close(whole, own + 0.5 * result.aux_loss)
    assert result.aux_loss > 0.5


@pytest.mark.parametrize("name", PRESETS)
def test_only_a_model_that_continues_text_is_a_language_model(name: str) -> None:
    assert isinstance(tiny(name), LanguageModel) == (name in ("gpt2", "llama", "mixtral"))


@pytest.mark.parametrize("experts", ["batched_mm", "grouped_mm", "eager"])
def test_the_implementation_of_experts_can_be_chosen_and_changes_no_result(experts: str) -> None:
    needs_transformers()
    batch = some_batch("mixtral")
    expected = tiny("mixtral").loss(batch)

    torch.manual_seed(0)
    model = build(preset("mixtral", TINY["mixtral"], experts=experts))

    assert model.network.config._experts_implementation == experts
    torch.testing.assert_close(model.loss(batch), expected)


def test_experts_are_multiplied_in_groups_by_default() -> None:
    assert tiny("mixtral").network.config._experts_implementation == "grouped_mm"


def test_nothing_is_kept_for_generating_text() -> None:
    model = tiny("gpt2")

    result = model.network(input_ids=some_batch("gpt2")["tokens"])

    assert result.past_key_values is None


def test_an_unknown_kind_is_refused_with_the_nearest() -> None:
    needs_transformers()
    with pytest.raises(ConfigError, match=r"^kind=lama") as caught:
        build(HfConfig(kind="lama"))

    assert "did you mean 'llama'?" in caught.value.todo


def test_a_misspelt_override_is_refused_with_the_nearest() -> None:
    needs_transformers()
    with pytest.raises(ConfigError, match="n_layers") as caught:
        build(HfConfig(kind="gpt2", overrides={"n_layers": 2}))

    assert "did you mean 'overrides.n_layer'?" in caught.value.todo


def test_overrides_that_the_library_refuses_are_refused_with_its_words() -> None:
    needs_transformers()
    with pytest.raises(ConfigError, match=r"^kind=gpt2") as caught:
        build(HfConfig(kind="gpt2", overrides={"n_embd": 10, "n_head": 3, "n_layer": 1}))

    assert "model.overrides" in caught.value.todo


def test_a_kind_that_cannot_do_the_task_is_refused() -> None:
    needs_transformers()
    with pytest.raises(ConfigError, match="kind=vit cannot be made for the task causal_lm"):
        build(HfConfig(kind="vit"))


def test_a_context_beyond_the_positions_is_refused() -> None:
    needs_transformers()
    with pytest.raises(ConfigError, match="context=999 is more than the 128 positions"):
        build(preset("gpt2", context=999))


def test_without_the_library_one_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)

    with pytest.raises(ConfigError, match="transformers, which is not installed") as caught:
        build(HfConfig(kind="gpt2"))

    assert "sbp-models[transformers]" in caught.value.todo


def test_the_library_is_imported_only_to_build_a_model() -> None:
    code = "import sys, sbp_models.hf; print('transformers' in sys.modules)"

    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)

    assert found.stdout.strip() == "False"


@pytest.mark.parametrize(
    ("kind", "task", "overrides"),
    [
        ("bloom", "causal_lm", {"hidden_size": 8, "n_head": 2, "n_layer": 1, "vocab_size": 13}),
        (
            "deit",
            "image_classification",
            {"image_size": 32, "hidden_size": 12, "num_hidden_layers": 1, "intermediate_size": 8},
        ),
        (
            "qwen3_moe",
            "causal_lm",
            {
                "hidden_size": 8,
                "head_dim": 6,
                "num_hidden_layers": 1,
                "moe_intermediate_size": 4,
                "num_experts": 8,
                "vocab_size": 13,
            },
        ),
    ],
)
def test_kinds_with_peculiar_configurations_can_be_made(
    kind: str, task: str, overrides: dict[str, Any]
) -> None:
    """No SDPA; two classes for one task; a setting that the configuration does not declare."""
    needs_transformers()
    config = merge_settings(HfConfig, {"kind": kind, "task": task, "overrides": overrides})

    model = build(config)

    own = model.network.config
    assert {name: getattr(own, name) for name in overrides} == overrides

"""Settings of models of the library `transformers`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from sbp_core.errors import ConfigError
from sbp_models.configs.checks import check_positive
from sbp_models.configs.compatibility import check_images, check_text
from sbp_models.configs.text_data import text_task

#: Task of a model of `transformers`.
HfTask = Literal["causal_lm", "seq2seq_lm", "masked_lm", "image_classification"]


@dataclass(frozen=True, slots=True, kw_only=True)
class HfConfig:
    """Settings of `sbp_models.hf`: a model of `transformers` with random weights.

    Args:
        kind: Architecture by its name in `transformers` (`model_type`): gpt2, llama, t5, vit, ...
        task: Task of the model.
        context: Largest number of tokens of a text.
        overrides: Settings of the library's configuration, such as `n_layer: 2`. Others keep the
            library's defaults, which may be large.
        attention: Implementation of attention: `sdpa`, `eager`, or `auto` for the library's choice.
        experts: Implementation of mixtures of experts. `grouped_mm` sorts tokens by expert and
            multiplies each group once. `batched_mm` gathers a copy of the weights for each token,
            which takes memory of tokens x weights. `eager` loops over the experts in use, which
            cannot be captured. `auto` is `grouped_mm` for models that have it, otherwise `eager`.

    Raises:
        ConfigError: `kind` is empty or `context` is not positive.
    """

    kind: str
    task: HfTask = "causal_lm"
    context: int = 128
    overrides: Mapping[str, Any] = field(default_factory=dict)
    attention: Literal["auto", "sdpa", "eager"] = "auto"
    experts: Literal["auto", "grouped_mm", "batched_mm", "eager"] = "auto"

    def __post_init__(self) -> None:
        if not self.kind:
            raise ConfigError(
                "kind is empty",
                accepted="a model type of transformers, such as gpt2, llama, bert, t5, vit",
                todo="set model.kind",
            )
        check_positive(self, "context")

    def check_combination(self, others: Mapping[str, object]) -> None:
        """Refuse a data set that does not fit; see `sbp_core.plugins.ChecksCombination`.

        Sizes that are not in `overrides` are the library's defaults, and not known here.
        """
        data = others.get("data")
        if self.task == "image_classification":
            check_images(
                data,
                model=f"hf model.kind={self.kind}",
                channels=self.overrides.get("num_channels"),
                num_classes=self.overrides.get("num_labels"),
                image_size=self.overrides.get("image_size"),
            )
        else:
            check_text(
                data,
                model=f"hf model.kind={self.kind} model.task={self.task}",
                task=text_task(self.task),
                vocabulary=self.overrides.get("vocab_size"),
                context=self.context if self.task == "causal_lm" else None,
                vocabulary_key="model.overrides.vocab_size",
            )

"""Language models and image classifiers of the library `transformers`, with random weights.

The library is the extra `sbp-models[transformers]`, and is imported only when a model is built; no
network is used. A model is wrapped as `network`, so the names of its parameters begin with
`network.`. Losses are computed here from the logits, because targets of our data sets are shifted
already.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 (torch's own name for it)

from sbp_core.errors import ConfigError, suggestion
from sbp_core.plugins import unknown_key
from sbp_models.configs import HfConfig

#: The class of `transformers` that makes a model, for each task.
MAKERS = {
    "causal_lm": "AutoModelForCausalLM",
    "seq2seq_lm": "AutoModelForSeq2SeqLM",
    "masked_lm": "AutoModelForMaskedLM",
    "image_classification": "AutoModelForImageClassification",
}

#: Settings that models of `transformers` read though their configuration may not declare them.
UNDECLARED_SETTINGS = frozenset(
    {"bos_token_id", "decoder_start_token_id", "eos_token_id", "head_dim", "pad_token_id"}
)


class HfModel(nn.Module):
    """A model of `transformers`, extended by a loss.

    Args:
        network: The model of the library.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def inputs(self, batch: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Return the inputs of a batch, by the names that the model uses."""
        return {"input_ids": batch["tokens"]}

    def targets(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the targets of a batch, int64, of the shape of the logits without the last dim."""
        return batch["targets"]

    def loss(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the mean cross-entropy of a batch, in nats: a 0-d tensor.

        If a mixture of experts returns its load-balancing loss (`output_router_logits: true`), the
        loss is added, with the model's weight for it.

        Args:
            batch: `tokens` and `targets`, int64 (batch, time) each, the target being -100 for
                tokens without a target; or `images` and `labels`.
        """
        result = self.network(**self.inputs(batch))
        logits = result.logits
        loss = F.cross_entropy(logits.flatten(0, -2), self.targets(batch).flatten())
        balance = getattr(result, "aux_loss", None)
        if balance is not None:
            weight: float = getattr(self.network.config, "router_aux_loss_coef", 0.0)
            loss = loss + weight * balance
        return loss


class MaskedLm(HfModel):
    """An encoder that predicts masked tokens."""


class CausalLm(HfModel):
    """A decoder that continues a text.

    Args:
        network: The model of the library.
        context: Largest number of tokens of a text.
    """

    def __init__(self, network: nn.Module, context: int) -> None:
        super().__init__(network)
        self.context = context

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """Map int64 tokens (batch, time <= context) to logits (batch, time, vocabulary)."""
        logits: torch.Tensor = self.network(input_ids=tokens).logits
        return logits


class Seq2SeqLm(HfModel):
    """An encoder and a decoder."""

    def inputs(self, batch: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Return the tokens, and the decoder's input: the targets shifted by a start token."""
        config: Any = self.network.config
        start = getattr(config, "decoder_start_token_id", None)
        if start is None:
            start = getattr(config, "pad_token_id", None) or 0
        before = F.pad(batch["targets"][:, :-1], (1, 0), value=start)
        return {"input_ids": batch["tokens"], "decoder_input_ids": before}


class ImageClassifier(HfModel):
    """A classifier of images."""

    def inputs(self, batch: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Return the images."""
        return {"pixel_values": batch["images"]}

    def targets(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the classes."""
        return batch["labels"]


def build(config: HfConfig) -> HfModel:
    """Make the model, initialised from torch's global random state.

    Raises:
        ConfigError: `transformers` is not installed, or has no such kind or setting, or refuses
            them.
    """
    library = _library()
    own = _own_config(library, config)
    implementations: dict[str, str] = {}
    if config.attention != "auto":
        implementations["attn_implementation"] = config.attention
    if config.experts != "auto" and hasattr(own, "_experts_implementation"):
        implementations["experts_implementation"] = config.experts
    maker = getattr(library, MAKERS[config.task])
    try:
        network = maker.from_config(own, **implementations)
    except (ValueError, TypeError, KeyError, AttributeError, ImportError) as error:
        raise ConfigError(
            f"kind={config.kind} cannot be made for the task {config.task}: {error}",
            accepted=f"what transformers.{MAKERS[config.task]}.from_config accepts",
            todo="change model.task, model.overrides or model.attention",
        ) from error
    if config.task == "causal_lm":
        return CausalLm(network, config.context)
    if config.task == "seq2seq_lm":
        return Seq2SeqLm(network)
    if config.task == "masked_lm":
        return MaskedLm(network)
    return ImageClassifier(network)


def _library() -> ModuleType:
    try:
        return import_module("transformers")
    except ImportError as error:
        raise ConfigError(
            "model=hf needs the library transformers, which is not installed",
            accepted="transformers >= 5",
            todo='pip install "sbp-models[transformers]"',
        ) from error


def _own_config(library: ModuleType, config: HfConfig) -> Any:
    """Return the library's configuration, with the overrides."""
    kinds = sorted(library.CONFIG_MAPPING)
    if config.kind not in kinds:
        raise ConfigError(
            f"kind={config.kind} is no model type of transformers {library.__version__}",
            accepted=f"one of its {len(kinds)} model types, such as gpt2, llama, bert, t5, vit",
            todo=suggestion(config.kind, kinds, "choose one of these"),
        )
    known = library.AutoConfig.for_model(config.kind)
    # The library itself accepts unknown settings silently.
    for name in config.overrides:
        if not hasattr(known, name) and name not in UNDECLARED_SETTINGS:
            named = {key for key in vars(known) if not key.startswith("_")}
            raise unknown_key(f"overrides.{name}", {*named, *known.attribute_map})
    try:
        own = library.AutoConfig.for_model(config.kind, **config.overrides)
    except Exception as error:  # of several libraries that validate settings
        raise ConfigError(
            f"kind={config.kind} refuses its overrides: {error}", todo="change model.overrides"
        ) from error
    # If there are several classes for a task, the library takes the first, but needs a list.
    own.architectures = own.architectures or []
    # The cache of keys and values is for generating text, not for a loss.
    if hasattr(own, "use_cache"):
        own.use_cache = False
    most = getattr(own, "max_position_embeddings", None)
    if config.task == "causal_lm" and isinstance(most, int) and config.context > most:
        raise ConfigError(
            f"context={config.context} is more than the {most} positions of {config.kind}",
            accepted=f"1 to {most}",
            todo="lower model.context, or raise max_position_embeddings in model.overrides",
        )
    return own

"""Settings of the language models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import ClassVar, Literal

from sbp_core.errors import ConfigError
from sbp_models.configs.checks import (
    check_divides,
    check_fractions,
    check_not_negative,
    check_positive,
)
from sbp_models.configs.compatibility import check_text


@dataclass(frozen=True, slots=True, kw_only=True)
class GptConfig:
    """Settings of `sbp_models.gpt.Gpt`; the defaults make 3.3 million parameters.

    Args:
        vocabulary: Number of different tokens; 256 for bytes.
        context: Largest number of tokens of a text.
        num_layers: Number of blocks.
        num_heads: Attention heads of a block; divides `hidden`.
        hidden: Width of the residual stream.

    Raises:
        ConfigError: a setting is not positive, or the heads do not divide the width.
    """

    vocabulary: int = 256
    context: int = 128
    num_layers: int = 4
    num_heads: int = 8
    hidden: int = 256

    def __post_init__(self) -> None:
        check_positive(self, *(field.name for field in fields(self)))
        check_divides(self, "num_heads", "hidden")

    def check_combination(self, others: Mapping[str, object]) -> None:
        """Refuse a data set that does not fit; see `sbp_core.plugins.ChecksCombination`."""
        check_text(
            others.get("data"),
            model="gpt",
            task="next",
            vocabulary=self.vocabulary,
            context=self.context,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaConfig:
    """Settings of `sbp_models.llama.Llama`; the defaults make 0.9 million parameters.

    `vocabulary=32000 context=4096 num_layers=32 num_heads=32 num_key_heads=32 hidden=4096
    mlp_hidden=11008` is the published Llama-2 7B.

    Args:
        vocabulary: Number of different tokens; 256 for bytes.
        context: Largest number of tokens of a text.
        num_layers: Number of blocks.
        num_heads: Heads of queries; divides `hidden` into an even width.
        num_key_heads: Heads of keys and values; divides `num_heads`.
        hidden: Width of the residual stream.
        mlp_hidden: Width between the layers of an MLP.
        rope_base: Base of the wavelengths of the rotary positions.
        norm_epsilon: Number that is added to a mean square before its root is taken.

    Raises:
        ConfigError: a setting is not positive, or numbers of heads do not divide the widths.
    """

    option: ClassVar[str] = "llama"

    vocabulary: int = 256
    context: int = 128
    num_layers: int = 4
    num_heads: int = 8
    num_key_heads: int = 4
    hidden: int = 128
    mlp_hidden: int = 384
    rope_base: float = 10000.0
    norm_epsilon: float = 1e-5

    def __post_init__(self) -> None:
        check_positive(self, "vocabulary", "context", "num_layers", "num_heads")
        check_positive(self, "num_key_heads", "hidden", "mlp_hidden", "rope_base")
        check_not_negative(self, "norm_epsilon")
        check_divides(self, "num_heads", "hidden")
        check_divides(self, "num_key_heads", "num_heads")
        if self.hidden // self.num_heads % 2:
            raise ConfigError(
                f"num_heads={self.num_heads} makes heads of the odd width "
                f"{self.hidden // self.num_heads}; rotary positions turn pairs of dims",
                accepted="an even hidden / num_heads",
            )

    def check_combination(self, others: Mapping[str, object]) -> None:
        """Refuse a data set that does not fit; see `sbp_core.plugins.ChecksCombination`."""
        check_text(
            others.get("data"),
            model=self.option,
            task="next",
            vocabulary=self.vocabulary,
            context=self.context,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeConfig(LlamaConfig):
    """Settings of `sbp_models.moe.Moe`; the defaults make 2.6 million parameters.

    The settings of `LlamaConfig`, and these.

    Args:
        num_experts: Number of experts of a block.
        top_k: Number of experts for each token; at most `num_experts`.
        capacity: Tokens that an expert takes, as a multiple of an even share; more tokens are
            dropped. 0: every expert computes every token, and nothing is dropped.
        balance: Weight of the load-balancing loss.

    Raises:
        ConfigError: a setting is out of range.
    """

    option: ClassVar[str] = "moe"

    num_experts: int = 4
    top_k: int = 2
    capacity: float = 0.0
    balance: float = 0.01

    def __post_init__(self) -> None:
        # Not super(): `slots=True` creates a second class, and super() would refer to the first.
        LlamaConfig.__post_init__(self)
        check_positive(self, "num_experts", "top_k")
        check_not_negative(self, "capacity", "balance")
        if self.top_k > self.num_experts:
            raise ConfigError(
                f"top_k={self.top_k} is more than num_experts={self.num_experts}",
                accepted=f"top_k in 1 to {self.num_experts}",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class BertConfig:
    """Settings of `sbp_models.bert.Bert`; the defaults make 0.9 million parameters.

    `vocabulary=30522 context=512 num_layers=12 num_heads=12 hidden=768` is the published BERT-base.

    Args:
        vocabulary: Number of different tokens; 257 for bytes and the mask.
        context: Largest number of tokens of a text.
        num_layers: Number of blocks.
        num_heads: Attention heads of a block; divides `hidden`.
        hidden: Width of the residual stream; the MLP is four times as wide.
        dropout: Probability with which a number is dropped, in [0, 1).
        task: Task that the model learns from a text; data sets follow it.

    Raises:
        ConfigError: a setting is out of range, or the heads do not divide the width.
    """

    vocabulary: int = 257
    context: int = 128
    num_layers: int = 4
    num_heads: int = 4
    hidden: int = 128
    dropout: float = 0.0
    task: Literal["masked"] = "masked"

    def __post_init__(self) -> None:
        check_positive(self, "vocabulary", "context", "num_layers", "num_heads", "hidden")
        check_divides(self, "num_heads", "hidden")
        check_fractions(self, "dropout")

    def check_combination(self, others: Mapping[str, object]) -> None:
        """Refuse a data set that does not fit; see `sbp_core.plugins.ChecksCombination`."""
        check_text(
            others.get("data"),
            model="bert",
            task="masked",
            vocabulary=self.vocabulary,
            context=self.context,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class T5Config:
    """Settings of `sbp_models.t5.T5`; the defaults make 1.0 million parameters.

    `vocabulary=32128 num_layers=6 num_heads=8 head_width=64 hidden=512 mlp_hidden=2048` is the
    published T5-small.

    Args:
        vocabulary: Number of different tokens; 256 for bytes.
        num_layers: Blocks of the encoder, and as many of the decoder.
        num_heads: Attention heads of a block.
        head_width: Width of a head.
        hidden: Width of the residual stream.
        mlp_hidden: Width between the layers of an MLP.
        num_buckets: Number of distances that the relative bias distinguishes; even.
        max_distance: Distance from which all share a bucket; more than `num_buckets`.
        start: Token that the decoder starts with.
        norm_epsilon: Number that is added to a mean square before its root is taken.
        task: Task that the model learns from a text; data sets follow it.

    Raises:
        ConfigError: a setting is out of range.
    """

    vocabulary: int = 256
    num_layers: int = 2
    num_heads: int = 4
    head_width: int = 32
    hidden: int = 128
    mlp_hidden: int = 512
    num_buckets: int = 32
    max_distance: int = 128
    start: int = 0
    norm_epsilon: float = 1e-6
    task: Literal["continue"] = "continue"

    def __post_init__(self) -> None:
        check_positive(self, "vocabulary", "num_layers", "num_heads", "head_width")
        check_positive(self, "hidden", "mlp_hidden", "num_buckets", "max_distance")
        check_not_negative(self, "norm_epsilon")
        if self.num_buckets % 4 or self.max_distance <= self.num_buckets:
            raise ConfigError(
                f"num_buckets={self.num_buckets} cannot be spread over the distances up to "
                f"max_distance={self.max_distance}",
                accepted="a multiple of 4 below max_distance",
            )
        if not 0 <= self.start < self.vocabulary:
            raise ConfigError(
                f"start={self.start} is no token", accepted=f"0 to {self.vocabulary - 1}"
            )

    def check_combination(self, others: Mapping[str, object]) -> None:
        """Refuse a data set that does not fit; see `sbp_core.plugins.ChecksCombination`."""
        check_text(others.get("data"), model="t5", task="continue", vocabulary=self.vocabulary)

"""The models of the matrix: models of transformers, in small random sizes, and those of our zoo.

Losses are computed from logits in this module. Casts to float32 inside a model are skipped when it
runs in float64, so that float64 runs use float64 throughout. Transformers is imported when one of
its models is built.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - everybody's name for it
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from sbp_core.plugins import discover

Batch = Mapping[str, Tensor]

VOCABULARY, TIME, BATCH, CLASSES = 96, 16, 8, 10


@dataclass(frozen=True, kw_only=True)
class Program:
    """A one-device program of the matrix.

    Args:
        build: Makes the model, after torch was seeded.
        batch: Makes a batch from a generator.
        loss: Returns the loss of the model and a batch.
        columns: Patterns of weights (and biases) that tensor parallelism splits along the output:
            dim 0 of a Linear.
        rows: Patterns of weights that it splits along the input.
        transposed: Whether weights have the shape (in, out), as in GPT-2's Conv1D.
        others: Further pins of tensor parallelism, pattern -> SBP on the axis `tensor`.
        blocks: Patterns of the modules that are recomputed.
        stages: Patterns of the modules of two stages; empty: split evenly.
        sgd: Train by SGD with momentum instead of AdamW.
    """

    build: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], dict[str, Tensor]]
    loss: Callable[[nn.Module, Batch], Tensor]
    columns: tuple[str, ...] = ()
    rows: tuple[str, ...] = ()
    transposed: bool = False
    others: Mapping[str, str] = field(default_factory=dict)
    blocks: tuple[str, ...] = ()
    stages: tuple[tuple[str, ...], ...] = ()
    sgd: bool = False

    @property
    def has_tensor_pattern(self) -> bool:
        """Whether it has a pattern of tensor parallelism."""
        return bool(self.columns or self.rows or self.others)


class Widened(TorchFunctionMode):
    """A mode that skips the casts from float64 to float32 in models of libraries."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        wide = bool(args) and isinstance(args[0], Tensor) and args[0].dtype == torch.float64
        if wide and func is Tensor.float:
            return args[0]
        if wide and func is Tensor.to:
            args = tuple(torch.float64 if part is torch.float32 else part for part in args)
        if wide and kwargs.get("dtype") is torch.float32:
            kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)


def logits_loss(model: nn.Module, batch: Batch, *, label: str = "labels") -> Tensor:
    """Return the mean cross-entropy of the model's logits."""
    given = {name: value for name, value in batch.items() if name != label}
    with Widened():
        logits = model(**given).logits
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), batch[label].reshape(-1))


def zoo_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Return the model's own loss."""
    loss: Tensor = model.loss(batch)  # type: ignore[operator] # a method of the zoo's models
    return loss


def _tokens(generator: torch.Generator, *names: str, shape: tuple[int, ...]) -> dict[str, Tensor]:
    return {name: torch.randint(0, VOCABULARY, shape, generator=generator) for name in names}


def _text(generator: torch.Generator) -> dict[str, Tensor]:
    return _tokens(generator, "input_ids", "labels", shape=(BATCH, TIME))


def _masked_text(generator: torch.Generator) -> dict[str, Tensor]:
    found = _text(generator)
    mask = torch.ones(BATCH, TIME, dtype=torch.int64)
    mask[:, -3:] = torch.randint(0, 2, (BATCH, 3), generator=generator)
    return {**found, "attention_mask": mask}


def _pairs(generator: torch.Generator) -> dict[str, Tensor]:
    names = ("input_ids", "decoder_input_ids", "labels")
    return _tokens(generator, *names, shape=(BATCH, TIME))


def _images(generator: torch.Generator, *, name: str, size: int, label: str) -> dict[str, Tensor]:
    return {
        name: torch.randn(BATCH, 3, size, size, generator=generator, dtype=torch.float64),
        label: torch.randint(0, CLASSES, (BATCH,), generator=generator),
    }


def _named_tokens(generator: torch.Generator, names: tuple[str, ...]) -> dict[str, Tensor]:
    return _tokens(generator, *names, shape=(BATCH, TIME))


def _clicks(generator: torch.Generator, bag: int = 1) -> dict[str, Tensor]:
    data: Any = discover(strict=True).make("data", "clicks", {"rows": (40, 20, 7), "bag": bag})
    numbers = torch.randint(0, data.num_samples(), (BATCH,), generator=generator)
    return dict(data.samples(numbers.numpy()))


def _transformer(kind: str, config: str, **settings: Any) -> nn.Module:
    import transformers

    made: nn.Module = getattr(transformers, kind)(getattr(transformers, config)(**settings))
    return made.train()


def _zoo(name: str, **settings: Any) -> nn.Module:
    model = discover(strict=True).make("model", name, settings)
    assert isinstance(model, nn.Module)
    return model.train()


_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_LLAMA = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32,
    "use_cache": False,
}  # fmt: skip
_ENCODER = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
    **_NO_DROPOUT,
}  # fmt: skip

PROGRAMS = {
    "gpt2": Program(
        build=partial(
            _transformer,
            "GPT2LMHeadModel",
            "GPT2Config",
            vocab_size=VOCABULARY,
            n_positions=32,
            n_embd=32,
            n_layer=2,
            n_head=4,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            use_cache=False,
            bos_token_id=None,
            eos_token_id=None,
        ),
        batch=_text,
        loss=logits_loss,
        columns=("*.mlp.c_fc.*",),
        rows=("*.mlp.c_proj.weight",),
        transposed=True,
        blocks=("transformer.h.*",),
    ),
    "llama": Program(
        build=partial(_transformer, "LlamaForCausalLM", "LlamaConfig", **_LLAMA),
        batch=_text,
        loss=logits_loss,
        columns=(
            "*.q_proj.weight",
            "*.k_proj.weight",
            "*.v_proj.weight",
            "*.gate_proj.weight",
            "*.up_proj.weight",
        ),
        rows=("*.o_proj.weight", "*.down_proj.weight"),
        blocks=("model.layers.*",),
    ),
    "bert": Program(
        build=partial(
            _transformer,
            "BertForMaskedLM",
            "BertConfig",
            vocab_size=VOCABULARY,
            max_position_embeddings=32,
            **_ENCODER,
        ),
        batch=_masked_text,
        loss=logits_loss,
        columns=("*.query.*", "*.key.*", "*.value.*", "*.intermediate.dense.*"),
        rows=("*.attention.output.dense.weight", "bert.encoder.layer.*[0-9].output.dense.weight"),
        blocks=("bert.encoder.layer.*",),
    ),
    # Version 1.1, with GELU. With ReLU, one input of it is within float32's rounding of 0 at step 5
    # of these batches: it is on or off depending on the order of sums, and losses differ by 2e-5.
    "t5": Program(
        build=partial(
            _transformer,
            "T5ForConditionalGeneration",
            "T5Config",
            vocab_size=VOCABULARY,
            d_model=32,
            d_kv=8,
            d_ff=64,
            num_layers=2,
            num_heads=4,
            dropout_rate=0.0,
            decoder_start_token_id=0,
            feed_forward_proj="gated-gelu",
            use_cache=False,
        ),
        batch=_pairs,
        loss=logits_loss,
        columns=("*.q.weight", "*.k.weight", "*.v.weight", "*.wi_*.weight"),
        rows=("*.o.weight", "*.wo.weight"),
        blocks=("encoder.block.*", "decoder.block.*"),
    ),
    "vit": Program(
        build=partial(
            _transformer,
            "ViTForImageClassification",
            "ViTConfig",
            image_size=16,
            patch_size=4,
            num_labels=CLASSES,
            **_ENCODER,
        ),
        batch=partial(_images, name="pixel_values", size=16, label="labels"),
        loss=logits_loss,
        columns=("*.q_proj.*", "*.k_proj.*", "*.v_proj.*", "*.mlp.fc1.*"),
        rows=("*.o_proj.weight", "*.mlp.fc2.weight"),
        blocks=("vit.layers.*",),
    ),
    "mixtral": Program(
        build=partial(
            _transformer,
            "MixtralForCausalLM",
            "MixtralConfig",
            num_local_experts=4,
            experts_implementation="grouped_mm",
            **_LLAMA,
        ),
        batch=_text,
        loss=logits_loss,
        columns=("*.q_proj.weight", "*.k_proj.weight", "*.v_proj.weight"),
        rows=("*.o_proj.weight",),
        others={"*.experts.gate_up_proj": "S(0)", "*.experts.down_proj": "S(0)"},
        blocks=("model.layers.*",),
    ),
    "resnet18": Program(
        build=partial(_zoo, "resnet", depth=18, width=4, num_classes=CLASSES),
        batch=partial(_images, name="images", size=8, label="labels"),
        loss=zoo_loss,
        blocks=("layer*",),
        sgd=True,
    ),
    "resnet50": Program(
        build=partial(_zoo, "resnet", depth=50, width=4, num_classes=CLASSES),
        batch=partial(_images, name="images", size=16, label="labels"),
        loss=zoo_loss,
        blocks=("layer*",),
        sgd=True,
    ),
    "dlrm": Program(
        build=partial(_zoo, "dlrm", rows=(40, 20, 7), lookup="embedding", hidden=8),
        batch=_clicks,
        loss=zoo_loss,
        others={"tables.*.weight": "S(1)"},
        blocks=("bottom", "top"),
    ),
    "dlrm of bags": Program(
        build=partial(_zoo, "dlrm", rows=(40, 20, 7), lookup="bag", hidden=8, bag=2),
        batch=partial(_clicks, bag=2),
        loss=zoo_loss,
        others={"tables.*.weight": "S(1)"},
        blocks=("bottom", "top"),
    ),
    "moe": Program(
        build=partial(_zoo, "moe", vocabulary=VOCABULARY, context=TIME, hidden=32),
        batch=partial(_named_tokens, names=("tokens", "targets")),
        loss=zoo_loss,
        blocks=("blocks.*",),
    ),
}

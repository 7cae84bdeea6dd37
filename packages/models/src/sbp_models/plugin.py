"""Plugin hooks of sbp-models: the names and configs of its models and data sets.

The objects are built in the modules of their names, which are imported only then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sbp_core.plugins import Factory, factories, hookimpl
from sbp_models.configs import (
    BertConfig,
    ClickLogConfig,
    ClicksConfig,
    DigitsConfig,
    DlrmConfig,
    GptConfig,
    HfConfig,
    HfDatasetConfig,
    ImageFolderConfig,
    ImagesConfig,
    LlamaConfig,
    MoeConfig,
    ResnetConfig,
    StdlibConfig,
    T5Config,
    TextConfig,
    TokensConfig,
    VitConfig,
    WebDatasetConfig,
)

SBP_API_VERSION = 2


@hookimpl
def sbp_models() -> Mapping[str, Factory]:
    """Return the models of this package, initialised from torch's global random state."""
    models = {
        "gpt": (GptConfig, "decoder-only transformer, pre-norm, learned positions"),
        "llama": (
            LlamaConfig,
            "decoder-only transformer, rotary positions, grouped queries, SwiGLU",
        ),
        "moe": (MoeConfig, "Llama with a mixture of experts in every block, as in Mixtral"),
        "bert": (BertConfig, "transformer encoder that predicts masked tokens"),
        "t5": (T5Config, "encoder and decoder, relative positions; continues a text"),
        "resnet": (ResnetConfig, "residual network of 18 to 152 layers, for images"),
        "vit": (VitConfig, "vision transformer, for images"),
        "dlrm": (DlrmConfig, "embedding tables, dot products and MLPs, for clicks"),
    }
    hf = {
        "hf": (HfConfig, "any language model or image classifier of transformers, random weights"),
    }
    return {
        **factories("sbp_models.{name}:{Name}", models),
        **factories("sbp_models.hf:build", hf),
    }


@hookimpl
def sbp_datasets() -> Mapping[str, Factory]:
    """Return the data sets of this package."""
    own = {
        "images": (
            ImagesConfig,
            "synthetic images of stripes, whose direction and colour give the class",
        ),
        "image_folder": (ImageFolderConfig, "your images, in a folder for each class"),
        "webdataset": (WebDatasetConfig, "your images in tar files of the webdataset format"),
        "click_log": (ClickLogConfig, "your clicks, in Parquet or CSV files"),
        "hf_dataset": (HfDatasetConfig, "a folder that the library `datasets` has saved"),
    }
    at_hand = {
        "clicks": (
            ClicksConfig,
            "synthetic clicks: numbers, categorical features, and a rule to learn",
        ),
        "digits": (DigitsConfig, "1,797 handwritten digits, which come with scikit-learn"),
    }
    text = {
        "stdlib": (StdlibConfig, "bytes of the running Python's own standard library"),
        "text": (TextConfig, "the bytes of your file or folder"),
    }
    tokens = {
        "tokens": (
            TokensConfig,
            "your text or .jsonl files, tokenised by a tokenizer.json and packed",
        ),
    }
    return {
        **factories("sbp_models.{name}:build", own),
        **factories("sbp_models.{name}:{Name}", at_hand),
        **factories("sbp_models.text:build_{name}", text),
        **factories("sbp_models.token_text:build", tokens),
    }


@hookimpl
def sbp_signatures() -> Mapping[str, Factory]:
    """Return the rules of operators of `transformers`."""
    return {
        "transformers.grouped_mm_fallback.default": Factory(
            build="sbp_models.hf_operators:product",
            summary="tokens times the weights of their expert",
        ),
        "transformers.grouped_mm_fallback_backward.default": Factory(
            build="sbp_models.hf_operators:gradients", summary="its gradients"
        ),
    }


@hookimpl
def sbp_config_folders() -> Sequence[str]:
    """Return the Hydra search paths of this package."""
    return ["pkg://sbp_models.conf"]

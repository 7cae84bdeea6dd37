"""Plugin hooks of sbp-models: the names and configs of its models and data sets.

The objects are built in the modules of their names, which are imported only then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sbp_core.plugins import Factory, hookimpl
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
    """Return the models of this package."""
    return {
        "gpt": Factory(
            build="sbp_models.gpt:build",
            config=GptConfig,
            summary="decoder-only transformer, pre-norm, learned positions",
        ),
        "llama": Factory(
            build="sbp_models.llama:build",
            config=LlamaConfig,
            summary="decoder-only transformer, rotary positions, grouped queries, SwiGLU",
        ),
        "moe": Factory(
            build="sbp_models.moe:build",
            config=MoeConfig,
            summary="Llama with a mixture of experts in every block, as in Mixtral",
        ),
        "bert": Factory(
            build="sbp_models.bert:build",
            config=BertConfig,
            summary="transformer encoder that predicts masked tokens",
        ),
        "t5": Factory(
            build="sbp_models.t5:build",
            config=T5Config,
            summary="encoder and decoder, relative positions; continues a text",
        ),
        "resnet": Factory(
            build="sbp_models.resnet:build",
            config=ResnetConfig,
            summary="residual network of 18 to 152 layers, for images",
        ),
        "vit": Factory(
            build="sbp_models.vit:build", config=VitConfig, summary="vision transformer, for images"
        ),
        "dlrm": Factory(
            build="sbp_models.dlrm:build",
            config=DlrmConfig,
            summary="embedding tables, dot products and MLPs, for clicks",
        ),
        "hf": Factory(
            build="sbp_models.hf:build",
            config=HfConfig,
            summary="any language model or image classifier of transformers, random weights",
        ),
    }


@hookimpl
def sbp_datasets() -> Mapping[str, Factory]:
    """Return the data sets of this package."""
    return {
        "stdlib": Factory(
            build="sbp_models.text:build_stdlib",
            config=StdlibConfig,
            summary="bytes of the running Python's own standard library",
        ),
        "text": Factory(
            build="sbp_models.text:build_text",
            config=TextConfig,
            summary="the bytes of your file or folder",
        ),
        "images": Factory(
            build="sbp_models.images:build",
            config=ImagesConfig,
            summary="synthetic images of stripes; their direction and colour tell the class",
        ),
        "clicks": Factory(
            build="sbp_models.clicks:build",
            config=ClicksConfig,
            summary="synthetic clicks: numbers, categorical features, and a rule to learn",
        ),
        "tokens": Factory(
            build="sbp_models.token_text:build",
            config=TokensConfig,
            summary="your text or .jsonl files, tokenised by a tokenizer.json and packed",
        ),
        "image_folder": Factory(
            build="sbp_models.image_folder:build",
            config=ImageFolderConfig,
            summary="your images, in a folder for each class",
        ),
        "digits": Factory(
            build="sbp_models.digits:build",
            config=DigitsConfig,
            summary="1,797 handwritten digits, which come with scikit-learn",
        ),
        "webdataset": Factory(
            build="sbp_models.webdataset:build",
            config=WebDatasetConfig,
            summary="your images in tar files of the webdataset format",
        ),
        "click_log": Factory(
            build="sbp_models.click_log:build",
            config=ClickLogConfig,
            summary="your clicks, in Parquet or CSV files",
        ),
        "hf_dataset": Factory(
            build="sbp_models.hf_dataset:build",
            config=HfDatasetConfig,
            summary="a folder that the library `datasets` has saved",
        ),
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

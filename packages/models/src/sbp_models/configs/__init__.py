"""Settings of the models and data sets, as dataclasses that are validated on construction.

Imports no torch, so that a wrong setting is reported before torch is imported. Messages begin with
the name of the setting, which `sbp_core.plugins.merge_settings` completes to its full key.
"""

from sbp_models.configs.files import (
    AugmentConfig,
    ClickLogConfig,
    DigitsConfig,
    HfDatasetConfig,
    ImageFilesConfig,
    ImageFolderConfig,
    TokensConfig,
    WebDatasetConfig,
)
from sbp_models.configs.language import BertConfig, GptConfig, LlamaConfig, MoeConfig, T5Config
from sbp_models.configs.recommendation import DlrmConfig
from sbp_models.configs.synthetic_data import ClicksConfig, ImagesConfig
from sbp_models.configs.text_data import StdlibConfig, TextConfig, TextTask, text_task
from sbp_models.configs.transformers_models import HfConfig
from sbp_models.configs.vision import ResnetConfig, VitConfig

__all__ = [
    "AugmentConfig",
    "BertConfig",
    "ClickLogConfig",
    "ClicksConfig",
    "DigitsConfig",
    "DlrmConfig",
    "GptConfig",
    "HfConfig",
    "HfDatasetConfig",
    "ImageFilesConfig",
    "ImageFolderConfig",
    "ImagesConfig",
    "LlamaConfig",
    "MoeConfig",
    "ResnetConfig",
    "StdlibConfig",
    "T5Config",
    "TextConfig",
    "TextTask",
    "TokensConfig",
    "VitConfig",
    "WebDatasetConfig",
    "text_task",
]

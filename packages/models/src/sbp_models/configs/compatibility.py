"""Check that a data set config is compatible with a model config: text, images or clicks; sizes.

The model configs of this package call these checks, before any object is built. Data sets of other
packages are not checked: there, the model reports a missing entry when it reads the first batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sbp_core.errors import ConfigError
from sbp_models.configs.files import (
    ClickLogConfig,
    DigitsConfig,
    ImageFolderConfig,
    TokensConfig,
    WebDatasetConfig,
)
from sbp_models.configs.synthetic_data import ClicksConfig, ImagesConfig
from sbp_models.configs.text_data import VOCABULARY, StdlibConfig, TextConfig, TextTask, text_task

#: Config class -> (kind of its samples, name of its option).
OPTIONS: Mapping[type, tuple[str, str]] = {
    StdlibConfig: ("a text", "stdlib"),
    TextConfig: ("a text", "text"),
    ImagesConfig: ("images", "images"),
    ClicksConfig: ("clicks", "clicks"),
    TokensConfig: ("a text", "tokens"),
    ImageFolderConfig: ("images", "image_folder"),
    DigitsConfig: ("images", "digits"),
    WebDatasetConfig: ("images", "webdataset"),
    ClickLogConfig: ("clicks", "click_log"),
}

#: Task -> (description of what a model learns, our models for the task).
_LEARNS: Mapping[TextTask, tuple[str, str]] = {
    "next": ("the next token", "gpt, llama, moe, hf/gpt2"),
    "masked": ("masked tokens", "bert, hf/bert"),
    "continue": ("how a text continues", "t5, hf/t5"),
}


def check_text(
    data: object,
    *,
    model: str,
    task: TextTask,
    vocabulary: int | None,
    context: int | None = None,
    vocabulary_key: str = "model.vocabulary",
) -> None:
    """Refuse data that a language model cannot learn from.

    Args:
        data: Config of the data set.
        model: Option of the model, for the message.
        task: Task of the model.
        vocabulary: Number of tokens of the model; None if that is not known here.
        context: Largest number of tokens of the model; None if there is no limit.
        vocabulary_key: The setting with the vocabulary, for the message.

    Raises:
        ConfigError: the data are no text, are for another task, or have too many or too long rows
            of tokens.
    """
    _check_kind(data, model, StdlibConfig, TextConfig, TokensConfig)
    if not isinstance(data, StdlibConfig | TextConfig | TokensConfig):
        return
    asked = "next" if isinstance(data, TokensConfig) else text_task(data.task)
    if asked != task:
        if isinstance(data, TokensConfig):
            raise ConfigError(
                f"model={model} learns {_LEARNS[task][0]}, and data=tokens asks for "
                f"{_LEARNS[asked][0]}",
                accepted="data=stdlib, data=text",
                todo=f"choose a model for it: {_LEARNS[asked][1]}",
            )
        raise ConfigError(
            f"model={model} learns {_LEARNS[task][0]}, and data.task={data.task} "
            f"asks for {_LEARNS[asked][0]}",
            accepted=f"data.task={task}",
            todo=f"leave data.task out, or choose a model for it: {_LEARNS[asked][1]}",
        )
    needed = data.vocabulary or 0 if isinstance(data, TokensConfig) else VOCABULARY[task]
    if vocabulary is not None and vocabulary < needed:
        mask = " (bytes and the mask)" if task == "masked" else " (bytes)"
        mask = "" if isinstance(data, TokensConfig) else mask
        raise ConfigError(
            f"{vocabulary_key}={vocabulary} is less than the {needed} tokens of "
            f"data={OPTIONS[type(data)][1]}{mask}",
            accepted=f"{vocabulary_key} >= {needed}",
        )
    if context is not None and data.context > context:
        raise ConfigError(
            f"data.context={data.context} is longer than model.context={context}",
            accepted=f"data.context in 1 to {context}",
            todo="leave data.context out to take the model's, or raise model.context",
        )


def check_images(
    data: object,
    *,
    model: str,
    channels: int | None,
    num_classes: int | None,
    image_size: int | None = None,
) -> None:
    """Refuse data that an image classifier cannot learn from.

    Args:
        data: Config of the data set.
        model: Option of the model, for the message.
        channels: Channels of the model's input; any if None.
        num_classes: Number of classes of the model; any if None.
        image_size: Height and width of the model's input, in pixels; any if None.

    Raises:
        ConfigError: the data are no images, or have another size or number.
    """
    images = (ImagesConfig, ImageFolderConfig, DigitsConfig, WebDatasetConfig)
    _check_kind(data, model, *images)
    if not isinstance(data, images):
        return
    for name, wanted in (("image_size", image_size), ("channels", channels)):
        given = getattr(data, name)
        if wanted is not None and given != wanted:
            raise ConfigError(
                f"data.{name}={given}, and model={model} takes {wanted}",
                accepted=f"data.{name}={wanted}",
                todo=f"leave data.{name} out to take the model's value",
            )
    if num_classes is not None and data.num_classes > num_classes:
        raise ConfigError(
            f"data.num_classes={data.num_classes}, and model={model} knows {num_classes}",
            accepted=f"data.num_classes in 1 to {num_classes}",
            todo="leave data.num_classes out to take the model's value",
        )


def check_clicks(data: object, *, model: str, num_dense: int, rows: Sequence[int]) -> None:
    """Refuse data that a recommendation model cannot learn from.

    Args:
        data: Config of the data set.
        model: Option of the model, for the message.
        num_dense: Count of numbers in a sample of the model.
        rows: Number of values of each feature in the model.

    Raises:
        ConfigError: the data are no clicks, or have other features.
    """
    _check_kind(data, model, ClicksConfig, ClickLogConfig)
    if isinstance(data, ClickLogConfig) and len(data.dense) != num_dense:
        raise ConfigError(
            f"data.dense names {len(data.dense)} columns, and model={model} takes {num_dense} "
            "numbers",
            accepted=f"{num_dense} columns",
            todo=f"set model.num_dense={len(data.dense)}",
        )
    if isinstance(data, ClicksConfig) and data.num_dense != num_dense:
        raise ConfigError(
            f"data.num_dense={data.num_dense}, and model={model} takes {num_dense}",
            accepted=f"data.num_dense={num_dense}",
            todo="leave data.num_dense out to take the model's value",
        )
    if not isinstance(data, ClicksConfig | ClickLogConfig):
        return
    fits = len(data.rows) == len(rows) and all(map(int.__le__, data.rows, rows))
    if not fits:
        raise ConfigError(
            f"data.rows={list(data.rows)}, and model={model} has tables of {list(rows)} rows",
            accepted="one feature for each table, with at most as many values as it has rows",
            todo="leave data.rows out to take the model's value",
        )


def _check_kind(data: object, model: str, *wanted: type) -> None:
    """Refuse a data set of this package that is of none of the wanted kinds.

    Raises:
        ConfigError: the data set is of another kind.
    """
    if type(data) not in OPTIONS or isinstance(data, wanted):
        return
    given, option = OPTIONS[type(data)]
    options = [f"data={OPTIONS[kind][1]}" for kind in wanted]
    raise ConfigError(
        f"model={model} learns from {OPTIONS[wanted[0]][0]}, and data={option} gives {given}",
        accepted=", ".join(options),
        todo="leave data=... out: the model then chooses what fits it",
    )

"""Settings of the data sets of stored data: text, images, logged clicks, `datasets` folders."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from sbp_core.errors import ConfigError, SbpError
from sbp_core.serialize import read_bytes
from sbp_core.user_paths import user_path
from sbp_models.configs.checks import (
    check_fractions,
    check_not_negative,
    check_positive,
    check_seed,
)


def _check_given(config: object, *names: str) -> None:
    for name in names:
        if not getattr(config, name):
            raise ConfigError(f"{name} is empty", todo=f"set data.{name}")


def _check_cache(cache: str | None) -> None:
    if cache == "":
        raise ConfigError("cache is empty", accepted="a folder, or null", todo="set data.cache")


def _check_channels(channels: int) -> None:
    if channels not in (1, 3):
        raise ConfigError(f"channels={channels} are neither grey nor colours", accepted="1, 3")


@dataclass(frozen=True, slots=True, kw_only=True)
class TokensConfig:
    """Settings of the data set `tokens`.

    Args:
        path: A file, or a folder whose files are all read: text, or `.jsonl` with one document a
            line.
        tokenizer: A `tokenizer.json` of the library `tokenizers`.
        end: Token that is put after each document.
        field: Name of the field with the text in a line of a `.jsonl` file.
        context: Tokens of one sample.
        cache: Folder for the tokens. If None, tokens of less than 16 MiB of files are kept in
            memory, tokens of larger files in the user's cache folder.

    Raises:
        ConfigError: a setting is empty, or `context` is not positive.
    """

    path: str
    tokenizer: str
    end: str = "<|endoftext|>"
    field: str = "text"
    context: int = 128
    cache: str | None = None

    def __post_init__(self) -> None:
        _check_given(self, "path", "tokenizer", "end", "field")
        check_positive(self, "context")
        _check_cache(self.cache)

    @property
    def vocabulary(self) -> int | None:
        """Number of tokens of the tokenizer; None if its file does not define it."""
        try:
            value = json.loads(read_bytes(user_path(self.tokenizer, key="data.tokenizer")))
            known = value["model"]["vocab"]
            ids = known.values() if isinstance(known, dict) else range(len(known))
            return int(1 + max([*ids, *(token["id"] for token in value.get("added_tokens", []))]))
        except (SbpError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
            return None  # an error is reported when the file is read


@dataclass(frozen=True, slots=True, kw_only=True)
class AugmentConfig:
    """Random augmentation of images in each epoch of training.

    Args:
        flip: Whether each image is mirrored, left to right, in half of the epochs.
        pad: Width of a grey border, in pixels, before a random crop back to the size.
        seed: Seed of the random choices.

    Raises:
        ConfigError: a setting is negative.
    """

    flip: bool = False
    pad: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        check_not_negative(self, "pad")
        check_seed(self.seed)


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageFilesConfig:
    """Settings that data sets of images in files share.

    Args:
        path: Path of the file or folder.
        image_size: Height and width to which images are scaled and cropped, in pixels.
        channels: 3 for colours, 1 for grey.
        num_classes: Number of classes of the model; the images may have fewer.
        held_out: Fraction of the images to hold out.
        augment: Augmentation of the training images.

    Raises:
        ConfigError: a setting is out of range.
    """

    path: str
    image_size: int = 32
    channels: int = 3
    num_classes: int = 10
    held_out: float = 0.05
    augment: AugmentConfig = AugmentConfig()

    def __post_init__(self) -> None:
        _check_given(self, "path")
        check_positive(self, "image_size", "num_classes")
        check_fractions(self, "held_out")
        _check_channels(self.channels)


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageFolderConfig(ImageFilesConfig):
    """Settings of the data set `image_folder`.

    Its `path` is a folder with one folder of images for each class; or with folders `train` and
    `validation` that contain these, and then `held_out` is not used.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class WebDatasetConfig(ImageFilesConfig):
    """Settings of the data set `webdataset`.

    Its `path` is a `.tar` file, or a folder with such files ("shards"): for each sample an image
    and a file `.cls` of the same name, which contains its class.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class DigitsConfig:
    """Settings of the data set `digits`.

    Args:
        image_size: Height and width, in pixels: a multiple of 8.
        channels: 1, or 3 that are equal.
        num_classes: Number of classes of the model, >= 10.

    Raises:
        ConfigError: a setting is out of range.
    """

    image_size: int = 8
    channels: int = 1
    num_classes: int = 10

    def __post_init__(self) -> None:
        if self.image_size < 8 or self.image_size % 8:
            raise ConfigError(
                f"image_size={self.image_size} is no multiple of 8, which digits have",
                accepted="8, 16, 24, 32, ...",
            )
        _check_channels(self.channels)
        if self.num_classes < 10:
            raise ConfigError(
                f"num_classes={self.num_classes} are not enough for ten digits", accepted=">= 10"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ClickLogConfig:
    """Settings of the data set `click_log`.

    Args:
        path: A `.parquet` or `.csv` file, or a folder with such files.
        dense: Columns of numbers.
        sparse: Columns of categories: integers or text.
        rows: Rows of the table of each category. The last one is for missing values, a smaller
            integer is its own row, and other categories are hashed to these rows.
        label: Column of the label: 1 for a click, else 0.
        log_transform: Whether to transform numbers x to log(1 + max(x, 0)), as for counts.
        held_out: Fraction of the rows to hold out: the last ones.
        cache: Folder for the rows. If None, rows of less than 16 MiB of files are kept in memory,
            rows of larger files in the user's cache folder.

    Raises:
        ConfigError: a setting is out of range, or columns and rows are inconsistent.
    """

    FORMER_NAMES: ClassVar[Mapping[str, str]] = {"log": "log_transform"}
    path: str
    dense: tuple[str, ...]
    sparse: tuple[str, ...]
    rows: tuple[int, ...]
    label: str = "label"
    log_transform: bool = True
    held_out: float = 0.05
    cache: str | None = None

    def __post_init__(self) -> None:
        _check_given(self, "path", "label", "dense", "sparse")
        columns = [self.label, *self.dense, *self.sparse]
        twice = [name for name in columns if columns.count(name) > 1]
        if twice:
            raise ConfigError(
                f"label, dense and sparse name the column {twice[0]!r} twice",
                accepted="each column once",
            )
        if len(self.rows) != len(self.sparse) or any(count < 2 for count in self.rows):
            raise ConfigError(
                f"rows={list(self.rows)} are {len(self.rows)}, and the columns of data.sparse are "
                f"{len(self.sparse)}",
                accepted="one integer >= 2 for each column of data.sparse",
            )
        check_fractions(self, "held_out")
        _check_cache(self.cache)


@dataclass(frozen=True, slots=True, kw_only=True)
class HfDatasetConfig:
    """Settings of the data set `hf_dataset`.

    Args:
        path: A folder written by `save_to_disk` of the library `datasets`.
        columns: Column by its name in a batch; all columns if empty.
        train: Split to train on, if there are several.
        validation: Split to hold out, if there are several.
        held_out: Fraction of the rows to hold out if there is one split: the last ones.

    Raises:
        ConfigError: a setting is empty or out of range.
    """

    path: str
    columns: Mapping[str, str] = dataclasses.field(default_factory=dict)
    train: str = "train"
    validation: str = "validation"
    held_out: float = 0.05

    def __post_init__(self) -> None:
        _check_given(self, "path", "train", "validation")
        check_fractions(self, "held_out")

"""The settings of the models and data sets, validated on construction.

Holds no torch: a wrong setting must be answered before torch is imported. Messages begin with the
name of the setting, which `sbp_core.plugins.merge_settings` completes to its key.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from sbp_core.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class GptConfig:
    """Settings of `sbp_models.gpt.Gpt`; the defaults make 3.3 million parameters.

    Args:
        vocabulary: Number of different tokens; 256 for bytes.
        context: Most tokens that the model looks at.
        num_layers: Blocks.
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
        for field in fields(self):
            _check_positive(field.name, getattr(self, field.name))
        if self.hidden % self.num_heads:
            divisors = [n for n in range(1, self.hidden + 1) if self.hidden % n == 0]
            raise ConfigError(
                f"num_heads={self.num_heads} does not divide hidden={self.hidden}",
                accepted=f"num_heads among {', '.join(map(str, divisors))}",
                todo="change one of the two so that every head has the same width",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class StdlibConfig:
    """Settings of the data set `stdlib`.

    Args:
        context: Tokens of one sample.
        seed: Seed of the order of the samples.

    Raises:
        ConfigError: `context` is not positive or `seed` is negative.
    """

    context: int = 128
    seed: int = 0

    def __post_init__(self) -> None:
        _check_windows(self.context, self.seed)


@dataclass(frozen=True, slots=True, kw_only=True)
class TextConfig:
    """Settings of the data set `text`.

    Args:
        path: A file, taken as raw bytes, or a folder, of which every UTF-8 file is taken.
        context: Tokens of one sample.
        seed: Seed of the order of the samples.

    Raises:
        ConfigError: `path` is empty, `context` is not positive or `seed` is negative.
    """

    path: str
    context: int = 128
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.path:
            raise ConfigError(
                "path is empty",
                accepted="a file, or a folder of text files",
                todo="set data.path=FILE_OR_FOLDER",
            )
        _check_windows(self.context, self.seed)


def _check_windows(context: int, seed: int) -> None:
    _check_positive("context", context)
    if seed < 0:
        raise ConfigError(f"seed={seed} is negative", accepted="an integer >= 0")


def _check_positive(name: str, value: int) -> None:
    if value < 1:
        raise ConfigError(f"{name}={value} is too small", accepted="an integer >= 1")

"""The settings of the data sets of bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from sbp_core.errors import ConfigError, nearest
from sbp_models.configs.checks import check_positive, check_seed

#: What a model is to do with a window of text; see `sbp_models.text.ByteText`.
TextTask = Literal["next", "masked", "continue"]

#: Different tokens of each task: bytes, and the mask.
VOCABULARY: Mapping[TextTask, int] = {"next": 256, "masked": 257, "continue": 256}

#: What `transformers` calls them.
HF_TASKS: Mapping[str, TextTask] = {
    "causal_lm": "next",
    "masked_lm": "masked",
    "seq2seq_lm": "continue",
}


def text_task(task: str) -> TextTask:
    """Return what a task is called here.

    Raises:
        ConfigError: it is none that one learns from a text.
    """
    found = HF_TASKS.get(task, task)
    for known in VOCABULARY:
        if found == known:
            return known
    near = nearest(task, (*VOCABULARY, *HF_TASKS))
    meant = f"did you mean {near}?" if near else ""
    raise ConfigError(
        f"task={task} is nothing that one learns from a text",
        accepted=f"{', '.join(VOCABULARY)}; or {', '.join(HF_TASKS)}, as transformers calls them",
        todo="choose data=images for a classifier of images" if "image" in task else meant,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StdlibConfig:
    """Settings of the data set `stdlib`.

    Args:
        context: Tokens of one sample.
        task: `next`: predict each next token; `masked`: those that are masked; `continue`: the
            text that follows; or what `transformers` calls them: `causal_lm`, `masked_lm`,
            `seq2seq_lm`.
        seed: Seed of what `masked` hides.

    Raises:
        ConfigError: `task` is none, `context` is not positive or `seed` is negative.
    """

    context: int = 128
    task: str = "next"
    seed: int = 0

    def __post_init__(self) -> None:
        check_positive(self, "context")
        text_task(self.task)
        check_seed(self.seed)


@dataclass(frozen=True, slots=True, kw_only=True)
class TextConfig:
    """Settings of the data set `text`.

    Args:
        path: A file, taken as raw bytes, or a folder, of which every UTF-8 file is taken.
        context: Tokens of one sample.
        task: `next`: predict each next token; `masked`: those that are masked; `continue`: the
            text that follows; or what `transformers` calls them: `causal_lm`, `masked_lm`,
            `seq2seq_lm`.
        seed: Seed of what `masked` hides.

    Raises:
        ConfigError: `path` is empty, `task` is none, `context` is not positive or `seed` is
            negative.
    """

    path: str
    context: int = 128
    task: str = "next"
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.path:
            raise ConfigError(
                "path is empty",
                accepted="a file, or a folder of text files",
                todo="set data.path=FILE_OR_FOLDER",
            )
        check_positive(self, "context")
        text_task(self.task)
        check_seed(self.seed)

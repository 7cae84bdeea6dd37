"""Settings of the data sets of bytes, `stdlib` and `text`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from sbp_core.errors import ConfigError, nearest
from sbp_models.configs.checks import check_positive, check_seed

#: Task of a model on a window of text; see the module `sbp_models.text`.
TextTask = Literal["next", "masked", "continue"]

#: Number of tokens for each task: bytes, and the mask.
VOCABULARY: Mapping[TextTask, int] = {"next": 256, "masked": 257, "continue": 256}

#: Name of a task in `transformers` -> our name.
HF_TASKS: Mapping[str, TextTask] = {
    "causal_lm": "next",
    "masked_lm": "masked",
    "seq2seq_lm": "continue",
}


def text_task(task: str) -> TextTask:
    """Return our name of a task.

    Raises:
        ConfigError: the task is unknown, or not a task for text.
    """
    found = HF_TASKS.get(task, task)
    for known in VOCABULARY:
        if found == known:
            return known
    near = nearest(task, (*VOCABULARY, *HF_TASKS))
    meant = f"did you mean {near}?" if near else ""
    raise ConfigError(
        f"task={task} is not a task for text",
        accepted=f"{', '.join(VOCABULARY)}; or {', '.join(HF_TASKS)}, as transformers calls them",
        todo="choose data=images for a classifier of images" if "image" in task else meant,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StdlibConfig:
    """Settings of the data set `stdlib`.

    Args:
        context: Tokens of one sample.
        task: `next`: predict each next token; `masked`: the masked tokens; `continue`: the text
            that follows; or the names in `transformers`: `causal_lm`, `masked_lm`, `seq2seq_lm`.
        seed: Seed of the places that `masked` hides.

    Raises:
        ConfigError: `task` is unknown, `context` is not positive or `seed` is negative.
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
        path: A file, read as raw bytes, or a folder, whose UTF-8 files are all read.
        context: Tokens of one sample.
        task: `next`: predict each next token; `masked`: the masked tokens; `continue`: the text
            that follows; or the names in `transformers`: `causal_lm`, `masked_lm`, `seq2seq_lm`.
        seed: Seed of the places that `masked` hides.

    Raises:
        ConfigError: `path` is empty, `task` is unknown, `context` is not positive or `seed` is
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

"""A data set of text that a tokenizer of the library `tokenizers` cuts into tokens, packed.

Documents stand one behind the other, each with the token `end` behind it, and the samples are the
windows of that, so no token is padding. Which token begins the next document cannot be known from
the one before, so it is not asked for (`context` 6; `|` is the end of a document):

    tokens     the cat sat | a  dog        targets    cat sat |  -100 dog ran
    tokens     ran |  the ...              targets    |  -100 ...

A document is a text file, or a line of a `.jsonl` file. All of it is cut when the data set is
built, and its tokens are kept in memory, 4 bytes each.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from sbp_core.errors import ConfigError, nearest
from sbp_models.configs import TokensConfig
from sbp_models.extras import library
from sbp_models.local_files import files_of, read_bytes
from sbp_models.splits import SplitDataset

#: The part of the tokens that is held out.
HELD_OUT = 0.05

#: The target where nothing is asked for, as in `torch.nn.functional.cross_entropy`.
NO_TARGET = -100

#: Documents that are cut at once, on all cores.
_AT_ONCE = 1000


class TokenText(SplitDataset):
    """Packed documents. Fulfils `sbp_torch.kinds.TextDataset`.

    Args:
        documents: Tokens of each, in order.
        tokenizer: A `tokenizers.Tokenizer`.
        end: Token behind each document.
        context: Tokens of one sample.
        label: What `describe` calls the text.

    Raises:
        ConfigError: a split is shorter than one sample.
    """

    def __init__(
        self,
        documents: Iterable[Sequence[int]],
        *,
        tokenizer: Any,
        end: int,
        context: int,
        label: str,
    ) -> None:
        self._tokenizer, self._end, self._context = tokenizer, end, context
        self.vocabulary = int(tokenizer.get_vocab_size(with_added_tokens=True))
        parts = [np.array([*document, end], dtype=np.int32) for document in documents]
        stream = np.concatenate([np.empty(0, np.int32), *parts])
        cut = len(stream) - round(HELD_OUT * len(stream))
        self._streams = {"train": stream[:cut], "validation": stream[cut:]}
        shortest = min(map(len, self._streams.values()))
        if shortest < context + 1:
            raise ConfigError(
                f"{label} has {len(stream)} tokens, of which {shortest} are held out, and one "
                f"sample of data.context={context} takes {context + 1}",
                accepted=f"about {int((context + 1) / HELD_OUT) + 1} tokens or more",
                todo="give more text, or a smaller data.context",
            )
        super().__init__(
            {split: (len(own) - 1) // context for split, own in self._streams.items()},
            label=f"{label}: {len(parts)} document{'s' if len(parts) != 1 else ''}",
        )

    def samples(
        self, numbers: npt.NDArray[np.int64], split: str = "train"
    ) -> Mapping[str, torch.Tensor]:
        """Return windows of `train` or `validation`.

        Returns:
            `tokens` and `targets`, int64 (n, context) each; see the module docstring.
        """
        found = self._checked(numbers, split)
        places = found[:, None] * self._context + np.arange(self._context + 1)
        windows = self._streams[split][places].astype(np.int64)
        tokens, targets = windows[:, :-1], windows[:, 1:]
        return {
            "tokens": torch.from_numpy(np.ascontiguousarray(tokens)),
            "targets": torch.from_numpy(np.where(tokens == self._end, NO_TARGET, targets)),
        }

    def describe(self) -> str:
        """Return one line: what the text is and how large each split is."""
        sizes = ", ".join(f"{len(own):,} tokens {split}" for split, own in self._streams.items())
        return f"{self._label}, {sizes}, {self.vocabulary:,} different ones"

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text, none added."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, tokens: Iterable[int]) -> str:
        """Return the text of tokens."""
        known = [token for token in tokens if 0 <= token < self.vocabulary]
        return str(self._tokenizer.decode(known, skip_special_tokens=False))


def build(config: TokensConfig) -> TokenText:
    """Make the data set of a file or folder.

    Raises:
        ConfigError: a file cannot be read or is broken (with the byte), or there is too little.
    """
    tokenizers = library("tokenizers", extra="tokens", needed_by="data=tokens")
    tokenizer = _tokenizer(tokenizers, config.tokenizer)
    vocabulary: Mapping[str, int] = tokenizer.get_vocab(with_added_tokens=True)
    if config.end not in vocabulary:
        near = nearest(config.end, vocabulary)
        special = [token.content for token in tokenizer.get_added_tokens_decoder().values()]
        raise ConfigError(
            f"data.end={config.end} is no token of {config.tokenizer}",
            accepted=f"a token, such as {', '.join(special[:5])}" if special else "a token of it",
            todo=f"did you mean {near}?" if near else "set data.end to what ends a document",
        )
    texts = documents(Path(config.path).expanduser(), config.field)
    return TokenText(
        _cut(tokenizer, texts),
        tokenizer=tokenizer,
        end=vocabulary[config.end],
        context=config.context,
        label=config.path,
    )


def documents(path: Path, field: str) -> Iterator[str]:
    """Yield the documents of a file, or of every file below a folder.

    Args:
        path: Of the file or folder.
        field: What holds the text in a line of a `.jsonl` file.

    Raises:
        ConfigError: a file cannot be read, is no UTF-8 or no JSON: names the byte or line.
    """
    for file in files_of(path, key="data.path"):
        content = read_bytes(file)
        if file.suffix == ".jsonl":
            yield from _lines(file, content, field)
        else:
            yield _text(file, content)


def _text(file: Path, content: bytes, begin: int = 0) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{file} is no UTF-8 text: {error.reason} {content[error.start :][:4]!r}",
            where=f"{file}, byte {begin + error.start}",
            accepted="text in UTF-8",
        ) from error


def _lines(file: Path, content: bytes, field: str) -> Iterator[str]:
    begin = 0
    for number, line in enumerate(content.split(b"\n"), start=1):
        if line.strip():
            where = f"{file}, line {number}, byte {begin}"
            try:
                value = json.loads(_text(file, line, begin))
            except (ValueError, RecursionError) as error:
                if isinstance(error, ConfigError):
                    raise
                at = getattr(error, "pos", 0)
                raise ConfigError(
                    f"{file} has a line that is no JSON: {error}",
                    where=f"{file}, line {number}, byte {begin + at}",
                    accepted=f'a JSON object a line, such as {{"{field}": "..."}}',
                ) from error
            if not isinstance(value, dict) or not isinstance(value.get(field), str):
                known = ", ".join(map(str, value)) if isinstance(value, dict) else ""
                raise ConfigError(
                    f"{file} has a line without the text {field!r}",
                    where=where,
                    accepted=f'a JSON object a line, such as {{"{field}": "..."}}',
                    todo=f"set data.field to one of {known}" if known else "",
                )
            yield value[field]
        begin += len(line) + 1


def _cut(tokenizer: Any, texts: Iterable[str]) -> Iterator[Sequence[int]]:
    """Yield the tokens of each text."""
    waiting: list[str] = []

    def cut() -> Iterator[Sequence[int]]:
        for found in tokenizer.encode_batch(waiting, add_special_tokens=False):
            yield found.ids
        waiting.clear()

    for text in texts:
        waiting.append(text)
        if len(waiting) == _AT_ONCE:
            yield from cut()
    yield from cut()


def _tokenizer(tokenizers: Any, path: str) -> Any:
    file = Path(path).expanduser()
    content = read_bytes(file, key="data.tokenizer")
    try:
        return tokenizers.Tokenizer.from_buffer(content)
    except Exception as error:  # the library raises nothing more special
        raise ConfigError(
            f"data.tokenizer={path} is no tokenizer: {error}",
            accepted="a tokenizer.json, as the library tokenizers and Hugging Face write it",
        ) from error

"""The data set `tokens`: documents tokenized by the library `tokenizers`, and packed.

Documents are concatenated, each followed by the token `end`, and the samples are windows of this
stream, so no token is padding. The first token of the next document cannot be predicted from the
one before, so it is no target (`context` 6; `|` is the end of a document):

    tokens     the cat sat | a  dog        targets    cat sat |  -100 dog ran
    tokens     ran |  the ...              targets    |  -100 ...

All documents are tokenized once, when the data set is built. `record_cache` keeps the tokens, with
2 bytes each if the tokenizer has at most 65,536 tokens.
"""

from __future__ import annotations

from codecs import BOM_UTF8
from collections.abc import Iterable, Iterator, Mapping
from hashlib import blake2b
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from sbp_core.errors import ConfigError, suggestion
from sbp_core.user_paths import user_path
from sbp_models.configs import TokensConfig
from sbp_models.extras import library
from sbp_models.local_files import files_of, read_bytes
from sbp_models.record_cache import Chunk, Recipe, load_records
from sbp_models.splits import SplitDataset
from sbp_models.text_files import PIECE_BYTES, DocumentPiece, pieces

#: The fraction of the tokens that is held out.
HELD_OUT = 0.05

#: The target of tokens without one, as in `torch.nn.functional.cross_entropy`.
NO_TARGET = -100

#: Largest number of documents that are tokenized at once, on all cores.
_AT_ONCE = 1000

#: Letters from which on a batch is full: each takes about 100 bytes while it is tokenized.
_LETTERS_AT_ONCE = 2**20


class TokenText(SplitDataset):
    """Packed documents. Implements `sbp_torch.kinds.TextDataset`.

    Args:
        stream: Tokens of all documents, integers (n,), each document with `end` after it.
        num_documents: Number of documents.
        tokenizer: A `tokenizers.Tokenizer`.
        end: Token after each document.
        context: Tokens of one sample.
        label: Name of the text in `describe`.

    Raises:
        ConfigError: a split is shorter than one sample.
    """

    def __init__(
        self,
        stream: npt.NDArray[Any],
        *,
        num_documents: int,
        tokenizer: Any,
        end: int,
        context: int,
        label: str,
    ) -> None:
        self._tokenizer, self._end, self._context = tokenizer, end, context
        self.vocabulary = int(tokenizer.get_vocab_size(with_added_tokens=True))
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
            label=f"{label}: {num_documents} document{'s' if num_documents != 1 else ''}",
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
        """Return a line with the name of the text and the size of each split."""
        sizes = ", ".join(f"{len(own):,} tokens {split}" for split, own in self._streams.items())
        return f"{self._label}, {sizes}, {self.vocabulary:,} different ones"

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text, without special tokens."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, tokens: Iterable[int]) -> str:
        """Return the text of tokens."""
        known = [token for token in tokens if 0 <= token < self.vocabulary]
        return str(self._tokenizer.decode(known, skip_special_tokens=False))


def build(config: TokensConfig) -> TokenText:
    """Build the data set from a file or folder.

    Raises:
        ConfigError: a file cannot be read or is broken (names the byte), or the text is too short.
        RunError: the cache cannot be written.
    """
    tokenizers = library("tokenizers", extra="tokens", needed_by="data=tokens")
    tokenizer, digest = _tokenizer(tokenizers, config.tokenizer)
    vocabulary: Mapping[str, int] = tokenizer.get_vocab(with_added_tokens=True)
    if config.end not in vocabulary:
        special = [token.content for token in tokenizer.get_added_tokens_decoder().values()]
        raise ConfigError(
            f"data.end={config.end} is no token of {config.tokenizer}",
            accepted=f"a token, such as {', '.join(special[:5])}" if special else "a token of it",
            todo=suggestion(config.end, vocabulary, "choose one of its tokens"),
        )
    end = vocabulary[config.end]
    files = files_of(user_path(config.path, key="data.path"), key="data.path")
    dtype = np.dtype("<u2" if max(vocabulary.values()) < 2**16 else "<u4")
    recipe = Recipe(
        kind="tokens",
        files=files,
        settings={
            "tokenizer": digest,
            "tokenizers": tokenizers.__version__,
            "end": config.end,
            "field": config.field,
            "piece_bytes": PIECE_BYTES,
        },
        dtype=dtype,
        chunks=lambda: cut(tokenizer, pieces(files, config.field), end, dtype),
    )
    records = load_records(recipe, config.cache)
    return TokenText(
        records.values,
        num_documents=records.counts.get("documents", 0),
        tokenizer=tokenizer,
        end=end,
        context=config.context,
        label=config.path,
    )


def cut(
    tokenizer: Any, found: Iterable[DocumentPiece], end: int, dtype: np.dtype[Any]
) -> Iterator[Chunk]:
    """Tokenize documents, and yield the tokens in chunks.

    Args:
        tokenizer: A `tokenizers.Tokenizer`.
        found: The documents, in pieces.
        end: Token that is put after each document.
        dtype: Dtype of the tokens.
    """
    waiting: list[DocumentPiece] = []
    waiting_letters = 0

    def chunk() -> Chunk:
        texts = [piece.text for piece in waiting]
        parts = []
        for piece, one in zip(
            waiting, tokenizer.encode_batch_fast(texts, add_special_tokens=False), strict=True
        ):
            parts.append(np.array(one.ids, dtype))
            if piece.is_last:
                parts.append(np.array([end], dtype))
        return Chunk(
            records=np.concatenate(parts),
            counts={"documents": sum(piece.is_last for piece in waiting)},
            read_bytes=waiting[-1].read_bytes,
        )

    for piece in found:
        waiting.append(piece)
        waiting_letters += len(piece.text)
        if len(waiting) == _AT_ONCE or waiting_letters >= _LETTERS_AT_ONCE:
            yield chunk()
            waiting.clear()
            waiting_letters = 0
    if waiting:
        yield chunk()


def _tokenizer(tokenizers: Any, path: str) -> tuple[Any, str]:
    """Return a tokenizer for whole texts (no truncation, no padding), and a hash of its file."""
    file = user_path(path, key="data.tokenizer")
    content = read_bytes(file, key="data.tokenizer").removeprefix(BOM_UTF8)
    try:
        tokenizer = tokenizers.Tokenizer.from_buffer(content)
    except Exception as error:  # the library raises no narrower class
        raise ConfigError(
            f"data.tokenizer={path} is no tokenizer: {error}",
            accepted="a tokenizer.json, as the library tokenizers and Hugging Face write it",
        ) from error
    # Some files enable truncation and padding, for models of short texts.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer, blake2b(content, digest_size=16).hexdigest()

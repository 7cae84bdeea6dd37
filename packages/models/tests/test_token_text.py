"""Packed documents: every token once an epoch, no loss over borders, and files that are broken."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from sbp_core.errors import ConfigError
from sbp_models.configs import BertConfig, GptConfig, TokensConfig
from sbp_models.token_text import NO_TARGET, TokenText, build, documents
from sbp_torch.testing.data import DatasetConformance

TEXT = "the quick brown fox jumps over a lazy dog and runs on until it is night"
WORDS = TEXT.split()
END = "<|endoftext|>"


def train_tokenizer(folder: Path) -> str:
    """Write a byte-level tokenizer of a few merges; return its path."""
    tokenizer = Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        show_progress=False,
        special_tokens=[END],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator([" ".join(WORDS)] * 3, trainer)
    path = folder / "tokenizer.json"
    tokenizer.save(str(path))
    return str(path)


def write_texts(folder: Path, count: int = 40) -> Path:
    texts = folder / "texts"
    texts.mkdir()
    for number in range(count):
        text = " ".join(WORDS[(number * place) % len(WORDS)] for place in range(1, 40))
        (texts / f"{number:03}.txt").write_text(text, "utf-8")
    return texts


def make(folder: Path, path: Path, **settings: object) -> TokenText:
    tokenizer = train_tokenizer(folder)
    return build(TokensConfig(path=str(path), tokenizer=tokenizer, **{"context": 8, **settings}))


class TestTokens(DatasetConformance):
    splits = ("train", "validation")

    @pytest.fixture(autouse=True)
    def _write(self, tmp_path: Path) -> None:
        self.folder, self.root = tmp_path, write_texts(tmp_path)

    def make_dataset(self) -> TokenText:
        return make(self.folder, self.root)


class Letters:
    """A tokenizer whose tokens are numbers already."""

    def get_vocab_size(self, with_added_tokens: bool) -> int:
        return 100


def packed(parts: Sequence[Sequence[int]], context: int) -> TokenText:
    return TokenText(parts, tokenizer=Letters(), end=99, context=context, label="numbers")


@given(
    st.lists(st.lists(st.integers(0, 98), max_size=30), min_size=1, max_size=30),
    st.integers(1, 9),
)
def test_every_token_is_asked_for_once_but_for_the_first_of_a_document(
    parts: list[list[int]], context: int
) -> None:
    stream = [token for part in parts for token in [*part, 99]]
    cut = len(stream) - round(0.05 * len(stream))
    if min(cut, len(stream) - cut) <= context:
        with pytest.raises(ConfigError, match="tokens or more"):
            packed(parts, context)
        return
    data = packed(parts, context)

    batch = data.samples(np.arange(data.num_samples()))

    count = batch["tokens"].numel()
    assert cut - 1 - count < context
    assert batch["tokens"].flatten().tolist() == stream[:count]
    wanted = [
        NO_TARGET if before == 99 else token for before, token in pairwise(stream[: count + 1])
    ]
    assert batch["targets"].flatten().tolist() == wanted


def test_there_is_no_loss_over_the_border_of_documents(tmp_path: Path) -> None:
    data = make(tmp_path, write_texts(tmp_path))
    end = data.encode(END)

    batch = data.samples(np.arange(data.num_samples()))

    border = batch["tokens"] == end[0]
    assert len(end) == 1 and border.sum() > 30
    assert torch.equal(batch["targets"] == NO_TARGET, border)


def test_lines_of_json_are_documents(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    lines = [json.dumps({"body": f"text {number}", "id": 3}) for number in range(3)]
    file.write_text("\n".join([*lines, "", ""]), "utf-8")

    assert list(documents(file, "body")) == ["text 0", "text 1", "text 2"]


@pytest.mark.parametrize(
    ("content", "says", "where"),
    [
        (b'{"text": "a"}\n{"text": "b"\n', "no JSON", "line 2, byte 26"),
        (b'{"text": "a"}\n{"txt": "b"}\n', "without the text 'text'", "line 2, byte 14"),
        (b'{"text": 3}\n', "without the text 'text'", "line 1, byte 0"),
        (b"[1]\n", "without the text", "line 1, byte 0"),
        (b'{"text": "a"}\n{"text": "\xff"}\n', "no UTF-8", "byte 24"),
        (b"[" * 200_000, "no JSON", "line 1"),
    ],
)
def test_a_broken_line_is_named_with_its_byte(
    tmp_path: Path, content: bytes, says: str, where: str
) -> None:
    file = tmp_path / "a.jsonl"
    file.write_bytes(content)

    with pytest.raises(ConfigError, match=says) as caught:
        list(documents(file, "text"))

    assert caught.value.where[0].startswith(f"{file}, {where}")


def test_a_text_that_is_no_utf8_is_named_with_its_byte(tmp_path: Path) -> None:
    texts = write_texts(tmp_path, 2)
    (texts / "x.txt").write_bytes(b"abc\xffd")

    with pytest.raises(ConfigError, match="no UTF-8") as caught:
        make(tmp_path, texts)

    assert caught.value.where == (f"{texts / 'x.txt'}, byte 3",)


@pytest.mark.parametrize("content", [None, b"", b"{}", b"\x00\x01", b'{"model": {"type": "BPE"}}'])
def test_what_is_no_tokenizer_is_refused(tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "tokenizer.json"
    if content is not None:
        file.write_bytes(content)
    config = TokensConfig(path=str(write_texts(tmp_path)), tokenizer=str(file))

    with pytest.raises(ConfigError, match=r"data\.tokenizer="):
        build(config)
    assert config.vocabulary is None


def test_an_end_that_is_no_token_is_refused_with_those_there_are(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.end=<eos> is no token") as caught:
        make(tmp_path, write_texts(tmp_path), end="<eos>")

    assert END in caught.value.accepted


def test_a_model_that_knows_too_few_tokens_is_refused_before_the_tokenizer_is_loaded(
    tmp_path: Path,
) -> None:
    config = TokensConfig(path="x", tokenizer=train_tokenizer(tmp_path), context=8)

    assert config.vocabulary == Tokenizer.from_file(config.tokenizer).get_vocab_size()
    GptConfig(vocabulary=config.vocabulary, context=8).check_beside({"data": config})
    with pytest.raises(
        ConfigError, match=r"vocabulary=256 is less than the \d+ tokens of data=tok"
    ):
        GptConfig(context=8).check_beside({"data": config})
    with pytest.raises(
        ConfigError, match="learns masked tokens, and data=tokens asks for the next"
    ):
        BertConfig(vocabulary=1000).check_beside({"data": config})

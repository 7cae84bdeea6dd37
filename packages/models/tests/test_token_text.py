"""Packed documents: every token once an epoch, no loss over borders, and files that are broken."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import tokenizers
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from sbp_core.errors import ConfigError
from sbp_models.configs import BertConfig, GptConfig, TokensConfig
from sbp_models.text_files import pieces
from sbp_models.token_text import NO_TARGET, TokenText, build, cut
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
    stream = np.array([token for part in parts for token in [*part, 99]], np.uint16)
    return TokenText(
        stream,
        num_documents=len(parts),
        tokenizer=Letters(),
        end=99,
        context=context,
        label="numbers",
    )


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

    found = list(pieces([file], "body"))

    assert [piece.text for piece in found] == ["text 0", "text 1", "text 2"]
    assert all(piece.is_last for piece in found)
    assert found[-1].read_bytes == file.stat().st_size - 1


@pytest.mark.parametrize(
    ("content", "says", "where"),
    [
        (b'{"text": "a"}\n{"text": "b"\n', "no JSON", "line 2, byte 26"),
        (b'{"text": "a"}\n{"txt": "b"}\n', "without the text 'text'", "line 2, byte 14"),
        (b'{"text": 3}\n', "without the text 'text'", "line 1, byte 0"),
        (b"[1]\n", "without the text", "line 1, byte 0"),
        (b'{"text": "a"}\n{"text": "\xff"}\n', "no UTF-8", "byte 24"),
        (b"[" * 200_000, "no JSON", "line 1"),
        (b'{"text": "a\\ud800"}', "half of a surrogate pair", "line 1, byte 0"),
    ],
)
def test_a_broken_line_is_named_with_its_byte(
    tmp_path: Path, content: bytes, says: str, where: str
) -> None:
    file = tmp_path / "a.jsonl"
    file.write_bytes(content)

    with pytest.raises(ConfigError, match=says) as caught:
        list(pieces([file], "text"))

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
    GptConfig(vocabulary=config.vocabulary, context=8).check_combination({"data": config})
    with pytest.raises(
        ConfigError, match=r"vocabulary=256 is less than the \d+ tokens of data=tok"
    ):
        GptConfig(context=8).check_combination({"data": config})
    with pytest.raises(
        ConfigError, match="learns masked tokens, and data=tokens asks for the next"
    ):
        BertConfig(vocabulary=1000).check_combination({"data": config})


@given(st.text("aä€😀\n", max_size=60), st.integers(5, 20))
def test_a_long_document_comes_in_pieces_that_end_with_a_line_where_one_does(
    text: str, piece_bytes: int
) -> None:
    with TemporaryDirectory() as folder:
        plain, lines = Path(folder, "a.txt"), Path(folder, "a.jsonl")
        plain.write_bytes(text.encode())
        lines.write_text(json.dumps({"text": text}), "utf-8")

        found = list(pieces([plain], "text", piece_bytes=piece_bytes))
        of_line = list(pieces([lines], "text", piece_bytes=piece_bytes))

    assert "".join(piece.text for piece in found) == text
    assert [piece.is_last for piece in found] == [False] * (len(found) - 1) + [True]
    assert [piece.text for piece in of_line] == [piece.text for piece in found]
    for piece in found[:-1]:
        size_bytes = len(piece.text.encode())
        assert size_bytes <= piece_bytes
        if "\n" in piece.text:
            assert piece.text.endswith("\n")
        else:
            assert size_bytes > piece_bytes - 4


def test_a_byte_that_is_no_utf8_is_named_where_it_is_in_the_file(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_bytes(b"line\n" * 10 + b"ab\xff")

    with pytest.raises(ConfigError, match="no UTF-8") as caught:
        list(pieces([file], "text", piece_bytes=8))

    assert caught.value.where == (f"{file}, byte 52",)


def test_tokens_of_a_cache_are_those_in_memory(tmp_path: Path) -> None:
    texts = write_texts(tmp_path)
    (texts / "more.jsonl").write_text('{"text": ""}\n{"text": "quick"}\n' * 30, "utf-8")
    cache = tmp_path / "cache"

    found = [make(tmp_path, texts, cache=one) for one in (None, str(cache), str(cache))]

    assert len(list(cache.glob("tokens-*/records.bin"))) == 1
    for split in ("train", "validation"):
        numbers = np.arange(found[0].num_samples(split))
        wanted = found[0].samples(numbers, split)
        for other in found[1:]:
            given = other.samples(numbers, split)
            assert all(torch.equal(given[name], wanted[name]) for name in wanted)
    assert len({data.describe() for data in found}) == 1


def test_documents_are_cut_as_each_alone_is(tmp_path: Path) -> None:
    texts = write_texts(tmp_path, 30)
    data = make(tmp_path, texts, context=1)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))

    found = [data.samples(np.arange(data.num_samples(s)), s) for s in ("train", "validation")]

    stream: list[int] = []
    for file in sorted(texts.iterdir()):
        stream += [*tokenizer.encode(file.read_text(), add_special_tokens=False).ids, 0]
    cut = len(stream) - round(0.05 * len(stream))
    assert tokenizer.token_to_id(END) == 0
    assert found[0]["tokens"].flatten().tolist() == stream[: cut - 1]
    assert found[1]["tokens"].flatten().tolist() == stream[cut:-1]


def test_the_pieces_of_a_document_have_one_end(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(train_tokenizer(tmp_path))
    text = "\n".join(WORDS * 20)
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text(text)
    files = [tmp_path / "a.txt", tmp_path / "b.txt"]

    found = list(pieces(files, "text", piece_bytes=100))
    chunks = list(cut(tokenizer, found, 0, np.dtype("<u2")))

    wanted = [*tokenizer.encode(text, add_special_tokens=False).ids, 0] * 2
    assert len(found) > 20
    assert np.concatenate([chunk.records for chunk in chunks]).tolist() == wanted
    assert sum(chunk.counts["documents"] for chunk in chunks) == 2
    assert chunks[-1].read_bytes == 2 * len(text)


@pytest.mark.parametrize("setting", ["end", "tokenizer"])
def test_other_settings_have_tokens_of_their_own(tmp_path: Path, setting: str) -> None:
    texts, cache = write_texts(tmp_path), tmp_path / "cache"
    make(tmp_path, texts, cache=str(cache))

    if setting == "end":
        make(tmp_path, texts, cache=str(cache), end="a")
    else:
        file = Path(train_tokenizer(tmp_path))
        file.write_text(file.read_text() + "\n")
        build(TokensConfig(path=str(texts), tokenizer=str(file), context=8, cache=str(cache)))

    assert len(list(cache.glob("tokens-*/records.bin"))) == 2


def test_a_tokenizer_that_says_how_long_texts_are_cuts_them_whole(tmp_path: Path) -> None:
    texts = write_texts(tmp_path)
    wanted = make(tmp_path, texts).describe()
    file = tmp_path / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.enable_truncation(5)
    tokenizer.enable_padding(length=300)
    tokenizer.save(str(file))

    found = build(TokensConfig(path=str(texts), tokenizer=str(file), context=8))

    assert found.describe() == wanted


def test_what_a_tokenizer_of_many_tokens_cuts_takes_four_bytes_a_token(tmp_path: Path) -> None:
    words = {f"w{number}": number for number in range(2**16 + 10)}
    tokenizer = Tokenizer(tokenizers.models.WordLevel({END: 2**16 + 10, **words}, "w0"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(tmp_path / "many.json"))
    (tmp_path / "a.txt").write_text(" ".join(f"w{2**16 - 20 + n % 30}" for n in range(400)))

    data = build(
        TokensConfig(
            path=str(tmp_path / "a.txt"),
            tokenizer=str(tmp_path / "many.json"),
            context=4,
            cache=str(tmp_path / "cache"),
        )
    )

    tokens = data.samples(np.arange(10))["tokens"].flatten().tolist()
    assert tokens == [2**16 - 20 + n % 30 for n in range(40)]


def test_a_byte_order_mark_is_no_part_of_a_document(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("hello", "utf-8-sig")
    line = '{"text": "you"}\n'.encode("utf-8-sig")
    (tmp_path / "b.jsonl").write_bytes(line + line)

    found = list(pieces([tmp_path / "a.txt", tmp_path / "b.jsonl"], "text"))

    assert [piece.text for piece in found] == ["hello", "you", "you"]
    assert [piece.read_bytes for piece in found] == [8, 27, 46]


@pytest.mark.parametrize("name", ["x.txt", "x.jsonl"])
@pytest.mark.parametrize("encoding", ["UTF-16", "ISO-8859-1"])
def test_another_encoding_is_named_with_the_way_out(
    tmp_path: Path, name: str, encoding: str
) -> None:
    (tmp_path / name).write_text('{"text": "Zürich"}', encoding)

    with pytest.raises(ConfigError, match="is no UTF-8 text; it looks like ") as caught:
        list(pieces([tmp_path / name], "text"))

    assert f"iconv -f {encoding} -t UTF-8" in caught.value.todo

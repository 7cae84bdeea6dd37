import logging
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from sbp_core.errors import ConfigError, SbpLookupError
from sbp_models import text
from sbp_models.configs import StdlibConfig, TextConfig, TextTask
from sbp_models.text import MASK, ByteText, build_stdlib, build_text
from sbp_torch.kinds import TextDataset

LINES = "".join(f"line {number}\n" for number in range(200))


def make(text: bytes = LINES.encode(), *, context: int = 8, seed: int = 0) -> ByteText:
    return ByteText([("file", text)], context=context, seed=seed, label="test")


def build_from(path: Path, context: int = 8) -> ByteText:
    return build_text(TextConfig(path=str(path), context=context))


def all_windows(data: ByteText, split: str) -> set[bytes]:
    batch = data.samples(np.arange(data.num_samples(split)), split)
    windows = torch.cat([batch["tokens"], batch["targets"][:, -1:]], dim=1)
    return {bytes(window) for window in windows.tolist()}


def test_targets_are_one_byte_ahead_of_tokens() -> None:
    batch = make().samples(np.arange(4))

    assert batch["tokens"].shape == batch["targets"].shape == (4, 8)
    assert batch["tokens"].dtype == batch["targets"].dtype == torch.int64
    assert torch.equal(batch["tokens"][:, 1:], batch["targets"][:, :-1])


def test_samples_are_windows_of_the_text() -> None:
    found = all_windows(make(), "train") | all_windows(make(), "validation")

    assert all(window in LINES.encode() for window in found)


def test_the_splits_share_no_byte_and_the_last_twentieth_is_held_out() -> None:
    text = bytes(95) + bytes([1] * 5)

    data = make(text, context=2)

    assert all_windows(data, "train") == {bytes([0, 0, 0])}
    assert all_windows(data, "validation") == {bytes([1, 1, 1])}


@pytest.mark.parametrize("task", ["next", "masked", "continue"])
def test_an_epoch_asks_for_every_byte_once(task: TextTask) -> None:
    text = bytes(range(200))  # of which 190 are to train on
    data = ByteText([("file", text)], context=3, seed=0, label="test", task=task)

    batch = data.samples(np.arange(data.num_samples()))

    if task == "masked":
        asked = torch.where(batch["tokens"] == MASK, batch["targets"], batch["tokens"])
    elif task == "next":
        asked = batch["targets"] - 1
    else:
        asked = torch.cat([batch["tokens"], batch["targets"]], dim=1)
    filled = 186 if task == "continue" else 189  # what fills no window is left out
    assert asked.flatten().tolist() == list(range(filled))


def test_another_seed_hides_other_tokens() -> None:
    def masked(seed: int) -> torch.Tensor:
        data = ByteText([("f", LINES.encode())], context=8, seed=seed, label="x", task="masked")
        return data.samples(np.arange(8))["tokens"]

    assert torch.equal(masked(0), masked(0))
    assert not torch.equal(masked(0), masked(1))


def test_an_unknown_split_is_refused_with_the_known_ones() -> None:
    with pytest.raises(SbpLookupError, match="did you mean 'validation'") as caught:
        make().samples(np.arange(1), "validate")

    assert caught.value.accepted == "train, validation"


def test_a_text_too_short_for_one_sample_is_refused_with_the_size_it_needs() -> None:
    with pytest.raises(ConfigError) as caught:
        make(b"short" * 10, context=8)

    assert "50 bytes" in caught.value.what
    assert caught.value.accepted == "about 181 bytes or more"
    assert make(bytes(181), context=8).num_samples("validation") == 1


def test_the_order_of_the_files_does_not_depend_on_the_order_they_are_given_in() -> None:
    files = [(f"file{number}", LINES[number:].encode()) for number in range(5)]

    one = ByteText(files, context=8, seed=0, label="x").samples(np.arange(16))["tokens"]
    two = ByteText(files[::-1], context=8, seed=0, label="x").samples(np.arange(16))["tokens"]

    assert torch.equal(one, two)


def test_text_becomes_bytes_and_comes_back() -> None:
    data = make()

    assert isinstance(data, TextDataset)
    assert data.vocabulary == 256
    assert data.encode("é") == [0xC3, 0xA9]
    assert data.decode([0xC3, 0xA9]) == "é"


def test_tokens_that_are_no_utf8_or_no_bytes_are_replaced() -> None:
    assert make().decode([0x41, 0xC3, 0x42, 999]) == "A\ufffdB\ufffd"


def test_a_file_is_taken_byte_for_byte(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "data.bin"
    file.write_bytes(bytes(range(256)) * 2)

    data = build_from(file)

    assert any(max(window) >= 0x80 for window in all_windows(data, "train"))
    assert f"{file}: 1 file," in data.describe()
    assert "data.bin is not UTF-8 text; its bytes are used as they are" in caplog.text


def test_a_folder_is_read_but_for_hidden_and_binary_files(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "deep" / "er").mkdir(parents=True)
    (tmp_path / "deep" / "er" / "a.txt").write_text("a" * 150)
    (tmp_path / "b.txt").write_text("b" * 150)
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").write_text("h" * 150)
    (tmp_path / "picture.png").write_bytes(bytes([0xFF] * 150))

    with caplog.at_level(logging.WARNING):
        data = build_from(tmp_path)

    seen = set(b"".join(all_windows(data, "train") | all_windows(data, "validation")))
    assert seen == set(b"ab\n")
    assert "2 files" in data.describe()
    assert "left out of the text: 1 (picture.png: not UTF-8)" in caplog.text


def test_a_path_that_does_not_exist_is_refused_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist") as caught:
        build_from(tmp_path / "nothing")

    assert "data.path" in caught.value.todo


@pytest.mark.parametrize("name", ["folder", "file"])
def test_a_path_without_content_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_bytes(b"")

    with pytest.raises(ConfigError, match="holds no text"):
        build_from(tmp_path / name)


def forbid(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Let nobody read files and folders of these names, not even root."""
    opened, scandir = os.open, os.scandir

    def open_one(path: Path, *given: int) -> int:
        if Path(path).name in names:
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path, *given)

    def scan(path: str) -> Iterator[os.DirEntry[str]]:
        if Path(path).name in names:
            raise PermissionError(13, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "open", open_one)
    monkeypatch.setattr(os, "scandir", scan)


def test_what_cannot_be_read_is_named_and_the_rest_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "secret").mkdir()
    for name in ("secret/a.txt", "b.txt", "c.txt"):
        (tmp_path / name).write_text(name[-5] * 150)
    (tmp_path / "lost").symlink_to(tmp_path / "nowhere")
    forbid(monkeypatch, "secret", "b.txt")

    with caplog.at_level(logging.WARNING):
        data = build_from(tmp_path, context=4)

    assert "1 file," in data.describe()
    assert (
        "left out of the text: 3 (b.txt: Permission denied; lost: a link to nothing; "
        "secret: Permission denied)"
    ) in caplog.text


@pytest.mark.parametrize("named", [".", "only.txt"])
def test_a_text_of_which_nothing_can_be_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: str
) -> None:
    (tmp_path / "only.txt").write_text(LINES)
    forbid(monkeypatch, "only.txt")

    with pytest.raises(ConfigError, match="Permission denied") as caught:
        build_from(tmp_path / named)

    assert caught.value.what.startswith(f"data.path={tmp_path}")


def test_what_is_neither_file_nor_folder_is_called_so(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")

    with pytest.raises(ConfigError, match="neither a file nor a folder"):
        build_from(tmp_path / "pipe")


def test_a_pipe_and_a_link_to_one_in_a_folder_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "a.txt").write_text(LINES)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "also").symlink_to("pipe")

    with caplog.at_level(logging.WARNING):
        data = build_from(tmp_path, context=4)

    assert "1 file," in data.describe()
    wanted = "2 (also: it is a pipe, no plain file; pipe: it is a pipe, no plain file)"
    assert wanted in caplog.text


@pytest.mark.parametrize("named", [".", "b.txt"])
def test_a_text_that_memory_cannot_hold_is_refused_before_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: str
) -> None:
    (tmp_path / "a.txt").write_text("a" * 900)
    with (tmp_path / "b.txt").open("wb") as file:
        file.truncate(900 if named == "." else 2**42)  # of which nothing is on the disk
    if named == ".":
        monkeypatch.setattr(text, "room_bytes", lambda: 1799)

    with pytest.raises(
        ConfigError, match="the text is kept in memory, and there is not enough"
    ) as no:
        build_from(tmp_path / named)

    assert ("1800 B" if named == "." else "4.4 TB") in no.value.what
    assert "data=tokens" in no.value.todo


def test_a_text_is_held_where_the_system_does_not_say_how_much_it_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.txt").write_text(LINES)
    monkeypatch.setattr(text, "room_bytes", lambda: None)

    assert "1 file," in build_from(tmp_path, context=4).describe()


def test_a_character_over_two_pieces_is_utf8(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(text, "_PIECE_BYTES", 2)
    (tmp_path / "a.txt").write_text("x\N{SNOWMAN}" * 40, "utf-8")
    (tmp_path / "cut.txt").write_bytes(("x\N{SNOWMAN}" * 40).encode()[:-1])

    with caplog.at_level(logging.WARNING):
        data = build_from(tmp_path, context=2)

    assert "1 file," in data.describe()
    assert "(cut.txt: not UTF-8)" in caplog.text


def test_a_short_text_is_refused_by_the_name_that_was_given(tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("short")

    with pytest.raises(ConfigError, match=r"data\.path=.*short\.txt has 5 bytes"):
        build_from(tmp_path / "short.txt")


def test_the_standard_library_is_found_and_is_python() -> None:
    data, again = (build_stdlib(StdlibConfig(context=64)) for _ in range(2))

    tokens = data.samples(np.arange(64))["tokens"]

    assert "standard library of Python 3." in data.describe()
    assert "self" in "".join(data.decode(row.tolist()) for row in tokens)
    assert torch.equal(tokens, again.samples(np.arange(64))["tokens"])


def test_the_standard_library_has_neither_tests_nor_installed_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in (".", "json", "test", "json/tests", "site-packages/torch", "__pycache__"):
        (tmp_path / folder).mkdir(exist_ok=True, parents=True)
        content = "good" if folder in (".", "json") else "evil"
        (tmp_path / folder / "module.py").write_text(content * 50)
    (tmp_path / "README.txt").write_text("evil" * 50)
    monkeypatch.setattr(sysconfig, "get_path", {"stdlib": str(tmp_path)}.__getitem__)

    data = build_stdlib(StdlibConfig(context=8))

    assert set(b"".join(all_windows(data, "train"))) == set(b"good\n")
    assert "2 files" in data.describe()


def test_a_python_without_its_library_is_answered_with_the_other_data_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sysconfig, "get_path", {"stdlib": str(tmp_path)}.__getitem__)

    with pytest.raises(ConfigError) as caught:
        build_stdlib(StdlibConfig())

    assert "data=text" in caught.value.todo


def test_a_byte_order_mark_is_no_part_of_a_text(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text("abcdefgh " * 100, "utf-8-sig")

    for path in (tmp_path / "x.txt", tmp_path):
        data = build_text(TextConfig(path=str(path), context=8))
        assert data.decode(data.samples(np.array([0]))["tokens"][0].tolist()) == "abcdefgh"

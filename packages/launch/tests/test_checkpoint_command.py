"""The command `sbp-checkpoint`: what all its verbs have in common."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from rich.console import Console
from rich.progress import Progress
from safetensors.torch import load_file, save_file
from written_checkpoints import answered, called, states, write, write_to

from sbp_launch.checkpoint.objects import FsspecStorage
from sbp_launch.console import reading

pytestmark = pytest.mark.usefixtures("wide_tables")


@pytest.mark.parametrize("width", [80, 100, 140])
def test_no_line_is_wider_than_the_terminal(
    width: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sbp_launch.console.FILE_WIDTH", width)
    name = "network.transformer.blocks.0.self_attention.query_key_value.weight"
    write(tmp_path / "a", 1, {name: torch.zeros(4, 6), f"{name}.exp_avg": torch.zeros(4, 6)})
    write(tmp_path / "b", 2, {name: torch.ones(4, 6), f"{name}.exp_avg": torch.zeros(4, 6)})

    _, printed = called(capsys, "inspect", tmp_path / "a")
    _, compared = called(capsys, "diff", tmp_path / "a", tmp_path / "b")

    assert name in printed or width < 140
    rows = [line for line in (printed + compared).splitlines() if str(tmp_path) not in line]
    assert max(map(len, rows)) <= width


def test_a_terminal_shows_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[float] = []
    monkeypatch.setattr(Console, "is_terminal", True)
    monkeypatch.setattr(
        Progress, "advance", lambda self, task, size: told.append(size), raising=True
    )

    with reading("verifying", 10**12) as tell:
        tell(7)
    with reading("verifying", 10**6) as tell:
        tell(7)

    assert told == [7]


def test_json_has_the_keys_that_are_documented(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, weights = tmp_path / "run", tmp_path / "x.safetensors"
    write(run, 100)
    write(run, 200, states(2.0))

    inspected = answered(capsys, "inspect", run)
    compared = answered(capsys, "diff", run / "checkpoints" / "step-00000100", run)

    assert " ".join(inspected) == "format path older size_bytes metadata tensors others"
    one = inspected["tensors"]["network.1.weight"]
    assert " ".join(one) == "shape dtype size_bytes optimizer_state_of files"
    assert " ".join(answered(capsys, "verify", run)["checkpoints"][0]) == "path whole what"
    assert " ".join(answered(capsys, "convert", run, weights)) == (
        "source target format tensors dropped left_out size_bytes files"
    )
    assert " ".join(compared) == (
        "one other differs equal_tensors only_in_one only_in_other forms deviations settings"
    )
    assert " ".join(compared["deviations"]["network.1.weight"]) == "largest relative differing"
    assert " ".join(answered(capsys, "prune", run, "--keep", 1)) == (
        "kept removed to_remove damaged_and_kept size_bytes"
    )


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "arguments are required: VERB"),
        (["inspct", "run"], "did you mean 'inspect'?"),
        (["inspect", "{}/rnu"], "did you mean {}/run?"),
        (["inspect", "{}/run", "--jsno"], "did you mean --json?"),
        (["inspect", "{}"], "did you mean {}/plain.safetensors or {}/run?"),
        (["inspect", "{}/old"], "model.bin is a pickle, which runs code"),
        (["inspect", "{}/old/model.bin"], "model.bin is a pickle, which runs code"),
        (["convert", "{}/run", "{}/x"], "is not known"),
        (["convert", "{}/run", "{}/x", "--to", "hff"], "invalid choice: 'hff'"),
        (["convert", "{}/run", "{}/x", "--to", "safetensors"], "accepted here: FILE.safetensors"),
        (["convert", "{}/run", "{}/x", "--to", "hf", "--rename", "a"], "has no new prefix"),
        (["convert", "{}/run", "{}/run", "--to", "dcp"], "overlaps with its source"),
        (["convert", "{}/run", "{}/old", "--to", "dcp"], "exists already"),
        (["convert", "{}/run", "{}/x.safetensors", "--rename", "netwrk.="], "'network.'?"),
        (["convert", "{}/run", "{}/x.safetensors", "--rename", "network.1.=network.2."],
         "would both be called"),
        (["convert", "{}/run", "{}/x.safetensors", "--max-shard-size", "much"], "is no size"),
        (["convert", "{}/run", "{}/x.safetensors", "--all", "--ema"], "not allowed with"),
        (["convert", "{}/plain.safetensors", "{}/x.safetensors", "--ema"], "no parameter has"),
        (["diff", "{}/run"], "arguments are required: OTHER"),
        (["prune", "{}/run"], "arguments are required: --keep"),
        (["prune", "{}/run", "--keep", "0"], "would leave none"),
        (["prune", "{}/plain.safetensors", "--keep", "1"], "is no folder of checkpoints"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_with_what_is_near(
    arguments: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "run", 100)
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "model.bin").write_bytes(b"pickle")
    save_file({"x": torch.ones(3)}, tmp_path / "plain.safetensors")

    code, printed = called(capsys, *(text.format(tmp_path) for text in arguments))

    assert code == 2
    assert says.replace("{}", str(tmp_path)) in printed
    assert "Traceback" not in printed
    assert not (tmp_path / "x").exists()
    assert not (tmp_path / "x.safetensors").exists()


def test_checkpoints_in_an_object_store_are_named_by_their_addresses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    address = "memory://sbp-checkpoint/run"
    storage = FsspecStorage(address)
    for step in (10, 20):
        write_to(storage, step)

    assert "step 20, seed 7" in called(capsys, "inspect", address)[1]
    assert "step 10, seed 7" in called(capsys, "inspect", f"{address}/step-00000010")[1]
    assert called(capsys, "verify", address)[1].count("whole, by its checksums") == 2
    assert called(capsys, "verify", f"{address}/step-00000010")[1].count("whole") == 1
    assert called(capsys, "convert", address, tmp_path / "w.safetensors", "--all")[0] == 0
    assert torch.equal(load_file(tmp_path / "w.safetensors")["network.positions"], torch.arange(4))
    assert called(capsys, "diff", address, tmp_path / "w.safetensors", "--all")[0] == 0
    assert called(capsys, "prune", address, "--keep", "1", "--yes")[0] == 0
    assert storage.names() == ["step-00000020"]
    code, printed = called(capsys, "inspect", "memory://sbp-checkpoint/elsewhere")
    assert (code, "there is no checkpoint at" in printed) == (2, True)

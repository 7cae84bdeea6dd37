"""`sbp-checkpoint inspect` and `verify`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from held import Held
from safetensors.torch import load_file, save_file
from written_checkpoints import answered, called, damage, states, write

from sbp_launch.checkpoint.formats.indexed import IndexedTensors
from sbp_launch.checkpoint.formats.writers import write_distributed_checkpoint
from sbp_launch.checkpoint.places import look, open_tensors, read_index

pytestmark = pytest.mark.usefixtures("wide_tables")


def test_inspect_shows_the_newest_checkpoint_of_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, 50)
    write(tmp_path, 100)

    code, printed = called(capsys, "inspect", tmp_path)

    assert code == 0
    assert "step 100, seed 7" in printed
    assert "older ones next to it: step-00000050" in printed
    assert "network.*.weight       2  [4, 6]  float32  192 B\n" in printed
    assert "network.positions      1  [4]     int64     32 B\n" in printed
    assert (
        "parameters and buffers: 3, 224 B\n"
        "states of the optimizer (ema, exp_avg, step): 6, 392 B\n"
        "files: 2\n"
    ) in printed


def test_inspect_names_the_states_of_each_parameter_where_they_differ(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values = states()
    del values["network.2.weight.ema"]
    write(tmp_path, 1, values)

    _, printed = called(capsys, "inspect", tmp_path)

    assert "network.1.weight       1  [4, 6]  float32  96 B  ema, exp_avg, step\n" in printed
    assert "network.2.weight       1  [4, 6]  float32  96 B  exp_avg, step\n" in printed


def test_inspect_says_it_in_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, 100)

    found = answered(capsys, "inspect", tmp_path / "checkpoints" / "step-00000100")

    assert found["metadata"] == {"step": 100, "seed": 7, "settings": {"lr": 0.1}}
    assert found["tensors"]["network.1.weight.exp_avg"] == {
        "shape": [4, 6],
        "dtype": "float32",
        "size_bytes": 96,
        "optimizer_state_of": "network.1.weight",
        "files": ["rank-00000.safetensors", "rank-00001.safetensors"],
    }


def test_looking_takes_no_torch(tmp_path: Path) -> None:
    save_file({"x": torch.ones(3)}, tmp_path / "w.safetensors")
    write(tmp_path / "run", 1)
    write_distributed_checkpoint(tmp_path / "dcp", Held(x=torch.ones(3)))
    program = """
import sys
from sbp_launch.checkpoint.command.app import main
try:
    main(["--help"])
except SystemExit as ended:
    assert ended.code == 0
for path in sys.argv[1:]:
    assert main(["inspect", path]) == 0, path
assert main(["inspect", "nowhere"]) == 2
assert main(["convert", sys.argv[1], "x"]) == 2
assert "torch" not in sys.modules
"""

    paths = [tmp_path / name for name in ("w.safetensors", "run", "dcp")]
    subprocess.run([sys.executable, "-c", program, *map(str, paths)], check=True, timeout=200)


def test_verify_names_what_is_damaged_in_all_checkpoints_of_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, 50)
    damage(write(tmp_path, 100))

    code, printed = called(capsys, "verify", tmp_path)

    assert code == 1
    assert "step-00000050: whole, by its checksums" in printed
    assert "step-00000100: damaged" in printed
    assert "rank-00001.safetensors" in printed
    found = answered(capsys, "verify", tmp_path)["checkpoints"]
    assert [one["whole"] for one in found] == [True, False]
    assert "network." in found[1]["what"]
    assert called(capsys, "verify", tmp_path / "checkpoints" / "step-00000050")[0] == 0


def test_verify_finds_a_flipped_bit_in_a_distributed_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_distributed_checkpoint(tmp_path / "dcp", Held(x=torch.ones(3), y=torch.full((5,), 7.0)))
    assert called(capsys, "verify", tmp_path / "dcp")[0] == 0
    path = tmp_path / "dcp" / "__0_1.distcp"
    content = path.read_bytes()
    path.write_bytes(content.replace(b"\0\0\xe0\x40", b"\0\0\xe0\x41", 1))

    code, printed = called(capsys, "verify", tmp_path / "dcp")

    assert code == 1
    assert "'y' is damaged" in printed


def test_verify_says_what_it_cannot_know(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "w.safetensors"
    save_file({"x": torch.ones(3)}, path)

    code, printed = called(capsys, "verify", path)

    assert code == 0
    assert "the format has no checksums" in printed
    path.write_bytes(path.read_bytes()[:-1])
    assert called(capsys, "verify", path)[0] == 1


def test_names_behind_one_beginning_are_told_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values = {**states(), "ema.count": torch.tensor(3.0)}
    write(tmp_path / "run", 100, values)
    renamed = "convert", tmp_path / "run", tmp_path / "dcp", "--to", "dcp", "--all"
    assert called(capsys, *renamed, "--rename", "=model.x.")[0] == 0

    text = called(capsys, "inspect", tmp_path / "dcp")[1]
    convert = called(capsys, "convert", tmp_path / "dcp", tmp_path / "x.safetensors")

    assert "parameters and buffers: 3," in text
    assert convert[0] == 0
    assert load_file(tmp_path / "x.safetensors").keys() == {
        "model.x.network.1.weight", "model.x.network.2.weight", "model.x.network.positions",
    }  # fmt: skip


def test_a_path_that_is_a_manifest_or_an_index_is_its_folder(tmp_path: Path) -> None:
    folder = write(tmp_path, 1)

    assert look(folder / "manifest.json").place == str(folder)
    with open_tensors(look(folder)) as tensors:
        assert set(read_index(look(folder)).tensors) == set(tensors)
    # Where the pieces lie is as in the files of any other format.
    found = IndexedTensors(read_index(look(folder)))
    assert all(torch.equal(found[name], value) for name, value in states().items())


@pytest.mark.parametrize("verb", ["inspect", "verify", "convert", "prune"])
@pytest.mark.parametrize("kind", ["pipe", "device", "long"])
def test_what_is_neither_file_nor_folder_is_refused_in_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], verb: str, kind: str
) -> None:
    place = {"pipe": tmp_path / "pipe", "device": Path("/dev/zero"), "long": Path("x" * 300)}[kind]
    os.mkfifo(tmp_path / "pipe")
    more = {"convert": [tmp_path / "out.safetensors"], "prune": ["--keep", "1"]}.get(verb, [])

    code, printed = called(capsys, verb, place, *more)

    assert code == 2
    assert "sbp-checkpoint: " in printed

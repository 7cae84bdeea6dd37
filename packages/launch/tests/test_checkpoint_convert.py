"""`sbp-checkpoint convert`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from written_checkpoints import answered, called, states, write

from sbp_core.boxing import volume
from sbp_core.errors import ConfigError
from sbp_launch.checkpoint.formats.indexed import IndexedTensors
from sbp_launch.checkpoint.names import rename
from sbp_launch.checkpoint.objects import FsspecStorage
from sbp_launch.checkpoint.places import look, manifest_of, open_tensors

pytestmark = pytest.mark.usefixtures("wide_tables")


def test_convert_writes_the_models_own_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "run", 100)
    target = tmp_path / "weights.safetensors"

    code, printed = called(
        capsys, "convert", tmp_path / "run", target, "--rename", "network.=", "--json"
    )

    assert code == 0
    assert json.loads(printed)["tensors"]["1.weight"] == "network.1.weight"
    found = load_file(target)
    assert found.keys() == {"1.weight", "2.weight", "positions"}
    assert torch.equal(found["2.weight"], states()["network.2.weight"])


def test_convert_takes_all_states_or_averages(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "run", 100)

    called(capsys, "convert", tmp_path / "run", tmp_path / "all.safetensors", "--all")
    called(capsys, "convert", tmp_path / "run", tmp_path / "ema.safetensors", "--ema")

    everything = load_file(tmp_path / "all.safetensors")
    assert everything.keys() == states().keys()
    assert all(torch.equal(everything[name], value) for name, value in states().items())
    averages = load_file(tmp_path / "ema.safetensors")
    assert averages.keys() == {"network.1.weight", "network.2.weight", "network.positions"}
    assert torch.equal(averages["network.2.weight"], states()["network.2.weight.ema"])


@pytest.mark.parametrize("first", ["safetensors", "hf", "dcp", "sbp"])
@pytest.mark.parametrize("second", ["safetensors", "hf", "dcp", "sbp"])
def test_from_each_format_to_each_nothing_changes(
    first: str, second: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    write(run, 100)
    paths = [run]
    for number, form in enumerate((first, second)):
        suffix = ".safetensors" if form == "safetensors" else ""
        paths.append(tmp_path / f"{number}{suffix}")
        convert = "convert", paths[-2], paths[-1], "--to", form, "--all", "--max-shard-size", "200B"
        assert called(capsys, *convert)[0] == 0

    found = answered(capsys, "diff", run, paths[-1], "--all")
    assert (found["equal_tensors"], found["only_in_one"], found["only_in_other"]) == (9, [], [])
    # Files of others do not say where the run was.
    assert bool(found["settings"]) == (second == "sbp" and first != "sbp")


@pytest.mark.parametrize(
    ("target", "place"),
    [
        ("new", "new/checkpoints/step-00000100"),
        ("new/checkpoints/", "new/checkpoints/step-00000100"),
        ("step-00000100", "step-00000100"),
        ("memory://copies/new", "memory://copies/new/step-00000100"),
        ("memory://copies/step-00000100", "memory://copies/step-00000100"),
    ],
)
def test_a_checkpoint_is_copied_with_what_it_says_of_its_run(
    target: str, place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    write(tmp_path / "run", 100, trainer={"step": 100})
    monkeypatch.chdir(tmp_path)

    copy = "convert", "run", target, "--to", "sbp", "--all"
    made = answered(capsys, *copy)

    assert made["target"] == place
    assert made["files"] == ["manifest.json", "rank-00000.safetensors"]
    assert called(capsys, "verify", target)[0] == 0
    assert manifest_of(look(target)).metadata == manifest_of(look("run")).metadata
    assert called(capsys, "diff", "run", target, "--all")[0] == 0
    again = called(capsys, *copy)
    assert again[0] == 2 and "exists already" in again[1]
    assert called(capsys, *copy, "--overwrite")[0] == 0
    if "://" in place:
        FsspecStorage(place.rpartition("/")[0]).remove("step-00000100")


def test_the_step_of_weights_is_that_of_their_place(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = tmp_path / "weights.safetensors"
    save_file({"x": torch.arange(4.0)}, weights)

    for place, step in ((tmp_path / "step-00000123", 123), (tmp_path / "run", 0)):
        assert called(capsys, "convert", weights, place, "--to", "sbp")[0] == 0
        assert manifest_of(look(place)).metadata.step == step


def other_files(folder: Path) -> None:
    (folder / "step-00000100").mkdir()
    (folder / "step-00000100" / "mine.txt").write_text("mine")


@pytest.mark.parametrize(
    ("prepare", "target", "says"),
    [
        (lambda folder: None, "run", "overlaps with its source"),
        (lambda folder: None, "run/checkpoints/step-00000100/new", "overlaps with its source"),
        (
            lambda folder: None,
            "step-00000007",
            "step 7, and the checkpoint is of step 100",
        ),
        (other_files, "step-00000100", "exists and is not a checkpoint"),
    ],
)
def test_a_place_that_is_none_for_a_checkpoint_is_refused(
    prepare: Callable[[Path], None], target: str, says: str,
    tmp_path: Path, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    write(tmp_path / "run", 100)
    prepare(tmp_path)

    convert = "convert", tmp_path / "run", tmp_path / target, "--to", "sbp", "--overwrite"
    code, text = called(capsys, *convert)

    assert code == 2
    assert says in text


def test_what_no_state_can_be_is_no_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_file({"x": torch.ones(3).to(torch.float8_e5m2)}, tmp_path / "x.safetensors")

    convert = "convert", tmp_path / "x.safetensors", tmp_path / "new", "--to", "sbp"
    code, text = called(capsys, *convert)

    assert code == 2
    assert "'x' is float8_e5m2, which no state has" in text
    assert not (tmp_path / "new").exists()


def test_only_checkpoints_are_written_to_addresses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "run", 100)

    code, text = called(capsys, "convert", tmp_path / "run", "memory://x", "--to", "hf")

    assert code == 2
    assert "memory://x is an address, and --to hf writes on this machine" in text


@pytest.mark.parametrize("form", ["safetensors", "hf", "sbp"])
def test_a_part_of_a_tensor_at_a_time_is_in_memory(
    form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    read = IndexedTensors.part

    def noted(self: IndexedTensors, name: str, bounds: Any) -> Tensor:
        sizes.append(volume(bounds) * self.like(name).element_size())
        return read(self, name, bounds)

    monkeypatch.setattr(IndexedTensors, "part", noted)
    for module in ("tensors", "saving"):
        monkeypatch.setattr(f"sbp_launch.checkpoint.{module}.PART_BYTES", 1000)
    whole = torch.randn(50, 30)
    save_file({"x": whole}, tmp_path / "x.safetensors")
    target = tmp_path / ("y.safetensors" if form == "safetensors" else "y")

    convert = "convert", tmp_path / "x.safetensors", target, "--to", form
    assert called(capsys, *convert)[0] == 0

    assert max(sizes) <= 1000
    assert sum(sizes) == 6000
    with open_tensors(look(target)) as found:
        assert torch.equal(found["x"], whole)
    sizes.clear()
    assert called(capsys, "diff", tmp_path / "x.safetensors", target)[0] == 0
    assert max(sizes) <= 1000


def test_a_target_that_is_there_is_replaced_only_if_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "run", 100)
    target = tmp_path / "hf"
    target.mkdir()
    (target / "config.json").write_text("{}")
    assert called(capsys, "convert", tmp_path / "run", target, "--to", "hf")[0] == 0

    again = called(capsys, "convert", tmp_path / "run", target, "--to", "hf")
    replaced = called(capsys, "convert", tmp_path / "run", target, "--to", "hf", "--overwrite")

    assert again[0] == 2
    assert "exists already" in again[1]
    assert replaced[0] == 0
    assert (target / "config.json").read_text() == "{}"
    assert look(target).format == "hf"


def test_no_name_is_empty_and_none_stands_for_two() -> None:
    with pytest.raises(ConfigError, match="would both be called"):
        rename({"x": "x"}, [("x", "")])
    with pytest.raises(ConfigError, match=r"'b.x' and 'a.x' would both be called 'x'"):
        rename({"a.x": "a.x", "b.x": "b.x"}, [("a.", ""), ("b.", "")])
    with pytest.raises(ConfigError, match=r"or \._orig_mod\. for the middle of names"):
        rename({"h.0._orig_mod.w": ""}, [("_orig_mod.", "")])
    assert rename({"h.0._orig_mod.w": ""}, [("._orig_mod.", ".")]) == {"h.0.w": ""}


def test_a_disk_that_is_full_is_a_failure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import resource

    write(tmp_path / "run", 100)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300, before[1]))  # as full after 300 bytes
    try:
        found = [
            called(capsys, "convert", tmp_path / "run", tmp_path / name, "--to", form)
            for name, form in (("x.safetensors", "safetensors"), ("hf", "hf"), ("dcp", "dcp"))
        ]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)

    assert [code for code, _ in found] == [1, 1, 1]
    assert all("cannot be written: File too large" in printed for _, printed in found)
    left = {
        str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if "run" not in str(path)
    }
    assert left <= {"hf"}

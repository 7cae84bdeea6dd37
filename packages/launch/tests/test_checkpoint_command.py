"""The command `sbp-checkpoint`."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from held import Held
from rich.console import Console
from rich.progress import Progress
from safetensors.torch import load_file, save_file
from torch import Tensor

from sbp_core.boxing import volume
from sbp_core.errors import ConfigError
from sbp_core.plugins import Storage
from sbp_core.runtime import StatePiece
from sbp_launch.checkpoint import LocalStorage, Metadata, commit, write_part
from sbp_launch.checkpoint.command.app import main
from sbp_launch.checkpoint.command.diff import deviation
from sbp_launch.checkpoint.command.progress import reading
from sbp_launch.checkpoint.formats.distributed_writer import write_distributed_checkpoint
from sbp_launch.checkpoint.formats.indexed import IndexedTensors
from sbp_launch.checkpoint.names import renamed
from sbp_launch.checkpoint.objects import FsspecStorage
from sbp_launch.checkpoint.opening import look, manifest_of, open_tensors, read_index


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no path of a temporary folder be parted."""
    monkeypatch.setattr("sbp_launch.checkpoint.command.table._FILE_WIDTH", 400)


def states(scale: float = 1.0) -> dict[str, Tensor]:
    """Return the states of a small run: two layers, a buffer, and what an optimizer keeps."""
    found = {f"network.{layer}.weight": torch.ones(4, 6) * scale * layer for layer in (1, 2)}
    found["network.positions"] = torch.arange(4)
    for name in list(found)[:2]:
        found[f"{name}.exp_avg"] = torch.zeros(4, 6)
        found[f"{name}.step"] = torch.tensor(3.0)
        found[f"{name}.ema"] = found[name] / 2
    return found


def write(
    folder: Path, step: int, values: dict[str, Tensor] | None = None, trainer: Any = None
) -> Path:
    """Write a checkpoint of two ranks into a run folder, and return its folder."""
    storage = LocalStorage(folder / "checkpoints")
    return Path(write_to(storage, step, values, trainer))


def write_to(
    storage: Storage, step: int, values: dict[str, Tensor] | None = None, trainer: Any = None
) -> str:
    """Write a checkpoint of two ranks into a storage, and return where it is."""
    staged = storage.stage(f"step-{step:08d}")
    metadata = Metadata(step=step, seed=7, settings={"lr": step / 1000}, trainer=trainer)
    for rank in (0, 1):
        pieces = []
        for name, value in (values or states()).items():
            rows = (2 * rank, 2 * rank + 2)
            if value.dim() == 2:
                pieces.append(piece(name, value, (rows, (0, value.shape[1])), value[slice(*rows)]))
            elif rank == 0:
                pieces.append(piece(name, value, tuple((0, n) for n in value.shape), value))
        write_part(staged, rank, metadata, pieces)
    commit(staged, [0, 1])
    return storage.place(f"step-{step:08d}")


def piece(name: str, whole: Tensor, bounds: Any, value: Tensor) -> StatePiece:
    dtype = str(whole.dtype).removeprefix("torch.")
    return StatePiece(name=name, shape=tuple(whole.shape), dtype=dtype, bounds=bounds, value=value)


def damage(checkpoint: Path) -> None:
    """Flip a bit of the last tensor of a rank."""
    path = checkpoint / "rank-00001.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def called(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    """Return exit code and what was printed, errors included."""
    code = main(list(map(str, arguments)))
    printed = capsys.readouterr()
    return code, printed.out + printed.err


def answered(capsys: pytest.CaptureFixture[str], *arguments: object) -> Any:
    """Return the JSON that was printed."""
    main([*map(str, arguments), "--json"])
    return json.loads(capsys.readouterr().out)


def test_inspect_shows_the_newest_checkpoint_of_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, 50)
    write(tmp_path, 100)

    code, printed = called(capsys, "inspect", tmp_path)

    assert code == 0
    assert "step 100, seed 7" in printed
    assert "older ones beside it: step-00000050" in printed
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


@pytest.mark.parametrize("width", [80, 100, 140])
def test_no_line_is_wider_than_the_terminal(
    width: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sbp_launch.checkpoint.command.table._FILE_WIDTH", width)
    name = "network.transformer.blocks.0.self_attention.query_key_value.weight"
    write(tmp_path / "a", 1, {name: torch.zeros(4, 6), f"{name}.exp_avg": torch.zeros(4, 6)})
    write(tmp_path / "b", 2, {name: torch.ones(4, 6), f"{name}.exp_avg": torch.zeros(4, 6)})

    _, printed = called(capsys, "inspect", tmp_path / "a")
    _, compared = called(capsys, "diff", tmp_path / "a", tmp_path / "b")

    assert name in printed or width < 140
    rows = [line for line in (printed + compared).splitlines() if str(tmp_path) not in line]
    assert max(map(len, rows)) <= width


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
    assert again[0] == 2 and "is there already" in again[1]
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
        (lambda folder: None, "run", "would lie in what it is made of"),
        (lambda folder: None, "run/checkpoints/step-00000100/new", "would lie in what it is made"),
        (
            lambda folder: None,
            "step-00000007",
            "step 7, and the checkpoint is of step 100",
        ),
        (other_files, "step-00000100", "holds something else than a checkpoint"),
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
    for module in ("tensors", "rewriting"):
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
    assert "is there already" in again[1]
    assert replaced[0] == 0
    assert (target / "config.json").read_text() == "{}"
    assert look(target).format == "hf"


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


def test_no_name_is_empty_and_none_stands_for_two() -> None:
    with pytest.raises(ConfigError, match="would both be called"):
        renamed({"x": "x"}, [("x", "")])
    with pytest.raises(ConfigError, match=r"'b.x' and 'a.x' would both be called 'x'"):
        renamed({"a.x": "a.x", "b.x": "b.x"}, [("a.", ""), ("b.", "")])


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


def test_diff_says_what_differs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changed = states()
    changed["network.2.weight"][3, 5] = 2.5
    changed["network.positions"] = changed["network.positions"].int()
    changed["network.more"] = torch.ones(2)
    del changed["network.1.weight"]
    one, other = write(tmp_path / "a", 50), write(tmp_path / "b", 100, changed)

    code, printed = called(capsys, "diff", one, other)
    found = answered(capsys, "diff", one, other)

    assert code == 1
    assert "only in one: network.1.weight\n" in printed
    assert found["only_in_other"] == ["network.1.weight.ema", "network.1.weight.exp_avg",
                                      "network.1.weight.step", "network.more"]  # fmt: skip
    assert found["settings"] == {"step": [50, 100], "settings.lr": [0.05, 0.1]}
    assert found["forms"] == {"network.positions": ["int64 [4]", "int32 [4]"]}
    assert found["deviations"] == {
        "network.2.weight": {"largest": 0.5, "relative": 0.2, "differing": 1 / 24}
    }
    assert "network.2.weight                0.5       0.2       4.2%" in printed


@pytest.mark.parametrize(
    ("one", "other", "largest", "differing"),
    [
        ([1.0, 2.0], [1.0, 2.0], 0.0, 0.0),
        ([1.0, -2.0], [1.0, 2.0], 4.0, 0.5),
        ([float("nan"), 1.0], [float("nan"), 1.0], 0.0, 0.0),
        ([float("nan"), 1.0], [0.0, 1.0], float("inf"), 0.5),
        ([float("inf"), 1.0], [float("inf"), 1.0], 0.0, 0.0),
        ([float("inf"), 1.0], [-float("inf"), 1.0], float("inf"), 0.5),
        ([], [], 0.0, 0.0),
        ([2**53, 7], [2**53 + 1, 7], 1.0, 0.5),
    ],
)
def test_deviations_of_all_values(
    one: list[float], other: list[float], largest: float, differing: float
) -> None:
    found = deviation([(torch.tensor(one), torch.tensor(other))])

    assert (found.largest, found.differing) == (largest, differing)


def test_prune_keeps_the_newest_and_says_first_what_it_would_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in (10, 20, 30):
        write(tmp_path, step)
    storage = LocalStorage(tmp_path / "checkpoints")

    code, printed = called(capsys, "prune", tmp_path, "--keep", "2")

    assert code == 0
    assert "would be removed: step-00000010" in printed
    assert len(storage.names()) == 3
    assert called(capsys, "prune", tmp_path, "--keep", "2", "--yes")[0] == 0
    assert storage.names() == ["step-00000020", "step-00000030"]
    assert "nothing to remove" in called(capsys, "prune", tmp_path, "--keep", "2", "--yes")[1]


def test_prune_never_takes_the_newest_that_verifies(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = [write(tmp_path, step) for step in (10, 20, 30, 40)]
    damage(folders[2])
    damage(folders[3])
    storage = LocalStorage(tmp_path / "checkpoints")

    assert answered(capsys, "prune", tmp_path, "--keep", "1", "--yes") == {
        "kept": ["step-00000020"],
        "removed": ["step-00000010"],
        "to_remove": [],
        "damaged_and_kept": ["step-00000040", "step-00000030"],
        "size_bytes": sum((folders[1] / n).stat().st_size for n in storage.sizes(folders[1].name)),
    }
    called(capsys, "prune", tmp_path, "--keep", "1", "--yes", "--damaged")
    assert storage.names() == ["step-00000020"]
    damage(folders[1])
    code, printed = called(capsys, "prune", tmp_path, "--keep", "1", "--yes", "--damaged")
    assert (code, "is whole, so none is removed" in printed) == (2, True)
    assert storage.names() == ["step-00000020"]


def test_prune_keeps_the_best(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for step in (10, 20, 30):
        write(tmp_path, step, trainer={"step": step, "best_step": 10})

    code, printed = called(capsys, "prune", tmp_path, "--keep", "1", "--yes")

    assert code == 0
    assert "stays, as its held-out loss is the lowest: step-00000010" in printed
    assert LocalStorage(tmp_path / "checkpoints").names() == ["step-00000010", "step-00000030"]


def test_prune_waits_for_no_run_that_writes_here(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in (10, 20):
        write(tmp_path, step)
    storage = LocalStorage(tmp_path / "checkpoints")

    with storage.claim():
        code, printed = called(capsys, "prune", tmp_path, "--keep", "1", "--yes")

    assert code == 2
    assert "another run writes its checkpoints" in printed
    assert len(storage.names()) == 2


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
        (["convert", "{}/run", "{}/x"], "does not say its format"),
        (["convert", "{}/run", "{}/x", "--to", "hff"], "invalid choice: 'hff'"),
        (["convert", "{}/run", "{}/x", "--to", "safetensors"], "accepted here: FILE.safetensors"),
        (["convert", "{}/run", "{}/x", "--to", "hf", "--rename", "a"], "does not say to what"),
        (["convert", "{}/run", "{}/run", "--to", "dcp"], "would lie in what it is made of"),
        (["convert", "{}/run", "{}/old", "--to", "dcp"], "is there already"),
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


def test_a_path_that_is_a_manifest_or_an_index_is_its_folder(tmp_path: Path) -> None:
    folder = write(tmp_path, 1)

    assert look(folder / "manifest.json").place == str(folder)
    with open_tensors(look(folder)) as tensors:
        assert set(read_index(look(folder)).tensors) == set(tensors)
    # Where the pieces lie is as in the files of any other format.
    found = IndexedTensors(read_index(look(folder)))
    assert all(torch.equal(found[name], value) for name, value in states().items())

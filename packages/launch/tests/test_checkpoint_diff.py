"""`sbp-checkpoint diff` and `prune`: several checkpoints side by side."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from written_checkpoints import answered, called, damage, states, write

from sbp_launch.checkpoint import LocalStorage
from sbp_launch.checkpoint.command.diff import deviation

pytestmark = pytest.mark.usefixtures("wide_tables")


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
    assert "stays, because its held-out loss is the lowest: step-00000010" in printed
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

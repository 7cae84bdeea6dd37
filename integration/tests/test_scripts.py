"""Published scripts, moved to `parallelize`, print what they print in plain PyTorch."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.counted import FOLDER, count, names

# Of PyTorch itself, about `nn.Transformer` with time first.
pytestmark = pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")

#: Those whose steps are planned within seconds.
QUICK = ("gcn", "super_resolution")

#: What a script prints of its losses has four digits, of which the last may be rounded otherwise.
TOLERANCE = 2e-4


def printed(folder: str, name: str, capsys: pytest.CaptureFixture[str]) -> str:
    path = str(FOLDER / folder / f"{name}.py")
    if not count(name).is_ddp:
        runpy.run_path(path, run_name="__main__")
        return capsys.readouterr().out
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*command, "--nproc-per-node=2", path], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def split(text: str) -> tuple[list[str], list[float]]:
    numbers = [float(number) for number in re.findall(r"-?\d+\.\d+", text)]
    return re.sub(r"-?\d+\.\d+", "#", text).splitlines(), numbers


def assert_prints_the_same(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)

    words, wanted = split(printed("plain", name, capsys))
    own_words, found = split(printed("ours", name, capsys))

    assert words
    assert own_words == words
    assert found == pytest.approx(wanted, rel=TOLERANCE, abs=TOLERANCE)


@pytest.mark.parametrize("name", QUICK)
def test_a_script_prints_the_losses_of_plain_pytorch(name, tmp_path, monkeypatch, capsys):
    assert_prints_the_same(name, tmp_path, monkeypatch, capsys)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted({*names()} - {*QUICK}))
def test_a_longer_script_prints_the_losses_of_plain_pytorch(name, tmp_path, monkeypatch, capsys):
    assert_prints_the_same(name, tmp_path, monkeypatch, capsys)


def test_few_lines_differ_beside_the_loss_function():
    assert [one.name for one in map(count, names()) if one.differing >= 15] == []
    assert sorted(path.stem for path in (FOLDER / "ours").glob("*.py")) == names()


def test_the_page_of_scripts_is_up_to_date():
    done = subprocess.run(
        [sys.executable, "-m", "scripts", "document", "--check"], cwd=FOLDER.parent, check=False
    )

    assert done.returncode == 0, "python -m scripts document"

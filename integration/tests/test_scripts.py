"""Scripts with and without sbp print the same; `docs/reference/scripts.md` is current."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.__main__ import HERE, count, main, names, peer_of


def printed(script: Path, folder: Path) -> list[str]:
    """Run a script, on two processes unless it is a plain one; return what rank 0 prints."""
    command = [sys.executable, str(script)]
    if script.stem != "plain":
        command[1:1] = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        command,
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    # gloo may abort a process of plain DDP that has done its work: its thread is still there.
    aborted = script.stem == "ddp" and "terminate called without an active exception" in done.stderr
    assert done.returncode == 0 or aborted, done.stderr[-3000:]
    return done.stdout.splitlines()


@pytest.mark.slow
@pytest.mark.parametrize("name", names())
def test_a_script_prints_the_same_losses_with_sbp(name: str, tmp_path: Path) -> None:
    if name == "bert_finetuning":
        pytest.importorskip("transformers", reason="its model is one of transformers")

    wanted = printed(peer_of(name), tmp_path)

    assert len(wanted) >= 3 or name == "mnist"
    assert printed(HERE / name / "ours.py", tmp_path) == wanted


@pytest.mark.parametrize("name", names())
def test_a_script_needs_few_other_lines(name: str) -> None:
    found = count(name)

    assert found.come < 15
    assert found.come + found.loss < found.lines


def test_the_page_counts_the_lines(capsys: pytest.CaptureFixture[str]) -> None:
    assert len(names()) == 14
    assert main(["document", "--check"]) == 0, capsys.readouterr().out

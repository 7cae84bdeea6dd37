"""What ranks write goes to their logs, and of rank 0 to the terminal, too."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

_PROGRAM = """
import logging, os, sys, warnings
from pathlib import Path
from sbp_launch.logs import RankLog
with RankLog(Path(sys.argv[1]), int(sys.argv[2])) as log:
    print("from print")
    os.write(2, b"from a library\\n")
    logging.getLogger("somewhere").warning("from logging")
    warnings.warn("from warnings")
    log.note("a traceback\\n")
    log.last_words("the end")
print("behind it")
logging.getLogger("somewhere").warning("logging behind it")
"""


def run(folder: Path, rank: int) -> tuple[str, str]:
    """Return what a rank has written to its log, and to the terminal."""
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, str(folder), str(rank)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=True,
    )
    return (folder / "logs" / f"rank_{rank}.txt").read_text("utf-8"), done.stdout


@pytest.mark.parametrize("rank", [0, 1])
def test_a_log_begins_with_who_writes_it_and_messages_have_the_time(
    tmp_path: Path, rank: int
) -> None:
    log, _ = run(tmp_path, rank)

    time = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\S*"
    assert re.match(rf"{time} rank {rank}: host \S+, process \d+\n", log)
    assert re.search(rf"^{time} WARNING somewhere: from logging$", log, re.M)
    assert re.search(rf"^{time} WARNING py.warnings: .*from warnings", log, re.M)
    assert "from print" in log
    assert "a traceback\nthe end\n" in log
    assert log.count("from logging") == 1
    assert "behind it" not in log


def test_rank_0_writes_to_the_terminal_too(tmp_path: Path) -> None:
    _, terminal = run(tmp_path, 0)

    assert "traceback" not in terminal
    for text in ("from print", "from a library", "somewhere: from logging", "the end", "behind it"):
        assert text in terminal


def test_another_rank_writes_its_last_words_to_the_terminal_alone(tmp_path: Path) -> None:
    log, terminal = run(tmp_path, 3)

    assert "from a library" in log
    assert terminal.splitlines()[0] == "the end"
    assert "behind it" in terminal
    assert "from" not in terminal

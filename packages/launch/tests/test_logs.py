"""What a rank writes goes to its log; that of rank 0 to the terminal, too."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

_PROGRAM = """
import os, sys
from pathlib import Path
from sbp_launch.launching.rank import RankLog
with RankLog(Path(sys.argv[1]), int(sys.argv[2])) as log:
    print("printed")
    print("complained", file=sys.stderr)
    os.write(2, b"from a library\\n")
    log.last_words("the last words")
print("behind")
"""


@pytest.mark.parametrize("rank", [0, 1])
def test_what_a_rank_writes_is_in_its_log(tmp_path: Path, rank: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, str(tmp_path), str(rank)],
        capture_output=True,
        text=True,
        check=True,
    )

    log = (tmp_path / "logs" / f"rank_{rank}.txt").read_text("utf-8")
    assert all(text in log for text in ("printed", "complained", "the last words"))
    assert ("from a library" in log) is (rank == 1)
    assert "behind" not in log
    assert done.stdout == ("printed\n" if rank == 0 else "") + "behind\n"
    assert "the last words" in done.stderr
    assert ("complained" in done.stderr) is (rank == 0)

"""How one rank ends, by what its training raises: exit code, log, and last words."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

#: Runs rank 1 with a training that raises, once for each error; prints codes and logs.
_PROGRAM = """
import json, signal, sys
from pathlib import Path
from sbp_core.errors import ConfigError, RunError
from sbp_launch.launching import rank
from sbp_launch.run.stopping import Terminated
from sbp_launch.world import World

def of_an_operator():
    error = RunError("rank 1 failed in head", todo="mend it")
    error.__cause__ = RunError("it failed")
    error.__cause__.__cause__ = ArithmeticError("no such number")
    return error

raised = {
    "nothing": None,
    "a setting": ConfigError("lr=-1", todo="lr >= 0"),
    "a run": of_an_operator(),
    "Ctrl-C": KeyboardInterrupt(),
    "a signal": Terminated(signal.SIGTERM),
    "a word": SystemExit("no more data"),
    "an exit": SystemExit(0),
    "a mistake": KeyError("ours"),
}

def train(folder, world, width, log):
    print("in training")
    if raised[folder.name] is not None:
        raise raised[folder.name]

rank._train = train
codes = {}
for name in raised:
    folder = Path(sys.argv[1]) / name
    codes[name] = rank.run_rank(folder, World(rank=1, size=2, local_rank=1, local_size=2))
print(json.dumps(codes))
"""


@cache
def ended() -> tuple[dict[str, int], dict[str, str], str]:
    """Return exit code and log for each error, and what went to the terminal."""
    with TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-c", _PROGRAM, folder], capture_output=True, text=True, check=True
        )
        codes: dict[str, Any] = json.loads(done.stdout)
        logs = {
            name: (Path(folder) / name / "logs" / "rank_1.txt").read_text("utf-8") for name in codes
        }
    return codes, logs, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("raised", "code"),
    [("nothing", 0), ("a setting", 2), ("a run", 1), ("Ctrl-C", 130), ("a signal", 143),
     ("a word", 1), ("an exit", 1), ("a mistake", 1)],
)  # fmt: skip
def test_the_exit_code_says_how_a_rank_ended(raised: str, code: int) -> None:
    codes, logs, _ = ended()

    assert codes[raised] == code
    assert "in training" in logs[raised]


def test_what_ended_a_rank_is_said_in_its_log_and_to_who_started_it() -> None:
    _, logs, told = ended()

    assert "rank 1 (host " in logs["a setting"] and "): lr=-1\n" in logs["a setting"]
    assert told.count("): lr=-1\n") == told.count("): rank 1 failed in head\n") == 1
    assert told.count("): no more data\n") == 1
    assert told.count("): the program called sys.exit(0) before the run was over\n") == 1
    assert told.count("): KeyError: 'ours'\n  in ") == 1
    assert "in training" not in told


def test_tracebacks_are_in_the_log_alone_and_those_of_the_first_cause() -> None:
    _, logs, told = ended()

    assert "Traceback" not in told
    assert "ArithmeticError: no such number" in logs["a run"]
    assert "RunError" not in logs["a run"]
    assert "Traceback" in logs["a mistake"]
    assert "Traceback" not in logs["a setting"]

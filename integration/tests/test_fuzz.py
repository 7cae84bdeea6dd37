"""Edited files of every kind are used or refused; `python -m fuzz` tries many more.

What the core reads is tried in the tests of sbp-core.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from fuzz.__main__ import main
from fuzz.kinds import KINDS
from fuzz.watch import outcomes
from sbp_core.testing import files
from sbp_core.testing.fuzz import try_edit

#: Tells as a worker does, dies in the edit with seed 3, and says nothing any more from 6 on.
_WORKER = """
import json, os, sys, time
for seed in range(int(sys.argv[1]), int(sys.argv[2])):
    print("seed", seed, flush=True)
    if seed == 3:
        os.abort()
    if seed == 6:
        time.sleep(600)
    print(json.dumps({"seed": seed, "error": "", "fault": "", "time_s": 0.0}), flush=True)
"""


@pytest.mark.slow(but=2)
@pytest.mark.parametrize("name", sorted(KINDS.keys() - files.KINDS.keys()))
def test_an_edited_file_is_used_or_refused(name: str, tmp_path: Path) -> None:
    found = [try_edit(KINDS[name], seed, tmp_path) for seed in range(60)]

    assert [outcome for outcome in found if outcome.fault] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(KINDS.keys() - files.KINDS.keys()))
def test_a_file_that_nobody_edited_is_used(name: str, tmp_path: Path) -> None:
    for data in KINDS[name].originals():
        path = tmp_path / f"file{KINDS[name].suffix}"
        path.write_bytes(data)

        KINDS[name].use(path)


def test_a_process_that_dies_or_hangs_is_a_fault_of_the_edit_that_it_named_last() -> None:
    found = list(
        outcomes(
            "any",
            0,
            8,
            command_of=lambda _, first, last: [
                sys.executable, "-c", _WORKER, str(first), str(last)
            ],
            most_silence_s=3.0,
        )
    )  # fmt: skip

    assert [outcome.seed for outcome in found] == list(range(8))
    assert [outcome.seed for outcome in found if outcome.fault] == [3, 6]


def test_an_unknown_kind_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["nothing"])

    assert ended.value.code == 2
    assert "no kind is called 'nothing'" in capsys.readouterr().err

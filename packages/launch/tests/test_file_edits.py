"""Files with random edits: used, or refused by an error of ours; what is damaged is seen."""

from __future__ import annotations

from pathlib import Path

import pytest
from file_kinds import KINDS

from sbp_core.testing.fuzz import try_edit


@pytest.mark.parametrize("name", KINDS)
def test_a_file_that_nobody_edited_is_used(name: str, tmp_path: Path) -> None:
    for data in KINDS[name].originals():
        path = tmp_path / f"file{KINDS[name].suffix}"
        path.write_bytes(data)

        KINDS[name].use(path)


@pytest.mark.slow(but=4)
@pytest.mark.parametrize("name", KINDS)
def test_an_edited_file_is_used_or_refused(name: str, tmp_path: Path) -> None:
    found = [try_edit(KINDS[name], seed, tmp_path) for seed in range(100)]

    assert [outcome for outcome in found if outcome.fault] == []

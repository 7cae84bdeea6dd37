"""What is kept between runs may have been damaged, or put there by somebody else."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from sbp_torch.proof.record import Proof, ProofEntry
from sbp_torch.signatures.discovery_cache import CacheEntry, Discovery

ENTRIES = {
    "proof": (
        lambda folder: ProofEntry(folder=folder, key="this", budget_s=1.0),
        Proof(operators=3, alike=3),
    ),
    "signatures": (
        lambda folder: CacheEntry(folder=folder, key="this", budget=5),
        Discovery(signatures=(), tried=4, crashed=0, complete=True),
    ),
}


@pytest.mark.parametrize("kind", ENTRIES)
def test_what_is_stored_is_loaded_and_nothing_is_said_of_what_is_not_there(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make, value = ENTRIES[kind]

    before = make(tmp_path).load()
    make(tmp_path).store(value)

    assert before is None
    assert make(tmp_path).load() == value
    assert not caplog.text


@pytest.mark.parametrize("damage", ["pipe", "too large", "nested", "twice"])
@pytest.mark.parametrize("kind", ENTRIES)
def test_what_would_hang_or_fill_memory_is_made_again(
    kind: str, damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make, _ = ENTRIES[kind]
    path = make(tmp_path).path
    if damage == "pipe":
        os.mkfifo(path)
    elif damage == "too large":
        with path.open("wb") as file:
            file.truncate(2**42)  # of which nothing is on the disk
    elif damage == "nested":
        path.write_text("[" * 100_000)
    else:
        path.write_text('{"key": "this", "key": "this"}')

    with caplog.at_level(logging.WARNING):
        assert make(tmp_path).load() is None

    assert f"in {path}" in caplog.text

from pathlib import Path

import pytest

from sbp_core import machine_memory
from sbp_core.machine_memory import free_memory_bytes, room_bytes, total_memory_bytes


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    lines = ["MemTotal: 1000 kB", "MemFree: 1 kB", "MemAvailable: 600 kB", "SwapFree: 50 kB"]
    (tmp_path / "meminfo").write_text("\n".join(lines))
    monkeypatch.setattr(machine_memory, "_PROC", tmp_path)
    monkeypatch.setattr(machine_memory, "_CGROUP", tmp_path / "memory.max")
    return tmp_path


def test_what_is_free_and_swap_are_room(machine: Path) -> None:
    assert total_memory_bytes() == 1000 * 1024
    assert free_memory_bytes() == 600 * 1024
    assert room_bytes() == 650 * 1024


def test_a_container_has_less(machine: Path) -> None:
    (machine / "memory.max").write_text("2048\n")

    assert total_memory_bytes() == free_memory_bytes() == 2048
    assert room_bytes() == 2048 + 50 * 1024


def test_a_container_without_a_limit_has_all(machine: Path) -> None:
    (machine / "memory.max").write_text("max\n")

    assert total_memory_bytes() == 1000 * 1024


def test_a_system_that_says_nothing_is_not_held_against_a_file(machine: Path) -> None:
    (machine / "meminfo").unlink()

    assert room_bytes() is None
    assert 0 < free_memory_bytes() < total_memory_bytes()

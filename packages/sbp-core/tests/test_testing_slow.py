from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

_TESTS = """
import pytest

@pytest.mark.slow(but=3)
@pytest.mark.parametrize("b", [1, 2])
@pytest.mark.parametrize("a", range(5))
def test_many(a, b): pass

@pytest.mark.slow(but=9)
@pytest.mark.parametrize("a", [pytest.param(0, marks=pytest.mark.exhaustive), 1, 2])
def test_few(a): pass

@pytest.mark.slow
def test_long(): pass

@pytest.mark.slow
class TestAll:
    def test_one(self): pass

def test_short(): pass
"""

_QUICK = ["test_many[0-1]", "test_many[1-2]", "test_many[3-1]", "test_few[1]", "test_few[2]"]


def selected(folder: Path, marks: str) -> list[str]:
    """Return the tests that marks select, by their names."""
    (folder / "test_some.py").write_text(_TESTS, "utf-8")
    plugin = ("-p", "sbp_core.testing.slow", "-o", "markers=exhaustive")
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", *plugin, "-m", marks]
    done = subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if "::" in line]
    return [line.partition("::")[2] for line in lines]


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(
    ("marks", "names"),
    [
        ("not slow", [*_QUICK, "test_short"]),
        ("slow", ["test_few[0]", "test_long", "TestAll::test_one"]),
    ],
)
def test_some_cases_of_a_slow_test_are_quick(tmp_path, marks, names):
    found = selected(tmp_path, marks)

    rest = [name for name in found if name.startswith("test_many") and name not in _QUICK]
    assert [name for name in found if name not in rest] == names
    assert len(rest) == (7 if marks == "slow" else 0)


@pytest.mark.slow
def test_without_a_selection_all_run(tmp_path):
    assert len(selected(tmp_path, "")) == 16

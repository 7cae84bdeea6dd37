"""Programs in copies of a process behave as with `python -c`, and know nothing of each other."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from sbp_core.testing.forked_programs import ForkedPrograms


@pytest.fixture(scope="module")
def programs() -> Iterator[ForkedPrograms]:
    found = ForkedPrograms(["colorsys"])
    yield found
    found.close()


def test_a_program_has_its_arguments_folder_and_environment(
    programs: ForkedPrograms, tmp_path: Path
) -> None:
    (tmp_path / "beside.py").write_text("VALUE = 5")
    program = """
import atexit, os, sys, beside
atexit.register(print, "last")
print(sys.argv, os.getcwd(), os.environ["WHAT"], beside.VALUE, __name__)
print("aside", file=sys.stderr)
"""

    done = programs.run(program, ["a", "b c"], tmp_path, {"WHAT": "it", "PYTHONPATH": "."})

    assert done.stdout == f"['-c', 'a', 'b c'] {tmp_path} it 5 __main__\nlast\n"
    assert (done.returncode, done.stderr) == (0, "aside\n")


@pytest.mark.parametrize(
    ("program", "code", "says"),
    [
        ("raise SystemExit(3)", 3, ""),
        ("raise SystemExit('no')", 1, "no\n"),
        ("raise SystemExit", 0, ""),
        ("1 / 0", 1, "ZeroDivisionError"),
        ("import os; os.kill(os.getpid(), 9)", -9, ""),
    ],
)
def test_the_code_of_a_program_is_that_of_python(
    programs: ForkedPrograms, tmp_path: Path, program: str, code: int, says: str
) -> None:
    done = programs.run(program, [], tmp_path, os.environ)

    assert done.returncode == code
    assert says in done.stderr


def test_what_one_program_imports_the_next_has_not(
    programs: ForkedPrograms, tmp_path: Path
) -> None:
    seen = "import sys; print([name in sys.modules for name in ('colorsys', 'wave')])"
    programs.run("import wave", [], tmp_path, os.environ)

    assert programs.run(seen, [], tmp_path, os.environ).stdout == "[True, False]\n"

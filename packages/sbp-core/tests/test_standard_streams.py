"""Commands whose output lacks characters, is full or closed, or has a reader that left."""

from __future__ import annotations

import io
import os
import subprocess
import sys

import pytest

from sbp_core.standard_streams import BROKEN_PIPE, lenient

#: Prints many lines; with `essential=False`, does the rest of its work on the standard error.
_PROGRAM = """
import os, sys
from sbp_core.standard_streams import standard_streams
with standard_streams("sbp-x", essential={essential}):
    for _ in range(20_000):
        sys.stdout.write("█ Zürich \\udcff\\n")
    sys.stdout.flush()
    sys.stderr.write("done █\\n")
    sys.exit(3)
"""


def run(shell: str, *, essential: bool = True, **variables: str) -> tuple[int, str]:
    """Run the program with a redirection of bash; return its exit code and standard error."""
    command = f'set -o pipefail; "$PYTHON" -c "$PROGRAM" {shell}'
    done = subprocess.run(
        ["bash", "-c", command],
        env={
            **os.environ,
            "PYTHON": sys.executable,
            "PROGRAM": _PROGRAM.format(essential=essential),
            **variables,
        },
        capture_output=True,
        check=False,
    )
    return done.returncode, done.stderr.decode("utf-8", "replace")


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8", "cp437"])
def test_characters_that_an_encoding_lacks_are_shown_as_others(encoding: str) -> None:
    code, said = run("> /dev/null", PYTHONIOENCODING=encoding)

    assert code == 3
    assert said.startswith("done ") and "Traceback" not in said


def test_what_an_encoding_has_is_shown_as_it_is() -> None:
    shown = io.TextIOWrapper(io.BytesIO(), encoding="latin-1")

    stream = lenient(shown, lambda error: None)
    stream.writelines(["Zürich ", "█\n"])
    stream.flush()

    assert shown.buffer.getvalue() == "Zürich ?\n".encode("latin-1")  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("shell", "code", "why"),
    [
        ("> /dev/full", 1, "No space left on device"),
        (">&-", 1, "it is closed"),
        ("| head -1 > /dev/null", BROKEN_PIPE, ""),
    ],
)
def test_a_command_that_only_prints_ends_with_a_clear_message(
    shell: str, code: int, why: str
) -> None:
    told = f"sbp-x: the standard output cannot be written: {why}\n" if why else ""

    assert run(shell) == (code, told)


@pytest.mark.parametrize("shell", ["> /dev/full", ">&-", "| head -1 > /dev/null"])
def test_a_command_that_does_more_goes_on_and_says_once_that_nothing_is_printed(shell: str) -> None:
    code, said = run(shell, essential=False)

    assert code == 3
    assert said.endswith("done █\n")
    assert said.count("the standard output cannot be written") == 1


@pytest.mark.parametrize("shell", ["> /dev/null 2> /dev/full", "> /dev/null 2>&-", ">&- 2>&-"])
def test_a_standard_error_that_is_lost_ends_nothing(shell: str) -> None:
    assert run(shell, essential=False) == (3, "")


def test_a_file_that_is_opened_is_not_taken_for_a_standard_stream_that_was_closed() -> None:
    program = """
import os
from sbp_core.standard_streams import standard_streams
with standard_streams("sbp-x", essential=False):
    os.write(2, str(os.open(os.devnull, os.O_RDONLY)).encode())
"""
    command = '"$PYTHON" -c "$PROGRAM" >&-'
    environment = {**os.environ, "PYTHON": sys.executable, "PROGRAM": program}

    done = subprocess.run(["bash", "-c", command], env=environment, capture_output=True, check=True)

    assert int(done.stderr.split(b"\n")[-1]) > 2

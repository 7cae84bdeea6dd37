"""What commands write: signs that an encoding lacks, outputs that are closed, full, or gone."""

from __future__ import annotations

import io
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sbp_core.output import legible

#: A command that prints 4 MB of a sign, then says on the other output that it came to its end.
_COMMAND = """
import os, sys
from sbp_core.output import standard_output
with standard_output("name", outlives={outlives}):
    for _ in range(40_000):
        sys.stdout.write("─" * 100 + "\\n")
    sys.stdout.flush()
    file = os.open(os.devnull, os.O_RDONLY)
    sys.stderr.write(f"came to its end, opened {{file}}")
"""


def _printing(shell: str, *, outlives: bool, encoding: str = "utf-8") -> tuple[int, str, str]:
    """Run the command that prints; see `_run`."""
    return _run(shell, _COMMAND.format(outlives=outlives), encoding)


def _run(shell: str, command: str, encoding: str = "utf-8") -> tuple[int, str, str]:
    """Run a command in a line of a shell; return its exit code, and what it wrote."""
    done = subprocess.run(
        ["bash", "-c", shell, "bash", sys.executable, "-c", command],
        env={
            "PYTHONIOENCODING": encoding,
            "PATH": "/usr/bin:/bin",
            "PYTHONPATH": ":".join(sys.path),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


@given(st.text(), st.sampled_from(["ascii", "latin-1", "cp437", "koi8-r", "utf-8"]))
def test_every_encoding_takes_every_text_and_keeps_what_it_has(text: str, encoding: str) -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)

    found = legible(text, stream)

    assert found.encode(encoding).decode(encoding) == found
    kept = "".join(c for c in text if c.encode(encoding, "ignore"))
    assert found == text or kept != text


def test_lines_of_tables_are_drawn_in_ascii() -> None:
    assert legible("── 5 µs │ β", io.TextIOWrapper(io.BytesIO(), "ascii")) == r"-- 5 us | \u03b2"


def test_a_command_draws_in_ascii_where_its_output_lacks_signs() -> None:
    code, out, _ = _printing('"$@"', outlives=False, encoding="ascii")

    assert code == 0
    assert set(out) == {"-", "\n"}
    assert len(out) == 101 * 40_000


@pytest.mark.parametrize("outlives", [True, False])
def test_files_get_no_number_of_an_output_that_is_closed(outlives: bool) -> None:
    code, out, err = _printing('exec 3>&2; "$@" >&- 0<&-', outlives=outlives)

    assert (code, out) == (0, "")
    assert err.startswith("came to its end, opened ")
    assert int(err.rpartition(" ")[2]) > 2


def test_a_full_output_ends_a_command_that_only_prints() -> None:
    code, _, err = _printing('"$@" >/dev/full', outlives=False)

    assert code == 1
    assert err == "name: the output can no longer be written: No space left on device\n"


def test_a_reader_that_went_away_ends_a_command_that_only_prints_without_a_word() -> None:
    code, out, err = _printing('"$@" | head -1; exit ${PIPESTATUS[0]}', outlives=False)

    assert (code, out, err) == (141, "─" * 100 + "\n", "")


@pytest.mark.parametrize(("outlives", "wanted"), [(False, 1), (True, 0)])
def test_what_is_left_to_write_when_a_command_exits_is_not_lost_without_a_word(
    outlives: bool, wanted: int
) -> None:
    command = f"""
import sys
from sbp_core.output import standard_output
with standard_output("name", outlives={outlives}):
    sys.stdout.write("a line")
    sys.exit(0)
"""
    code, _, err = _run('"$@" >/dev/full', command)

    assert code == wanted
    assert err.startswith("name: the output can no longer be written: No space left on device")


@pytest.mark.parametrize(
    ("shell", "why"),
    [
        ('"$@" >/dev/full', "No space left on device"),
        ('"$@" | head -1; exit ${PIPESTATUS[0]}', "Broken pipe"),
    ],
)
def test_work_goes_on_without_its_output_and_says_so_once(shell: str, why: str) -> None:
    code, _, err = _printing(shell, outlives=True)

    assert code == 0
    first, rest = err.split("\n", 1)
    assert first.endswith(f"{why}; the command continues without it")
    assert rest.startswith("came to its end")

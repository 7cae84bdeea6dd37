from __future__ import annotations

import io

import pytest

from sbp_launch.console import FILE_WIDTH, make_console, say


@pytest.mark.parametrize(
    "text", ["a run in [data]/x", "[/tensor]", "runs/:on:/1", "[bold]3[/bold]"]
)
def test_a_text_is_printed_as_it_is(text: str) -> None:
    out = io.StringIO()

    make_console(file=out).print(text)

    assert out.getvalue() == f"{text}\n"


def test_a_console_on_a_file_has_the_width_of_files_or_that_which_is_given() -> None:
    assert make_console(file=io.StringIO()).width == FILE_WIDTH
    assert make_console(70, file=io.StringIO()).width == 70


def test_what_does_not_fit_on_a_line_goes_on_below_and_indented() -> None:
    out = io.StringIO()

    say(make_console(20, file=out), ["  " + " ".join(["word"] * 5)])

    assert out.getvalue().splitlines() == ["  word word word", "    word word"]

"""The printed table: what is folded, kept, and left out on lines of any width."""

import re
from dataclasses import replace

import pytest
from rich.console import Console
from trainable import planned, row

from sbp_launch.table import legend, plan_table


def text_of(table, width):
    console = Console(width=width, color_system=None)
    with console.capture() as captured:
        console.print(table)
    return captured.get()


def test_repeated_layers_are_one_row_with_their_number_and_bytes():
    rows = [row("blocks.0.up", moved=1000), row("blocks.1.up", moved=1000), row("head")]

    text = text_of(plan_table(rows, 10, 140), 140)

    assert "blocks.*.up x2" in text
    assert "2000 B" in text
    assert "blocks.0" not in text


def test_rows_with_boxing_are_kept_first_and_the_rest_is_counted():
    rows = [row("a"), row("b", "view"), row("c", moved=8), row("d", phase="optimizer")]

    text = text_of(plan_table(rows, 2, 140), 140)

    assert "all-reduce (data)" in text
    assert " a " in text
    assert "2 further kinds of rows" in text


def test_rows_that_move_most_are_kept_in_the_order_of_the_graph():
    rows = [row("a", moved=8), row("b", moved=800), row("c", moved=80), row("d", moved=8000)]

    text = text_of(plan_table(rows, 3, 100), 100)

    assert [line.split()[1] for line in text.splitlines() if " mm " in line] == ["b", "c", "d"]


def test_a_usual_terminal_gets_one_line_a_row_without_inputs():
    text = text_of(plan_table([row("blocks.0.attention.proj", moved=8)] * 2, 5, 100), 100)

    (line,) = (line for line in text.splitlines() if "attention" in line)
    assert re.split(r"  +", line.strip()) == [
        "fwd",
        "blocks.*.attention.proj x2",
        "mm",
        "(B)",
        "all-reduce (data)",
        "16 B",
    ]


def test_equal_outputs_are_counted():
    three = replace(row("a"), outputs="(B, S(0)) (B, S(0)) (B, S(0))")
    mixed = replace(row("b"), outputs="(B) (S(0))")

    text = text_of(plan_table([three, mixed], 5, 100), 100)

    assert "(B, S(0)) x3" in text
    assert "(B) (S(0))" in text


def test_the_words_of_the_table_are_explained_in_one_line():
    line = legend(planned().strategy)

    assert line.startswith("by axis (data): S(d) split along dim d, B whole, P parts of a sum")
    assert len(line) <= 100


@pytest.mark.parametrize("width", [80, 119, 120, 140, 200])
def test_every_column_is_on_the_line_whatever_its_width(width):
    long = row("blocks.0.attention.projection", "scaled_dot_product_flash_attention", moved=123456)
    wordy = replace(long, inputs="(S(0), S(1)) " * 3, boxing="reduce-scatter (tensor), " * 3)

    text = text_of(plan_table([long, wordy], 5, width), width)

    assert max(map(len, text.splitlines())) <= width
    assert "bytes/step" in text
    assert text.count("123.5 kB") == 2

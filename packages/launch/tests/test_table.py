"""The printed plan: groups of layers, what is left out, and lines of any width."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from test_rows import found_plan
from trainable import row

from sbp_core.placement import Placement
from sbp_launch.explaining.table import groups_of, legend, plan_table

ONE = (Placement([0, 1], ("data",)),)
TWO = (Placement([0], ("rank",)), Placement([1], ("rank",)))


def text_of(rows, width=100, max_rows=50, stages=ONE, todo=""):
    console = Console(width=width, color_system=None)
    with console.capture() as captured:
        console.print(plan_table(rows, stages, max_rows, width, todo))
    return captured.get()


def test_layers_that_are_planned_alike_are_one_group_with_their_bytes_together():
    rows = [row("blocks.0.up", moved=1000), row("blocks.1.up", moved=1000), row("head")]

    text = text_of(rows)

    assert "blocks.*.up x2" in text
    assert "2000 B" in text
    assert "blocks.0" not in text


def test_modules_of_a_layer_stand_below_its_name():
    sizes = {"up": 500, "down": 16}
    rows = [
        row(f"blocks.{layer}.{name}", num_parameters=size)
        for layer in range(3)
        for name, size in sizes.items()
    ]

    lines = text_of(rows).splitlines()

    # The numbers of parameters of all three.
    assert lines[2:5] == [
        "blocks.* x3",
        "  up          1,500  (B)  (S(0))",
        "  down           48  (B)  (S(0))",
    ]


def test_layers_of_other_sizes_with_one_plan_are_one_group():
    rows = [row("0", num_parameters=576), row("2", num_parameters=65)]

    assert "641" in text_of(rows)


def test_numbers_of_parameters_are_left_out_if_names_would_not_fit_next_to_them():
    rows = [row("block.attention.projection", num_parameters=10**9)]

    wide, narrow = (text_of(rows, width=width) for width in (54, 53))

    assert "block.attention.projection  1,000,000,000  (B)  (S(0))" in wide
    assert "1,000" not in narrow and "(B)" in narrow


def test_layers_that_are_cut_otherwise_are_another_group():
    rows = [row("blocks.0"), row("blocks.1"), row("blocks.2", output="(B)"), row("blocks.3")]

    assert [group.name for group in groups_of(rows)] == ["blocks.{0-1,3} x3", "blocks.2"]


def test_what_only_some_layers_send_says_which():
    rows = [row("blocks.0"), row("blocks.1", moved=70)]

    text = text_of(rows)

    assert "blocks.* x2" in text
    assert "after forward: all-reduce of output over data: P -> B (only blocks.1)" in text
    assert "70 B" in text


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.sampled_from(["a", "b", ""]), st.integers(0, 2)),
        unique_by=lambda entry: entry[:2],
    )
)
def test_folding_keeps_every_byte_and_every_row(entries):
    rows = [
        row(f"blocks.{layer}.{name}".rstrip("."), moved=moved) for layer, name, moved in entries
    ]

    groups = groups_of(rows)

    assert sum(group.count * len(group.rows) for group in groups) == len(rows)
    assert sum(r.bytes_of_a_rank for g in groups for r in g.rows) == sum(
        r.bytes_of_a_rank for r in rows
    )


def test_what_sends_most_is_kept_in_the_order_of_the_model_and_the_rest_is_counted():
    rows = [row("a", moved=8), row("b", moved=800), row("c", moved=80), row("d", moved=8000)]

    text = text_of(rows, max_rows=3, todo="see plan.txt")

    names = [line.split()[0] for line in text.splitlines() if "(S(0))" in line]
    assert names == ["b", "c", "d"]
    assert "1 further row, which sends 8 B: see plan.txt" in text


def test_of_what_sends_nothing_parameters_are_kept_first():
    rows = [row("a", parameters=()), row("b"), row("c", parameters=())]

    text = text_of(rows, max_rows=1)

    assert "\nb " in text
    assert "2 further rows, which send nothing" in text


def test_the_sum_of_the_column_stands_below_it():
    text = text_of([row("a", moved=100), row("b", moved=23)])

    assert text.splitlines()[-1].split() == ["all", "modules", "123", "B"]


def test_each_stage_says_its_ranks_and_what_they_send():
    text = text_of([row("a", moved=8), row("b", stage=1)], stages=TWO)

    heads = [line.split("  ")[0] for line in text.splitlines() if line.startswith("stage")]
    assert heads == ["stage 0 (rank 0)", "stage 1 (rank 1)"]


def test_parameters_that_are_stored_otherwise_are_named():
    one = row("a", parameters=(("weight", "(S(1))"), ("bias", "(B)")))

    text = text_of([one])

    assert "(S(1))" in text
    assert "bias (B)" in text


def test_the_words_of_the_table_are_explained():
    found = found_plan("replicated")

    lines = legend(found.module_rows, {"data": 2}, found.strategy.stages)

    assert lines[0].startswith("SBP by axis (data 2): S(d) split along dim d, B whole")
    assert any("before, within, after" in line for line in lines)


def test_an_axis_of_stages_is_called_as_it_was_set():
    lines = legend([row("a")], {"pipe": 2}, TWO)

    assert lines[0] == "mesh pipe 2: each position of pipe is a stage"
    assert not any("axis (rank" in line for line in lines)


def test_stages_of_unequal_meshes_are_said_one_by_one():
    stages = (
        Placement([[0]], ("data", "tensor")),
        Placement([[1]], ("data", "tensor")),
        Placement([[2, 3]], ("data", "tensor")),
    )

    lines = legend([row("a")], {"data": 4}, stages)

    assert lines[:2] == [
        "mesh data 4: stages 0, 1 on data 1 x tensor 1, stage 2 on data 1 x tensor 2",
        "SBP by axis (data, tensor): S(d) split along dim d, B whole on each rank, P parts of a "
        "sum",
    ]


@pytest.mark.parametrize("width", [80, 100, 140, 200])
@pytest.mark.parametrize("name", ["two axes", "pipeline of meshes"])
def test_lines_fit_and_no_word_is_broken(name, width):
    found = found_plan(name)

    text = text_of(found.module_rows, width, stages=found.strategy.stages)

    lines = text.splitlines()
    assert max(map(len, lines)) <= width
    assert lines[0].endswith("a rank sends")
    words = set(text.split())
    for move in (move for each in found.module_rows for move in each.moves if move.sent_bytes):
        assert move.how.partition(": ")[2] in text  # on one line
        assert {move.kind.value, move.when.value} <= words


def test_a_name_that_is_too_long_has_a_line_of_its_own():
    long = replace(row("a" * 90, moved=8), is_parent=False)

    text = text_of([long], width=80)

    assert max(map(len, text.splitlines())) <= 90
    assert any(line.split() == ["(B)", "(S(0))"] for line in text.splitlines())

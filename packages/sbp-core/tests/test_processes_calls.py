"""The names that ranks agree on; to how many collectives a rank has come, and who is told."""

from dict_store import stores_of

from sbp_core.processes.calls import Arrivals, group_name, tag_number


def test_a_rank_that_told_how_far_it_has_come_is_not_missing() -> None:
    mine, theirs = map(Arrivals, stores_of(2))

    assert [mine.begin((0, 1)), mine.begin((0, 1))] == [0, 1]
    assert theirs.begin((0, 1)) == 0
    theirs.tell((0, 1))

    assert mine.missing((0, 1), 0) == []
    assert mine.missing((0, 1), 1) == [1]


def test_an_early_wait_does_not_take_back_what_was_told_of_a_later_begin() -> None:
    mine, theirs = map(Arrivals, stores_of(2))
    for _ in range(2):
        mine.begin((0, 1))
        theirs.begin((0, 1))

    theirs.tell_overdue(0.0)
    theirs.tell((0, 1))

    assert mine.missing((0, 1), 1) == []


def test_what_is_overdue_is_told_once_for_each_group_in_which_something_is_open() -> None:
    store, _ = stores_of(3)[:2]
    arrivals, told = Arrivals(store), list[str]()
    store.say = lambda key, value="1", ranks=None: told.append(f"{key}: {value}")  # type: ignore[method-assign,assignment]
    for ranks in ((0, 1), (0, 1), (0, 2), (0, 1, 2)):
        arrivals.begin(ranks)
    arrivals.end((0, 2))

    arrivals.tell_overdue(60.0)
    assert told == []
    arrivals.tell_overdue(0.0)
    arrivals.tell_overdue(0.0)

    assert told == ["waiting/0-1: 1", "waiting/0-1-2: 0"]


def test_groups_of_other_ranks_have_other_names() -> None:
    assert group_name((0, 2)) == "0-2"
    assert len({group_name(ranks) for ranks in ((1, 12), (11, 2), (1, 1, 2), (2, 11))}) == 4


def test_tags_give_equal_numbers_for_equal_texts_only_below_the_bound() -> None:
    tags = [f"actor {actor}, micro-batch {batch}" for actor in range(40) for batch in range(40)]

    assert len({tag_number(tag, 2**31 - 1) for tag in tags}) == len(tags)
    assert all(0 <= tag_number(tag, 32767) < 32767 for tag in tags)
    # The same on every process and machine: nothing of it may depend on a run's hash seed.
    assert tag_number("case 1", 2**31 - 1) == 1627621487

"""Settings of processes that meet: what cannot be meant is refused, by its name."""

from __future__ import annotations

import pytest

from sbp_core.errors import ConfigError
from sbp_core.processes.backend_settings import check_rendezvous, check_timeouts


@pytest.mark.parametrize("place", ["env://", "tcp://127.0.0.1:29500", "file:///there"])
@pytest.mark.parametrize(("rank", "size"), [(None, None), (0, 1), (7, None), (None, 3), (2, 3)])
def test_any_place_and_any_rank_of_a_world_may_be_said(
    place: str, rank: int | None, size: int | None
) -> None:
    check_rendezvous(place, rank, size)


@pytest.mark.parametrize("place", ["", "127.0.0.1:29500", "http://there"])
def test_a_text_that_names_no_rendezvous_is_refused(place: str) -> None:
    with pytest.raises(ConfigError, match=r"^init_method='.*' names no rendezvous"):
        check_rendezvous(place, None, None)


@pytest.mark.parametrize(("rank", "size"), [(-1, None), (-1, 2), (2, 2)])
def test_a_rank_outside_of_its_world_is_refused(rank: int, size: int | None) -> None:
    with pytest.raises(ConfigError, match=rf"^rank={rank} is no rank of world_size={size}"):
        check_rendezvous("env://", rank, size)


def test_a_world_without_ranks_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^world_size=0 is too small"):
        check_rendezvous("env://", None, 0)


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan")])
def test_a_time_that_is_over_at_once_is_refused_by_its_name(seconds: float) -> None:
    check_timeouts(patience_s=0.1)

    with pytest.raises(ConfigError, match=r"^close_s=.* leaves no time"):
        check_timeouts(patience_s=0.1, close_s=seconds)

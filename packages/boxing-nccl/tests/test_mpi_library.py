import sys
from types import SimpleNamespace

import pytest

from sbp_boxing_nccl.configs import MpiBoxingConfig
from sbp_boxing_nccl.mpi.job import load_mpi
from sbp_boxing_nccl.mpi.mpi_backend import MpiBackend
from sbp_core.errors import BoxingError
from sbp_core.processes import Siblings


def test_without_mpi4py_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", None)
    backend = MpiBackend(MpiBoxingConfig())

    with pytest.raises(BoxingError, match=r"^boxing=mpi needs mpi4py") as caught:
        backend.open([0])

    assert 'pip install "sbp-boxing-nccl[mpi]"' in caught.value.todo


def test_an_mpi_for_one_thread_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    single = SimpleNamespace(Query_thread=lambda: 1, THREAD_MULTIPLE=3)
    monkeypatch.setitem(sys.modules, "mpi4py", SimpleNamespace(MPI=single))
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", single)

    with pytest.raises(BoxingError, match="fewer threads") as caught:
        load_mpi()

    assert caught.value.accepted == "MPI_THREAD_MULTIPLE"


def test_a_rank_that_has_ended_is_named_and_not_waited_for_by_mpi(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def check() -> None:
        raise BoxingError("rank 0 waited for ranks that did not open their boxing backend: 1")

    monkeypatch.setitem(sys.modules, "mpi4py", None)
    monkeypatch.delitem(sys.modules, "mpi4py.MPI", raising=False)
    monkeypatch.setattr(Siblings, "check_before_waiting", check)

    with pytest.raises(BoxingError, match="did not open their boxing backend: 1"):
        load_mpi()

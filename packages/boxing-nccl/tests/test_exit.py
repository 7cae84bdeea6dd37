import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("mpi4py", reason="mpi4py is not installed", exc_type=ImportError)

from rank_pool import MPIEXEC

pytestmark = pytest.mark.skipif(not MPIEXEC.exists(), reason="there is no mpiexec here")

#: Seconds in which all is over if one rank comes down; a step would wait for 100.
LIMIT_S = 60.0


def run(how: str) -> tuple[int, str, float]:
    """Start two ranks without `-m mpi4py`; return (exit status, what they said, seconds)."""
    environment = os.environ | {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_smsc": "^cma",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    script = Path(__file__).with_name("leaving_rank.py")
    start = time.monotonic()
    done = subprocess.run(
        [str(part) for part in (MPIEXEC, "-n", 2, sys.executable, script, how)],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=LIMIT_S,
        check=False,
    )
    return done.returncode, done.stdout.decode("utf-8", "replace"), time.monotonic() - start


@pytest.mark.slow
def test_ranks_that_close_their_backends_end_well() -> None:
    code, said, _ = run("well")

    assert code == 0, said
    assert "are ended" not in said


@pytest.mark.slow
@pytest.mark.parametrize("how", ["raises", "quits", "thread quits", "thread stays"])
def test_a_rank_that_ends_without_closing_brings_all_down(how: str) -> None:
    code, said, _ = run(how)

    assert code != 0, said
    assert "rank 0: the " in said and "without closing the boxing backend" in said
    assert "loss is not a number" in said or "raises" not in how
    assert "reader" in said or how != "thread stays"


@pytest.mark.slow
@pytest.mark.parametrize("how", ["raises", "quits"])
def test_a_rank_that_closes_because_of_an_exception_brings_all_down(how: str) -> None:
    code, said, _ = run(f"{how}, closing")

    assert code != 0, said
    assert "BoxingError" in said and "rank 0 reported" in said


@pytest.mark.slow
def test_a_rank_that_does_not_come_to_start_mpi_is_waited_for_so_long_and_no_longer() -> None:
    code, said, _ = run("never comes")

    assert code != 0, said
    assert "Timeout (0:00:02)!" in said
    assert "in _start_mpi_together_with_all_ranks" in said

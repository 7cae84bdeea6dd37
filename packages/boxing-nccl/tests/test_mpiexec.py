import os
import signal
import sys
from pathlib import Path

import pytest

from sbp_boxing_nccl.configs import MpiBoxingConfig
from sbp_boxing_nccl.mpi.mpi_backend import MpiBackend
from sbp_core.errors import BoxingError
from sbp_core.processes.supervisor import Line, supervise

_PROGRAM = """
import os, time
from sbp_boxing_nccl.mpi.mpi_backend import MpiBackend
from sbp_boxing_nccl.configs import MpiBoxingConfig
backend = MpiBackend(MpiBoxingConfig())
backend.open([0, 1])
print("open as", *backend.local_ranks(), "process", os.getpid(), flush=True)
{then}
backend.close()
"""


def run(then: str, on_line) -> object:
    command = [sys.executable, "-c", _PROGRAM.format(then=then)]
    specs = MpiBackend(MpiBoxingConfig()).launch_specs(2, command)
    return supervise(specs, timeout_s=120, on_line=on_line)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.slow
def test_the_launcher_starts_ranks_that_find_each_other():
    lines: list[Line] = []

    ended = run("", lines.append)

    assert ended.error() is None
    assert {" ".join(line.text.split()[:3]) for line in lines} >= {"open as 0", "open as 1"}


@pytest.mark.slow
@pytest.mark.parametrize("how", ["exception", "killed"])
def test_all_ranks_end_when_one_does(how):
    pids: list[int] = []
    ranks: list[str] = []

    def react(line: Line) -> None:
        words = line.text.split()
        if words[:2] == ["open", "as"]:
            ranks.append(words[2])
            pids.append(int(words[-1]))
            if how == "killed" and len(pids) == 2:
                os.kill(pids[1], signal.SIGKILL)

    raises = "if backend.local_ranks() == (1,): raise ValueError('no such luck')"
    ended = run(f"{raises if how == 'exception' else ''}\ntime.sleep(600)", react)

    assert ended.exit_status not in (0, 124)
    assert "ranks 0-1 ended with exit code" in str(ended)
    assert f"rank {ranks[1] if how == 'killed' else 1} failed first" in str(ended)
    assert ("no such luck" in str(ended)) == (how == "exception")
    assert not any(map(is_alive, pids))


def test_without_mpi4py_nothing_is_started(monkeypatch):
    monkeypatch.setattr("sbp_boxing_nccl.mpi.mpi_backend.find_spec", lambda name: None)

    with pytest.raises(BoxingError, match="needs mpi4py, which is missing") as caught:
        MpiBackend(MpiBoxingConfig()).launch_specs(2, [sys.executable, "-c", "pass"])

    assert "sbp-boxing-nccl[mpi]" in caught.value.todo

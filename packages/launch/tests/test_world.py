"""What launchers write into the environment, as they were seen to, and what is made of it."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from sbp_core.errors import ConfigError
from sbp_launch.world import World

TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "f00c7a42",
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "gpu1",
    "MASTER_PORT": "29500",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "prterun-host-16808@1",
}
MPICH = {
    "PMI_RANK": "1",
    "PMI_SIZE": "4",
    "MPI_LOCALRANKID": "1",
    "MPI_LOCALNRANKS": "2",
}
#: Of `srun --ntasks=5 --nodes=3`, in the fourth process.
SRUN = {
    "SLURM_JOB_ID": "712",
    "SLURM_STEP_ID": "1",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_NTASKS": "8",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_STEP_NODELIST": "gpu[08-09,14]",
}


def stands(world: World) -> tuple[str, int, int, int, int]:
    return world.launcher, world.rank, world.size, world.local_rank, world.local_size


@pytest.mark.parametrize(
    ("environment", "wanted"),
    [
        ({}, ("threads", 0, 1, 0, 1)),
        (TORCHRUN, ("torchrun", 3, 4, 1, 2)),
        (OPEN_MPI, ("mpiexec", 1, 2, 1, 2)),
        (MPICH, ("mpiexec", 1, 4, 1, 2)),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, ("mpiexec", 1, 2, 1, 2)),
        (SRUN, ("slurm", 3, 5, 1, 2)),
        ({"RANK": "1", "WORLD_SIZE": "2"}, ("torchrun", 1, 2, 1, 2)),
    ],
    ids=["none", "torchrun", "Open MPI", "MPICH", "PMI alone", "srun", "by hand"],
)
def test_a_process_finds_its_place(
    environment: Mapping[str, str], wanted: tuple[str, int, int, int, int]
) -> None:
    world = World.of_environment(environment)
    assert stands(world) == wanted
    assert world.is_alone is (world.launcher == "threads")


def test_a_launcher_that_another_one_started_is_the_one_that_counts() -> None:
    assert stands(World.of_environment({**SRUN, **OPEN_MPI, **TORCHRUN}))[0] == "torchrun"
    assert stands(World.of_environment({**SRUN, **OPEN_MPI})) == ("mpiexec", 1, 2, 1, 2)
    # mpiexec of MPICH starts its proxies by srun; `srun --mpi=pmi2` sets two of its variables.
    assert stands(World.of_environment({**SRUN, **MPICH})) == ("mpiexec", 1, 4, 1, 2)
    pmi2 = {**SRUN, "PMI_RANK": "3", "PMI_SIZE": "5"}
    assert stands(World.of_environment(pmi2)) == ("slurm", 3, 5, 1, 2)


@pytest.mark.parametrize("step", [{}, {"SLURM_STEP_ID": "4294967291"}])
def test_the_script_of_a_batch_job_is_alone(step: Mapping[str, str]) -> None:
    script = {name: value for name, value in SRUN.items() if "STEP" not in name}
    script |= {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", **step}
    assert World.of_environment(script).is_alone


def test_ranks_that_nobody_told_where_to_meet_find_it_by_themselves() -> None:
    assert World.of_environment(TORCHRUN).variables == {}
    slurm = World.of_environment(SRUN).variables
    assert slurm["MASTER_ADDR"] == "gpu08"
    assert (slurm["RANK"], slurm["WORLD_SIZE"], slurm["LOCAL_RANK"]) == ("3", "5", "1")
    other_rank = {**SRUN, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
    assert World.of_environment(other_rank).variables["MASTER_PORT"] == slurm["MASTER_PORT"]
    other_step = World.of_environment({**SRUN, "SLURM_STEP_ID": "2"}).variables
    assert other_step["MASTER_PORT"] != slurm["MASTER_PORT"]
    given = World.of_environment({**SRUN, "MASTER_ADDR": "here", "MASTER_PORT": "1"}).variables
    assert "MASTER_ADDR" not in given and "MASTER_PORT" not in given


def test_ranks_of_mpiexec_meet_on_their_host_if_it_is_one() -> None:
    local = World.of_environment(OPEN_MPI).variables
    assert local["MASTER_ADDR"] == "127.0.0.1"
    assert 20_000 <= int(local["MASTER_PORT"]) < 32_000
    assert "MASTER_ADDR" not in World.of_environment(MPICH).variables  # two hosts


@pytest.mark.parametrize(
    ("environment", "named"),
    [
        ({**OPEN_MPI, "RANK": "0"}, ("RANK=0", "OMPI_COMM_WORLD_RANK=1")),
        ({**OPEN_MPI, "WORLD_SIZE": "8"}, ("WORLD_SIZE=8", "OMPI_COMM_WORLD_SIZE=2")),
        ({**MPICH, "RANK": "0"}, ("RANK=0", "PMI_RANK=1")),
        ({**SRUN, "WORLD_SIZE": "1"}, ("WORLD_SIZE=1", "SLURM_STEP_NUM_TASKS=5")),
        ({"RANK": "0"}, ("WORLD_SIZE",)),
        ({"WORLD_SIZE": "2"}, ("RANK",)),
        ({"RANK": "two", "WORLD_SIZE": "2"}, ("RANK='two'",)),
        ({**TORCHRUN, "RANK": "4"}, ("rank 4 of 4",)),
        ({**TORCHRUN, "LOCAL_RANK": "2"}, ("rank 2 of 2 on its host",)),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "5"}, ("rank 1 of 5 on its host", "rank 3 of 4")),
    ],
)
def test_contradictions_name_their_variables(
    environment: Mapping[str, str], named: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError) as caught:
        World.of_environment(environment)
    assert all(name in str(caught.value) for name in named), str(caught.value)


def test_the_same_in_two_launchers_variables_is_no_contradiction() -> None:
    both = {**OPEN_MPI, "RANK": "1", "WORLD_SIZE": "2"}
    world = World.of_environment(both)
    assert stands(world) == ("mpiexec", 1, 2, 1, 2)
    assert "RANK" not in world.variables


@pytest.mark.parametrize(
    ("environment", "told"),
    [
        ({"RANK": "1", "WORLD_SIZE": "2"}, "RANK=1, WORLD_SIZE=2"),
        (OPEN_MPI, "OMPI_COMM_WORLD_RANK=1, OMPI_COMM_WORLD_SIZE=2"),
        (MPICH, "PMI_RANK=1, PMI_SIZE=4"),
        (SRUN, "SLURM_PROCID=3, SLURM_STEP_NUM_TASKS=5"),
        ({}, ""),
    ],
)
def test_a_world_says_which_variables_say_so(environment: Mapping[str, str], told: str) -> None:
    assert World.of_environment(environment).said_by == told


def test_one_process_needs_no_rank_and_what_is_missing_is_named_with_what_is_there() -> None:
    assert stands(World.of_environment({"WORLD_SIZE": "1"})) == ("torchrun", 0, 1, 0, 1)
    with pytest.raises(
        ConfigError, match="does not say RANK, together with MASTER_ADDR=here, WORLD_SIZ"
    ):
        World.of_environment({"WORLD_SIZE": "2", "MASTER_ADDR": "here"})
    with pytest.raises(ConfigError, match="does not say PMI_SIZE, together with PMI_RANK=0"):
        World.of_environment({"PMI_RANK": "0"})

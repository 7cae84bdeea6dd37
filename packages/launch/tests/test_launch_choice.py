"""Which launcher a run means, by boxing and by who started the process; and what is refused."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trainable import run_config

from sbp_core.errors import ConfigError
from sbp_core.plugins import Factory, PluginEntry, PluginRegistry, PluginSource, discover
from sbp_launch.launching.launching import choose_launcher, has_threads, is_started
from sbp_launch.settings.config import ComposedConfig, PluginChoice, RunConfig
from sbp_launch.world import World

NOTHING_SAID = ComposedConfig(values={}, files={}, overrides=())


@dataclass(frozen=True, slots=True, kw_only=True)
class BetweenConfig:
    spans_processes: ClassVar[bool] = True


def make_registry() -> PluginRegistry:
    """Return our own plugins, with two boxing backends: `local`, and `torch` between processes."""
    ours = discover(
        [PluginSource(name="launch", value="sbp_launch.plugin", distribution="sbp-launch")]
    )
    backends = {
        "local": Factory(build="m:build"),
        "torch": Factory(build="m:b", config=BetweenConfig),
    }
    entries = [
        PluginEntry(
            kind="boxing", name=name, distribution="d", version="1", api_version=1, factory=factory
        )
        for name, factory in backends.items()
    ]
    return replace(ours, entries=(*ours.entries, *entries))


REGISTRY = make_registry()


def wanted(launcher: str, boxing: str, mesh: tuple[int, ...] = (4,)) -> RunConfig:
    axes = tuple(f"axis{number}" for number in range(len(mesh)))
    config = run_config(mesh=mesh, axes=axes)
    return replace(config, launcher=PluginChoice(name=launcher), boxing=PluginChoice(name=boxing))


def chosen(launcher: str, boxing: str, world: World, mesh: tuple[int, ...] = (4,)) -> RunConfig:
    return choose_launcher(wanted(launcher, boxing, mesh), NOTHING_SAID, REGISTRY, world)


def world_of(launcher: str, size: int) -> World:
    return World(size=size, local_size=size, launcher=launcher)


@pytest.mark.parametrize(
    ("boxing", "world", "launcher", "started"),
    [
        ("local", World(), "threads", False),
        ("torch", World(), "spawn", False),
        ("torch", world_of("torchrun", 4), "torchrun", True),
        ("torch", world_of("mpiexec", 4), "mpiexec", True),
        ("torch", world_of("slurm", 4), "slurm", True),
        # A job of one process may well start four, or hold four threads.
        ("torch", world_of("slurm", 1), "spawn", False),
        ("local", world_of("slurm", 1), "threads", False),
    ],
)
def test_what_is_left_out_is_chosen(
    boxing: str, world: World, launcher: str, started: bool
) -> None:
    config = chosen("auto", boxing, world)

    assert config.launcher.name == launcher
    assert is_started(config, world) is started
    assert has_threads(config, REGISTRY) is (launcher == "threads")


def test_one_rank_that_a_launcher_started_is_that_launchers() -> None:
    world = world_of("torchrun", 1)
    config = chosen("auto", "torch", world, mesh=(1,))
    assert config.launcher.name == "torchrun" and is_started(config, world)


@pytest.mark.parametrize("launcher", ["spawn", "torchrun", "mpiexec", "slurm"])
def test_a_launcher_that_was_chosen_starts_the_ranks(launcher: str) -> None:
    config = chosen(launcher, "torch", World())
    assert config.launcher.name == launcher and not is_started(config, World())


def test_a_process_of_slurm_that_is_alone_may_submit_a_job_of_many() -> None:
    world = world_of("slurm", 1)
    config = chosen("slurm", "torch", world)
    assert config.launcher.name == "slurm" and not is_started(config, world)


@pytest.mark.parametrize(
    ("launcher", "boxing", "world", "named"),
    [
        ("threads", "torch", World(), ("boxing=torch", "launcher=threads", "launcher=spawn")),
        ("spawn", "local", World(), ("launcher=spawn", "boxing=local", "add boxing=torch")),
        ("mpiexec", "local", World(), ("launcher=mpiexec", "add boxing=mpi")),
        ("auto", "local", world_of("mpiexec", 4), ("mpiexec has started 4", "add boxing=mpi")),
        ("auto", "local", world_of("torchrun", 4), ("torchrun has started 4", "boxing=torch")),
        ("spawn", "torch", world_of("torchrun", 4), ("launcher=spawn", "torchrun has started 4")),
        ("threads", "local", world_of("mpiexec", 2), ("launcher=threads", "mpiexec has")),
        (
            "auto",
            "torch",
            world_of("torchrun", 3),
            ("started 3 processes", "cluster.mesh=[2, 2] has 4 ranks", "--nproc-per-node=4"),
        ),
        ("mpiexec", "torch", world_of("mpiexec", 1), ("started 1 process,", "mpiexec -n 4")),
    ],
)
def test_what_does_not_fit_is_refused(
    launcher: str, boxing: str, world: World, named: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError) as caught:
        chosen(launcher, boxing, world, mesh=(2, 2))
    assert all(text in str(caught.value) for text in named), str(caught.value)


def test_what_the_command_line_said_is_quoted() -> None:
    said = ComposedConfig(
        values={}, files={}, overrides=("boxing=torch", "launcher=threads", "a=b")
    )

    with pytest.raises(ConfigError) as caught:
        choose_launcher(wanted("threads", "torch"), said, REGISTRY, World())

    assert caught.value.where == (
        "the command line: launcher=threads",
        "the command line: boxing=torch",
    )


@pytest.mark.slow
@settings(derandomize=True, max_examples=200)
@given(
    launcher=st.sampled_from(["auto", "threads", "spawn", "torchrun", "mpiexec", "slurm"]),
    boxing=st.sampled_from(["local", "torch"]),
    by=st.sampled_from(["torchrun", "mpiexec", "slurm"]),
    size=st.integers(1, 5),
)
def test_a_choice_is_refused_or_fits(launcher: str, boxing: str, by: str, size: int) -> None:
    world = world_of(by, size) if size > 1 else World()
    try:
        config = chosen(launcher, boxing, world)
    except ConfigError as error:
        assert error.todo
        return
    assert launcher in ("auto", config.launcher.name)
    assert has_threads(config, REGISTRY) is (boxing == "local")
    # Processes that are there already are used, and are as many as the ranks.
    assert is_started(config, world) is (size > 1)
    assert size in (1, 4)

"""A mesh of which the launcher's processes make up one axis."""

from __future__ import annotations

import pytest

from sbp_core.errors import ConfigError
from sbp_launch.clusters.local import LocalConfig
from sbp_launch.settings.check import close_mesh
from sbp_launch.settings.config import ComposedConfig
from sbp_launch.world import World


def composed(mesh: object) -> ComposedConfig:
    return ComposedConfig(
        values={"cluster": {"name": "local", "mesh": mesh}, "model": {"name": "gpt"}},
        files={},
        overrides=(f"cluster.mesh={mesh}", "model=gpt"),
    )


def of_torchrun(size: int) -> World:
    return World(size=size, local_size=size, launcher="torchrun")


@pytest.mark.parametrize(
    ("mesh", "size", "whole"),
    [([-1], 1, [1]), ([-1], 3, [3]), ([-1, 2], 6, [3, 2]), ([2, -1], 2, [2, 1]), ([4], 2, [4])],
    ids=str,
)
def test_an_open_axis_is_as_long_as_the_processes_make_it(
    mesh: list[int], size: int, whole: list[int]
) -> None:
    found = close_mesh(composed(mesh), of_torchrun(size))

    assert found.values == composed(whole).values


def test_processes_that_the_other_axes_do_not_divide_are_refused() -> None:
    with pytest.raises(ConfigError, match="torchrun has started 3 processes") as caught:
        close_mesh(composed([-1, 2]), of_torchrun(3))

    assert "a multiple of 2" in str(caught.value)
    assert "the command line: cluster.mesh=[-1, 2]" in str(caught.value)


@pytest.mark.parametrize("mesh", [[-1, -1], [-1, 0], "-1", None, [-1, "a"], [[-1]]], ids=str)
def test_what_is_no_mesh_is_left_to_its_cluster_or_refused(mesh: object) -> None:
    try:
        found = close_mesh(composed(mesh), of_torchrun(4))
    except ConfigError:
        assert mesh == [-1, 0]
    else:
        assert found == composed(mesh)


def test_without_a_launcher_nobody_says_how_long_it_is() -> None:
    left = close_mesh(composed([-1]), World())

    assert left == composed([-1])
    with pytest.raises(
        ConfigError, match=r"mesh=\[-1\] takes the length of an axis from the launcher"
    ):
        LocalConfig(mesh=(-1,))

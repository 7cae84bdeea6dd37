"""Names that have moved to another room work where they were for a release, and say so."""

from __future__ import annotations

import pytest

from sbp_core import planning, plugins, processes


@pytest.mark.parametrize(
    ("name", "room"),
    [
        ("PlanRequest", planning),
        ("Planner", planning),
        ("Launcher", processes),
        ("LaunchRequest", processes),
    ],
)
def test_a_name_that_has_moved_is_the_same_and_tells_its_room(name: str, room: object) -> None:
    with pytest.warns(DeprecationWarning, match=f"is {room.__name__}.{name} now"):  # type: ignore[attr-defined]
        found = getattr(plugins, name)

    assert found is getattr(room, name)


@pytest.mark.parametrize(
    ("name", "now"), [("Storage", "CheckpointStorage"), ("ChecksOthers", "ChecksCombination")]
)
def test_a_name_that_has_changed_is_the_same_and_tells_its_new_name(name: str, now: str) -> None:
    with pytest.warns(DeprecationWarning, match=f"{name} is sbp_core.plugins.{now} now"):
        found = getattr(plugins, name)

    assert found is getattr(plugins, now)


def test_a_name_that_never_was_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Planer'"):
        plugins.Planer  # noqa: B018 - read for its error

"""What a planner raises and returns is said of its plugin, or of the argument of the user."""

from __future__ import annotations

from typing import Any

import pytest

from sbp_core.errors import PlanError, PluginError, SbpError, SbpTypeError
from sbp_core.plugins import Factory, PluginEntry
from sbp_launch.planning.checked_planner import CheckedPlanner

ENTRY = PluginEntry(
    kind="planner",
    name="mine",
    distribution="my-dist",
    version="1.2",
    api_version=2,
    factory=Factory(build="mine.planner:build"),
)


class Plans:
    def __init__(self, found: object) -> None:
        self.found = found

    def plan(self, request: object) -> Any:
        if isinstance(self.found, Exception):
            raise self.found
        return self.found


class TakesNoRequest:
    def plan(self) -> Any: ...


def asked(planner: Any, entry: PluginEntry | None) -> SbpError:
    request: Any = None
    with pytest.raises(SbpError) as caught:
        CheckedPlanner(planner=planner, entry=entry).plan(request)
    return caught.value


@pytest.mark.parametrize(
    ("planner", "says"),
    [
        (Plans(None), "returned None, not a Strategy"),
        (Plans("a"), "returned str, not a Strategy"),
        (Plans(ConnectionError("lost")), "raised ConnectionError: lost"),
        (TakesNoRequest(), "raised TypeError: "),
    ],
)
def test_a_plugin_is_named(planner: object, says: str) -> None:
    error = asked(planner, ENTRY)

    assert isinstance(error, PluginError)
    assert error.what.startswith(f"planner 'mine' of my-dist 1.2 {says}")


def test_an_object_of_the_user_is_named_as_the_argument() -> None:
    error = asked(Plans(None), None)

    assert isinstance(error, SbpTypeError)
    assert error.what == "the planner returned None"
    assert error.where == ("Plans.plan, the argument planner",)


def test_what_a_planner_refuses_stays_what_it_is() -> None:
    refusal = PlanError("it does not fit")

    assert asked(Plans(refusal), ENTRY) is refusal

"""The mark `slow`, as a plugin of pytest: `addopts = "-p sbp_core.testing.slow"`.

A test that takes a second or more is marked `@pytest.mark.slow`, and runs in the session of that
name. If a test has many short cases, some stay quick: `@pytest.mark.slow(but=3)` removes the mark
from three cases, evenly spread over the cases that are not marked `exhaustive`.
"""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

from pluggy import HookimplMarker

if TYPE_CHECKING:
    import pytest

__all__ = ["pytest_collection_modifyitems", "pytest_configure"]


def pytest_configure(config: pytest.Config) -> None:
    """Register the mark."""
    config.addinivalue_line(
        "markers", "slow(but=0): takes a second or more, runs in the session of that name"
    )


@HookimplMarker("pytest")(tryfirst=True)  # before pytest selects by marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Remove the mark from the cases that stay quick."""
    for _, same in groupby(items, key=_function):
        cases = [item for item in same if item.get_closest_marker("exhaustive") is None]
        mark = cases[0].get_closest_marker("slow") if cases else None
        but = min(mark.kwargs.get("but", 0), len(cases)) if mark else 0
        for place in range(but):
            item = cases[place * len(cases) // but]
            item.own_markers = [mark for mark in item.own_markers if mark.name != "slow"]


def _function(item: pytest.Item) -> tuple[object, object]:
    return item.parent, getattr(item, "originalname", item.name)

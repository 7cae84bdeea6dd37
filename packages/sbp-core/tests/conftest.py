"""The core is tested with a small rule set of its own, whatever else is installed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from sbp_core.plugins import PluginRegistry, PluginSource, discover
from sbp_core.signatures import rule_registry
from sbp_core.testing.holdings import no_thread_is_left

_PATCH = pytest.MonkeyPatch()


def _small_rules() -> PluginRegistry:
    source = PluginSource(name="small", value="small_rules", distribution="sbp-core", version="0")
    return discover([source], strict=True)


def pytest_configure() -> None:
    """Let `small_rules` be the only plugin with rules; before modules that make plans are read."""
    _PATCH.setattr(rule_registry, "discover", _small_rules)


def pytest_unconfigure() -> None:
    _PATCH.undo()


@pytest.fixture(autouse=True)
def _leave_no_thread() -> Iterator[None]:
    with no_thread_is_left():
        yield

"""Mark slow tests of conformance suites for pytest; do nothing where pytest is not installed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

__all__ = ["exhaustive"]

_Test = TypeVar("_Test", bound=Callable[..., None])


def exhaustive(test: _Test) -> _Test:
    """Mark a test as `exhaustive` for pytest: it takes minutes.

    Does nothing without pytest. A project whose tests subclass the suite lists the mark among its
    `markers`, and selects by it: `pytest -m exhaustive`.
    """
    try:
        import pytest
    except ImportError:
        return test
    marked: _Test = pytest.mark.exhaustive(test)
    return marked

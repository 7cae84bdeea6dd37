"""Marks on the tests of suites, which are there whether pytest is or not."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

__all__ = ["exhaustive"]

_Test = TypeVar("_Test", bound=Callable[..., None])


def exhaustive(test: _Test) -> _Test:
    """Give a test the mark `exhaustive` of pytest: it takes minutes.

    Nothing happens where pytest is not installed. A project whose tests subclass the suite lists
    the mark among its `markers`, and selects by it: `pytest -m exhaustive`.
    """
    try:
        import pytest
    except ImportError:
        return test
    marked: _Test = pytest.mark.exhaustive(test)
    return marked

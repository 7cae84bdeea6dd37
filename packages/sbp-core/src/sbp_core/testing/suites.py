"""A pytest plugin that runs the checks and conformance suites of an installed sbp plugin.

    pytest -p sbp_core.testing.suites --sbp-plugin my-plugin

collects them with all other tests; `sbp-plugins check my-plugin` runs them alone. The plugin object
is made with the settings of its option file, or else its defaults. A suite that needs more than the
object is skipped with a message about what it needs: subclass it in a test module. For a model, the
batch comes from a data set of the same plugin. The output of a metric sink is not read.
"""

from __future__ import annotations

import importlib
import re
import types
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any
from unittest import SkipTest

import numpy as np
from pluggy import HookimplMarker

from sbp_core.errors import SbpError
from sbp_core.plugins import KINDS, PluginEntry
from sbp_core.plugins.hooks import HookSpecs
from sbp_core.testing.plugin_check import PluginCheck

if TYPE_CHECKING:
    import pytest

__all__ = ["pytest_addoption", "pytest_collection_modifyitems", "suites"]

#: The line of a hook's docstring that names the suite of its kind.
_SUITE = re.compile(r"^\s*Suite: `([\w.]+)\.(\w+)`\.$", re.MULTILINE)

#: Suites that also run the plans; they replace the hooks' suites if their package is installed.
_RUNNING = {"planner": ("sbp_torch.testing.planner", "PlannerRunConformance")}


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option `--sbp-plugin`."""
    parser.addoption(
        "--sbp-plugin",
        action="append",
        default=[],
        metavar="NAME",
        help="check this plugin of sbp, and run the conformance suites of its kinds",
    )


@HookimplMarker("pytest")(tryfirst=True)  # before pytest selects by names and marks
def pytest_collection_modifyitems(
    session: pytest.Session, config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Add the tests of the requested plugins."""
    import pytest

    for name in config.getoption("--sbp-plugin"):
        try:
            module = types.ModuleType(name)
            vars(module).update(suites(name))
        except SbpError as error:
            raise pytest.UsageError(str(error)) from error

        class Suites(pytest.Module):
            """A stand-in for a test file with the suites."""

            def _getobj(self, found: types.ModuleType = module) -> types.ModuleType:
                return found

        collector = Suites.from_parent(session, path=session.path / name, name=name)
        items += session.genitems(collector)


def suites(name: str) -> dict[str, type]:
    """Return the test classes of an installed plugin, by name.

    Args:
        name: The name of its distribution or entry point.

    Raises:
        SbpLookupError: there is none of that name.
    """
    check = PluginCheck.of(name)
    names = ("hooks", "imports", "builds", "options", "rules", "callbacks")
    tests = {f"test_{name}": _test_of(getattr(check, f"check_{name}")) for name in names}
    found: dict[str, type] = {"TestPlugin": type("TestPlugin", (), tests)}
    for entry in check.entries:
        base = _suite(entry.kind)
        if base is not None:
            title = re.sub(r"\W+", "_", f"Test_{entry.kind}_{entry.name}")
            found[title] = _suite_of(title, base, check, entry)
    return found


def _test_of(faults: Callable[[], Iterator[str]]) -> Callable[[object], None]:
    def test(self: object) -> None:
        found = list(faults())
        assert not found, "\n".join(found)

    test.__doc__ = faults.__doc__
    return test


def _suite(kind: str) -> type | None:
    """Return the conformance suite of a kind, or None if it has none that is a class."""
    named = _SUITE.search(getattr(HookSpecs, KINDS[kind]).__doc__ or "")
    for place in (_RUNNING.get(kind), named and named.groups()):
        try:
            found = getattr(importlib.import_module(place[0]), place[1]) if place else None
        except ModuleNotFoundError:
            continue  # the suites of these kinds need sbp-torch
        if isinstance(found, type):
            return found
    return None


def _suite_of(title: str, base: type, check: PluginCheck, entry: PluginEntry) -> type:
    """Return a suite completed by a plugin's objects, or a test that is skipped with a reason."""
    supplied: dict[str, Any] = {}
    needed: frozenset[str] = getattr(base, "__abstractmethods__", frozenset())
    for method in needed:
        if method == "make_batch":
            supplied[method] = lambda self, batch_size: _batch(check, entry, batch_size)
        elif method.startswith("make_"):
            supplied[method] = lambda self: check.registry.make(
                entry.kind, entry.name, check.settings(entry)
            )
        elif method == "read":
            supplied[method] = lambda self, run_folder: None
    if missing := sorted(needed - supplied.keys()):

        def test(self: object) -> None:
            raise SkipTest(f"subclass {base.__name__}: it needs {', '.join(missing)} of you, too")

        return type(title, (), {"test_conformance": test})
    return type(title, (base,), supplied)


def _batch(check: PluginCheck, model: PluginEntry, batch_size: int) -> Mapping[str, Any]:
    """Return a batch of the first data set of the same plugin that a model accepts."""
    made: Any = check.registry.make("model", model.name, check.settings(model))
    for entry in check.entries:
        if entry.kind != "data":
            continue
        data: Any = check.registry.make("data", entry.name, check.settings(entry))
        batch: Mapping[str, Any] = data.samples(np.arange(batch_size), "train")
        try:
            made.loss(batch)
        except Exception:  # it is for other data
            continue
        return batch
    raise SkipTest("subclass ModelConformance: no data set of this plugin fits the model")

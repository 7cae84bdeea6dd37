"""Which plugin is to blame for an exception."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

from sbp_core.plugins import Factory, PluginEntry, blame

_OWN = """
def plan(request):
    return choose(request)

def choose(request):
    return loads(request)
"""


def entry(build: str, kind: str = "planner") -> PluginEntry:
    return PluginEntry(
        kind=kind,
        name="mine",
        distribution="my-dist",
        version="1.2",
        api_version=1,
        factory=Factory(build=build),
    )


def raised(folder: Path, module: str) -> Exception:
    """Return what code of a module raises, from inside a library that it calls."""
    (folder / f"{module}.py").write_text(_OWN, encoding="utf-8")
    loaded = runpy.run_path(str(folder / f"{module}.py"), {"loads": json.loads}, module)
    try:
        loaded["plan"]("{")
    except ValueError as error:
        return error
    raise AssertionError("it has to raise")


def test_the_plugin_is_named_with_the_last_lines_of_its_own_code(tmp_path: Path) -> None:
    error = raised(tmp_path, "theirs")

    told = blame(error, [entry("theirs.sub:build"), entry("another:build", "model")])

    assert told is not None
    assert told.what.startswith("planner 'mine' of my-dist 1.2 raised JSONDecodeError: ")
    file = tmp_path / "theirs.py"
    assert told.where == (
        f"{file}:6, in choose: return loads(request)",
        f"{file}:3, in plan: return choose(request)",
    )


def test_of_one_package_the_plugin_is_named_whose_module_ran(tmp_path: Path) -> None:
    error = raised(tmp_path, "theirs")
    others = [entry("theirs.models:build", "model"), entry("theirs.data:build", "data")]

    told = blame(error, [entry("theirs:build"), *others])

    assert told is not None
    assert told.what.startswith("planner 'mine' of my-dist 1.2 raised JSONDecodeError: ")


def test_all_plugins_of_a_package_are_named_if_the_code_may_be_of_any(tmp_path: Path) -> None:
    error = raised(tmp_path, "theirs")
    entries = [entry("theirs.models:build", "model"), entry("theirs.data:build", "data")]

    told = blame(error, entries)

    assert told is not None
    assert told.what.startswith("data 'mine' or model 'mine' of my-dist 1.2 raised JSONDecode")


def test_nobody_is_blamed_whose_code_did_not_run(tmp_path: Path) -> None:
    error = raised(tmp_path, "theirs")

    assert blame(error, [entry("another:build")]) is None


def test_what_calls_plugins_is_not_to_blame_for_them(tmp_path: Path) -> None:
    error = raised(tmp_path, "sbp_torch")

    assert blame(error, [entry("sbp_torch.boxing:build", "boxing")]) is None

"""Plugins that are broken in every way we know: each is named, and none stops the others."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from sbp_core.errors import SbpError, SbpLookupError
from sbp_core.plugins import PluginRegistry, PluginSource, discover
from sbp_core.plugins.discovery import installed_sources

Write = Callable[..., PluginSource]

GOOD = """
    from sbp_core.plugins import Factory, hookimpl
    SBP_API_VERSION = 1

    @hookimpl
    def sbp_planners():
        return {"good": Factory(build="nowhere:build", summary="a good one")}
"""

_NUMBERS = itertools.count()


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Write a plugin module and return its source."""
    monkeypatch.syspath_prepend(tmp_path)

    def make(text: str, distribution: str = "some-dist", name: str = "") -> PluginSource:
        module = f"fake_plugin_{next(_NUMBERS)}"
        (tmp_path / f"{module}.py").write_text(textwrap.dedent(text), encoding="utf-8")
        return PluginSource(
            name=name or module, value=module, distribution=distribution, version="2.3"
        )

    return make


def problems(registry: PluginRegistry) -> str:
    return "\n".join(map(str, registry.problems))


def test_a_healthy_plugin_is_listed_with_all_that_is_known(write: Write) -> None:
    registry = discover([write(GOOD)])

    (entry,) = registry.entries
    assert registry.problems == ()
    assert (entry.kind, entry.name, entry.distribution) == ("planner", "good", "some-dist")
    assert (entry.version, entry.api_version, entry.health) == ("2.3", 1, "ok")
    assert entry.summary == "a good one"
    assert registry.factory("planner", "good").build == "nowhere:build"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("raise OSError('the library is\\n too old')", "OSError: the library is too old"),
        ("import no_such_module_anywhere", "no_such_module_anywhere"),
        ("import sys; sys.exit(3)", "SystemExit: 3"),
        ("def broken(:", "SyntaxError"),
        ("x = 1", "states no API version"),
        ("def __getattr__(name): raise OSError('of an attribute')", "OSError: of an attribute"),
        ("SBP_API_VERSION = 3", "API version 3; this sbp-core has 2"),
        ("SBP_API_VERSION = 0", "API version 0; the oldest that works is 1"),
        ("SBP_API_VERSION = '1'", "API version '1', which is no integer"),
        ("SBP_API_VERSION = True", "API version True, which is no integer"),
        (
            """
            from sbp_core.plugins import hookimpl
            SBP_API_VERSION = 1
            @hookimpl
            def sbp_planners(config):
                return {}
            """,
            "its hooks are refused",
        ),
    ],
)
def test_a_plugin_that_cannot_be_used_is_set_aside_with_its_reason(
    write: Write, text: str, says: str
) -> None:
    bad = write(text, distribution="bad-dist")

    registry = discover([bad, write(GOOD)])

    (line,) = [entry for entry in registry.entries if entry.distribution == "bad-dist"]
    assert (line.kind, line.name, line.health) == ("-", bad.name, "broken")
    assert says in problems(registry)
    assert "bad-dist" in problems(registry)
    assert registry.names("planner") == ("good",)


def test_a_keyboard_interrupt_is_nobodys_fault(write: Write) -> None:
    source = write("raise KeyboardInterrupt")

    with pytest.raises(KeyboardInterrupt):
        discover([source])


FAULTY = """
    import sbp_core  # a module, not a hook
    from sbp_core.plugins import Factory, hookimpl
    SBP_API_VERSION = 1

    @hookimpl
    def sbp_models():
        return {{"kept": Factory(build="nowhere:build")}}

    {mark}
    def {name}():
        {body}
"""


@pytest.mark.parametrize(
    ("mark", "name", "body", "says"),
    [
        ("@hookimpl", "sbp_planers", "return {}", "is no hook; did you mean sbp_planners"),
        ("@hookimpl(specname='sbp_modles')", "f", "return {}", "did you mean sbp_models"),
        ("", "sbp_plannres", "return {}", "sbp_plannres is no hook; did you mean sbp_planners"),
        ("", "sbp_planners", "return {}", "sbp_planners is not marked with @hookimpl"),
        ("@hookimpl", "sbp_planners", "raise KeyError(3)", "sbp_planners raises KeyError: 3"),
        ("@hookimpl", "sbp_planners", "pass", "sbp_planners returns nothing"),
        ("@hookimpl", "sbp_planners", "exit()", "sbp_planners raises SystemExit"),
        ("@hookimpl", "sbp_planners", "return ['a']", "sbp_planners returns list, not name"),
        ("@hookimpl", "sbp_planners", "return {'a': 'x:y'}", "'a' as str, not as Factory"),
        ("@hookimpl", "sbp_planners", "return {3: Factory(build='x:y')}", "the name 3"),
        ("@hookimpl", "sbp_config_folders", "return 'pkg://x'", "returns str, not a list"),
        ("@hookimpl", "sbp_config_folders", "return [3]", "offers 3, not pkg://package.folder"),
        ("@hookimpl", "sbp_config_folders", "return ['conf']", "offers 'conf', not pkg://"),
        ("@hookimpl", "sbp_config_folders", "return ['pkg://sbp_core.x']", "No module named"),
        ("@hookimpl", "sbp_config_folders", "return ['file:///no/such']", "does not exist"),
        ("@hookimpl", "sbp_planners", "return {'x': Factory(build=None)}", "build=None"),
        ("@hookimpl", "sbp_planners", "return {'x': Factory(build='a:b', summary=3)}", "summary=3"),
        ("@hookimpl", "sbp_planners", "return {'x': Factory(build='a:b', config=3)}", "config=3"),
    ],
)
def test_a_fault_in_one_hook_is_named_and_leaves_the_other_hooks(
    write: Write, mark: str, name: str, body: str, says: str
) -> None:
    registry = discover([write(FAULTY.format(mark=mark, name=name, body=body))])

    assert says in problems(registry)
    assert len(registry.problems) == 1
    assert registry.names("model") == ("kept",)
    assert registry.entry("model", "kept").health == "faulty"


def test_what_a_plugin_merely_imports_is_no_misspelt_hook(write: Write) -> None:
    text = """
        from listed_plugin import sbp_runtimes as sbp_imported_by_hand  # marked, and no hook
        from textwrap import dedent as sbp_dedent
        SBP_API_VERSION = 1
    """

    registry = discover([write(text)])

    assert "sbp_dedent" not in problems(registry)
    assert "sbp_imported_by_hand" in problems(registry)


def test_two_plugins_that_claim_one_name_are_an_error_only_if_it_is_asked_for(
    write: Write,
) -> None:
    registry = discover([write(GOOD, "first-dist"), write(GOOD, "second-dist")])

    assert [entry.health for entry in registry.entries] == ["conflict", "conflict"]
    assert "first-dist and second-dist" in problems(registry)
    assert registry.names("planner") == ("good",)
    with pytest.raises(SbpLookupError, match=r"first-dist 2\.3 and second-dist 2\.3"):
        registry.factory("planner", "good")


def test_equal_entry_point_names_are_found_and_both_plugins_are_read(write: Write) -> None:
    other = GOOD.replace("good", "other")

    registry = discover([write(GOOD, "first-dist", "same"), write(other, "second-dist", "same")])

    assert registry.names("planner") == ("good", "other")
    assert "same (first-dist and second-dist)" in problems(registry)


def test_strict_raises_whatever_is_wrong(write: Write) -> None:
    assert discover([write(GOOD)], strict=True).problems == ()

    with pytest.raises(SbpError, match="states no API version"):
        discover([write("x = 1"), write(GOOD)], strict=True)


def test_config_folders_come_with_their_distribution(write: Write) -> None:
    text = """
        from sbp_core.plugins import hookimpl
        SBP_API_VERSION = 1
        @hookimpl
        def sbp_config_folders():
            return ["pkg://sbp_core.graph", "pkg://sbp_core/plugins"]
    """

    registry = discover([write(text, "a-dist")])

    assert [(folder.path, folder.distribution) for folder in registry.config_folders()] == [
        ("pkg://sbp_core.graph", "a-dist"),
        ("pkg://sbp_core/plugins", "a-dist"),
    ]


def test_an_entry_point_may_name_an_object_of_a_module(write: Write) -> None:
    text = """
        from sbp_core.plugins import Factory, hookimpl
        class Plugin:
            SBP_API_VERSION = 1
            @hookimpl
            def sbp_planners(self):
                return {"good": Factory(build="nowhere:build")}
        plugin = Plugin()
    """
    source = write(text)

    registry = discover(
        [PluginSource(name="x", value=f"{source.value}:plugin", distribution="some-dist")]
    )

    assert registry.problems == ()
    assert registry.names("planner") == ("good",)


def test_installed_distributions_are_read_and_one_on_the_path_twice_counts_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("one", "two"):
        info = tmp_path / folder / "fake_dist-1.5.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(
            "Metadata-Version: 2.1\nName: fake-dist\nVersion: 1.5\n", encoding="utf-8"
        )
        (info / "entry_points.txt").write_text(
            "[sbp]\nfake = fake_module\n[console_scripts]\nx = y:z\n", encoding="utf-8"
        )
        monkeypatch.syspath_prepend(tmp_path / folder)

    sources = [one for one in installed_sources() if one.distribution == "fake-dist"]

    assert sources == [
        PluginSource(name="fake", value="fake_module", distribution="fake-dist", version="1.5")
    ]


def test_a_distribution_without_a_name_or_with_unreadable_entry_points_stops_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = {"a": "[sbp]\nmine = not a module!\n", "b": "[sbp]\nx\n[y\n"}
    for name, text in texts.items():
        info = tmp_path / f"{name}-1.dist-info"
        info.mkdir()
        (info / "entry_points.txt").write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)

    registry = discover([one for one in installed_sources() if one.name == "mine"])

    assert "mine ((no name)): not a module! cannot be imported" in problems(registry)
    assert "names no module" in problems(registry)


def test_a_config_folder_whose_package_ends_the_process_is_named(
    write: Write, tmp_path: Path
) -> None:
    (tmp_path / "fatal_conf").mkdir()
    (tmp_path / "fatal_conf" / "__init__.py").write_text("raise SystemExit(3)", encoding="utf-8")
    text = (
        GOOD
        + """
    @hookimpl
    def sbp_config_folders():
        return ["pkg://fatal_conf", "pkg://sbp_core.graph"]
    """
    )

    registry = discover([write(text)])

    assert "config folder pkg://fatal_conf cannot be read: SystemExit: 3" in problems(registry)
    assert [one.path for one in registry.config_folders()] == ["pkg://sbp_core.graph"]
    assert registry.names("planner") == ("good",)


def test_a_plugin_is_left_out_by_its_name_or_distribution(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    fatal = write("raise SystemExit(1)", "Bad_Dist", "fatal")
    other = write("raise SystemExit(1)", "other-dist", "Bad_Entry")
    monkeypatch.setenv("SBP_DISABLE_PLUGINS", "bad-dist, bad_entry")

    registry = discover([fatal, other, write(GOOD)], strict=True)

    assert registry.names("planner") == ("good",)
    assert {(one.name, one.health) for one in registry.entries} == {
        ("fatal", "disabled"),
        ("Bad_Entry", "disabled"),
        ("good", "ok"),
    }
    with pytest.raises(SbpLookupError, match=r"fatal.*is left out by SBP_DISABLE_PLUGINS"):
        registry.entry("planner", "bad")


def test_a_name_to_leave_out_that_nobody_has_is_told(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SBP_DISABLE_PLUGINS", "some-dits")

    registry = discover([write(GOOD)])

    assert registry.names("planner") == ("good",)
    assert problems(registry) == (
        "SBP_DISABLE_PLUGINS (the environment): 'some-dits' is no plugin; did you mean some-dist?"
    )

"""Asking the registry: names, configs, and objects that are imported only when made."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from sbp_core.errors import ConfigError, PluginError, SbpError, SbpLookupError
from sbp_core.plugins import Factory, PluginEntry, PluginRegistry, Problem, factories


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    size: int = 1


def registry(build: str, *problems: Problem, distribution: str = "some-dist") -> PluginRegistry:
    factory = Factory(build=build, config=Config)
    entry = PluginEntry(
        kind="planner",
        name="mine",
        distribution=distribution,
        version="1.0",
        api_version=1,
        factory=factory,
    )
    return PluginRegistry(entries=(entry,), problems=problems)


def test_an_object_is_made_with_its_settings_and_imported_only_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "late_module.py").write_text(
        "class Late:\n"
        "    def plan(self, request): ...\n"
        "    @classmethod\n"
        "    def build(cls, config):\n"
        "        late = cls()\n"
        "        late.size = config.size * 2\n"
        "        return late\n",
        encoding="utf-8",
    )
    monkeypatch.syspath_prepend(tmp_path)
    plugins = registry("late_module:Late.build")

    config = plugins.configure("planner", "mine", {"size": 4})
    imported_early = "late_module" in sys.modules
    made = plugins.make("planner", "mine", {"size": 4})

    assert config == Config(size=4)
    assert not imported_early
    assert vars(made) == {"size": 8}


def test_a_table_of_plugins_becomes_factories_by_name() -> None:
    made = factories("pkg.{name}:{Name}Planner", {"ilp": (Config, "exact"), "osdp": (Config, "")})

    assert made == {
        "ilp": Factory(build="pkg.ilp:IlpPlanner", config=Config, summary="exact"),
        "osdp": Factory(build="pkg.osdp:OsdpPlanner", config=Config),
    }


@pytest.mark.parametrize("target", ["Planner", "build"])
def test_a_plugin_names_a_class_or_a_function(
    target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "two_ways.py").write_text(
        "class Planner:\n"
        "    def __init__(self, config): self.size = config.size\n"
        "    def plan(self, request): ...\n"
        "def build(config): return Planner(config)\n",
        encoding="utf-8",
    )
    monkeypatch.syspath_prepend(tmp_path)

    made = registry(f"two_ways:{target}").make("planner", "mine", {"size": 4})

    assert type(made).__name__ == "Planner"
    assert vars(made) == {"size": 4}


def test_settings_are_checked_before_anything_is_imported() -> None:
    with pytest.raises(ConfigError, match=r"planner\.sise") as caught:
        registry("no_such_module:build").make("planner", "mine", {"sise": 4}, where="x.yaml")

    assert caught.value.todo == "did you mean 'planner.size'?"
    assert caught.value.where == ("x.yaml",)


def test_an_unknown_name_gets_the_nearest_and_the_list() -> None:
    with pytest.raises(SbpLookupError) as caught:
        registry("x:y").factory("planner", "mein")

    assert caught.value.accepted == "mine"
    assert caught.value.todo == "did you mean 'mine'?"
    assert caught.value.where == ()


def test_a_former_name_finds_the_plugin_with_a_warning_that_names_the_new_one() -> None:
    (entry,) = registry("x:y").entries
    factory = Factory(build="x:y", config=Config, former_names=("old",))
    renamed = PluginRegistry(entries=(replace(entry, factory=factory),))

    with pytest.warns(FutureWarning, match="planner=old has a new name: planner=mine"):
        found = renamed.factory("planner", "old")

    assert found is factory
    assert renamed.names("planner") == ("mine",)
    assert renamed.former_names("planner") == {"old": "mine"}


def test_an_unknown_name_mentions_plugins_that_could_not_be_read() -> None:
    problem = Problem(plugin="theirs", distributions=("their-dist",), what="cannot be imported: x")

    with pytest.raises(SbpLookupError, match=r"their-dist.*cannot be imported: x"):
        registry("x:y", problem).factory("planner", "theirs")


def broken(module: str, what: str = "is too old") -> Problem:
    return Problem(
        plugin="p", distributions=("their-dist",), what=what, version="3.1", module=module
    )


def test_a_broken_plugin_that_may_bring_a_name_is_named_first() -> None:
    with pytest.raises(SbpLookupError) as caught:
        registry("x:y", broken("nowhere.plugin")).factory("planner", "zzz")

    assert caught.value.what == (
        "planner=zzz: the plugin 'p' of their-dist 3.1 that may provide it cannot be used: "
        "it is too old"
    )
    assert caught.value.todo == "correct that plugin, or choose one of these"


def test_a_slip_of_the_pen_is_no_broken_plugin() -> None:
    with pytest.raises(SbpLookupError) as caught:
        registry("x:y", broken("nowhere.plugin")).factory("planner", "mien")

    assert caught.value.todo == "did you mean 'mine'?"
    assert caught.value.where == ("a plugin with a problem: p (their-dist): is too old",)


def test_a_plugin_that_has_the_option_file_surely_brings_the_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "with_option" / "conf" / "planner").mkdir(parents=True)
    (tmp_path / "with_option" / "__init__.py").write_text("raise OSError", encoding="utf-8")
    (tmp_path / "with_option" / "conf" / "planner" / "mien.yaml").write_text("", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    others = broken("nowhere.plugin"), broken("with_option.plugin", "raises OSError")

    with pytest.raises(SbpLookupError, match="that provides it cannot be used: raises OSError"):
        registry("x:y", *others).factory("planner", "mien")


@pytest.mark.parametrize(
    ("body", "what", "where"),
    [
        ("def build(config): ...", "returned None, not a planner", "wrong_0:build"),
        ("def build(config): return 3", "returned int, not a planner with the", "wrong_1:build"),
        ("class build:\n  def __init__(self, c): ...", "returned build, not a pl", "wrong_2:build"),
        (
            "class P:\n  def plan(self, r): ...\ndef build(c): return P",
            "returned the class P, not a planner",
            "wrong_3:build",
        ),
        (
            "def build(): ...",
            "raised TypeError: build() takes 0 positional arguments but 1 was given",
            "wrong_4:build",
        ),
        (
            "def build(config, x): ...",
            "raised TypeError: build() missing 1 required positional argument: 'x'",
            "wrong_5:build",
        ),
        (
            "def build(config):\n    return {}['missing']",
            "raised KeyError: 'missing'",
            "wrong_6.py:2, in build: return {}['missing']",
        ),
        ("raise OSError('too old')", "raised OSError: too old", "wrong_7.py:1, in <module>"),
    ],
)
def test_a_target_that_makes_no_planner_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, what: str, where: str
) -> None:
    module = where[: len("wrong_0")]
    (tmp_path / f"{module}.py").write_text(body, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)

    with pytest.raises(PluginError) as caught:
        registry(f"{module}:build").make("planner", "mine")

    assert caught.value.what.startswith(f"planner 'mine' of some-dist 1.0 {what}")
    assert where in caught.value.where[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class FailingConfig:
    size: int = 1

    def __post_init__(self) -> None:
        {}[self.size]  # a fault of the plugin's, and no refusal


def test_a_config_that_fails_is_its_plugins_fault_and_no_wrong_setting() -> None:
    entry = replace(
        registry("x:y").entries[0], factory=Factory(build="test_x:y", config=FailingConfig)
    )

    with pytest.raises(PluginError) as caught:
        PluginRegistry(entries=(entry,)).configure("planner", "mine", {})

    assert caught.value.what == "planner 'mine' of some-dist 1.0 raised KeyError: 1"


def test_an_unknown_kind_gets_the_list_of_kinds() -> None:
    with pytest.raises(SbpLookupError, match="did you mean 'planner'"):
        registry("x:y").names("planer")


def test_a_target_that_needs_something_uninstalled_names_what_to_install() -> None:
    with pytest.raises(SbpError) as caught:
        registry("no_such_module:build").make("planner", "mine")

    assert "no_such_module" in caught.value.what
    assert caught.value.where == ("distribution some-dist 1.0",)


def test_a_missing_module_is_found_among_the_extras_of_its_distribution(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "needs_more.py").write_text("import fancylib\n", encoding="utf-8")
    info = tmp_path / "extra_dist-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: extra-dist\nVersion: 1.0\n"
        'Requires-Dist: fancylib-cuda12x>=3; extra == "gpu"\n'
        'Requires-Dist: fancylib-cuda12x>=3; extra == "test"\n'
        'Requires-Dist: otherlib; extra == "all"\n',
        encoding="utf-8",
    )
    monkeypatch.syspath_prepend(tmp_path)

    with pytest.raises(SbpError) as caught:
        registry("needs_more:build", distribution="extra-dist").make("planner", "mine")

    assert caught.value.todo == "pip install 'extra-dist[gpu]'"


@pytest.mark.parametrize("build", ["json:no_such_thing", "json:decoder.nothing", "json:__name__"])
def test_a_target_that_is_nothing_to_call_is_its_authors_fault(build: str) -> None:
    with pytest.raises(SbpError) as caught:
        registry(build).make("planner", "mine")

    assert build in caught.value.what
    assert caught.value.todo == "report it to the authors of some-dist"

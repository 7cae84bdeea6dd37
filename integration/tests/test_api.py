"""The tools of the declared API, on repositories made up for it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

import api.__main__
from api.compare import Level, compare, next_version
from api.document import FOLDER, documents
from api.imports import faults
from api.public import FILE, LIMIT, Public, broken_promises, functions_called_like_modules
from api.rooms import ROOT, Packages
from api.users import copied_imports

ROOM = '''"""Sums and products."""

from mine.behind import add

__all__ = ["add"]
'''

BEHIND = '''"""Where the names of the room are defined."""


def add(a, b):
    """Return the sum."""
    return a + b


def secret():
    """Return nothing."""
'''

#: Who reads what.
PUBLIC = """
[sums]
title = "Add"
about = "For those who add."

[sums.stable]
mine = ["add"]
"""

PROJECT = '[project]\nname = "mine"\nversion = "{version}"\n'


def write(root: Path, path: str, text: str) -> None:
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, "utf-8")


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository of one package with one room, and of a second package that uses it."""
    write(tmp_path, "packages/mine/pyproject.toml", PROJECT.format(version="1.2.3"))
    write(tmp_path, "packages/mine/CHANGELOG.md", "# Changelog\n\n## 1.2.3\n\n- First.\n")
    write(tmp_path, "packages/mine/src/mine/__init__.py", ROOM)
    write(tmp_path, "packages/mine/src/mine/behind.py", BEHIND)
    write(tmp_path, "packages/yours/src/yours/__init__.py", "from mine import add\n")
    write(tmp_path, str(FILE), PUBLIC)
    return tmp_path


def git(root: Path, *arguments: str) -> None:
    names = ["-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run(["git", "-C", str(root), *names, *arguments], check=True, capture_output=True)


def release(root: Path, version: str) -> None:
    if not (root / ".git").exists():
        git(root, "init", "--quiet")
    git(root, "add", "--all")
    git(root, "commit", "--quiet", "--message", "A release")
    git(root, "tag", f"mine-v{version}")


def test_an_import_from_a_room_is_no_fault(repository: Path) -> None:
    assert list(faults(Packages.below(repository))) == []


@pytest.mark.parametrize(
    ("statement", "what"),
    [
        ("from mine.behind import add", "mine.behind is private; import from mine"),
        ("from mine import behind", "mine.behind is private; import from mine"),
        ("import mine.behind", "mine.behind is private; import from mine"),
        ("from mine import secret", "mine does not offer 'secret'"),
        ("def f():\n    from mine.behind import secret", "mine.behind is private"),
    ],
)
def test_an_import_from_behind_a_room_is_told_with_the_line(
    repository: Path, statement: str, what: str
) -> None:
    write(repository, "packages/yours/src/yours/__init__.py", f"\n{statement}\n")

    (fault,) = faults(Packages.below(repository))

    assert what in fault.what
    assert str(fault.path) == "packages/yours/src/yours/__init__.py"
    assert fault.line == statement.count("\n") + 2


def test_a_package_may_look_behind_its_own_rooms(repository: Path) -> None:
    write(repository, "packages/mine/src/mine/other.py", "from mine.behind import secret\n")

    assert list(faults(Packages.below(repository))) == []


@pytest.mark.parametrize(
    ("old", "new", "what"),
    [
        ('["add"]', '["add", "lost"]', "offers 'lost', and has no such name"),
    ],
)
def test_a_room_that_is_not_in_order_is_told(
    repository: Path, old: str, new: str, what: str
) -> None:
    write(repository, "packages/mine/src/mine/__init__.py", ROOM.replace(old, new))

    (fault,) = faults(Packages.below(repository))

    assert what in fault.what


@pytest.mark.parametrize(
    ("released", "level", "wanted"),
    [
        ((0, 3, 1), Level.NOTHING, (0, 3, 1)),
        ((0, 3, 1), Level.MINOR, (0, 3, 2)),
        ((0, 3, 1), Level.BREAKS_PROVISIONAL, (0, 4, 0)),
        ((0, 3, 1), Level.MAJOR, (0, 4, 0)),
        ((1, 3, 1), Level.MINOR, (1, 4, 0)),
        ((1, 3, 1), Level.BREAKS_PROVISIONAL, (1, 4, 0)),
        ((1, 3, 1), Level.MAJOR, (2, 0, 0)),
    ],
)
def test_versions_go_up_as_semantic_versioning_says(
    released: tuple[int, int, int], level: Level, wanted: tuple[int, int, int]
) -> None:
    assert next_version(released, level) == wanted


def test_without_a_release_there_is_nothing_to_compare(repository: Path) -> None:
    git(repository, "init", "--quiet")

    (verdict,) = compare(repository)

    assert verdict.ok
    assert str(verdict) == "mine 1.2.3: nothing of it was released"


@pytest.mark.parametrize(
    ("file", "old", "new", "wanted", "what"),
    [
        ("behind.py", "def secret", "def secrets", (1, 2, 3), ""),
        ("behind.py", "def add(a, b)", "def add(a, b, c)", (2, 0, 0), "Parameter was added"),
        ("behind.py", "def add(a, b)", "def add(a, b, c=0)", (1, 2, 3), ""),
        ("__init__.py", '["add"]', "[]", (2, 0, 0), "mine does not offer add any more"),
        ("__init__.py", '["add"]', '["add", "behind"]', (1, 2, 3), ""),
    ],
)
def test_a_change_asks_for_the_version_that_it_should(
    repository: Path, file: str, old: str, new: str, wanted: tuple[int, int, int], what: str
) -> None:
    release(repository, "1.2.3")
    path = repository / "packages/mine/src/mine" / file
    path.write_text(path.read_text("utf-8").replace(old, new), "utf-8")

    (verdict,) = compare(repository)

    assert verdict.wanted == wanted
    assert what in " ".join(change.what for change in verdict.changes)
    assert verdict.ok == (wanted == (1, 2, 3))


def test_a_version_that_does_needs_its_heading_in_the_changelog(repository: Path) -> None:
    release(repository, "1.2.3")
    write(repository, "packages/mine/src/mine/__init__.py", ROOM.replace('["add"]', "[]"))
    write(repository, "packages/mine/pyproject.toml", PROJECT.format(version="2.0.0"))

    (without,) = compare(repository)
    write(repository, "packages/mine/CHANGELOG.md", "# Changelog\n\n## 2.0.0\n\n- `add` is gone.\n")
    (with_heading,) = compare(repository)

    assert not without.ok
    assert "the changelog has no heading for this version" in str(without)
    assert with_heading.ok


def test_what_breaks_a_provisional_name_asks_for_a_minor_version(repository: Path) -> None:
    write(repository, str(FILE), PUBLIC.replace("stable", "provisional"))
    release(repository, "1.2.3")
    write(repository, "packages/mine/src/mine/__init__.py", ROOM.replace('["add"]', "[]"))

    (verdict,) = compare(repository)

    assert verdict.wanted == (1, 3, 0)
    assert "breaks mine does not offer add any more" in str(verdict)


@pytest.mark.parametrize(
    ("old", "new", "wanted", "what"),
    [
        ('stable]\nmine = ["add"]', "stable]", (2, 0, 0), "breaks mine.add is internal now"),
        ("stable]", "provisional]", (2, 0, 0), "breaks mine.add is provisional now"),
        ('["add"]', '["add", "secret"]', (1, 3, 0), "new    mine offers secret"),
    ],
)
def test_a_promise_that_is_given_or_taken_back_is_a_change(
    repository: Path, old: str, new: str, wanted: tuple[int, int, int], what: str
) -> None:
    room = ROOM.replace("import add", "import add, secret").replace('["add"]', '["add", "secret"]')
    write(repository, "packages/mine/src/mine/__init__.py", room)
    release(repository, "1.2.3")
    write(repository, str(FILE), PUBLIC.replace(old, new))

    (verdict,) = compare(repository)

    assert verdict.wanted == wanted
    assert what in str(verdict)


def test_a_method_of_a_public_class_counts_and_other_names_of_its_module_do_not(
    repository: Path,
) -> None:
    path = repository / "packages/mine/src/mine/behind.py"
    path.write_text(BEHIND + "\n\nclass add:\n    def of(self, a):\n        return a\n", "utf-8")
    release(repository, "1.2.3")
    path.write_text(path.read_text("utf-8").replace("of(self, a)", "of(self)"), "utf-8")

    (verdict,) = compare(repository)

    assert verdict.wanted == (2, 0, 0)


def test_a_release_from_before_the_declaration_goes_by_its_docstrings(repository: Path) -> None:
    told = ROOM.replace('products."""', 'products.\n\nStability: stable.\n"""')
    write(repository, "packages/mine/src/mine/__init__.py", told)
    (repository / FILE).unlink()
    release(repository, "1.2.3")
    write(repository, "packages/mine/src/mine/__init__.py", ROOM)
    write(repository, str(FILE), PUBLIC)

    (same,) = compare(repository)
    write(repository, str(FILE), "")
    (without,) = compare(repository)

    assert same.changes == ()
    assert without.wanted == (2, 0, 0)


def test_a_copy_without_tags_of_releases_is_refused_and_not_taken_for_unchanged(
    repository: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(api.__main__, "ROOT", repository)
    git(repository, "init", "--quiet")

    without = api.__main__.main(["compare"])
    said = capsys.readouterr().out
    release(repository, "1.2.3")

    assert without == 1
    assert "nothing was compared" in said and "git fetch --tags" in said
    assert api.__main__.main(["compare"]) == 0


def test_internal_names_may_change(repository: Path) -> None:
    write(repository, str(FILE), "")
    release(repository, "1.2.3")
    write(repository, "packages/mine/src/mine/__init__.py", ROOM.replace('["add"]', "[]"))

    (verdict,) = compare(repository)

    assert verdict.ok
    assert verdict.changes == ()


PLANNER = '''"""What planners are, and how they are tested."""

from abc import ABC, abstractmethod
from typing import Protocol

__all__ = ["Planner", "PlannerConformance"]


class Planner(Protocol):
    """Plans."""

    quick: bool = True

    def plan(self, request: int) -> Plan:
        """Return a plan."""


class Plan(ABC):
    """What a planner returns."""

    @abstractmethod
    def cost(self) -> float:
        """Return what it costs."""

    def describe(self):
        """Return nothing."""

    def _hidden(self):
        """Return nothing."""


class PlannerConformance(ABC):
    """What every planner must do."""

    @abstractmethod
    def make_planner(self):
        """Return a planner."""

    def test_it_plans(self):
        """Not to be written by the author of a planner."""
'''

HOOKS = '''
KINDS = {"planner": "mine_planners"}


class HookSpecs:
    def mine_planners(self):
        """Planners: `mine.planner.Planner`.

        Suite: `mine.planner.PlannerConformance`.
        """
'''


#: The names of planners, for a reader of their own.
PLANNERS = """
[planners]
title = "Plan"
about = "For those who plan."
kinds = ["planner"]
also = ["mine.add"]

[planners.provisional]
"mine.planner" = ["Planner", "PlannerConformance"]
"""


@pytest.fixture
def with_hooks(repository: Path) -> Path:
    """The same repository, with a hook for planners."""
    write(repository, "packages/core/src/sbp_core/plugins/hooks.py", HOOKS)
    for folder in ("sbp_core", "sbp_core/plugins"):
        write(repository, f"packages/core/src/{folder}/__init__.py", "")
    write(repository, "packages/mine/src/mine/planner.py", PLANNER)
    write(repository, str(FILE), PUBLIC + PLANNERS)
    return repository


def pages(root: Path) -> dict[str, str]:
    made = documents(Packages.below(root), Public.below(root))
    return {path.name: text for path, text in made.items() if path.parent == FOLDER}


def test_there_is_a_page_for_each_reader_and_one_for_all_other_names(with_hooks: Path) -> None:
    made = pages(with_hooks)

    assert [*made] == ["README.md", "sums.md", "planners.md", "internal.md"]
    assert "| [Plan](planners.md) | 2 |" in made["README.md"]
    assert "- `mine.planner`" not in made["internal.md"]


def test_what_no_reader_is_promised_is_on_the_page_of_internal_names(with_hooks: Path) -> None:
    room = ROOM.replace("import add", "import add, secret").replace('["add"]', '["add", "secret"]')
    write(with_hooks, "packages/mine/src/mine/__init__.py", room)

    assert "- `mine`: `secret`" in pages(with_hooks)["internal.md"].splitlines()


def test_a_page_has_a_line_a_name(with_hooks: Path) -> None:
    lines = pages(with_hooks)["sums.md"].splitlines()

    assert "Sums and products." in lines
    assert "- `add(a, b)`: Return the sum. *stable*" in lines


def test_a_page_leads_to_names_of_other_readers(with_hooks: Path) -> None:
    assert "- `mine.add`: [Add](sums.md)" in pages(with_hooks)["planners.md"].splitlines()


def test_the_page_says_what_a_plugin_author_writes_and_which_suite_tests_it(
    with_hooks: Path,
) -> None:
    lines = pages(with_hooks)["planners.md"].splitlines()

    assert (
        "| planner | `mine_planners` | Planners: `mine.planner.Planner`. "
        "| `mine.planner.PlannerConformance`: `make_planner` |"
    ) in lines


def test_the_page_has_the_methods_of_what_a_plugin_supplies_and_of_what_they_return(
    with_hooks: Path,
) -> None:
    page = pages(with_hooks)["planners.md"]

    assert page.partition("```text\n# kind planner\n")[2].partition("\n\n")[0].splitlines() == [
        "class Planner(Protocol):",
        "    quick: bool = True",
        "    def plan(self, request: int) -> Plan: ...",
        "class Plan(ABC):",
        "    def cost(self) -> float: ...",
        "    def describe(self): ...  # has a default",
    ]


@pytest.mark.parametrize("name", ["Planner", "PlannerConformance"])
def test_a_hook_that_names_what_no_room_offers_is_refused(with_hooks: Path, name: str) -> None:
    write(
        with_hooks,
        "packages/core/src/sbp_core/plugins/hooks.py",
        HOOKS.replace(f"mine.planner.{name}`", f"mine.behind.{name}`"),
    )

    with pytest.raises(LookupError, match=f"mine.behind.{name}, which no room offers"):
        pages(with_hooks)


@pytest.mark.parametrize(
    ("old", "new", "what"),
    [
        ('["add"]', '["add", "lost"]', "mine.lost is listed, and no module offers it"),
        ('mine = ["add"]', '"mine.behind" = ["add"]', "mine.behind.add is listed, and no module"),
        ('["add"]', '["add", "add"]', "mine.add is listed 2 times"),
        ('["mine.add"]', '["mine.secret"]', "mine.secret is no public name, and planners.also"),
        (
            '["Planner", ',
            "[",
            "mine.planner.Planner is no public name, and a plugin of kind planner",
        ),
        (', "PlannerConformance"]', "]", "PlannerConformance is no public name, and a plugin of"),
    ],
)
def test_a_declaration_that_does_not_hold_is_told(
    with_hooks: Path, old: str, new: str, what: str
) -> None:
    packages = Packages.below(with_hooks)
    assert list(broken_promises(packages, Public.below(with_hooks))) == []

    write(with_hooks, str(FILE), (PUBLIC + PLANNERS).replace(old, new))

    assert what in " ".join(broken_promises(packages, Public.below(with_hooks)))


def test_two_public_names_that_are_alike_are_told(with_hooks: Path) -> None:
    write(with_hooks, "packages/yours/src/yours/__init__.py", '__all__ = ["add"]\nadd = 1\n')
    write(
        with_hooks,
        str(FILE),
        PUBLIC + PLANNERS.replace('"mine.planner" =', 'yours = ["add"]\n"mine.planner" ='),
    )

    (told,) = broken_promises(Packages.below(with_hooks), Public.below(with_hooks))

    assert told == "public names are alike: mine.add, yours.add"


def test_more_public_names_than_the_limit_are_told(repository: Path) -> None:
    names = [f"name_{number}" for number in range(LIMIT)]
    write(repository, "packages/yours/src/yours/__init__.py", f"__all__ = {names}\n")
    most = f"[all]\ntitle = 'All'\nabout = 'All.'\n[all.stable]\nyours = {names}\n"
    write(repository, str(FILE), most)

    assert list(broken_promises(Packages.below(repository), Public.below(repository))) == []
    write(repository, str(FILE), most + 'mine = ["add"]\n')
    (told,) = broken_promises(Packages.below(repository), Public.below(repository))

    assert told == "151 names are public, and at most 150 may be"


def test_a_function_that_is_called_like_a_module_of_its_package_is_told(repository: Path) -> None:
    assert list(functions_called_like_modules(Packages.below(repository))) == []

    write(repository, "packages/mine/src/mine/add.py", '"""A module."""\n')
    (told,) = functions_called_like_modules(Packages.below(repository))

    assert told == "mine.add is a module, and mine offers something else of that name"


#: Files whose code readers copy, and how a line of Python stands there.
SHOWN = {
    "README.md": "```python\n{}\n```\n",
    "docs/how-to/page.md": "Text.\n\n```python\n>>> {}\n\n```\n",
    "docs/tutorials/first.md": '```console\n$ python -c "{}"\n```\n',
    "packages/mine/README.md": "1. One\n\n   ```python\n   {}\n   ```\n",
    "integration/example-plugin/README.md": "```python\n{}\n```\n",
    "integration/example-plugin/src/example/planner.py": '"""A planner."""\n\n{}\n',
    "integration/example-plugin/tests/test_it.py": "{}\n",
    "packages/core/src/sbp_core/plugins/templates/pass.py.txt": '"""$kind."""\n\n{}\n',
}


@pytest.mark.parametrize("file", SHOWN)
@pytest.mark.parametrize(
    ("statement", "told"),
    [
        ("from mine import add", ""),
        ("import mine; mine.add(1, 2)", ""),
        ("from elsewhere import secret", ""),
        ("from mine import secret", "mine.secret is not public"),
        ("from mine.behind import add", "mine.behind.add is not public"),
        ("from mine import behind; behind.secret()", "mine.behind.secret is not public"),
        ("import mine.behind as b; b.secret()", "mine.behind.secret is not public"),
        ("import mine.behind; mine.behind.secret()", "mine.behind.secret is not public"),
    ],
)
def test_code_that_readers_copy_imports_public_names_only(
    repository: Path, file: str, statement: str, told: str
) -> None:
    write(repository, file, SHOWN[file].format(statement))

    found = list(copied_imports(Packages.below(repository), Public.below(repository)))

    assert [fault.what for fault in found] == ([told] if told else [])
    lines = SHOWN[file].partition("{}")[0].count("\n")
    assert all(str(fault.path) == file and fault.line == lines + 1 for fault in found)


def test_a_module_that_one_example_imports_is_known_to_the_next(repository: Path) -> None:
    write(repository, "README.md", "```python\n>>> import mine\n>>> mine.secret()\n\n```\n")

    (fault,) = copied_imports(Packages.below(repository), Public.below(repository))

    assert (fault.line, fault.what) == (3, "mine.secret is not public")


def test_python_that_cannot_be_read_is_told(repository: Path) -> None:
    write(repository, "README.md", "```python\nfrom mine import\n```\n")

    (fault,) = copied_imports(Packages.below(repository), Public.below(repository))

    assert str(fault).startswith("README.md:2: no Python: ")


def test_changelogs_name_what_there_was(repository: Path) -> None:
    write(repository, "packages/mine/CHANGELOG.md", "```python\nfrom mine import secret\n```\n")

    assert not list(copied_imports(Packages.below(repository), Public.below(repository)))


@pytest.mark.parametrize(
    ("file", "text"),
    [
        (str(FILE), PUBLIC.replace('["add"]', '["add", "lost"]')),
        ("README.md", SHOWN["README.md"].format("from mine import secret")),
        ("packages/mine/src/mine/add.py", '"""A module."""\n'),
        ("packages/yours/src/yours/__init__.py", "from mine.behind import add\n"),
    ],
)
def test_the_command_fails_for_each_fault_and_passes_without(
    repository: Path, monkeypatch: pytest.MonkeyPatch, file: str, text: str
) -> None:
    monkeypatch.setattr(api.__main__, "ROOT", repository)
    assert api.__main__.main(["check"]) == 0

    write(repository, file, text)

    assert api.__main__.main(["check"]) == 1


def test_pages_that_are_missing_changed_or_too_many_are_told_and_mended(
    with_hooks: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(api.__main__, "ROOT", with_hooks)
    write(with_hooks, str(FOLDER / "gone.md"), "# Gone\n")
    write(with_hooks, str(FOLDER / "sums.md"), "# Changed\n")

    assert api.__main__.main(["document", "--check"]) == 1
    told = capsys.readouterr().out
    assert all(f"{FOLDER}/{name}.md is not what" in told for name in ("gone", "sums", "planners"))
    assert api.__main__.main(["document"]) == 0
    assert api.__main__.main(["document", "--check"]) == 0
    assert not (with_hooks / FOLDER / "gone.md").exists()


def test_the_public_api_of_this_repository_fits_its_limit_and_holds() -> None:
    public = Public.below(ROOT)

    assert len(public.listed) <= LIMIT
    assert len(next(one for one in public.readers if one.key == "train").names) <= 15
    assert not list(broken_promises(Packages.below(ROOT), public))

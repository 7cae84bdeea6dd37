"""The tools of the declared API, on repositories made up for it."""

from __future__ import annotations

from pathlib import Path

import pytest
from api_repository import PUBLIC, ROOM, make_repository, write

import api.__main__
from api.document import FOLDER, documents
from api.imports import faults
from api.public import FILE, LIMIT, Public, broken_promises, functions_called_like_modules
from api.rooms import ROOT, Packages
from api.users import copied_imports


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    return make_repository(tmp_path)


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

"""What sessions of nox find and run: touched packages, versions, commands beside tests."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

import repository
from beside import beside


def touched(*paths: str) -> list[str]:
    return [package.name for package in repository.touched_packages(paths)]


def test_what_the_core_changes_touches_every_package() -> None:
    assert touched("packages/sbp-core/src/sbp_core/sbp.py") == [
        package.name for package in repository.PACKAGES
    ]


def test_a_plugin_that_nobody_declares_touches_itself_alone() -> None:
    assert touched("packages/planner/src/sbp_planner/plugin.py") == ["planner"]


def test_packages_that_only_tests_need_count_too() -> None:
    touching = touched("packages/sbp-torch/README.md")

    # Their tests run plans, which they themselves only make.
    assert {"sbp-aten", "planner", "sbp-torch"} <= {*touching}
    assert "sbp-core" not in touching


def test_integration_and_documents_touch_no_package() -> None:
    assert touched("integration/soak.py", "docs/how-to/pins.md", "README.md") == []


def test_what_all_share_touches_all() -> None:
    every = [package.name for package in repository.PACKAGES]

    assert touched("docs/how-to/pins.md", "noxfile.py") == every
    assert touched("constraints.txt") == every
    assert touched("integration/repository.py") == every


def test_others_are_what_packages_declare_but_ours() -> None:
    needed = {repository.name_of(entry) for entry in repository.needed_of_others()}

    assert {"hydra-core", "numpy", "torch"} <= needed
    assert not any(name.startswith("sbp-") for name in needed)
    assert "pytest" not in needed


def test_without_pytorch_everything_else_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = repository.needed_of_others(with_tests=True)
    monkeypatch.setattr(repository, "TORCH", "")

    missing = whole - repository.needed_of_others(with_tests=True)

    assert {repository.name_of(entry) for entry in missing} == {"torch"}


def test_every_declared_package_has_a_resolved_version_but_those_of_gpus() -> None:
    lines = repository.CONSTRAINTS.read_text("utf-8").splitlines()
    held = {line.partition("==")[0] for line in lines if not line.startswith("#")}

    needed = repository.needed_of_others(with_tests=True, with_extras=True)
    names = {repository.name_of(entry).lower() for entry in needed}

    assert {name for name in names - held if not repository.OF_TORCH.match(name)} == set()
    assert {name for name in held if repository.OF_TORCH.match(name)} == set()


def test_continuous_integration_runs_sessions_that_there_are_and_nothing_else() -> None:
    workflow = yaml.safe_load((repository.ROOT / ".github/workflows/ci.yml").read_text("utf-8"))
    (job,) = workflow["jobs"].values()
    matrix = job["strategy"]["matrix"]
    named = {*matrix["session"], *(one["session"] for one in matrix["include"])}

    listed = subprocess.run(
        [sys.executable, "-m", "nox", "--list", "--json", "-s", *sorted(named)],
        cwd=repository.ROOT,
        capture_output=True,
        text=True,
    )

    assert listed.returncode == 0, listed.stderr  # names those that there are not
    assert {one["name"] for one in json.loads(listed.stdout)} == named
    assert {"tests", "lowest", "newest", "cold", "docs", "build"} <= named
    pythons = {*matrix["python"], *(one["python"] for one in matrix["include"])}
    assert pythons == {"3.11", "3.12", "3.13"}
    assert [step["run"] for step in job["steps"] if "run" in step] == [
        "python -m pip install nox",
        "python -m nox -s ${{ matrix.session }}",
    ]


class _Session(SimpleNamespace):
    """What `beside` asks of a session of nox."""

    def __init__(self) -> None:
        bin_paths = [str(Path(sys.executable).parent)]
        super().__init__(virtualenv=SimpleNamespace(bin_paths=bin_paths), logged=[])

    def log(self, text: str) -> None:
        self.logged.append(text)

    def error(self, text: str) -> None:
        raise RuntimeError(text)


def test_what_runs_beside_others_is_waited_for_and_printed(tmp_path: Path) -> None:
    session = _Session()
    wait = "import pathlib, time\nwhile not pathlib.Path('go').exists(): time.sleep(0.01)\nprint(7)"

    with beside(session, tmp_path, "python", "-c", wait):
        (tmp_path / "go").touch()  # it runs while the block does

    assert session.logged[-1].endswith("\n7")


def test_what_fails_beside_others_fails_the_session(tmp_path: Path) -> None:
    session = _Session()

    with (
        pytest.raises(RuntimeError, match="exit code 3"),
        beside(session, tmp_path, "python", "-c", "print('why'); raise SystemExit(3)"),
    ):
        pass

    assert session.logged[-1].endswith("\nwhy")


def test_what_runs_beside_a_block_that_fails_is_ended(tmp_path: Path) -> None:
    with (
        pytest.raises(ZeroDivisionError),
        beside(_Session(), tmp_path, "python", "-c", "import time; time.sleep(600)"),
    ):
        raise ZeroDivisionError


def test_links_that_lead_nowhere_are_found_and_code_is_no_link(tmp_path: Path) -> None:
    text = """[`here`](README.md), [gone](gone.md#part), [far](https://example.org), `x[0](y)`

```python
model["head"](batch["x"])
```

[last](docs/none.md)
"""
    (tmp_path / "README.md").write_text(text, "utf-8")

    assert repository.dead_links(tmp_path) == ["README.md: gone.md", "README.md: docs/none.md"]
    assert repository.dead_links() == []

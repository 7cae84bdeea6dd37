"""Which packages a change touches, as the session `changed` of nox tests them."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture(scope="session")  # nox warns of a session that is registered twice
def noxfile() -> Iterator[ModuleType]:
    pytest.importorskip("nox", reason="sessions that test integration install nox")
    spec = importlib.util.spec_from_file_location("noxfile_of_sbp", ROOT / "noxfile.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there for their annotations
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def touched(noxfile: ModuleType, *paths: str) -> list[str]:
    return [package.name for package in noxfile.touched_packages(paths)]


def test_what_the_core_changes_touches_every_package(noxfile: ModuleType) -> None:
    assert touched(noxfile, "packages/sbp-core/src/sbp_core/sbp.py") == [
        package.name for package in noxfile.PACKAGES
    ]


def test_a_plugin_that_nobody_declares_touches_itself_alone(noxfile: ModuleType) -> None:
    assert touched(noxfile, "packages/planner/src/sbp_planner/plugin.py") == ["planner"]


def test_packages_that_only_tests_need_count_too(noxfile: ModuleType) -> None:
    touching = touched(noxfile, "packages/sbp-torch/README.md")

    # Their tests run plans, which they themselves only make.
    assert {"sbp-aten", "planner", "sbp-torch"} <= {*touching}
    assert "sbp-core" not in touching


def test_integration_and_documents_touch_no_package(noxfile: ModuleType) -> None:
    assert touched(noxfile, "integration/soak.py", "docs/pins.md", "README.md") == []


def test_what_all_share_touches_all(noxfile: ModuleType) -> None:
    assert touched(noxfile, "docs/pins.md", "noxfile.py") == [
        package.name for package in noxfile.PACKAGES
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


def test_what_runs_beside_others_is_waited_for_and_printed(
    noxfile: ModuleType, tmp_path: Path
) -> None:
    session = _Session()
    wait = "import pathlib, time\nwhile not pathlib.Path('go').exists(): time.sleep(0.01)\nprint(7)"

    with noxfile.beside(session, tmp_path, "python", "-c", wait):
        (tmp_path / "go").touch()  # it runs while the block does

    assert session.logged[-1].endswith("\n7")


def test_what_fails_beside_others_fails_the_session(noxfile: ModuleType, tmp_path: Path) -> None:
    session = _Session()

    with (
        pytest.raises(RuntimeError, match="exit code 3"),
        noxfile.beside(session, tmp_path, "python", "-c", "print('why'); raise SystemExit(3)"),
    ):
        pass

    assert session.logged[-1].endswith("\nwhy")


def test_what_runs_beside_a_block_that_fails_is_ended(noxfile: ModuleType, tmp_path: Path) -> None:
    with (
        pytest.raises(ZeroDivisionError),
        noxfile.beside(_Session(), tmp_path, "python", "-c", "import time; time.sleep(600)"),
    ):
        raise ZeroDivisionError

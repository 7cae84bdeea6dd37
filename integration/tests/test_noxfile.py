"""What functions of the noxfile find and run: touched packages, versions, commands beside tests."""

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


def test_resolved_versions_touch_all(noxfile: ModuleType) -> None:
    assert touched(noxfile, "constraints.txt") == [package.name for package in noxfile.PACKAGES]


def test_others_are_what_packages_declare_but_ours(noxfile: ModuleType) -> None:
    needed = {noxfile.name_of(entry) for entry in noxfile.needed_of_others()}

    assert {"hydra-core", "numpy", "torch"} <= needed
    assert not any(name.startswith("sbp-") for name in needed)
    assert "pytest" not in needed


def test_without_pytorch_everything_else_is_needed(
    noxfile: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = noxfile.needed_of_others(with_tests=True)
    monkeypatch.setattr(noxfile, "TORCH", "")

    missing = whole - noxfile.needed_of_others(with_tests=True)

    assert {noxfile.name_of(entry) for entry in missing} == {"torch"}


def test_every_declared_package_has_a_resolved_version_but_those_of_gpus(
    noxfile: ModuleType,
) -> None:
    lines = noxfile.CONSTRAINTS.read_text("utf-8").splitlines()
    held = {line.partition("==")[0] for line in lines if not line.startswith("#")}

    needed = noxfile.needed_of_others(with_tests=True, with_extras=True)
    names = {noxfile.name_of(entry).lower() for entry in needed}

    assert {name for name in names - held if not noxfile.OF_TORCH.match(name)} == set()
    assert {name for name in held if noxfile.OF_TORCH.match(name)} == set()


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

"""Runs the apps in a child process, beside a stand-in distribution."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
from toys import CHILD, OPTIONS, PLUGIN, TOYS, Outcome, group_of, write_distribution

from sbp_core.testing.forked_programs import ForkedPrograms


@pytest.fixture(scope="session")
def toys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the stand-in distribution `sbp-toys`."""
    root = tmp_path_factory.mktemp("site")
    write_distribution(root, "sbp-toys", "toy_package", PLUGIN, OPTIONS)
    return root


@pytest.fixture(scope="session")
def programs() -> Iterator[ForkedPrograms]:
    """What runs the app in processes without PyTorch."""
    found = ForkedPrograms(
        ["sbp_launch.apps.hydra_app", "sbp_launch.settings.check", "sbp_launch.apps.plan"]
    )
    yield found
    found.close()


@pytest.fixture
def app(toys: Path, tmp_path: Path, programs: ForkedPrograms) -> Callable[..., Outcome]:
    """Run an app with a toy task in a child process, on the given command line."""

    def call(
        *arguments: str,
        config: str = "config",
        fail: bool = False,
        refuse: str = "",
        warn: bool = False,
        defaults: bool = False,
        overwrites: bool = False,
        goes_on: bool = False,
        stopped_by: int = 0,
        build: str = "",
        beside: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> Outcome:
        folder = tmp_path / "work"
        folder.mkdir(exist_ok=True)
        path = [str(toys), *([str(beside)] if beside else [])]
        inherited = os.environ.get("PYTHONPATH")
        toys_missing = [
            toy for toy in TOYS if not any(group_of(toy) == group_of(one) for one in arguments)
        ]
        child = programs.run(
            CHILD.format(
                config=config,
                fail=fail,
                refuse=refuse,
                warn=warn,
                build=build,
                overwrites=overwrites,
                goes_on=goes_on,
                stopped_by=stopped_by,
            ),
            [*(() if defaults else toys_missing), *arguments],
            folder,
            {
                **os.environ,
                "PYTHONPATH": os.pathsep.join([*path, *([inherited] if inherited else [])]),
                **(environment or {}),
            },
        )
        err, _, last = child.stderr.rpartition("\n")
        code, torch = json.loads(last)
        return Outcome(
            code=code,
            out=child.stdout,
            err=err,
            torch=torch,
            folder=folder,
        )

    return call


@pytest.fixture
def wide_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `sbp-checkpoint` part no path of a temporary folder."""
    monkeypatch.setattr("sbp_launch.console.FILE_WIDTH", 400)

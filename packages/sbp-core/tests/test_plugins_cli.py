"""The command `sbp-plugins`."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import sbp_core.plugins.cli as cli
from sbp_core.plugins import PluginRegistry, PluginSource, discover

LISTED = PluginSource(
    name="listed", value="listed_plugin", distribution="listed-dist", version="0.1.0"
)
LOST = PluginSource(name="lost", value="no_such_plugin", distribution="lost-dist", version="9")


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> list[PluginSource]:
    """The plugins that the command sees; tests add to it."""
    sources = [LISTED]

    def discover_these() -> PluginRegistry:
        return discover(sources)

    monkeypatch.setattr(cli, "discover", discover_these)
    return sources


@pytest.mark.usefixtures("installed")
def test_the_table_is_aligned(capsys: pytest.CaptureFixture[str]) -> None:
    code = cli.main([])

    assert code == 0
    assert capsys.readouterr().out.splitlines() == [
        "kind     name       distribution  version  API  health",
        "boxing   local      listed-dist   0.1.0    1    ok",
        "runtime  reference  listed-dist   0.1.0    1    ok",
    ]


def test_problems_stand_below_and_count_only_with_strict(
    installed: list[PluginSource], capsys: pytest.CaptureFixture[str]
) -> None:
    installed.append(LOST)

    codes = cli.main([]), cli.main(["--strict"])

    out = capsys.readouterr().out
    assert codes == (0, 1)
    assert "1 problem(s):" in out
    assert "lost (lost-dist): no_such_plugin cannot be imported" in out
    assert ["-", "lost", "lost-dist", "9", "-", "broken"] in [
        line.split() for line in out.splitlines()
    ]


@pytest.mark.usefixtures("installed")
def test_one_kind_can_be_listed(capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["--kind", "runtime", "--json"])
    runtimes = json.loads(capsys.readouterr().out)
    cli.main(["--kind", "planner"])
    planners = capsys.readouterr().out

    assert [one["name"] for one in runtimes["plugins"]] == ["reference"]
    assert runtimes["problems"] == []
    assert "(none)" in planners


def test_an_unknown_kind_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["--kind", "planer"])

    assert caught.value.code == 2
    assert "planner" in capsys.readouterr().err


def test_listing_imports_nothing_that_takes_long() -> None:
    script = (
        "import sys\n"
        "from sbp_core.plugins.cli import main\n"
        "code = main(['--json'])\n"
        "heavy = sys.modules.keys() & {'hydra', 'scipy', 'sympy', 'torch'}\n"
        "sys.exit(code or ', '.join(heavy) or 0)\n"
    )

    child = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
    )

    assert child.returncode == 0, child.stderr
    assert json.loads(child.stdout)["problems"] == []

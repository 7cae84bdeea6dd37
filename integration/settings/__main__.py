"""The command `python -m settings`, run in the folder `integration`; see the package."""

from __future__ import annotations

import argparse
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reference" / "settings.md"


def main(words: list[str] | None = None) -> int:
    """Run the command and return its exit code: 1 if a check fails."""
    parser = argparse.ArgumentParser(prog="settings", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    document = commands.add_parser("document", help="write docs/reference/settings.md")
    document.add_argument("--check", action="store_true", help="only see that it is up to date")
    options = parser.parse_args(words)
    projects = [
        tomllib.loads(path.read_text("utf-8"))["project"]["name"]
        for path in sorted(ROOT.glob("packages/*/pyproject.toml"))
    ]
    command = [sys.executable, "-m", "sbp_launch.settings_page", str(PAGE), "--of", *projects]
    return subprocess.run([*command, *["--check"] * options.check], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())

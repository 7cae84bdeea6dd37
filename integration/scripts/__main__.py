"""The command `python -m scripts`, run in the folder `integration`; see the package."""

from __future__ import annotations

import argparse
import sys

from scripts.counted import FOLDER, page

PAGE = FOLDER / "README.md"


def main(words: list[str] | None = None) -> int:
    """Run the command and return its exit code: 1 if the page is not as it should be."""
    parser = argparse.ArgumentParser(prog="scripts", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    document = commands.add_parser("document", help="write integration/scripts/README.md")
    document.add_argument("--check", action="store_true", help="only see that it is up to date")
    if parser.parse_args(words).check:
        return int(PAGE.read_text("utf-8") != page())
    PAGE.write_text(page(), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

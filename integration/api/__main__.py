"""The command `python -m api`; see the package."""

from __future__ import annotations

import argparse
import sys

from api.compare import compare
from api.document import document, file
from api.imports import faults
from api.rooms import ROOT, Packages


def main(words: list[str] | None = None) -> int:
    """Run the command and return its exit code: 1 if something is not as it should be."""
    parser = argparse.ArgumentParser(prog="api", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("check", help="see that imports between packages lead to rooms only")
    page = commands.add_parser("document", help="write docs/reference/api.md")
    page.add_argument("--check", action="store_true", help="only see that it is up to date")
    other = commands.add_parser("compare", help="what changed, and which version it asks for")
    other.add_argument("--against", default="", metavar="REF", help="instead of the last releases")
    options = parser.parse_args(words)
    if options.command == "check":
        found = list(faults(Packages.below()))
        rooms = Packages.below().rooms.values()
        names = sum(len(room.offers or ()) for room in rooms)
        print(*found, f"{len(rooms)} rooms, {names} names, {len(found)} faults", sep="\n")
        return bool(found)
    if options.command == "document":
        return _document(only_check=options.check)
    verdicts = list(compare(ROOT, options.against))
    print(*verdicts, sep="\n")
    if not any(verdict.release for verdict in verdicts):
        # A copy without tags looks as if nothing had ever been released.
        print(
            "nothing was compared: there is no tag of a release, such as sbp-core-v0.1.0",
            "  to mend it: git fetch --tags, or name a revision: nox -s api -- --against main",
            sep="\n",
        )
        return 1
    return not all(verdict.ok for verdict in verdicts)


def _document(*, only_check: bool) -> int:
    packages = Packages.below()
    path, text = file(packages), document(packages)
    if not only_check:
        path.write_text(text, "utf-8")
        return 0
    if path.exists() and path.read_text("utf-8") == text:
        return 0
    print(f"{path.relative_to(ROOT)} is not what the source says: run `python -m api document`")
    return 1


if __name__ == "__main__":
    sys.exit(main())

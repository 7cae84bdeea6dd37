"""The command `python -m api`; see the package."""

from __future__ import annotations

import argparse
import sys

from api.compare import compare
from api.document import FOLDER, documents
from api.imports import faults
from api.public import Public, broken_promises, functions_called_like_modules
from api.rooms import ROOT, Packages
from api.users import copied_imports


def main(words: list[str] | None = None) -> int:
    """Run the command and return its exit code: 1 if a check fails."""
    parser = argparse.ArgumentParser(prog="api", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("check", help="see that imports lead to rooms, and public names hold")
    page = commands.add_parser("document", help="write docs/reference/api/")
    page.add_argument("--check", action="store_true", help="only see that it is up to date")
    other = commands.add_parser("compare", help="what changed, and which version it asks for")
    other.add_argument("--against", default="", metavar="REF", help="instead of the last releases")
    options = parser.parse_args(words)
    if options.command == "check":
        return _check()
    if options.command == "document":
        return _document(only_check=options.check)
    verdicts = list(compare(ROOT, options.against))
    print(*verdicts, sep="\n")
    if not any(verdict.release for verdict in verdicts):
        # In a clone without tags, no package seems to be released.
        print(
            "nothing was compared: there is no tag of a release, such as sbp-core-v0.1.0",
            "  to fix it: git fetch --tags, or name a revision: nox -s api -- --against main",
            sep="\n",
        )
        return 1
    return not all(verdict.ok for verdict in verdicts)


def _check() -> int:
    packages, public = Packages.below(ROOT), Public.below(ROOT)
    found = [
        *faults(packages),
        *functions_called_like_modules(packages),
        *broken_promises(packages, public),
        *copied_imports(packages, public),
    ]
    names = sum(len(room.offers or ()) for room in packages.rooms.values())
    tally = f"{len(packages.rooms)} rooms, {names} names, {len(public.stability)} of them public"
    print(*found, f"{tally}, {len(found)} faults", sep="\n")
    return bool(found)


def _document(*, only_check: bool) -> int:
    pages = documents(Packages.below(ROOT), Public.below(ROOT))
    there = {path.relative_to(ROOT) for path in (ROOT / FOLDER).glob("*.md")}
    wrong = [
        path
        for path, text in pages.items()
        if path not in there or (ROOT / path).read_text("utf-8") != text
    ]
    wrong += sorted(there - pages.keys())
    for path in wrong:
        if only_check:
            print(f"{path} is not what the source says: run `python -m api document`")
        elif path in pages:
            (ROOT / path).parent.mkdir(exist_ok=True)
            (ROOT / path).write_text(pages[path], "utf-8")
        else:
            (ROOT / path).unlink()
    return int(only_check and bool(wrong))


if __name__ == "__main__":
    sys.exit(main())

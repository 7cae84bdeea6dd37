"""Count lines of source by package and room, and compare them with the budget in `budget.toml`.

    python integration/size.py                    the table
    python integration/size.py --against main     with the difference from a branch, tag or commit
    python integration/size.py --check            fails if a package has more lines than its budget

Every line of a Python file below `packages/*/src` counts, blank or not.
The budget only decreases; if it increases, a decision in `docs/decisions` explains why.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUDGET = ROOT / "budget.toml"

#: A package and one of its rooms; `.` for files outside of rooms.
Room = tuple[str, str]


def room_of(path: str) -> Room | None:
    """Return the room of a file with a path from the root; None if it is no source."""
    parts = path.split("/")
    if not path.endswith(".py") or len(parts) < 5 or (parts[0], parts[2]) != ("packages", "src"):
        return None
    return parts[1], parts[4] if len(parts) > 5 else "."


def lines_here() -> Counter[Room]:
    """Return the lines of every room in the present files."""
    found: Counter[Room] = Counter()
    for file in ROOT.glob("packages/*/src/**/*.py"):
        room = room_of(file.relative_to(ROOT).as_posix())
        if room is not None:
            found[room] += file.read_text("utf-8").count("\n")
    return found


def lines_at(revision: str) -> Counter[Room]:
    """Return the lines of every room at a revision.

    Raises:
        SystemExit: there is no such revision.
    """
    # Relative to the empty tree, each line of a file is an added line.
    empty = git("hash-object", "-t", "tree", "/dev/null").strip()
    found: Counter[Room] = Counter()
    for line in git("diff", "--numstat", "--no-renames", empty, revision, "--").splitlines():
        added, _, path = line.split("\t")
        room = room_of(path)
        if room is not None:
            found[room] += int(added)
    return found


def git(*arguments: str) -> str:
    """Return the output of git.

    Raises:
        SystemExit: git fails.
    """
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"git {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout


def table(now: Counter[Room], before: Counter[Room] | None) -> list[str]:
    """Return a line for each package, with its rooms below it, and one for the total."""
    rows = []
    for package in sorted({package for package, _ in (*now, *(before or ()))}):
        rooms = {room for room in (*now, *(before or ())) if room[0] == package}
        rows.append(row(package, rooms, now, before))
        for room in sorted(rooms, key=lambda one: -now[one]):
            rows.append(row(f"  {room[1]}", {room}, now, before))
    return [*rows, row("all packages", {*now, *(before or ())}, now, before)]


def row(name: str, rooms: set[Room], now: Counter[Room], before: Counter[Room] | None) -> str:
    """Return a line of the table."""
    lines = sum(now[room] for room in rooms)
    text = f"{name:<24}{lines:>9,}"
    return text if before is None else f"{text}{lines - sum(before[r] for r in rooms):>+9,}"


def problems(now: Counter[Room]) -> list[str]:
    """Return the packages that are above their budget, or have none."""
    budget: dict[str, int] = tomllib.loads(BUDGET.read_text("utf-8"))["lines"]
    lines: Counter[str] = Counter()
    for (package, _), count in now.items():
        lines[package] += count
    found = [f"{package} has no budget in {BUDGET.name}" for package in lines.keys() - budget]
    found += [f"{package} is no package" for package in budget.keys() - lines]
    found += [
        f"{package} has {lines[package]:,} lines of source, {lines[package] - most:,} above its "
        f"budget of {most:,}"
        for package, most in budget.items()
        if lines[package] > most
    ]
    return sorted(found)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table, or check the budget; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="hold it against the budget")
    parser.add_argument("--against", metavar="REVISION", help="also print the difference from it")
    options = parser.parse_args(arguments)
    now = lines_here()
    if not options.check:
        before = lines_at(options.against) if options.against else None
        print("\n".join(table(now, before)))
        return 0
    found = problems(now)
    for problem in found:
        print(problem)
    if found:
        print("take out what is not needed, or say in docs/decisions why the budget rises")
    return min(len(found), 1)


if __name__ == "__main__":
    sys.exit(main())

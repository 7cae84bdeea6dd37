"""The command `python -m scripts`, run in the folder `integration`; see the package."""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "reference" / "scripts.md"

_HEAD = """# Fourteen scripts, with and without sbp

Each script is written twice: as one trains it today, and with
[`parallelize`](../how-to/parallelize.md). Both print the same losses;
`integration/tests/test_scripts.py` runs them and compares. In `integration/scripts`, `ddp.py` uses
`DistributedDataParallel`; `plain.py` is for one process, where `DistributedDataParallel` computes
something else (batch norms, means over padded words, noise that each rank draws) or does not fit
(`gcn`, `dcgan`, `reinforce`). Run one in its folder:

<!-- not run torchrun: integration/tests/test_scripts.py does -->
```console
$ torchrun --nproc-per-node=2 ours.py
```

The table counts the lines that are removed from a script and those that are added, without empty
lines and whatever their indentation. Models and data are in `parts.py`, the same for both. The loss
becomes a function, whose lines are counted apart.

| script | compared with | lines | removed | added | in the loss function |
|---|---|---|---|---|---|
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Count:
    """The differences between a script with sbp and the script without it.

    Args:
        name: Folder of the scripts.
        peer: The file without sbp.
        lines: Number of lines of that file.
        gone: Number of its lines that are not in ours.
        come: Number of our lines that are not in it, without functions called `loss...`.
        loss: The same number for these functions.
    """

    name: str
    peer: str
    lines: int
    gone: int
    come: int
    loss: int


def names() -> list[str]:
    """Return the scripts, in alphabetical order."""
    return sorted(path.parent.name for path in HERE.glob("*/ours.py"))


def peer_of(name: str) -> Path:
    """Return the file of a script without sbp."""
    (found,) = (path for path in HERE.glob(f"{name}/*.py") if path.stem in ("ddp", "plain"))
    return found


def count(name: str) -> Count:
    """Count the lines of a script that differ."""
    peer, ours = peer_of(name), HERE / name / "ours.py"
    old, new = (list(_lines(path)) for path in (peer, ours))
    texts = ([line for line, _ in lines] for lines in (old, new))
    blocks = SequenceMatcher(None, *texts, autojunk=False).get_matching_blocks()
    same = {block.b + at for block in blocks for at in range(block.size)}
    come = [is_loss for at, (_, is_loss) in enumerate(new) if at not in same]
    return Count(
        name=name,
        peer=peer.name,
        lines=len(old),
        gone=len(old) - len(same),
        come=come.count(False),
        loss=come.count(True),
    )


def _lines(path: Path) -> Iterator[tuple[str, bool]]:
    """Yield the lines of a file without indentation, and whether each is in a loss function."""
    text = path.read_text("utf-8")
    inside: set[int] = set()
    for one in ast.parse(text).body:
        if isinstance(one, ast.FunctionDef) and one.name.startswith("loss"):
            inside.update(range(one.lineno, (one.end_lineno or one.lineno) + 1))
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip():
            yield line.strip(), number in inside


def page() -> str:
    """Return docs/reference/scripts.md."""
    rows = [
        f"| [{one.name}](../../integration/scripts/{one.name}/ours.py) | {one.peer} | {one.lines} "
        f"| {one.gone} | {one.come} | {one.loss} |\n"
        for one in map(count, names())
    ]
    return _HEAD + "".join(rows)


def main(words: list[str] | None = None) -> int:
    """Run the command and return its exit code: 1 if the page is out of date."""
    parser = argparse.ArgumentParser(prog="scripts", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    document = commands.add_parser("document", help="write docs/reference/scripts.md")
    document.add_argument("--check", action="store_true", help="only see that it is up to date")
    options = parser.parse_args(words)
    if not options.check:
        PAGE.write_text(page(), "utf-8")
    elif PAGE.read_text("utf-8") != page():
        sys.stdout.write(
            "docs/reference/scripts.md is not what the scripts are: python -m scripts document\n"
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""How many lines of a script change when it is moved to `parallelize`."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path

FOLDER = Path(__file__).parent

#: What a script is called that several processes run.
_DDP = "init_process_group"


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """One script.

    Args:
        name: Of both its files.
        title: What it trains.
        is_ddp: Whether the plain one is for several processes.
        differing: Lines of ours that are not in the plain one, without those of loss functions.
        loss: Lines of functions that are called `loss...`, which the plain one has not.
        gone: Lines of the plain one that are not in ours.
    """

    name: str
    title: str
    is_ddp: bool
    differing: int
    loss: int
    gone: int


def names() -> list[str]:
    """Return the names of all scripts."""
    return sorted(path.stem for path in (FOLDER / "plain").glob("*.py"))


def count(name: str) -> Counted:
    """Count the lines of a script that differ, whatever their indentation; empty ones do not."""
    plain, ours = (
        (FOLDER / folder / f"{name}.py").read_text("utf-8") for folder in ("plain", "ours")
    )
    of_loss = {
        number
        for node in ast.walk(ast.parse(ours))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("loss")
        for number in range(node.lineno - 1, node.end_lineno or 0)
    }
    before, after = ([line.strip() for line in text.splitlines()] for text in (plain, ours))
    differing = loss = gone = 0
    for kind, start, stop, begin, end in SequenceMatcher(
        None, before, after, autojunk=False
    ).get_opcodes():
        if kind != "equal":
            new = [number for number in range(begin, end) if after[number]]
            loss += len(of_loss.intersection(new))
            differing += len(set(new) - of_loss)
            gone += sum(bool(line) for line in before[start:stop])
    title = (ast.get_docstring(ast.parse(plain)) or "").partition("\n")[0].rstrip(".")
    return Counted(
        name=name, title=title, is_ddp=_DDP in plain, differing=differing, loss=loss, gone=gone
    )


def page() -> str:
    """Return the page that shows what was counted."""
    counted = [count(name) for name in names()]
    rows = [
        f"| [{one.name}](ours/{one.name}.py) | {one.title} | "
        f"[{'DDP' if one.is_ddp else 'one device'}](plain/{one.name}.py) | "
        f"{one.differing} | {one.loss} | {one.gone} |"
        for one in counted
    ]
    lines = [
        "# Scripts that were moved",
        "",
        "Each script is written as such scripts are published: for one device, or for",
        "`torchrun` with `DistributedDataParallel`; and by `parallelize`, on two ranks. Both",
        "print the same losses, which `integration/tests/test_scripts.py` compares. The",
        "numbers are lines: those of ours that the other has not, without the loss function",
        "and whatever their indentation; those of the loss function; and those that are gone.",
        "`python -m scripts document` writes this page.",
        "",
        "| script | what it trains | before | lines that differ | loss function | lines gone |",
        "|---|---|---|---|---|---|",
        *rows,
        "",
    ]
    return "\n".join(lines)

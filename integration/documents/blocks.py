"""Read a Markdown page: its fenced blocks, and the comments above them that control running them.

| comment above a block | effect |
|---|---|
| `<!-- not run: REASON -->` | the block is only read; the reason is listed |
| `<!-- not run COMMAND: REASON -->` | the same for lines that begin with COMMAND |
| `<!-- run COMMAND with: ARGUMENTS -->` | lines with the longest such COMMAND get more arguments |
| `<!-- first: COMMAND -->` | runs a command that the reader does not see, before the block |
| `<!-- saved as: FILE -->` | the block is a file, which exists from the beginning |
| `<!-- output -->` | the block is the output of the last command above it |
"""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass, field
from pathlib import Path

_FENCE = re.compile(
    r"^(?P<indent> *)```(?P<language>\w*)\n(?P<body>.*?)^(?P=indent)```$", re.M | re.S
)
_COMMENT = re.compile(r"<!--\s*(.*?)\s*-->", re.S)
_COMMENTS_ABOVE = re.compile(r"(?:^ *<!--(?:(?!-->).)*-->\s*?\n)+\Z", re.M | re.S)
_DIRECTIVE = re.compile(
    r"(?P<name>not run|run|first|saved as|output)(?P<of> [\w./ =-]+?)?(?:: *(?P<value>.*))?\Z", re.S
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A fenced block.

    Args:
        line: Number of its first line inside the fence, from 1.
        language: The word after the fence; may be empty.
        text: The text inside, without the indentation of the fence.
        not_run: Why it is not run; empty if it is run.
        without: Why some commands are not run, by their beginning.
        more: Additional arguments by the beginning of the command.
        first: Commands that are run before it.
        saved_as: Name of the file; empty if the block is no file.
        is_output: Whether it is the output of the last command above.
    """

    line: int
    language: str
    text: str
    not_run: str = ""
    without: dict[str, str] = field(default_factory=dict)
    more: dict[str, str] = field(default_factory=dict)
    first: tuple[str, ...] = ()
    saved_as: str = ""
    is_output: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A command of a `console` block, and the lines that it prints according to the page."""

    line: int
    text: str
    output: tuple[str, ...]


def read(path: Path) -> list[Block]:
    """Return the fenced blocks of a page.

    Raises:
        ValueError: a comment above a block is unknown.
    """
    text = path.read_text("utf-8")
    return [_block(path, text, found) for found in _FENCE.finditer(text)]


def _block(path: Path, text: str, found: re.Match[str]) -> Block:
    above = _COMMENTS_ABOVE.search(text[: found.start()])
    line = text[: found.start("body")].count("\n") + 1
    not_run, saved_as, is_output = "", "", False
    more: dict[str, str] = {}
    without: dict[str, str] = {}
    first: list[str] = []
    for comment in _COMMENT.findall(above[0]) if above else ():
        directive = _DIRECTIVE.match(comment)
        if directive is None:
            raise ValueError(f"{path}:{line - 1}: nothing is known of the comment {comment!r}")
        value, of = directive["value"] or "", (directive["of"] or "").strip()
        match directive["name"]:
            case "not run" if of:
                without[of] = value
            case "not run":
                not_run = value
            case "run":
                more[of.removesuffix("with").strip()] = value
            case "first":
                first.append(value)
            case "saved as":
                saved_as = value
            case "output":
                is_output = True
    return Block(
        line=line,
        language=found["language"],
        text=textwrap.dedent(found["body"]),
        not_run=not_run,
        without=without,
        more=more,
        first=tuple(first),
        saved_as=saved_as,
        is_output=is_output,
    )


def commands(block: Block) -> list[Command]:
    r"""Return the commands of a `console` block: lines that begin with `$ `, continued by `\`."""
    made: list[Command] = []
    lines = block.text.splitlines()
    index = 0
    while index < len(lines):
        begin = index
        if not lines[index].startswith("$ "):
            raise ValueError(f"line {block.line + index} is no command and no output of one")
        text = lines[index].removeprefix("$ ")
        while text.endswith("\\"):
            index += 1
            text = text[:-1] + " " + lines[index].strip()
        index += 1
        end = index
        while end < len(lines) and not lines[end].startswith("$ "):
            end += 1
        made.append(Command(line=block.line + begin, text=text, output=tuple(lines[index:end])))
        index = end
    return made

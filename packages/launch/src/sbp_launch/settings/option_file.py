"""What an option file says beside its values: its first comment, and one for each setting.

    # Adam with decoupled weight decay.       the comment of the file
    name: adamw
    lr: 0.001  # learning rate                the comment of `lr`, which may go on
      # in lines that are indented further

A comment may also stand above its setting. Hydra reads the values; here they are read as written.
"""

from __future__ import annotations

from itertools import takewhile
from math import inf

import yaml  # type: ignore[import-untyped] # its stubs are a package of their own

from sbp_core.errors import ConfigError

#: Values that an option file may have, those that references repeat counted each time.
MOST_VALUES = 100_000

#: What PyYAML passes on of values that it cannot make.
_OF_YAML = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError)


def headline(text: str) -> str:
    """Return the first sentence of the comment that a file begins with, or `""`."""
    comment = takewhile(lambda line: line.startswith("#"), text.splitlines())
    return " ".join(line.lstrip("# ") for line in comment).partition(". ")[0].rstrip(".")


def comments(text: str) -> dict[str, str]:
    r"""Return the comment of each setting by its key, `schedule.decay`; none of what is no YAML.

    >>> comments("a: 1  # one\nb:  # more\n  # above c\n  c: [2]\n  d: x  # long\n    # text")
    {'a': 'one', 'b': 'more', 'b.c': 'above c', 'b.d': 'long text'}
    """
    found: dict[str, str] = {}
    lines = text.splitlines()
    first = len(list(takewhile(lambda line: line.startswith("#"), lines)))
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except (yaml.YAMLError, *_OF_YAML):
        return {}  # `refuse_faults` says what is wrong
    if num_values(root) > MOST_VALUES:
        return {}
    todo = [("", root)] if isinstance(root, yaml.MappingNode) else []
    while todo:
        prefix, node = todo.pop(0)
        for name, value in node.value:
            key = f"{prefix}{name.value}"
            if comment := _comment(lines, name, value, first):
                found[key] = comment
            if isinstance(value, yaml.MappingNode):
                todo.append((f"{key}.", value))
    return found


def _comment(lines: list[str], name: yaml.Node, value: yaml.Node, first: int) -> str:
    """Return the comment behind or above a setting.

    Args:
        lines: The file.
        name: Its name.
        value: Its value.
        first: Number of the first line behind the file's own comment.
    """
    is_block = isinstance(value, yaml.CollectionNode) and not value.flow_style
    end = name.end_mark if is_block else value.end_mark
    behind = lines[end.line][end.column :].lstrip(": ")
    if behind.startswith("#"):
        parts = [behind]
        indent = name.start_mark.column
        if not is_block:
            parts += takewhile(lambda line: _is_comment(line, indent + 1), lines[end.line + 1 :])
        return " ".join(part.lstrip("# ").rstrip() for part in parts)
    above = lines[first : name.start_mark.line][::-1]
    parts = list(takewhile(lambda line: _is_comment(line, name.start_mark.column), above))
    return " ".join(part.lstrip("# ").rstrip() for part in parts[::-1])


def _is_comment(line: str, indent: int) -> bool:
    """Return whether a line is a comment that is indented so far at least."""
    return line.lstrip().startswith("#") and len(line) - len(line.lstrip()) >= indent


class _OnceLoader(yaml.SafeLoader):  # type: ignore[misc] # yaml has no types
    """Refuses a name that stands twice in a mapping."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[object, object]:
        """Return a mapping.

        Raises:
            MarkedYAMLError: a name stands twice.
        """
        seen: dict[object, int] = {}
        for name, _ in node.value:
            if name.value in seen:
                first = seen[name.value]
                raise yaml.MarkedYAMLError(
                    problem=f"{name.value!r} stands twice, the first time in line {first}",
                    problem_mark=name.start_mark,
                )
            seen[name.value] = name.start_mark.line + 1
        made: dict[object, object] = super().construct_mapping(node, deep=deep)
        return made


def num_values(node: yaml.Node | None, known: dict[int, float] | None = None) -> float:
    """Return how many values a part of a file stands for; infinity if it is within itself.

    Args:
        node: Of the part.
        known: Of the parts that have been met, by identity: references share them.
    """
    known = {} if known is None else known
    if node is None:
        return 0
    if id(node) not in known:
        known[id(node)] = inf
        parts = list(node.value) if isinstance(node, yaml.CollectionNode) else []
        if isinstance(node, yaml.MappingNode):
            parts = [one for pair in parts for one in pair]
        known[id(node)] = 1 + sum(num_values(part, known) for part in parts)
    return known[id(node)]


def refuse_expansion(text: str, file: str) -> None:
    """Check that the references of an option file stand for no more values than memory holds.

    A few lines of references to references do: `a: &a [1, 1]`, `b: &b [*a, *a]`, ...

    Raises:
        ConfigError: they do.
    """
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader) if "*" in text else None
    except (yaml.YAMLError, *_OF_YAML):
        return  # `refuse_faults` says what is wrong
    if num_values(root) > MOST_VALUES:
        raise ConfigError(
            "the references of the option file stand for a value almost without end",
            where=file,
            accepted=f"at most {MOST_VALUES:,} values",
            todo="write out what is meant",
        )


def refuse_faults(text: str, file: str) -> None:
    """Check that an option file is a mapping in YAML.

    Raises:
        ConfigError: it is not; names file, line and what is wrong there.
    """
    if "\ufffd" in text:
        raise ConfigError("the option file is no UTF-8", where=file, todo="save it as UTF-8")
    try:
        refuse_expansion(text, file)
        value = yaml.load(text, Loader=_OnceLoader)  # a SafeLoader
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else 0
        what = error.problem or error.context or "it cannot be read"
        shown = text.splitlines()[line - 1] if 0 < line <= len(text.splitlines()) else ""
        if "\t" in shown[: len(shown) - len(shown.lstrip())]:
            what = "a tab where YAML takes spaces only"
        raise ConfigError(
            f"the option file is no YAML: {what}",
            where=f"{file}, line {line}{f': {shown.strip()}' if shown.strip() else ''}",
            accepted="name: value, one a line; nested settings indented by spaces",
            todo="correct that line, or what stands before it",
        ) from error
    except ConfigError:
        raise
    except (yaml.YAMLError, *_OF_YAML) as error:
        what = " ".join(str(error).split())
        raise ConfigError(f"the option file is no YAML: {what}", where=file) from error
    if value is not None and not isinstance(value, dict):
        raise ConfigError(
            f"the option file is a {type(value).__name__}, not a mapping",
            where=f"{file}, line 1",
            accepted="name: value, one a line",
        )

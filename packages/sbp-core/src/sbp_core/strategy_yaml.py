"""Strategies as YAML files for people to read, compare and edit. Needs PyYAML.

    planner: manual
    graph_hash: 0123456789abcdef
    stages:
    - {ranks: [0, 1], axes: [data], device: cpu}
    num_micro_batches: 1
    in_flight: [1]
    storage:                                    # of states and batch tensors
      tokens: (S(0))
      blocks.{0-31}.up.weight: (B)
    nodes:                                      # by module, then by operator
      blocks.{0-31}.up:
        mm: (S(0)) (B) -> (S(0))

Signatures are written as in error messages: the nd-SBP of each tensor argument, an arrow, the
nd-SBP of each output. Layers with equal decisions share a line: `{0-31}` or `{0-3,8}` stands for
the number of the layer. With several stages, `@1` after a decision is its stage. In an edited file,
the patterns `*` and `?` may stand for names. They apply to names without an entry; the first
pattern that matches counts.

>>> from sbp_core.strategy import Strategy
>>> from sbp_core.placement import Placement
>>> from sbp_core.sbp import B, NdSbp, S
>>> from sbp_core.strategy import Assignment, Signature, Storage
>>> up = Assignment(stage=0, signature=Signature((NdSbp(S(0)), NdSbp(B)), (NdSbp(S(0)),)))
>>> strategy = Strategy(
...     planner="manual", graph_hash="0123", stages=(Placement([0, 1], ["data"]),),
...     num_micro_batches=1, in_flight=(1,),
...     nodes={"layers.0.mm": up, "layers.1.mm": up, "loss": up},
...     storage={"layers.0.w": Storage(stage=0, sbp=NdSbp(B))})
>>> print(to_yaml(strategy), end="")
planner: manual
graph_hash: '0123'
stages:
- ranks: [0, 1]
  axes: [data]
  device: cpu
num_micro_batches: 1
in_flight: [1]
storage:
  layers.0.w: (B)
nodes:
  layers.{0-1}:
    mm: (S(0)) (B) -> (S(0))
  (root):
    loss: (S(0)) (B) -> (S(0))
>>> from_yaml(to_yaml(strategy)) == strategy
True
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from itertools import chain
from pathlib import Path
from typing import Any

from sbp_core import serialize
from sbp_core.errors import SbpLookupError, SbpValueError, unknown_name
from sbp_core.graph.ir import LogicalGraph, TensorType
from sbp_core.serialize import Keys, Lines, pyyaml, read_yaml, shown
from sbp_core.strategy import Strategy
from sbp_core.units import format_ranges

__all__ = ["ROOT", "from_yaml", "load", "load_form", "load_with_lines", "save", "to_yaml"]

#: The module of operators that no module called.
ROOT = "(root)"

_BRACES = re.compile(r"\{(\d{1,9}(?:-\d{1,9})?(?:,\d{1,9}(?:-\d{1,9})?)*)\}", re.ASCII)

#: Prefix of a name that contains pattern characters, but is not a pattern.
_AS_IT_STANDS = "="
_SPECIAL = re.compile(r"[{}*?\[\]=]")

#: The most names in a section of a file that is read without a graph.
_MOST_NAMES = 100_000

#: The most ranges in one name.
_MOST_RANGES = 8

_TODO = "correct that line, or let a planner write the file anew"


def to_yaml(strategy: Strategy) -> str:
    """Return the file of a strategy; `from_yaml` reads it back equal.

    Raises:
        SbpLookupError: PyYAML is not installed.
    """
    value = serialize.dump(strategy, Strategy)
    # With one stage, everything is on it.
    end = " @0" if len(strategy.stages) == 1 else ""
    for key in ("storage", "nodes"):
        value[key] = _grouped({n: text.removesuffix(end) for n, text in value[key].items()})
    sections: dict[str, dict[str, str]] = {}
    for name, entry in value["nodes"].items():
        module, _, op = name.rpartition(".")
        sections.setdefault(module or ROOT, {})[op] = entry
    value["nodes"] = sections
    yaml = pyyaml()
    text: str = yaml.dump(value, Dumper=_dumper(yaml), sort_keys=False, width=2**31)
    return text


def from_yaml(text: str, graph: LogicalGraph | None = None) -> Strategy:
    """Read a strategy.

    Args:
        text: A text by `to_yaml`, edited or not.
        graph: The graph that it is for: names are checked against it, and patterns may be used.

    Raises:
        SbpValueError: the text is not a strategy; names the line or the entry.
        SbpLookupError: a name of the graph is unknown (with the closest match); PyYAML is not
            installed.
    """
    return _read(text, graph, "")[0]


def _read(
    text: str, graph: LogicalGraph | None, file: str, *, patterns_stand: bool = False
) -> tuple[Strategy, Lines]:
    """Read a strategy; return also the lines of its parts.

    Args:
        text: The text of the file.
        graph: See `from_yaml`.
        file: The name of the file in messages.
        patterns_stand: Without a graph, whether patterns are read as if they were names.

    Raises:
        SbpValueError, SbpLookupError: see `from_yaml`.
    """
    value, of_keys = read_yaml(text, file)
    if not isinstance(value, dict):
        raise SbpValueError(
            f"a strategy is a mapping, not {shown(value)}",
            where=of_keys.where(()),
            accepted="planner, graph_hash, stages, num_micro_batches, in_flight, storage, nodes",
            todo=_TODO,
        )
    read: dict[str, Any] = dict(value)
    inputs, ops = (None, None) if graph is None else _names(graph)
    found: dict[Keys, Keys] = {}
    if "storage" in value:
        section = _flat(("storage",), value["storage"], of_keys)
        stored = {name: (("storage", name), entry) for name, entry in section.items()}
        read["storage"] = _decisions(
            "storage", stored, inputs, of_keys, found, patterns_stand=patterns_stand
        )
    if "nodes" in value:
        named = _named(value["nodes"], of_keys)
        read["nodes"] = _decisions(
            "nodes", named, ops, of_keys, found, patterns_stand=patterns_stand
        )
    # Names that share a line in the file are separate parts in the strategy.
    lines = Lines(
        file,
        lambda: chain(
            of_keys.index.items(),
            ((name, of_keys.index[keys]) for name, keys in found.items() if keys in of_keys.index),
        ),
    )
    strategy = serialize.load(read, Strategy, root="the strategy", where=lines, todo=_TODO)
    return strategy.on_its_stages(lines), lines


def save(strategy: Strategy, path: Path) -> None:
    """Write a strategy as YAML."""
    path.write_text(to_yaml(strategy), encoding="utf-8")


def load(path: Path, graph: LogicalGraph | None = None) -> Strategy:
    """Read a file by `save` or by a person; see `from_yaml`."""
    return load_with_lines(path, graph)[0]


def load_with_lines(path: Path, graph: LogicalGraph | None = None) -> tuple[Strategy, Lines]:
    """Read a file; also return the line of each decision: `("nodes", "head.mm")`.

    Raises:
        SbpValueError, SbpLookupError: see `from_yaml`; the file and the line are named.
    """
    return _read(serialize.read_text(path), graph, str(path))


def load_form(path: Path) -> tuple[Strategy, Lines]:
    """Read a file without its graph, to check its syntax.

    Any names are accepted, and patterns are read as if they were names.

    Raises:
        SbpValueError, SbpLookupError: the syntax is wrong; the file and the line are named.
    """
    return _read(serialize.read_text(path), None, str(path), patterns_stand=True)


# Writing.


def _grouped(entries: Mapping[str, str]) -> dict[str, str]:
    """Return the entries with equal ones of several layers merged.

    before: a.0.w: (B)   a.1.w: (B)   a.2.w: (S(0)) after:  a.{0-1}.w: (B)   a.2.w: (S(0))
    """
    layers: dict[tuple[str, str, str], list[int]] = {}
    for name, value in entries.items():
        before, number, after = _split_number(name)
        if number is not None:
            layers.setdefault((before, after, value), []).append(number)
    found: dict[str, str] = {}
    for name, value in entries.items():
        before, number, after = _split_number(name)
        if number is None:
            found[_AS_IT_STANDS + name if _SPECIAL.search(name) else name] = value
            continue
        numbers = layers[(before, after, value)]
        if len(numbers) > 1:
            name = f"{before}{{{format_ranges(numbers)}}}{after}"
        found.setdefault(name, value)
    return found


def _split_number(name: str) -> tuple[str, int | None, str]:
    """Return the parts of a name before, at and after its first number; with dots."""
    parts = name.split(".")
    for index, part in enumerate(parts):
        # No longer than the numbers that `_BRACES` reads.
        is_plain = part.isascii() and part.isdigit() and len(part) < 10 and part == str(int(part))
        if is_plain and not _SPECIAL.search(name):
            before = "".join(f"{piece}." for piece in parts[:index])
            return before, int(part), "".join(f".{piece}" for piece in parts[index + 1 :])
    return name, None, ""


def _dumper(yaml: Any) -> Any:
    """Return a dumper that writes lists of plain values on one line, and no references."""

    class Dumper(yaml.SafeDumper):  # type: ignore[misc] # PyYAML has no types
        def ignore_aliases(self, data: object) -> bool:
            return True

        def represent_sequence(self, tag: str, sequence: Any, flow_style: Any = None) -> Any:
            flat = not any(isinstance(part, dict) for part in sequence)
            return super().represent_sequence(tag, sequence, flow_style=flat)

        def represent_mapping(self, tag: str, mapping: Any, flow_style: Any = None) -> Any:
            return super().represent_mapping(tag, mapping, flow_style=not mapping)

    return Dumper


# Reading.


def _flat(keys: Keys, section: Any, lines: Lines) -> dict[str, Any]:
    name = ".".join(map(str, keys))
    if not isinstance(section, dict):
        raise SbpValueError(
            f"{name} is {shown(section)}",
            where=lines.where(keys),
            accepted="a mapping, name: decision",
            todo=_TODO,
        )
    for key in section:
        if not isinstance(key, str):
            raise SbpValueError(
                f"{name} has a name that is no text: {shown(key)}",
                where=lines.where((*keys, str(key))),
                accepted="text",
                todo="put it in quotation marks",
            )
    return section


def _named(sections: Any, lines: Lines) -> dict[str, tuple[Keys, Any]]:
    """Return operators by whole names; in the file, modules contain them by their last part."""
    found: dict[str, tuple[Keys, Any]] = {}
    for module, section in _flat(("nodes",), sections, lines).items():
        for op, value in _flat(("nodes", module), section, lines).items():
            name = op if module == ROOT else f"{module}.{op}"
            keys = ("nodes", module, op)
            if name in found:
                raise SbpValueError(
                    f"{name!r} is decided twice in nodes", where=(lines.where(keys), module)
                )
            found[name] = keys, value
    return found


def _names(graph: LogicalGraph) -> tuple[Collection[str], Collection[str]]:
    """Return the names of a graph that a strategy decides on: inputs, and nodes."""
    inputs = [e.name for e in graph.inputs if isinstance(graph.types[e.name], TensorType)]
    ops = [node.name for node in graph.nodes if not node.is_host]
    # A dict keeps the order, and has fast lookups.
    return dict.fromkeys(inputs), dict.fromkeys(ops)


def _decisions(
    section: str,
    entries: Mapping[str, tuple[Keys, Any]],
    names: Collection[str] | None,
    lines: Lines,
    found: dict[Keys, Keys],
    *,
    patterns_stand: bool,
) -> dict[str, Any]:
    """Return decisions by exact names, in the order of the graph, for the type of a strategy.

    Args:
        section: `storage` or `nodes`.
        entries: The entries of the file, each with its keys, by names and patterns of them.
        names: The names of the graph, if it is known.
        lines: The lines of the file.
        found: Output: the keys of each decision -> the keys of its entry in the file.
        patterns_stand: Whether patterns are read as if they were names.
    """
    exact: dict[str, Any] = {}
    patterns: dict[str, tuple[Keys, Any]] = {}
    for name, (keys, value) in entries.items():
        is_pattern = not name.startswith(_AS_IT_STANDS) and re.search(r"[*?]", name)
        if is_pattern and not patterns_stand:
            patterns[name] = keys, value
            continue
        for each in _expanded(name, keys, lines):
            if each in exact:
                raise SbpValueError(
                    f"{each!r} is decided twice in {section}", where=(lines.where(keys), name)
                )
            if names is not None and each not in names:
                kind = "state or batch tensor" if section == "storage" else "operator"
                raise _unknown(kind, each, names, (lines.where(keys), f"{section} of the strategy"))
            if names is None and len(exact) == _MOST_NAMES:
                raise SbpValueError(
                    f"{section} decides on more than {_MOST_NAMES:,} names, at {name!r}",
                    where=lines.where(keys),
                    accepted="fewer; any number where the graph is known",
                )
            exact[each] = value
            found[section, each] = keys
    if names is not None and patterns:
        return _filled(section, exact, patterns, names, lines, found)
    if patterns:
        name, (keys, _) = next(iter(patterns.items()))
        raise SbpValueError(
            f"the pattern {name!r} in {section} needs the graph",
            where=lines.where(keys),
            accepted="exact names; numbers of layers as {0-31}",
        )
    return exact


def _unknown(kind: str, name: str, names: Iterable[str], where: tuple[str, ...]) -> SbpLookupError:
    """Return the error of an unknown name; of long lists only the closest names are listed."""
    error = unknown_name(kind, name, names, where=where)
    if len(error.accepted) > 300:
        error = error.replaced(
            SbpLookupError, accepted=f"names of the graph, such as {error.accepted[:200]} ..."
        )
    return error


def _filled(
    section: str,
    exact: dict[str, Any],
    patterns: Mapping[str, tuple[Keys, Any]],
    names: Iterable[str],
    lines: Lines,
    found: dict[Keys, Keys],
) -> dict[str, Any]:
    used = set()
    filled = {}
    for name in names:
        match = next((pattern for pattern in patterns if fnmatchcase(name, pattern)), None)
        if name in exact:
            filled[name] = exact[name]
        elif match is not None:
            found[section, name], filled[name] = patterns[match]
            used.add(match)
    if idle := [pattern for pattern in patterns if pattern not in used]:
        raise SbpValueError(
            f"the pattern {idle[0]!r} decides nothing",
            where=(lines.where(patterns[idle[0]][0]), f"{section} of the strategy"),
            todo="correct or remove it; names and earlier patterns go first",
        )
    return filled


def _expanded(name: str, keys: Keys, lines: Lines) -> Iterator[str]:
    """Yield the names for which a name with ranges of numbers stands.

    Raises:
        SbpValueError: it has too many ranges, or one that ends before it begins.
    """
    if name.startswith(_AS_IT_STANDS):
        yield name.removeprefix(_AS_IT_STANDS)
        return
    match = _BRACES.search(name)
    if match is None:
        yield name
        return
    if len(_BRACES.findall(name)) > _MOST_RANGES:
        raise SbpValueError(
            f"{name[:100]!r} has too many ranges",
            where=lines.where(keys),
            accepted=f"at most {_MOST_RANGES}",
        )
    for part in match[1].split(","):
        first, _, last = part.partition("-")
        if int(last or first) < int(first):
            raise SbpValueError(
                f"the range {part} of {name[:100]!r} ends before it begins",
                where=lines.where(keys),
                accepted=f"{{{last}-{first}}}",
            )
        for number in range(int(first), int(last or first) + 1):
            yield from _expanded(
                f"{name[: match.start()]}{number}{name[match.end() :]}", keys, lines
            )

"""Strategies as YAML that a person can read, compare and edit. Needs PyYAML.

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

Signatures read as errors print them: the nd-SBP of each tensor argument, an arrow, that of each
output. Layers that are cut alike share a line: `{0-31}` or `{0-3,8}` stands for the number of the
layer. With several stages, `@1` behind a decision is its stage. Besides names, a reader of the file
may use the patterns `*` and `?`; they hold for what nothing else names, the first one first.

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

Stability: stable.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from sbp_core import serialize
from sbp_core.errors import SbpLookupError, SbpValueError, unknown_name
from sbp_core.graph.ir import LogicalGraph, TensorType
from sbp_core.serialize import shown
from sbp_core.strategy import Strategy

__all__ = ["ROOT", "from_yaml", "load", "save", "to_yaml"]

#: The module of operators that no module called.
ROOT = "(root)"

_BRACES = re.compile(r"\{(\d{1,9}(?:-\d{1,9})?(?:,\d{1,9}(?:-\d{1,9})?)*)\}", re.ASCII)

#: Written before a name that holds characters of patterns, and is meant as it stands.
_AS_IT_STANDS = "="
_SPECIAL = re.compile(r"[{}*?\[\]=]")

#: Names that a section may decide on, where no graph says which there are.
_MOST_NAMES = 100_000

#: Ranges in one name.
_MOST_RANGES = 8

#: What PyYAML passes on of values that it cannot make.
_OF_PYYAML = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError)

_TODO = "see the docstring of sbp_core.strategy_yaml"


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
    yaml = _pyyaml()
    text: str = yaml.dump(value, Dumper=_dumper(yaml), sort_keys=False, width=2**31)
    return text


def from_yaml(text: str, graph: LogicalGraph | None = None) -> Strategy:
    """Read a strategy.

    Args:
        text: As `to_yaml` writes it, edited or not.
        graph: The graph that it is for: names are checked against it, and patterns may be used.

    Raises:
        SbpValueError: the text is no strategy; names the line or the entry.
        SbpLookupError: a name of the graph is unknown (with the closest match); PyYAML is not
            installed.
    """
    value = _yaml_value(text)
    if not isinstance(value, dict):
        raise SbpValueError(
            f"a strategy is a mapping, not {shown(value)}",
            accepted="planner, graph_hash, stages, num_micro_batches, in_flight, storage, nodes",
            todo=_TODO,
        )
    read: dict[str, Any] = dict(value)
    inputs, ops = (None, None) if graph is None else _names(graph)
    if "storage" in value:
        read["storage"] = _decisions("storage", _flat("storage", value["storage"]), inputs)
    if "nodes" in value:
        read["nodes"] = _decisions("nodes", _named("nodes", value["nodes"]), ops)
    return serialize.load(read, Strategy, root="the strategy", todo=_TODO).on_its_stages()


def save(strategy: Strategy, path: Path) -> None:
    """Write a strategy as YAML."""
    path.write_text(to_yaml(strategy), encoding="utf-8")


def load(path: Path, graph: LogicalGraph | None = None) -> Strategy:
    """Read a file that `save` wrote, or a person; see `from_yaml`."""
    return from_yaml(serialize.read_text(path), graph)


# Writing.


def _grouped(entries: Mapping[str, str]) -> dict[str, str]:
    """Return the entries with equal ones of several layers in one.

    before: a.0.w: (B)   a.1.w: (B)   a.2.w: (S(0))
    after:  a.{0-1}.w: (B)   a.2.w: (S(0))
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
        numbers = sorted(layers[(before, after, value)])
        if len(numbers) > 1:
            name = f"{before}{{{_ranges(numbers)}}}{after}"
        found.setdefault(name, value)
    return found


def _split_number(name: str) -> tuple[str, int | None, str]:
    """Return a name before, in and after its first part that is a number; with dots."""
    parts = name.split(".")
    for index, part in enumerate(parts):
        # As short as `_BRACES` reads them.
        is_plain = part.isascii() and part.isdigit() and len(part) < 10 and part == str(int(part))
        if is_plain and not _SPECIAL.search(name):
            before = "".join(f"{piece}." for piece in parts[:index])
            return before, int(part), "".join(f".{piece}" for piece in parts[index + 1 :])
    return name, None, ""


def _ranges(numbers: list[int]) -> str:
    """Return sorted numbers as text: `0-3,8`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


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


def _pyyaml() -> Any:
    try:
        import yaml  # type: ignore[import-untyped] # its stubs are a package of their own
    except ImportError as error:
        raise SbpLookupError(
            "strategies as YAML need PyYAML, which is not installed",
            accepted="JSON: Strategy.save and Strategy.load",
            todo="pip install 'sbp-core[yaml]'",
        ) from error
    return yaml


# Reading.


def _yaml_value(text: str) -> Any:
    """Return what a text in YAML says.

    Raises:
        SbpValueError: it is none, says something twice, or refers to parts of itself.
        SbpLookupError: PyYAML is not installed.
    """
    yaml = _pyyaml()
    try:
        return yaml.load(text, Loader=_loader(yaml))
    # PyYAML passes on what Python says of dates and numbers that are none.
    except (yaml.YAMLError, *_OF_PYYAML) as error:
        raise SbpValueError(f"this is no YAML: {error}", todo="correct that place") from error


def _loader(yaml: Any) -> Any:
    """Return a loader that refuses references and keys that stand twice."""

    class Loader(yaml.SafeLoader):  # type: ignore[misc] # PyYAML has no types
        def compose_node(self, parent: Any, index: Any) -> Any:
            # A few lines of references to references stand for a value without end.
            if self.check_event(yaml.AliasEvent):
                mark = self.peek_event().start_mark
                raise yaml.composer.ComposerError(None, None, "a reference (*)", mark)
            return super().compose_node(parent, index)

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            known = set()
            for key, _ in node.value:
                name = (key.tag, key.value) if isinstance(key, yaml.ScalarNode) else None
                if name in known:
                    what = f"{key.value!r} stands twice"
                    raise yaml.constructor.ConstructorError(None, None, what, key.start_mark)
                known |= {name} if name else set()
            return super().construct_mapping(node, deep)

    return Loader


def _flat(where: str, section: Any) -> dict[str, Any]:
    if not isinstance(section, dict):
        raise SbpValueError(
            f"{where} is {shown(section)}", accepted="a mapping, name: decision", todo=_TODO
        )
    for key in section:
        if not isinstance(key, str):
            raise SbpValueError(
                f"{where} has a name that is no text: {shown(key)}",
                accepted="text",
                todo="put it in quotation marks",
            )
    return section


def _named(where: str, sections: Any) -> dict[str, Any]:
    """Return operators by their whole names; modules hold them by their last part."""
    found: dict[str, Any] = {}
    for module, section in _flat(where, sections).items():
        for op, value in _flat(f"{where}.{module}", section).items():
            name = op if module == ROOT else f"{module}.{op}"
            if name in found:
                raise SbpValueError(f"{name!r} is decided twice in {where}", where=module)
            found[name] = value
    return found


def _names(graph: LogicalGraph) -> tuple[Collection[str], Collection[str]]:
    """Return the names of a graph that a strategy decides on: inputs, and nodes."""
    inputs = [e.name for e in graph.inputs if isinstance(graph.types[e.name], TensorType)]
    ops = [node.name for node in graph.nodes if not node.is_host]
    # In order, and found at once.
    return dict.fromkeys(inputs), dict.fromkeys(ops)


def _decisions(
    where: str, entries: Mapping[str, Any], names: Collection[str] | None
) -> dict[str, Any]:
    """Return what the type of a strategy reads, by exact names and in the order of the graph."""
    exact: dict[str, Any] = {}
    patterns: dict[str, Any] = {}
    for name, value in entries.items():
        if not name.startswith(_AS_IT_STANDS) and re.search(r"[*?]", name):
            patterns[name] = value
            continue
        for each in _expanded(name):
            if each in exact:
                raise SbpValueError(f"{each!r} is decided twice in {where}", where=name)
            if names is not None and each not in names:
                kind = "state or batch tensor" if where == "storage" else "operator"
                raise _unknown(kind, each, names, where)
            if names is None and len(exact) == _MOST_NAMES:
                raise SbpValueError(
                    f"{where} decides on more than {_MOST_NAMES:,} names, at {name!r}",
                    accepted="fewer; any number where the graph is known",
                )
            exact[each] = value
    if names is not None and patterns:
        return _filled(where, exact, patterns, names)
    if patterns:
        raise SbpValueError(
            f"the pattern {next(iter(patterns))!r} in {where} needs the graph",
            accepted="exact names; numbers of layers as {0-31}",
        )
    return exact


def _unknown(kind: str, name: str, names: Iterable[str], where: str) -> SbpLookupError:
    """Make the error of an unknown name; of long lists only the closest are listed."""
    error = unknown_name(kind, name, names, where=f"{where} of the strategy")
    if len(error.accepted) > 300:
        error = SbpLookupError(
            error.what,
            where=error.where,
            accepted=f"names of the graph, such as {error.accepted[:200]} ...",
            todo=error.todo,
        )
    return error


def _filled(
    where: str, exact: dict[str, Any], patterns: Mapping[str, Any], names: Iterable[str]
) -> dict[str, Any]:
    used = set()
    found = {}
    for name in names:
        match = next((pattern for pattern in patterns if fnmatchcase(name, pattern)), None)
        if name in exact:
            found[name] = exact[name]
        elif match is not None:
            found[name] = patterns[match]
            used.add(match)
    if idle := [pattern for pattern in patterns if pattern not in used]:
        raise SbpValueError(
            f"the pattern {idle[0]!r} decides nothing",
            where=f"{where} of the strategy",
            todo="correct or remove it; names and earlier patterns go first",
        )
    return found


def _expanded(name: str) -> Iterator[str]:
    """Yield the names that a name with ranges of numbers stands for.

    Raises:
        SbpValueError: it has too many ranges.
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
            f"{name[:100]!r} has too many ranges", accepted=f"at most {_MOST_RANGES}"
        )
    for part in match[1].split(","):
        first, _, last = part.partition("-")
        for number in range(int(first), int(last or first) + 1):
            yield from _expanded(f"{name[: match.start()]}{number}{name[match.end() :]}")

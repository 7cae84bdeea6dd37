"""Strategies as YAML that a person can read, compare and edit. No torch; needs PyYAML.

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
regather: ['*']
report: {}
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
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from sbp_core.errors import SbpError, SbpLookupError, SbpValueError, unknown_name
from sbp_core.graph.ir import LogicalGraph, TensorType
from sbp_core.sbp import NdSbp
from sbp_core.strategy import FORMAT, Strategy

#: The module of operators that no module called.
ROOT = "(root)"

_GROUP = re.compile(r"\(((?:[^()]|\([^()]*\))*)\)")
_BRACES = re.compile(r"\{(\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*)\}")
_STAGE = re.compile(r"^(.*?)\s*@\s*(\d+)$", re.DOTALL)

#: Written before a name that holds characters of patterns, and is meant as it stands.
_AS_IT_STANDS = "="
_SPECIAL = re.compile(r"[{}*?\[\]=]")


def to_yaml(strategy: Strategy) -> str:
    """Return the file of a strategy; `from_yaml` reads it back equal.

    Raises:
        SbpLookupError: PyYAML is not installed.
    """
    value = strategy.to_json()
    value.pop("format")
    staged = len(strategy.stages) > 1
    storage, nodes = value.pop("storage"), value.pop("nodes")
    value["storage"] = _grouped({name: _text(entry, staged) for name, entry in storage.items()})
    sections: dict[str, dict[str, Any]] = {}
    for name, entry in _grouped({n: _text(part, staged) for n, part in nodes.items()}).items():
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
        SbpLookupError: a key, or a name of the graph, is unknown (with the closest match);
            something of the graph is not decided; PyYAML is not installed.
    """
    yaml = _pyyaml()
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise SbpValueError(f"this is no YAML: {error}") from error
    _check_keys(value)
    stages = len(value["stages"])
    storage = _flat("storage", value["storage"])
    nodes = dict(_named("nodes", value["nodes"]))
    names: tuple[list[str] | None, list[str] | None] = (None, None)
    if graph is not None:
        names = _names(graph)
    read = dict(value) | {
        "format": FORMAT,
        "storage": _decisions("storage", storage, names[0], stages),
        "nodes": _decisions("nodes", nodes, names[1], stages),
    }
    try:
        return Strategy.from_json(read)
    except SbpError:
        raise
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise SbpValueError(
            f"this is no strategy: {type(error).__name__}: {error}",
            todo="see the docstring of sbp_core.strategy_yaml",
        ) from error


def save(strategy: Strategy, path: Path) -> None:
    """Write a strategy as YAML."""
    path.write_text(to_yaml(strategy), encoding="utf-8")


def load(path: Path, graph: LogicalGraph | None = None) -> Strategy:
    """Read a file that `save` wrote, or a person; see `from_yaml`."""
    return from_yaml(path.read_text(encoding="utf-8"), graph)


# Writing.


def _text(entry: list[Any], staged: bool) -> Any:
    """Return a decision as people read it; as it is, if it holds more than they would see."""
    if len(entry) == 2:
        stage, text = entry[0], f"({entry[1]})"
    elif len(entry) == 3:
        stage, inputs, outputs = entry
        left, right = (" ".join(f"({sbp})" for sbp in part) for part in (inputs, outputs))
        text = f"{left} -> {right}".strip()
    else:
        return entry
    return f"{text} @{stage}" if staged else text


def _grouped(entries: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries with equal ones of several layers in one.

    before: a.0.w: (B)   a.1.w: (B)   a.2.w: (S(0))
    after:  a.{0-1}.w: (B)   a.2.w: (S(0))
    """
    layers: dict[tuple[str, str, str], list[int]] = {}
    for name, value in entries.items():
        before, number, after = _split_number(name)
        if number is not None:
            layers.setdefault((before, after, repr(value)), []).append(number)
    found: dict[str, Any] = {}
    for name, value in entries.items():
        before, number, after = _split_number(name)
        if number is None:
            found[_AS_IT_STANDS + name if _SPECIAL.search(name) else name] = value
            continue
        numbers = sorted(layers[(before, after, repr(value))])
        if len(numbers) > 1:
            name = f"{before}{{{_ranges(numbers)}}}{after}"
        found.setdefault(name, value)
    return found


def _split_number(name: str) -> tuple[str, int | None, str]:
    """Return a name before, in and after its first part that is a number; with dots."""
    parts = name.split(".")
    for index, part in enumerate(parts):
        is_plain = part.isascii() and part.isdigit() and part == str(int(part))
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


def _check_keys(value: Any) -> None:
    needed = {"planner", "graph_hash", "stages", "num_micro_batches", "in_flight", "storage"}
    needed |= {"nodes", "report"}
    if not isinstance(value, dict):
        raise SbpValueError(
            f"a strategy is a mapping, not {type(value).__name__}",
            accepted=", ".join(sorted(needed)),
        )
    value.setdefault("report", {})
    known = needed | Strategy.__dataclass_fields__.keys()
    for key in value:
        if key not in known:
            raise unknown_name("key of a strategy", str(key), known)
    if missing := sorted(needed - value.keys()):
        raise SbpLookupError(f"the strategy has no {missing[0]!r}", accepted=", ".join(missing))
    if not isinstance(value["stages"], list):
        raise SbpValueError("stages is no list", accepted="a list of {ranks, axes, device}")


def _flat(where: str, section: Any) -> dict[str, Any]:
    if not isinstance(section, dict):
        raise SbpValueError(f"{where} is no mapping", accepted="name: decision")
    return {str(key): value for key, value in section.items()}


def _named(where: str, sections: Any) -> Iterator[tuple[str, Any]]:
    """Yield operators by their whole names; modules hold them by their last part."""
    for module, section in _flat(where, sections).items():
        for op, value in _flat(f"{where}.{module}", section).items():
            yield (op if module == ROOT else f"{module}.{op}"), value


def _names(graph: LogicalGraph) -> tuple[list[str], list[str]]:
    """Return the names of a graph that a strategy decides on: inputs, and nodes."""
    inputs = [e.name for e in graph.inputs if isinstance(graph.types[e.name], TensorType)]
    return inputs, [node.name for node in graph.nodes if not node.is_host]


def _decisions(
    where: str, entries: Mapping[str, Any], names: list[str] | None, num_stages: int
) -> dict[str, Any]:
    """Return what `Strategy.from_json` reads, by exact names and in the order of the graph."""
    exact: dict[str, Any] = {}
    patterns: dict[str, Any] = {}
    for name, value in entries.items():
        decision = _decision(f"{where}: {name}", value, num_stages)
        if not name.startswith(_AS_IT_STANDS) and re.search(r"[*?]", name):
            patterns[name] = decision
            continue
        for each in _expanded(name):
            if each in exact:
                raise SbpValueError(f"{each!r} is decided twice in {where}", where=name)
            exact[each] = decision
    if names is None:
        if patterns:
            raise SbpValueError(
                f"the pattern {next(iter(patterns))!r} in {where} needs the graph",
                accepted="exact names; numbers of layers as {0-31}",
            )
        return exact
    for name in exact:
        if name not in names:
            kind = "state or batch tensor" if where == "storage" else "operator"
            raise _unknown(kind, name, names, where)
    return exact if not patterns else _filled(where, exact, patterns, names)


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
    where: str, exact: dict[str, Any], patterns: Mapping[str, Any], names: list[str]
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
    """Yield the names that a name with ranges of numbers stands for."""
    if name.startswith(_AS_IT_STANDS):
        yield name.removeprefix(_AS_IT_STANDS)
        return
    match = _BRACES.search(name)
    if match is None:
        yield name
        return
    for part in match[1].split(","):
        first, _, last = part.partition("-")
        for number in range(int(first), int(last or first) + 1):
            yield from _expanded(f"{name[: match.start()]}{number}{name[match.end() :]}")


def _decision(where: str, value: Any, num_stages: int) -> list[Any]:
    """Read `(S(0)) (B) -> (S(0)) @1`, or the SBP of a state.

    Raises:
        SbpValueError: it cannot be read, or names a stage that is not there.
    """
    if isinstance(value, list):
        return value
    text, stage = str(value), 0
    if match := _STAGE.match(text):
        text, stage = match[1], int(match[2])
    if stage >= num_stages:
        raise SbpValueError(
            f"stage {stage} of {num_stages}", where=where, accepted=f"@0 to @{num_stages - 1}"
        )
    left, arrow, right = text.partition("->")
    try:
        inputs, outputs = _sbps(left), _sbps(right)
    except SbpError as error:
        raise SbpValueError(error.what, where=where, accepted=error.accepted) from error
    if arrow:
        return [stage, inputs, outputs]
    if len(inputs) != 1:
        raise SbpValueError(f"{text!r} is no nd-SBP", where=where, accepted="such as (S(0), B)")
    return [stage, inputs[0]]


def _sbps(text: str) -> list[str]:
    rest = _GROUP.sub("", text).strip()
    if rest:
        raise SbpValueError(f"{rest!r} stands outside of parentheses", accepted="(S(0), B)")
    return [str(NdSbp.parse(match[1])) for match in _GROUP.finditer(text)]

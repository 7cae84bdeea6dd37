"""Read a profile of PipeDream, a text file of measured operators and edges, as a `BlockGraph`.

    node5 -- Conv2d(64, 64) -- forward_compute_time=7.1, backward_compute_time=15.2,
        activation_size=1644167168.0, parameter_size=147712.0                  (all in one line)
    <TAB>node4 -- node5

Times are milliseconds of one mini-batch on one device, sizes are bytes. An operator with several
results has `activation_size=[a; b; c]`, which are added up. Lines come in any order. A fourth
field, ` -- stage_id=3`, is the choice of an earlier run, and is ignored. As in PipeDream's
optimizer, these operators are left out:

    sources whose description begins with `Input`     they load data; their times are not compute
    sinks whose description begins with `__getitem__` no operator uses them

A value goes whole from an operator to all its users, and is sent once over each cut.

Source: msr-fiddle/pipedream, graph/graph.py (`Node.from_str`, `Graph.from_str`) and
optimizer/optimizer_graph_hierarchical.py (the operators that are left out).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import isfinite
from pathlib import Path

from sbp_core.errors import SbpValueError
from sbp_core.serialize import read_text
from sbp_planner.stages.graph import AtomicBlock, BlockGraph, Flow

_NODE_FORM = (
    "ID -- DESCRIPTION -- forward_compute_time=MS, backward_compute_time=MS, "
    "activation_size=BYTES or [BYTES; BYTES], parameter_size=BYTES"
)
_EDGE_FORM = "<TAB>ID -- ID"

_FIELD = re.compile(r"(\w+)\s*=\s*(\[[^\]]*\]|[^,\s\[\]]+)")

_KEYS = ("forward_compute_time", "backward_compute_time", "activation_size", "parameter_size")


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """The contents of a profile.

    Args:
        graph: The operators, named by their ids.
        descriptions: Description of each operator, by id.
        dropped: Ids of the operators that were left out.
    """

    graph: BlockGraph
    descriptions: dict[str, str]
    dropped: tuple[str, ...]


def read_profile(path: str | Path) -> Profile:
    """Return the profile in a file.

    Raises:
        SbpValueError: The file cannot be read, or is no profile; names the line.
    """
    try:
        text = read_text(Path(path))
    except SbpValueError as error:
        raise SbpValueError(f"cannot read the profile: {error.what}", where=str(path)) from error
    return parse_profile(text, where=str(path))


def parse_profile(text: str, where: str = "profile") -> Profile:
    """Return the profile in a text.

    Args:
        text: The text of the file.
        where: Name of the file, for errors.

    Raises:
        SbpValueError: A line is neither a node nor an edge, an edge names an unknown node, a node
            is there twice, there is a cycle, or nothing is left to be cut.
    """
    blocks: dict[str, AtomicBlock] = {}
    descriptions: dict[str, str] = {}
    edges: list[tuple[str, str, str]] = []
    for number, line in enumerate(text.splitlines(), start=1):
        place = f"{where}:{number}"
        if not line.strip():
            continue
        if line[0].isspace():
            ends = [part.strip() for part in line.strip().split(" -- ")]
            if len(ends) != 2 or not all(ends):
                raise SbpValueError(f"no edge: {line.strip()!r}", where=place, accepted=_EDGE_FORM)
            edges.append((ends[0], ends[1], place))
            continue
        block, description = _node(line, place)
        if block.name in blocks:
            raise SbpValueError(f"node {block.name!r} is there twice", where=place)
        blocks[block.name] = block
        descriptions[block.name] = description
    for source, target, place in edges:
        for name in (source, target):
            if name not in blocks:
                raise SbpValueError(
                    f"an edge names {name!r}, and no line describes that node",
                    where=place,
                    accepted=_NODE_FORM,
                )
    pairs = list(dict.fromkeys((source, target) for source, target, _ in edges))
    # Leave out sources that load data, then sinks without users.
    targets = {target for _, target in pairs}
    inputs = [
        name
        for name, text in descriptions.items()
        if text.startswith("Input") and name not in targets
    ]
    used = {source for source, target in pairs if target not in inputs}
    unused = [
        name
        for name, text in descriptions.items()
        if text.startswith("__getitem__") and name not in used
    ]
    consumers: dict[str, list[str]] = {
        name: [] for name in blocks if name not in (*inputs, *unused)
    }
    for source, target in pairs:
        if source in consumers and target in consumers:
            consumers[source].append(target)
    if not consumers:
        raise SbpValueError("the profile has no operators", where=where, accepted=_NODE_FORM)
    flows = tuple(
        Flow(producer=name, consumers=tuple(own), num_bytes=blocks[name].activation_bytes)
        for name, own in consumers.items()
        if own
    )
    try:
        graph = BlockGraph(blocks=tuple(blocks[name] for name in consumers), flows=flows)
    except SbpValueError as error:
        raise error.replaced(SbpValueError, where=where) from error
    return Profile(graph=graph, descriptions=descriptions, dropped=(*inputs, *unused))


def _node(line: str, place: str) -> tuple[AtomicBlock, str]:
    parts = line.strip().split(" -- ")
    fields = dict(_FIELD.findall(parts[2])) if len(parts) >= 3 else {}
    missing = [key for key in _KEYS if key not in fields]
    if len(parts) < 3 or missing:
        lacks = f", which lacks {', '.join(missing)}" if fields else ""
        raise SbpValueError(
            f"no node: {line.strip()!r}{lacks}",
            where=place,
            accepted=f"{_NODE_FORM}; edges: {_EDGE_FORM}",
        )
    forward, backward, activation, parameter = (_number(key, fields[key], place) for key in _KEYS)
    block = AtomicBlock(
        name=parts[0].strip(),
        forward_s=forward / 1e3,
        backward_s=backward / 1e3,
        activation_bytes=activation,
        parameter_bytes=parameter,
    )
    return block, parts[1].strip()


def _number(key: str, text: str, place: str) -> float:
    """Return a number, or the sum of several in brackets."""
    parts = re.split(r"[;,]", text.strip("[]")) if text.startswith("[") else [text]
    try:
        value = sum(float(part) for part in parts if part.strip())
    except ValueError:
        value = -1.0
    if not (isfinite(value) and value >= 0):
        raise SbpValueError(
            f"{key}={text} is no time or size",
            where=place,
            accepted="a number >= 0, such as 12.5; several results: [12.5; 3.0]",
        )
    return int(value) if value == int(value) else value

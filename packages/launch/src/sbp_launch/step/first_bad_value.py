"""Find the operator that made a loss or gradient infinite or NaN, by running the step again.

The session has undone the step, so the states have their values from before it. All ranks run the
same step once more and watch each operator; see `sbp_torch.runtime.BadValueWatch`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict

import torch
from torch import Tensor

from sbp_core.graph import LogicalGraph
from sbp_core.runtime import BatchIs, NotFiniteStepError, Number, Session
from sbp_core.units import format_ranges
from sbp_torch.runtime import BadValue, BadValueWatch


class UndoneStepError(NotFiniteStepError):
    """A step that was undone because its loss or its gradients are infinite or NaN.

    `bad_value` has lines that describe where the first bad value was; `where` includes them.
    """

    bad_value: tuple[str, ...] = ()


#: The largest number of names of states or batch tensors that are reported.
_MOST_NAMES = 3


def first_bad_value(
    session: Session,
    graph: LogicalGraph,
    batch: Mapping[str, Tensor],
    scalars: Mapping[str, Number],
    gather: Callable[[str], Sequence[str]] = lambda text: [text],
    *,
    batch_is: BatchIs = "local",
) -> tuple[str, ...]:
    """Return lines that describe where the first bad value of an undone step was.

    Args:
        session: The session that has undone the step; all of its processes call this.
        graph: The graph that the plan was compiled from.
        batch: The batch of the step, or the part of it that this process gave.
        scalars: The scalars of the step.
        gather: Returns the text of every process, each shorter than 4 KiB; all of them call it.
        batch_is: Whether `batch` is the whole batch or the part of this process.

    Returns:
        Lines for `where` of an error; the same in all processes.
    """
    watch = BadValueWatch()
    session.watch = watch
    try:
        session.step(batch, scalars, batch_is=batch_is)
    except NotFiniteStepError:
        pass
    finally:
        del session.watch
    first = sorted(watch.found.values(), key=lambda bad: bad.number)[:2]
    own = {
        "states": _names({piece.name: piece.value for piece in session.pieces()}),
        "batch": _names(batch),
        "found": [asdict(bad) for bad in first],
    }
    parts = [json.loads(text) for text in gather(json.dumps(own))]
    for what, todo in (
        ("states", "which the step before has made so: its gradients were not finite"),
        ("batch", "as the data gave it"),
    ):
        if names := list(dict.fromkeys(name for part in parts for name in part[what])):
            return (f"{what}: {', '.join(names)} not finite before the step began, {todo}",)
    found = [BadValue(**entry) for part in parts for entry in part["found"]]
    return tuple(_lines(graph, found)) or ("the step, run again operator by operator, is finite",)


def _names(values: Mapping[str, object]) -> list[str]:
    """Return the names of at most `_MOST_NAMES` values that are not finite."""
    bad = [
        name
        for name, value in values.items()
        if isinstance(value, Tensor)
        and value.is_floating_point()
        and not bool(torch.isfinite(value).all())
    ]
    return bad[:_MOST_NAMES] + (["..."] if len(bad) > _MOST_NAMES else [])


def _lines(graph: LogicalGraph, found: Sequence[BadValue]) -> list[str]:
    """Return a line for the first operator that makes NaN, and for the first that makes inf."""
    nodes = {node.name: index for index, node in enumerate(graph.nodes)}
    order = sorted(found, key=lambda bad: (bad.micro_batch, nodes.get(bad.node, len(nodes))))
    firsts: dict[str, BadValue] = {}
    for bad in order:
        firsts.setdefault(bad.kind, bad)
    lines = []
    for kind, bad in firsts.items():
        where = bad.op
        if bad.node in nodes:
            (where,) = graph.nodes[nodes[bad.node]].where()
        ranks = sorted({one.rank for one in found if (one.kind, one.node) == (kind, bad.node)})
        on = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {format_ranges(ranks)}"
        inputs = "; ".join(bad.inputs) or "no tensors"
        when = f"on {on}, micro-batch {bad.micro_batch}"
        lines.append(f"{where}: makes the first {kind}, {when}, of {inputs}")
    return lines

"""Add to the error of a failed operator the line of the model that called it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from sbp_core.errors import RunError
from sbp_core.graph import LogicalGraph

#: The way in which runtimes name the node whose operator failed.
_NODE = re.compile(r"op '(?P<node>[^']+)':")


@contextmanager
def naming_source_lines(graph: LogicalGraph) -> Iterator[None]:
    """Return a context that adds the model's line to an error of a step in the `with` block.

    Args:
        graph: The graph of the session, before it was planned.

    Raises:
        RunError: the error of the step; see `with_source_line`.
    """
    try:
        yield
    except RunError as error:
        raise with_source_line(error, graph) from error.__cause__


def with_source_line(error: RunError, graph: LogicalGraph) -> RunError:
    """Return the error of a step with the model's line, if it names a node that has one.

    Its cause and its notes are kept.

    Args:
        error: The error that a step raised.
        graph: The graph of the session, before it was planned.
    """
    named = [found["node"] for place in error.where if (found := _NODE.search(place))]
    lines = [line for node in graph.nodes if node.name in named for line in node.where()]
    if not lines:
        return error
    made = error.replaced(type(error), where=(*lines, *error.where))
    made.__cause__ = error.__cause__
    for note in getattr(error, "__notes__", ()):
        made.add_note(note)
    return made

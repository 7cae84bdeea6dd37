"""Say of a failed operator which line of the model it came from."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from sbp_core.errors import RunError
from sbp_core.graph import LogicalGraph

#: How runtimes name the node whose operator failed.
_NODE = re.compile(r"op '(?P<node>[^']+)':")


@contextmanager
def naming_source_lines(graph: LogicalGraph) -> Iterator[None]:
    """Raise the error of a step inside the `with` block with the model's line.

    Args:
        graph: What the session runs, before it was planned.

    Raises:
        RunError: the one that the step raised; see `with_source_line`.
    """
    try:
        yield
    except RunError as error:
        raise with_source_line(error, graph) from error.__cause__


def with_source_line(error: RunError, graph: LogicalGraph) -> RunError:
    """Return the error of a step with the model's line, if it names a node that came from one.

    Its cause and its notes go along.

    Args:
        error: That a step raised.
        graph: What the session runs, before it was planned.
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

"""Check that capturing a step, which runs the user's loss, changes nothing that the loss reads."""

from __future__ import annotations

from collections.abc import Callable

from sbp_core.errors import ConfigError
from sbp_core.graph import LogicalGraph, graph_hash
from sbp_torch.guards import Guard


def check_unchanged(
    guard: Guard,
    graph: LogicalGraph,
    again: Callable[[], LogicalGraph],
    make_guard: Callable[[], Guard],
) -> None:
    """Check that the capture of a step has changed nothing that its program reads.

    Changed values are restored. A change that happens once, such as filling a cache, is harmless if
    the next capture changes nothing more and gives the same step.

    Args:
        guard: A guard that was made before the capture.
        graph: The captured step.
        again: Captures it again.
        make_guard: Makes a guard of the program in its present condition.

    Raises:
        ConfigError: each capture changes what the program reads.
    """
    changes = guard.changes()
    if not changes:
        return
    behind = make_guard()
    try:
        is_once = graph_hash(again()) == graph_hash(graph) and not behind.changes()
    except Exception:  # also errors of PyTorch, for example on tensors of the first capture
        is_once = False
    guard.restore()
    if not is_once:
        raise ConfigError(
            f"the loss changes what it reads: {changes[0].what}",
            where=changes[0].where,
            accepted="a loss that reads its batch, and changes only buffers of the model",
            todo="return the value as a metric; or keep it in a buffer of the model: "
            "self.register_buffer('hidden', ...), in forward self.hidden = hidden.detach(); if "
            "only the same step reads it, such as features that a hook keeps, let the loss "
            "restore it: features.pop('h'), features.clear()",
        )

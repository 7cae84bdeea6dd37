"""Tag operators without a sharding rule in the graph, before planning: run whole, or try out."""

from __future__ import annotations

import logging
from dataclasses import replace

from sbp_core.errors import SignatureError
from sbp_core.graph.ir import LogicalGraph
from sbp_core.signatures.call import OpCall
from sbp_core.signatures.rule_registry import UnknownOperator, installed_rules

_LOG = logging.getLogger(__name__)


def allow_unknown(graph: LogicalGraph, unknown: UnknownOperator) -> LogicalGraph:
    """Tag the operators without a rule, so that they run whole, or are discovered by execution.

    before: y = mylib.smooth(x)                    no rule defines how it may be split
    after:  y = mylib.smooth(x)   unknown:whole    runs whole on every rank

    A warning names each of them. With `UnknownOperator.REFUSE` the graph does not change, and
    planning refuses the first of them.
    """
    if unknown is UnknownOperator.REFUSE:
        return graph
    named: set[str] = set()
    nodes = list(graph.nodes)
    for at, node in enumerate(nodes):
        try:
            if not node.is_host:
                installed_rules().rule(OpCall.of(graph, node))
        except SignatureError:
            named.add(node.op)
            nodes[at] = replace(node, tags=(*node.tags, unknown.tag))
    for op in sorted(named):
        how = "runs whole" if unknown is UnknownOperator.WHOLE else "is split as trial runs allow"
        _LOG.warning("no rule says how %s may be split: it %s", op, how)
    return graph.with_nodes(tuple(nodes))

"""Write mean losses as a sum and a global count, so that a split batch gives a partial sum."""

from __future__ import annotations

from dataclasses import replace

from sbp_core.graph import LogicalGraph, Node, Ref

_MEAN, _SUM = 1, 2

_FORWARDS = ("aten.nll_loss_forward.default", "aten.nll_loss2d_forward.default")


def sum_losses(graph: LogicalGraph) -> LogicalGraph:
    """Write a mean negative log-likelihood as a sum, divided by its total weight.

    The backward node already takes the total weight as an argument and stays as it is.

    before: loss, count = nll_loss_forward(logp, y, w, mean, ignore)
    after:  total, count = nll_loss_forward(logp, y, w, sum, ignore); loss = div(total, count)
    """
    nodes: list[Node] = []
    types = dict(graph.types)
    for node in graph.nodes:
        if node.op not in _FORWARDS or node.args[3] != _MEAN:
            nodes.append(node)
            continue
        loss, count = node.outputs
        total = f"{node.name}.sum"
        types[total] = types[loss]
        args = (*node.args[:3], _SUM, *node.args[4:])
        nodes.append(replace(node, args=args, outputs=(total, count)))
        nodes.append(
            replace(
                node,
                name=f"{node.name}.div",
                op="aten.div.Tensor",
                args=(Ref(total), Ref(count)),
                kwargs={},
                outputs=(loss,),
                tags=("pointwise",),
            )
        )
    return graph.with_nodes(tuple(nodes), types=types)

"""Run a `LogicalGraph` on one device, op by op: the reference that every plan is compared with.

There is no plan, no rank and no boxing (communication). Micro-batches run one after the other, and
the accumulations in the graph add up their results. States that are replaced in each micro-batch
are passed on to the next. For an asynchronous pipeline, `staleness` selects old parameters:

    micro-batch     0    1    2    3        With an update after each: forward and backward of
    staleness 0     w0   w1   w2   w3       micro-batch n use the parameters after n - staleness
    staleness 2     w0   w0   w0   w1       updates, at least w0; its update uses the newest ones
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from sbp_core.graph import InputKind, LogicalGraph, Node, OutputKind, Phase, Rate
from sbp_core.runtime import Number
from sbp_torch.ops.operators import bind, operator_of, results_of
from sbp_torch.ops.random import draw_of
from sbp_torch.runtime.accumulation import accumulate


def run_graph(
    graph: LogicalGraph,
    states: Mapping[str, Tensor | Number],
    batches: list[Mapping[str, Tensor]],
    scalars: Mapping[str, Number],
    staleness: Mapping[str, int] | None = None,
) -> tuple[dict[str, Tensor], dict[str, Tensor | Number]]:
    """Run one step.

    Args:
        graph: A verified graph.
        states: Every state input by name.
        batches: One batch for each micro-batch.
        scalars: Every scalar input by name; `step` too, if the graph draws random numbers.
        staleness: Parameter -> staleness in updates, for a step with several updates.

    Returns:
        The losses and metrics by name, and the new states by name (unchanged ones included).
    """
    constants: dict[str, Any] = {**states, **scalars}
    sums: dict[str, Tensor] = {}
    values: dict[str, Any] = {}
    newest: dict[str, Any] = {name: states[name] for name in graph.carried}
    versions = [newest]
    per_update = graph.num_micro_batches // graph.num_updates
    draws = [entry.name for entry in graph.inputs if entry.kind is InputKind.RNG]
    for index, batch in enumerate(batches):
        values = {**constants, **newest, **batch}
        number, place = divmod(index, per_update)
        stale = {n: versions[max(0, number - d)][n] for n, d in (staleness or {}).items()}
        ends_update = place == per_update - 1
        values |= {name: draw_of(scalars, len(batches), index) for name in draws}
        for node in graph.nodes:
            if node.rate is Rate.STEP or (node.rate is Rate.UPDATE and not ends_update):
                continue
            if node.op == "sbp.accumulate":
                _accumulate(node, values, sums)
                if ends_update and graph.rate_of(node.name) is Rate.UPDATE:
                    values[node.name] = sums.pop(node.name)
            else:
                _run(node, values, {} if node.phase is Phase.OPTIMIZER else stale)
        newest = {name: values.get(value, newest[name]) for name, value in graph.carried.items()}
        if ends_update:
            versions.append(newest)
    values |= constants | sums
    for node in graph.nodes:
        if node.rate is Rate.STEP:
            _run(node, values, {})
    found = {
        out.name: values[out.value] for out in graph.outputs if out.kind is not OutputKind.STATE
    }
    new = {name: values[graph.new_states.get(name, name)] for name in states}
    return found, new


def _run(node: Node, values: dict[str, Any], stale: Mapping[str, Any]) -> None:
    read = ChainMap(stale, values).__getitem__  # type: ignore[arg-type] # only read from
    args = bind(node.args, read)
    kwargs = {key: bind(value, read) for key, value in node.kwargs.items()}
    made = results_of(operator_of(node.op)(*args, **kwargs))
    values |= zip(node.outputs, made, strict=True)


def _accumulate(node: Node, values: Mapping[str, Any], sums: dict[str, Tensor]) -> None:
    part, scale = bind(node.args, values.__getitem__)
    (name,) = node.outputs
    sums[name] = accumulate(sums.get(name), part, scale)

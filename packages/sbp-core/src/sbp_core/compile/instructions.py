"""What a segment executes: the operator calls of one rank, on keys and local sizes. No torch.

before: view = view(%x, [128, 64])      logical sizes, on a mesh that splits dim 0 in two
after:  view = reshape(%x, [64, 64])    what each rank runs
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from sbp_core.compile.lower import ALIASES, Item, ItemKind
from sbp_core.compile.physical import LOCAL_BOX, Instruction
from sbp_core.compile.program import Program
from sbp_core.graph.ir import Argument, Node, Ref, map_refs
from sbp_core.signatures.call import OpCall
from sbp_core.signatures.localize import localize

_RENAMED = {
    # A part need not be contiguous where the logical tensor is, so views must be able to copy.
    "aten.view.default": "aten.reshape.default",
    "aten._unsafe_view.default": "aten.reshape.default",
}


def instruction(program: Program, rank: int, item: Item) -> Instruction:
    """Return what one rank executes for an op or a local boxing step."""
    if item.kind is ItemKind.LOCAL:
        args = (Ref(item.inputs[0]), program.step_index[item.name])
        return Instruction(op=LOCAL_BOX, args=args, outputs=item.outputs, node=item.name)
    assert item.node is not None, item.name
    node = _with_keys(item.node, item.inputs)
    call = replace(
        OpCall.of(program.graph, item.node),
        args=node.args,
        kwargs=node.kwargs,
        tensor_names=tuple(k for k in item.inputs if k in program.lowered.held),
    )
    signature = program.strategy.nodes[item.node.name].signature
    local = localize(call, signature, program.strategy.stages[item.stage], rank)
    return Instruction(
        op=_RENAMED.get(local.op, local.op),
        args=local.args,
        kwargs=local.kwargs,
        outputs=item.outputs,
        node=item.node.name,
    )


def host_instruction(item: Item) -> Instruction:
    """Return what every rank executes for a host op."""
    node = item.node
    assert node is not None, item.name
    return Instruction(
        op=node.op, args=node.args, kwargs=node.kwargs, outputs=node.outputs, node=node.name
    )


def transient_bytes(program: Program, rank: int, items: Sequence[Item]) -> int:
    """Return the most bytes that a segment's own values take at once while it runs.

    An alias takes none, but what it views lives as long as the alias does.
    """
    base = _bases(items)
    last = {
        base.get(key, key): index
        for index, item in enumerate(items)
        for key in (*item.inputs, *item.outputs)
    }
    kept = {base[key] for key in base if key in program.kept_keys}
    sizes = {key: program.bytes_of(rank, key) for key, of in base.items() if key == of}
    freed = [0] * len(items)
    for key, index in last.items():
        if key in sizes and key not in kept:
            freed[index] += sizes[key]
    alive = peak = 0
    for item, gone in zip(items, freed, strict=True):
        alive += sum(sizes.get(key, 0) for key in item.outputs)
        peak = max(peak, alive)
        alive -= gone
    return peak


def _bases(items: Sequence[Item]) -> dict[str, str]:
    """Return for each key that a segment makes the key whose memory it is in."""
    base: dict[str, str] = {}
    for item in items:
        is_alias = item.node is not None and item.node.kind in ALIASES
        for key in item.outputs:
            base[key] = base.get(item.inputs[0], item.inputs[0]) if is_alias else key
    return base


def _with_keys(node: Node, keys: Sequence[str]) -> Node:
    """Return the node with its refs, in order, naming `keys`."""
    queue = iter(keys)

    def change(_: Ref) -> Argument:
        return Ref(next(queue))

    args = map_refs(node.args, change)
    return replace(
        node, args=args, kwargs={key: map_refs(part, change) for key, part in node.kwargs.items()}
    )

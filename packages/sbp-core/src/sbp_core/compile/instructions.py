"""What a segment executes: the operator calls of one rank, on keys and local sizes. No torch.

before: view = view(%x, [128, 64])      logical sizes, on a mesh that splits dim 0 in two
after:  view = reshape(%x, [64, 64])    what each rank runs
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from sbp_core.compile.lower import ALIASES, Item, ItemKind
from sbp_core.compile.physical import LOCAL_BOX, Instruction
from sbp_core.compile.program import Program
from sbp_core.graph.ir import Argument, Node, Ref, map_refs
from sbp_core.sbp import Partial, Split
from sbp_core.signatures.call import OpCall
from sbp_core.signatures.localize import localize
from sbp_core.signatures.rule import LocalProgram

_RENAMED = {
    # A part need not be contiguous where the logical tensor is, so views must be able to copy.
    "aten.view.default": "aten.reshape.default",
    "aten._unsafe_view.default": "aten.reshape.default",
}


def instructions(program: Program, rank: int, item: Item) -> Iterator[Instruction]:
    """Yield what one rank executes for an op or a local boxing step."""
    if item.kind is ItemKind.LOCAL:
        args = (Ref(item.inputs[0]), program.step_index[item.name])
        yield Instruction(op=LOCAL_BOX, args=args, outputs=item.outputs, node=item.name)
        return
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
    yield from named(local, item.outputs, item.node.name)


def named(local: LocalProgram, outputs: Sequence[str], node: str) -> Iterator[Instruction]:
    """Yield the calls of a program; what they make is named by the keys of the node's outputs."""
    pairs = list(zip(local.results, outputs, strict=bool(local.results)))
    keys = {ref.name: key for ref, key in pairs}
    own: set[str] = set()

    def renamed(ref: Ref) -> Ref:
        return Ref(keys.get(ref.name, f"{node}{ref.name}")) if ref.name in own else ref

    for call in local.calls:
        args = map_refs(call.args, renamed)
        kwargs = {key: map_refs(part, renamed) for key, part in call.kwargs.items()}
        own.update(call.outputs)
        yield Instruction(
            op=_RENAMED.get(call.op, call.op),
            args=args,
            kwargs=kwargs,
            outputs=tuple(renamed(Ref(name)).name for name in call.outputs) or tuple(outputs),
            node=node,
        )
    for ref, key in pairs:
        if ref.name not in own or keys[ref.name] != key:
            # An output that is a shard itself, or the same value as another output.
            args = (renamed(ref),)
            yield Instruction(op="aten.alias.default", args=args, outputs=(key,), node=node)


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
    base = _bases(program, items)
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


def _bases(program: Program, items: Sequence[Item]) -> dict[str, str]:
    """Return for each key that a segment makes the key whose memory it is in."""
    base: dict[str, str] = {}
    for item in items:
        is_alias = item.node is not None and _is_alias(program, item.node)
        for key in item.outputs:
            base[key] = base.get(item.inputs[0], item.inputs[0]) if is_alias else key
    return base


def _is_alias(program: Program, node: Node) -> bool:
    """Whether the node views its argument; a slice of a split dim is a new tensor, partial."""
    if node.kind not in ALIASES:
        return False
    signature = program.strategy.nodes[node.name].signature
    return not any(
        isinstance(before, Split) and isinstance(after, Partial)
        for made in signature.outputs
        for before, after in zip(signature.inputs[0], made, strict=True)
    )


def _with_keys(node: Node, keys: Sequence[str]) -> Node:
    """Return the node with its refs, in order, naming `keys`."""
    queue = iter(keys)

    def change(_: Ref) -> Argument:
        return Ref(next(queue))

    args = map_refs(node.args, change)
    return replace(
        node, args=args, kwargs={key: map_refs(part, change) for key, part in node.kwargs.items()}
    )

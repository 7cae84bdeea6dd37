"""Translate operators on logical tensors to the calls that each rank executes on its shards.

before: view = view(%x, [128, 64])      logical sizes, on a mesh that splits dim 0 in two
after:  view = reshape(%x, [64, 64])    what each rank runs

`segments` puts the calls into compute segments when it compiles a plan.
Repeated layers differ in names only, and most calls are the same on every rank. So each distinct
call is localised once, and ranks for which that gives the same share their instructions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from sbp_core.compile.actors import Instruction
from sbp_core.compile.items import Item, ItemKind
from sbp_core.compile.offload import owner_of
from sbp_core.compile.packing import pack_instructions, unpack_instructions
from sbp_core.compile.program import LoweredProgram
from sbp_core.graph.ir import Argument, Node, Ref, Symbol, map_refs
from sbp_core.graph.primitives import ALIAS, LOCAL_BOX, TO_DEVICE, TO_HOST
from sbp_core.signatures.call import OpCall
from sbp_core.signatures.localization import localize, varying_axes
from sbp_core.signatures.rule import LocalProgram
from sbp_core.signatures.views import traits_of

#: Some axes of a mesh, and a rank's coordinates on them.
_Axes = tuple[int, ...]
_Place = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Pattern:
    """The call of an item, with its arguments numbered.

    `kind` is equal for items that differ in names only; `keys` are the arguments by their number;
    along the mesh `axes`, ranks may execute different programs.
    """

    kind: int
    call: OpCall
    keys: Mapping[str, str]
    axes: _Axes


class Instructions:
    """The instructions of the segments of all ranks."""

    def __init__(self, program: LoweredProgram) -> None:
        # From items to instructions, in steps that are done once for equal inputs:
        #
        #     item -> pattern           calls that differ in names only are one kind
        #     (kind, place) -> program  localised: with the shard sizes of the ranks that have the
        #                               same place on the axes that matter to the call
        #     program -> itself         ranks with equal shards share one object, by its text
        #     (item, program) -> instructions, with the item's own keys
        self._program = program
        self._kinds: dict[object, int] = {}
        self._patterns: dict[str, _Pattern] = {}
        self._local: dict[tuple[int, _Place], LocalProgram] = {}
        self._distinct: dict[str, LocalProgram] = {}
        self._made: dict[tuple[str, int], tuple[Instruction, ...]] = {}
        #: For some stages, one item of each kind of call, by stage and the axes that matter.
        self._calls: dict[frozenset[int], dict[tuple[int, _Axes], list[Item]]] = {}
        #: The programs of these items, by the place of a rank on these axes.
        self._executed: dict[tuple[frozenset[int], int, _Axes, _Place], int] = {}
        self._sequences: dict[tuple[int, ...], int] = {}

    def of(self, rank: int, item: Item) -> tuple[Instruction, ...]:
        """Return the instructions of a rank for an op, a local boxing step, a packing or a copy."""
        if item.node is None:
            key = (item.name, 0)
            if key not in self._made:
                self._made[key] = tuple(self._boxing(item))
            return self._made[key]
        pattern, local = self._program_of(rank, item, item.node)
        # `_distinct` keeps every program alive, so no id is given twice.
        key = (item.name, id(local))
        if key not in self._made:
            self._made[key] = tuple(named(local, item.outputs, item.node.name, pattern.keys))
        return self._made[key]

    def programs(self, rank: int, stages: frozenset[int]) -> tuple[int, ...]:
        """Return a key, equal for ranks of some stages that execute the same for all items."""
        if stages not in self._calls:
            kinds: set[int] = set()
            calls = self._calls.setdefault(stages, {})
            for item in self._program.lowered.items:
                if item.stage in stages and (item.is_inside or item.is_apart) and item.node:
                    pattern = self._pattern(item, item.node)
                    if pattern.kind not in kinds:
                        kinds.add(pattern.kind)
                        calls.setdefault((item.stage, pattern.axes), []).append(item)
        found = []
        for (stage, axes), items in self._calls[stages].items():
            # Ranks at one place on the axes that matter execute the same.
            key = (stages, stage, axes, self._place(rank, stage, axes))
            if key not in self._executed:
                # `_distinct` keeps every program alive.
                nodes = ((item, item.node) for item in items if item.node is not None)
                ids = tuple(id(self._program_of(rank, item, node)[1]) for item, node in nodes)
                self._executed[key] = self._sequences.setdefault(ids, len(self._sequences))
            found.append(self._executed[key])
        return tuple(found)

    def _place(self, rank: int, stage: int, axes: _Axes) -> _Place:
        """Return the place of a rank on some axes of the mesh of a stage."""
        if not axes:
            return ()
        coordinate = self._program.strategy.stages[stage].coordinate(rank)
        return tuple(coordinate[axis] for axis in axes)

    def _program_of(self, rank: int, item: Item, node: Node) -> tuple[_Pattern, LocalProgram]:
        """Return the call of an item, and the program that a rank executes for it."""
        pattern = self._pattern(item, node)
        place = self._place(rank, item.stage, pattern.axes)
        local = self._local.get((pattern.kind, place))
        if local is None:
            strategy = self._program.strategy
            signature, mesh = strategy.nodes[node.name].signature, strategy.stages[item.stage]
            local = localize(pattern.call, signature, mesh, rank)
            # Shared by all items of one kind; equal programs are one object.
            local = self._local[pattern.kind, place] = self._distinct.setdefault(repr(local), local)
        return pattern, local

    def _boxing(self, item: Item) -> Iterator[Instruction]:
        """Yield the instructions that are the same on every rank."""
        if item.kind is ItemKind.LOCAL:
            args = (Ref(item.inputs[0]), self._program.step_index[item.name])
            yield Instruction(op=LOCAL_BOX, args=args, outputs=item.outputs, node=item.name)
        elif item.kind in (ItemKind.FETCH, ItemKind.STORE):
            fetches = item.kind is ItemKind.FETCH
            device = Symbol("device", self._program.strategy.stages[item.stage].device)
            yield Instruction(
                op=TO_DEVICE if fetches else TO_HOST,
                args=tuple(map(Ref, item.inputs)),
                kwargs={"device": device} if fetches else {},
                outputs=item.outputs,
                node=f"{owner_of(item.inputs[0])}.update.{item.kind.value}",
            )
        else:
            assert item.packed is not None, "a pack and an unpack have a layout"
            if item.kind is ItemKind.PACK:
                yield from pack_instructions(item.name, item.inputs, item.outputs[0], item.packed)
            else:
                yield from unpack_instructions(item.name, item.inputs[0], item.outputs, item.packed)

    def _pattern(self, item: Item, node: Node) -> _Pattern:
        if item.name in self._patterns:
            return self._patterns[item.name]
        # mm(a, b) and mm(c, d) become mm(0, 1), one kind; mm(a, a) becomes mm(0, 0), another.
        numbers = {key: str(at) for at, key in enumerate(dict.fromkeys(item.inputs))}
        queue = iter(item.inputs)

        def numbered(_: Ref) -> Argument:
            return Ref(numbers[next(queue)])

        call = replace(
            self._program.call(node),
            args=map_refs(node.args, numbered),
            kwargs={key: map_refs(part, numbered) for key, part in node.kwargs.items()},
            tensor_names=tuple(numbers[k] for k in item.inputs if k in self._program.lowered.held),
        )
        # As text, because 1, 1.0 and True are equal, but not the same argument.
        literals = repr((call.args, tuple(call.kwargs.items())))
        signature = self._program.strategy.nodes[node.name].signature
        types = (call.inputs, call.outputs)
        what = (call.op, literals, call.tensor_names, types, call.tags, signature, item.stage)
        kind = self._kinds.setdefault(what, len(self._kinds))
        keys = {number: key for key, number in numbers.items()}
        found = _Pattern(kind, call, keys, varying_axes(call, signature))
        self._patterns[item.name] = found
        return found


def named(
    local: LocalProgram,
    outputs: Sequence[str],
    node: str,
    inputs: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[Instruction]:
    """Yield the calls of a program; results are named by the keys of the node's outputs.

    Args:
        local: The program of a rank.
        outputs: Keys of the node's outputs.
        node: Name of the node.
        inputs: The key of each argument that has another name in the program.
    """
    pairs = list(zip(local.results, outputs, strict=bool(local.results)))
    keys = {ref.name: key for ref, key in pairs}
    # A name that the program makes is a local one, which the node's name makes unique; any other is
    # an argument. Results take the keys of the node's outputs.
    own: set[str] = set()

    def renamed(ref: Ref) -> Ref:
        if ref.name in own:
            return Ref(keys.get(ref.name, f"{node}{ref.name}"))
        return Ref(inputs.get(ref.name, ref.name))

    for call in local.calls:
        args = map_refs(call.args, renamed)
        kwargs = {key: map_refs(part, renamed) for key, part in call.kwargs.items()}
        own.update(call.outputs)
        yield Instruction(
            op=traits_of(call.op).on_shards.get(call.op, call.op),
            args=args,
            kwargs=kwargs,
            outputs=tuple(renamed(Ref(name)).name for name in call.outputs) or tuple(outputs),
            node=node,
        )
    for ref, key in pairs:
        if ref.name not in own or keys[ref.name] != key:
            # An output that is the shard itself, or the same value as another output.
            args = (renamed(ref),)
            yield Instruction(op=ALIAS, args=args, outputs=(key,), node=node)


def host_instruction(item: Item) -> Instruction:
    """Return the instruction that every rank executes for a host op."""
    node = item.node
    assert node is not None, item.name
    return Instruction(
        op=node.op, args=node.args, kwargs=node.kwargs, outputs=node.outputs, node=node.name
    )

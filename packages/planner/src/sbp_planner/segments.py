"""Cut out the part of a training step that belongs to some blocks of a model, as a separate step.

The planners `alpa` and `galvatron` plan such segments one by one, as pipeline stages or layers.

    blocks       embed | layers.0 | layers.1 | head
    segment            [layers.0 | layers.1]

        arrives  h, the output of embed          dh, the gradient of the output
        nodes    forward, backward and update of both layers
        leaves   the output of layers.1          the gradient of h

A value that arrives becomes an input; a value that leaves becomes the new value of a state; each
may be sharded in any way. Two segments with equal keys are the same program under other names, so
that one solution serves both.

Source: Zheng et al., "Alpa", OSDI 2022, section 5 (stages, and layers of about equal work).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from sbp_core.cluster import Cluster
from sbp_core.cost import op_time_s
from sbp_core.graph import (
    GraphInput,
    GraphOutput,
    InputKind,
    LogicalGraph,
    Node,
    OutputKind,
    Phase,
    Rate,
)
from sbp_core.infer import Pins, SharedTables, StageMap, StepCompanions, assign_stages
from sbp_core.placement import Placement
from sbp_core.sbp import B, NdSbp
from sbp_core.signatures import OpCall, call_key
from sbp_core.strategy import Signature
from sbp_planner.model_blocks import ModelBlocks
from sbp_planner.stages import AtomicBlock, BlockGraph, Flow

_ONE = Placement((0,), ("rank",))

#: Suffix of a value's name: the state that represents its use elsewhere.
_LEAVING = "@leaves"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Segment:
    """Some blocks of a step.

    Args:
        graph: The graph of its nodes; arriving values are its inputs, leaving values its states.
        nodes: Names of the nodes that compute tensors, in order.
        inputs: Names of the tensor inputs of the step in these blocks, in order.
        arriving: Names of the tensors that other blocks make or hold, and whether these blocks are
            before it.
        leaving: Names of the tensors that other blocks use, and whether all of these are before it.
        key: Equal for segments that are the same program.
    """

    graph: LogicalGraph
    nodes: tuple[str, ...]
    inputs: tuple[str, ...]
    arriving: Mapping[str, bool]
    leaving: Mapping[str, bool]
    key: Hashable

    @property
    def elsewhere(self) -> Mapping[str, bool]:
        """The inputs of `graph` that represent other blocks, and whether these are before it."""
        return {**self.arriving, **{v + _LEAVING: before for v, before in self.leaving.items()}}

    def value_of(self, name: str) -> str:
        """Return the value that a name of `elsewhere` represents."""
        return name.removesuffix(_LEAVING)

    def pins(self, pins: Pins) -> Pins:
        """Return the pins of values in the segment."""
        types = self.graph.types
        return Pins(
            storage={at: pin for at, pin in pins.storage.items() if at[0] in types},
            use={at: pin for at, pin in pins.use.items() if at[0] in types},
        )


@dataclass(slots=True, kw_only=True, eq=False)
class StepSegments:
    """All segments of a step.

    Args:
        graph: The step.
        groups: Modules of each block, in the order of the forward pass, as patterns of a stage.
        pins: The pins of the user and the planner; segments with other pins have other keys.
        cluster: The machine that runs it.
        bucket_bytes: The bucket size of the plan, as in `CompileOptions`.
        offloaded: States in host memory.
    """

    graph: LogicalGraph
    groups: tuple[tuple[str, ...], ...]
    pins: Pins
    cluster: Cluster
    bucket_bytes: int | None = None
    offloaded: frozenset[str] = frozenset()
    #: Prices and options, shared by all segments.
    tables: SharedTables = field(default_factory=SharedTables)
    #: The values that could share a bucket with each value, whatever the stages are.
    companions: StepCompanions = field(init=False)
    #: Block of each node that computes tensors, and of each tensor input.
    blocks: StageMap = field(init=False)
    _found: dict[frozenset[int], Segment] = field(init=False, default_factory=dict)
    _calls: dict[str, tuple[OpCall, str]] = field(init=False, default_factory=dict)
    _times: list[list[float]] = field(init=False)

    def __post_init__(self) -> None:
        self.blocks = assign_stages(self.graph, len(self.groups), self.groups)
        one = StageMap(
            nodes=dict.fromkeys(self.blocks.nodes, 0), inputs=dict.fromkeys(self.blocks.inputs, 0)
        )
        self.companions = StepCompanions(self.graph, one, self.tables.companions)
        self._times = [[] for _ in self.groups]
        for node in self.graph.nodes:
            if node.is_host:
                continue
            call = OpCall.of(self.graph, node)
            self._calls[node.name] = call, call_key(call)
            whole = Signature((NdSbp(B),) * len(call.inputs), (NdSbp(B),) * len(call.outputs))
            seconds = op_time_s(call, whole, _ONE, self.cluster)
            times = self.graph.repetitions[node.rate]
            self._times[self.blocks.nodes[node.name]].append(times * seconds)

    def least_s(self, block: int, num_ranks: int) -> float:
        """Return the least time of a block on so many ranks, in seconds of a step.

        Its operators in equal parts, without communication; a launch is no shorter on a part.
        """
        launch_s = self.cluster.device.launch_s
        return sum(max(time / num_ranks, min(time, launch_s)) for time in self._times[block])

    def state_bytes(self, block: int) -> int:
        """Return the bytes of a block's parameters, buffers and states on the device."""
        kinds = self.graph.input_kinds
        return sum(
            self.graph.tensor(name).size_bytes
            for name, at in self.blocks.inputs.items()
            if at == block and kinds[name].kind.is_state and name not in self.offloaded
        )

    def segment(self, blocks: frozenset[int]) -> Segment:
        """Return the segment of some blocks."""
        if blocks not in self._found:
            self._found[blocks] = self._extracted(blocks)
        return self._found[blocks]

    def _extracted(self, blocks: frozenset[int]) -> Segment:
        graph, home = self.graph, self.blocks.inputs
        nodes = [n for n in graph.nodes if n.is_host or self.blocks.nodes[n.name] in blocks]
        here = [node for node in nodes if not node.is_host]
        made = {value for node in here for value in node.outputs}
        own = [e for e in graph.inputs if e.name not in home or home[e.name] in blocks]
        known = made | {entry.name for entry in own}
        used = dict.fromkeys(value for node in here for value in graph.tensor_inputs(node))
        first = min(blocks)
        arriving = {v: self._home(v) < first for v in used if v not in known}
        outputs = [
            out
            for out in graph.outputs
            if out.value in known and (out.kind is not OutputKind.STATE or out.name in known)
        ]
        leaving = dict(self._leaving(here, blocks, known))
        types = {value: kind for value, kind in graph.types.items() if value in known}
        types |= {value: kind for value, kind in graph.types.items() if not graph.is_tensor(value)}
        types |= {value: graph.types[value] for value in arriving}
        types |= {value + _LEAVING: graph.types[value] for value in leaving}
        found = LogicalGraph(
            name=graph.name,
            inputs=(
                *own,
                *(GraphInput(name=value, kind=self._kind(value)) for value in arriving),
                *(GraphInput(name=v + _LEAVING, kind=InputKind.BUFFER) for v in leaving),
            ),
            outputs=(
                *outputs,
                *(GraphOutput(name=v + _LEAVING, kind=OutputKind.STATE, value=v) for v in leaving),
            ),
            nodes=tuple(nodes),
            types=types,
            num_micro_batches=graph.num_micro_batches,
            num_updates=graph.num_updates,
        )
        inputs = tuple(entry.name for entry in own if graph.is_tensor(entry.name))
        return Segment(
            graph=found,
            nodes=tuple(node.name for node in here),
            inputs=inputs,
            arriving=arriving,
            leaving=leaving,
            key=(self._key(found, here), tuple(arriving.values()), tuple(leaving.values())),
        )

    def _kind(self, value: str) -> InputKind:
        """Return the kind of an input that represents a value from elsewhere, by its rate."""
        is_micro = self.graph.rate_of(value) is Rate.MICRO
        return InputKind.BATCH if is_micro else InputKind.BUFFER

    def _home(self, value: str) -> int:
        """Return the block that makes or holds a value."""
        maker = self.graph.producers.get(value)
        return self.blocks.inputs[value] if maker is None else self.blocks.nodes[maker.name]

    def _leaving(
        self, here: Sequence[Node], blocks: frozenset[int], known: set[str]
    ) -> Iterator[tuple[str, bool]]:
        """Yield the tensors made here that other blocks use or keep as a state.

        Each comes with a flag: whether all those blocks are before these blocks.
        """
        graph = self.graph
        kept: dict[str, list[str]] = {}
        for state, value in graph.new_states.items():
            kept.setdefault(value, []).append(state)
        for node in here:
            for value in node.outputs:
                if not graph.is_tensor(value):
                    continue
                users = (user for user in graph.users[value] if not user.is_host)
                homes = [self.blocks.nodes[user.name] for user in users]
                homes += [self.blocks.inputs[state] for state in kept.get(value, ())
                          if state not in known]  # fmt: skip
                if others := [home for home in homes if home not in blocks]:
                    yield value, max(others) < min(blocks)

    def _key(self, graph: LogicalGraph, here: Sequence[Node]) -> Hashable:
        """Return a value that is equal for the same program under other names."""
        number: dict[str, int] = {}
        numbered = number.setdefault
        nodes = []
        for node in here:
            call = self._calls[node.name][1]
            taken = tuple(numbered(value, len(number)) for value in graph.tensor_inputs(node))
            made = tuple(numbered(value, len(number)) for value in node.outputs)
            nodes.append((call, taken, made, node.phase, node.rate, node.tags))
        entries = tuple(
            (numbered(e.name.removesuffix(_LEAVING), len(number)), graph.types[e.name], e.kind,
             e.name.endswith(_LEAVING), number.get(e.of, -1), e.name in self.offloaded)
            for e in graph.inputs if graph.is_tensor(e.name)
        )  # fmt: skip
        results = tuple(
            (numbered(o.name.removesuffix(_LEAVING), len(number)), number.get(o.value, -1), o.kind)
            for o in graph.outputs
        )
        pins = tuple(
            sorted(
                (which, number[name], axis, repr(pin.entry), pin.firm)
                for which, of in (("stored", self.pins.storage), ("used", self.pins.use))
                for (name, axis), pin in of.items()
                if name in number
            )
        )
        return tuple(nodes), entries, results, pins


def grouped(blocks: ModelBlocks, most: int) -> tuple[tuple[str, ...], ...]:
    """Return the modules of at most so many blocks, of about equal work, in order.

    Args:
        blocks: The blocks of the model.
        most: Largest number of groups, >= 1.
    """
    names = blocks.modules
    if len(names) <= most:
        return tuple((name,) for name in names)
    work = {block.name: block.forward_s + block.backward_s for block in blocks.graph.blocks}
    total, done = sum(work.values()), 0.0
    groups: list[list[str]] = [[] for _ in range(most)]
    for name in names:
        # The middle of its work determines the group, so groups end close to equal parts.
        middle = done + work[name] / 2
        groups[min(int(most * middle / total), most - 1) if total else 0].append(name)
        done += work[name]
    return tuple(tuple(group) for group in groups if group)


def merged(graph: BlockGraph, groups: Sequence[Sequence[str]]) -> BlockGraph:
    """Return a graph in which each group of blocks is one block, `0`, `1`, ... in order.

    Args:
        graph: The graph of blocks.
        groups: Names of the blocks of each group.
    """
    number = {name: str(at) for at, group in enumerate(groups) for name in group}
    blocks = {block.name: block for block in graph.blocks}
    flows = []
    for flow in graph.flows:
        producer = number[flow.producer]
        users = dict.fromkeys(number[name] for name in flow.consumers)
        if others := tuple(user for user in users if user != producer):
            flows.append(Flow(producer=producer, consumers=others, num_bytes=flow.num_bytes))
    found = [
        AtomicBlock(
            name=str(at),
            forward_s=sum(blocks[name].forward_s for name in group),
            backward_s=sum(blocks[name].backward_s for name in group),
            activation_bytes=sum(blocks[name].activation_bytes for name in group),
            parameter_bytes=sum(blocks[name].parameter_bytes for name in group),
        )
        for at, group in enumerate(groups)
    ]
    return BlockGraph(blocks=tuple(found), flows=tuple(flows))


def is_saved(segment: Segment, value: str, step: LogicalGraph) -> bool:
    """Return whether an arriving value waits for the backward phase, once for each micro-batch.

    Args:
        segment: The segment where it arrives.
        value: A name in `arriving`.
        step: The whole step.
    """
    maker = step.producers.get(value)
    is_forward = maker is not None and maker.phase is Phase.FORWARD
    users = segment.graph.users[value]
    return is_forward and any(user.phase is Phase.BACKWARD for user in users)

"""Random small graphs and random legal strategies for them, drawn by hypothesis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from hypothesis import strategies as st

from sbp_core.graph import LogicalGraph, Node, Ref, TensorType, graph_hash, verify_graph
from sbp_core.graph.ir import GraphInput, GraphOutput, InputKind, OutputKind, Phase, Rate
from sbp_core.passes import accumulate
from sbp_core.placement import Placement
from sbp_core.sbp import B, NdSbp, S
from sbp_core.signatures import OpCall, enumerate_signatures
from sbp_core.strategy import Assignment, Storage, Strategy
from sbp_torch.ops.operators import bind, operator_of, results_of

#: Dims of matrices; 5 and 3 divide no mesh, 1 leaves empty shards.
_EXTENTS = st.sampled_from((1, 2, 3, 4, 5))
_DTYPE = "float64"

#: Of all parameters, so that they may be gathered together.
_BLOCK = "blocks.0"

#: The largest row or column that an integer input names.
_MOST_PLACE = 1


@dataclass
class _Draft:
    """A graph while it is drawn."""

    inputs: list[GraphInput]
    nodes: list[Node]
    types: dict[str, TensorType]
    samples: dict[str, torch.Tensor]

    def add_input(
        self, name: str, kind: InputKind, shape: Sequence[int], dtype: str = _DTYPE
    ) -> None:
        self.inputs.append(GraphInput(name=name, kind=kind))
        self.types[name] = TensorType(tuple(shape), dtype)
        self.samples[name] = torch.empty(tuple(shape), dtype=getattr(torch, dtype), device="meta")

    def add(self, op: str, args: tuple[object, ...], phase: Phase) -> str:
        """Add a node and return its first output; types are what torch says without data."""
        function = operator_of(op)
        made = results_of(function(*bind(args, self.samples.__getitem__)))
        name = f"{op.split('.')[1]}_{len(self.nodes)}"
        names = (name, *(f"{name}_{index}" for index in range(1, len(made))))
        for output, sample in zip(names, made, strict=True):
            self.samples[output] = sample
            dtype = str(sample.dtype).removeprefix("torch.")
            self.types[output] = TensorType(tuple(sample.shape), dtype)
        self.nodes.append(
            Node(
                name=name,
                op=op,
                args=args,
                outputs=names,
                phase=phase,
                rate=Rate.STEP if phase is Phase.OPTIMIZER else Rate.MICRO,
                tags=("pointwise",) if torch.Tag.pointwise in function.tags else (),
            )
        )
        return name

    def matrices(self) -> list[str]:
        return [
            name
            for name, kind in self.types.items()
            if len(kind.shape) == 2 and kind.dtype == _DTYPE
        ]

    def places(self) -> list[str]:
        return [name for name, kind in self.types.items() if kind.dtype == "int64"]


def _calls(draft: _Draft, value: str) -> list[tuple[str, tuple[object, ...]]]:
    """Return the calls that may follow on a matrix."""
    rows, columns = draft.types[value].shape
    reshape = "view" if draft.samples[value].is_contiguous() else "reshape"
    calls: list[tuple[str, tuple[object, ...]]] = [
        ("aten.relu.default", (Ref(value),)),
        ("aten.neg.default", (Ref(value),)),
        ("aten.t.default", (Ref(value),)),
        ("aten.sum.dim_IntList", (Ref(value), (0,), True)),
        ("aten.sum.dim_IntList", (Ref(value), (1,), True)),
        ("aten.amax.default", (Ref(value), (0,), True)),
        (f"aten.{reshape}.default", (Ref(value), (columns, rows))),
        (f"aten.{reshape}.default", (Ref(value), (rows * columns, 1))),
        (f"aten.{reshape}.default", (Ref(value), (1, rows * columns))),
        ("aten.mean.dim", (Ref(value), (0,), True)),
        ("aten.mean.dim", (Ref(value), (-1,), True)),
        ("aten._softmax.default", (Ref(value), 1, False)),
        ("aten.cumsum.default", (Ref(value), 0)),
        ("aten.tril.default", (Ref(value), columns - rows)),
        ("aten.native_layer_norm.default", (Ref(value), (columns,), None, None, 1e-3)),
        ("aten.slice.Tensor", (Ref(value), 1, 0, max(columns - 1, 1))),
        ("aten.cat.default", ((Ref(value), Ref(value)), 0)),
    ]
    calls += [
        (op, args)
        for place in draft.places()
        for op, args in (
            ("aten.embedding.default", (Ref(value), Ref(place))),
            ("aten.index_select.default", (Ref(value), 0, Ref(place))),
            ("aten.index_select.default", (Ref(value), 1, Ref(place))),
        )
        if rows > _MOST_PLACE and columns > _MOST_PLACE
    ]
    for other in draft.matrices():
        shape = draft.types[other].shape
        if shape[0] == columns:
            calls.append(("aten.mm.default", (Ref(value), Ref(other))))
        if all(a == b or 1 in (a, b) for a, b in zip(shape, (rows, columns), strict=True)):
            calls.append(("aten.add.Tensor", (Ref(value), Ref(other))))
            calls.append(("aten.mul.Tensor", (Ref(value), Ref(other))))
    return calls


@st.composite
def graphs(draw: st.DrawFn, num_micro_batches: int = 1) -> LogicalGraph:
    """Draw a graph with forward, backward and update nodes, values of which have many users."""
    draft = _Draft([], [], {}, {})
    if draw(st.booleans()):
        draft.add_input("places", InputKind.BATCH, (draw(_EXTENTS),), "int64")
    for index in range(draw(st.integers(1, 2))):
        draft.add_input(f"x{index}", InputKind.BATCH, (draw(_EXTENTS), draw(_EXTENTS)))
        name = f"{_BLOCK}.w{index}"
        draft.add_input(name, InputKind.PARAMETER, (draw(_EXTENTS), draw(_EXTENTS)))
    num_forward, num_backward = draw(st.integers(1, 4)), draw(st.integers(0, 4))
    phases = [Phase.FORWARD] * num_forward + [Phase.BACKWARD] * num_backward
    outputs: list[GraphOutput] = []
    for index, phase in enumerate(phases):
        value = draw(st.sampled_from(draft.matrices()))
        last = draft.add(*draw(st.sampled_from(_calls(draft, value))), phase)
        if index == num_forward - 1:
            loss = draft.add("aten.sum.default", (Ref(last),), Phase.FORWARD)
            outputs.append(GraphOutput(name="loss", kind=OutputKind.LOSS, value=loss))
    _add_buffers(draw, draft, outputs)
    _add_updates(draw, draft, outputs)
    graph = LogicalGraph(
        name="random",
        inputs=tuple(draft.inputs),
        outputs=tuple(outputs),
        nodes=tuple(draft.nodes),
        types=draft.types,
    )
    divisors = [n for n in range(1, num_micro_batches + 1) if num_micro_batches % n == 0]
    graph = accumulate(graph, num_micro_batches, num_updates=draw(st.sampled_from(divisors)))
    return verify_graph(graph)


def _add_buffers(draw: st.DrawFn, draft: _Draft, outputs: list[GraphOutput]) -> None:
    """Replace buffers in every micro-batch, and use what was in them."""
    for index in range(draw(st.integers(0, 1))):
        value = draw(st.sampled_from(draft.matrices()))
        phase = draw(st.sampled_from((Phase.FORWARD, Phase.BACKWARD)))
        if any(value in node.outputs and node.phase is Phase.BACKWARD for node in draft.nodes):
            phase = Phase.BACKWARD
        name = f"b{index}"
        draft.add_input(name, InputKind.BUFFER, draft.types[value].shape)
        new = draft.add("aten.add.Tensor", (Ref(name), Ref(value)), phase)
        outputs.append(GraphOutput(name=name, kind=OutputKind.STATE, value=new))
        if draw(st.booleans()):
            late = draft.add("aten.mul.Tensor", (Ref(name), Ref(value)), Phase.BACKWARD)
            seen = draft.add("aten.sum.default", (Ref(late),), Phase.BACKWARD)
            outputs.append(GraphOutput(name=f"seen{index}", kind=OutputKind.METRIC, value=seen))


def _add_updates(draw: st.DrawFn, draft: _Draft, outputs: list[GraphOutput]) -> None:
    """Replace parameters by functions of themselves and of micro-batch values."""
    made = [node.outputs[0] for node in draft.nodes]
    for entry in [entry for entry in draft.inputs if entry.kind is InputKind.PARAMETER]:
        if not draw(st.booleans()):
            continue
        fitting = [v for v in made if draft.types[v] == draft.types[entry.name]]
        if fitting:
            grad = draw(st.sampled_from(fitting))
        else:
            value = draw(st.sampled_from([v for v in made if draft.types[v].shape]))
            grad = draft.add("aten.sum.default", (Ref(value),), Phase.BACKWARD)
        step = draft.add("aten.mul.Tensor", (Ref(entry.name), Ref(grad)), Phase.OPTIMIZER)
        new = draft.add("aten.sub.Tensor", (Ref(entry.name), Ref(step)), Phase.OPTIMIZER)
        outputs.append(GraphOutput(name=entry.name, kind=OutputKind.STATE, value=new))


_MESHES = ((1,), (2,), (3,), (2, 2), (1, 2), (2, 1, 2), (2, 2, 2))


@st.composite
def placements(draw: st.DrawFn, num_stages: int) -> tuple[Placement, ...]:
    """Draw a mesh for each stage: on ranks of their own, all on the same, or in turns on two."""
    shapes = [draw(st.sampled_from(_MESHES)) for _ in range(num_stages)]
    if num_stages > 1 and draw(st.integers(0, 3)) == 0:
        return (Placement.grid(shapes[0]),) * num_stages
    found, first = [], 0
    for shape in shapes:
        ranks = torch.arange(first, first + prod(shape)).view(shape).tolist()
        found.append(Placement(ranks))
        first += prod(shape)
    if num_stages > 2 and draw(st.booleans()):
        return tuple(found[stage % 2] for stage in range(num_stages))
    return tuple(found)


@st.composite
def action_orders(
    draw: st.DrawFn, stages: tuple[Placement, ...], num_micro_batches: int
) -> tuple[str, ...]:
    """Draw an order of the actions of each set of ranks, as some run could have them."""
    names = sorted({stage.rank_list for stage in stages}, key=[s.rank_list for s in stages].index)
    orders: dict[tuple[int, ...], list[str]] = {name: [] for name in names}
    halves = draw(st.sampled_from(("B", "IW")))
    done: set[tuple[int, str, int]] = set()
    left = {(s, kind, k) for s, _ in enumerate(stages) for kind in ("F", *halves)
            for k in range(num_micro_batches)}  # fmt: skip

    def needs(stage: int, kind: str, k: int) -> set[tuple[int, str, int]]:
        """Return what has to be done before: the micro-batch before, and other stages."""
        found = {(stage, kind, k - 1)} if k else set()
        if kind == "F":
            return found | {(other, "F", k) for other in range(stage)}
        if kind == "W":
            return found | {(stage, "I", k)}
        behind = {(other, kind, k) for other in range(stage + 1, len(stages))}
        return found | behind | {(other, "F", k) for other, _ in enumerate(stages)}

    while left:
        ready = sorted(action for action in left if needs(*action) <= done)
        action = draw(st.sampled_from(ready))
        orders[stages[action[0]].rank_list].append("".join(map(str, action)))
        done.add(action)
        left.discard(action)
    return tuple(" ".join(order) for order in orders.values())


@st.composite
def strategies(draw: st.DrawFn, graph: LogicalGraph, stages: tuple[Placement, ...]) -> Strategy:
    """Draw any legal strategy: signatures, storage, stages that a pipeline may have, quotas."""
    last = len(stages) - 1
    node_stages: dict[str, int] = {}
    at = 0
    for node in graph.nodes:
        if node.phase is Phase.FORWARD:
            at = draw(st.integers(at, last))
        elif node.phase is Phase.BACKWARD:
            at = draw(st.integers(0, at))
        else:
            at = draw(st.integers(0, last))
        node_stages[node.name] = at
        if node.op == "sbp.accumulate":
            at = node_stages[node.name] = node_stages[graph.producers[node.inputs()[0]].name]
    nodes = {
        node.name: Assignment(
            stage=node_stages[node.name],
            signature=draw(
                st.sampled_from(
                    list(
                        enumerate_signatures(
                            OpCall.of(graph, node), stages[node_stages[node.name]].mesh_shape
                        )
                    )
                )
            ),
        )
        for node in graph.nodes
    }
    storage = {}
    for entry in graph.inputs:
        stage = draw(st.integers(0, last))
        entries = [*(S(dim) for dim in range(len(graph.tensor(entry.name).shape))), B]
        drawn = [draw(st.sampled_from(entries)) for _ in stages[stage].mesh_shape]
        storage[entry.name] = Storage(stage=stage, sbp=NdSbp(*drawn))
    quotas = st.integers(1, graph.num_micro_batches)
    in_flight = tuple(draw(quotas) for _ in stages)
    orders: tuple[str, ...] = ()
    if draw(st.booleans()):
        # As many as an order may ask for.
        in_flight = (graph.num_micro_batches,) * len(stages)
        orders = draw(action_orders(stages, graph.num_micro_batches))
    staleness: tuple[int, ...] = ()
    if graph.num_updates > 1 and draw(st.booleans()):
        staleness = tuple(draw(st.integers(0, 3)) for _ in stages)
    return Strategy(
        planner="random",
        graph_hash=graph_hash(graph),
        stages=stages,
        num_micro_batches=graph.num_micro_batches,
        nodes=nodes,
        storage=storage,
        in_flight=in_flight,
        orders=orders,
        staleness=staleness,
        regather=draw(st.sampled_from((("*",), (), (f"{_BLOCK}.w0",)))),
    )


def random_values(
    graph: LogicalGraph, seed: int
) -> tuple[dict[str, torch.Tensor], list[dict[str, torch.Tensor]]]:
    """Return states, and a batch for each micro-batch: reals in [-1, 1), places that exist."""
    generator = torch.Generator().manual_seed(seed)

    def value(entry: GraphInput) -> torch.Tensor:
        kind = graph.tensor(entry.name)
        if kind.dtype == "int64":
            return torch.randint(0, _MOST_PLACE + 1, kind.shape, generator=generator)
        return 2 * torch.rand(kind.shape, dtype=torch.float64, generator=generator) - 1

    def values(kind: InputKind) -> dict[str, torch.Tensor]:
        return {entry.name: value(entry) for entry in graph.inputs if entry.kind is kind}

    batches = [values(InputKind.BATCH) for _ in range(graph.num_micro_batches)]
    return values(InputKind.PARAMETER) | values(InputKind.BUFFER), batches

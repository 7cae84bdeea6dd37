"""What of a step is alike, before anything of it is posed."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sbp_core.graph import GraphOutput, InputKind, OutputKind, Phase, Ref
from sbp_core.infer import (
    StepWork,
    assign_stages,
    find_equal_layers,
    infer_strategy,
    joint_problem,
    resolve_pins,
)
from sbp_core.infer.tie_break import SignatureTieBreaks, signature_tie_break
from sbp_core.placement import Placement
from sbp_core.planning import PlanRequest
from sbp_core.sbp import B, P, S
from sbp_core.signatures.signature import Signature1d
from sbp_core.testing.graphs import Builder, cluster, mlp


def found(widths, pins=None, shape=(2,), axes=("data",)):
    graph = mlp(widths, batch=8)
    mesh = Placement.grid(shape, axes)
    work = StepWork(
        graph=graph,
        placements=(mesh,),
        stages=assign_stages(graph, 1, ()),
        cluster=cluster(),
    )
    return graph, find_equal_layers(work, resolve_pins(graph, axes, pins or {}))


def sizes_of(firsts):
    return sorted(Counter(firsts.values()).values())


@pytest.mark.parametrize("count", [2, 5])
def test_every_layer_is_like_the_first_of_its_shape(count):
    graph, layers = found((16,) * (count + 1))

    weights = [f"layers.{at}.weight" for at in range(count)]
    assert {layers.inputs[name] for name in weights} == {weights[0]}
    assert {layers.nodes[f"layers.{at}.mm"] for at in range(count)} == {"layers.0.mm"}
    # States are like states of the same name, not like others of the layer.
    assert layers.inputs["layers.1.weight.exp_avg"] == "layers.0.weight.exp_avg"
    assert sum(number for _, number in layers.values) == sum(map(graph.is_tensor, graph.types))


def test_layers_of_other_shapes_are_not_alike():
    _, layers = found((16, 16, 16, 8, 8))

    firsts = [layers.inputs[f"layers.{at}.weight"] for at in range(4)]
    assert firsts == ["layers.0.weight", "layers.0.weight", "layers.2.weight", "layers.3.weight"]


def test_values_that_cross_layers_are_alike_where_what_takes_them_is():
    graph, layers = found((16,) * 6)

    alike = dict(layers.values)
    made = {name: node.outputs[0] for name, node in graph.by_name.items() if node.outputs}
    inner = [made[name] for name in made if name.startswith("layers.") and made[name] in alike]
    assert max(alike[value] for value in inner) > 1
    # What the last layer makes goes to the loss.
    users = {value: {layers.nodes.get(n.name) for n in graph.users[value]} for value in graph.types}
    for value, number in layers.values:
        makers = graph.producers.get(value)
        if makers is None or number == 1:
            continue
        first = layers.nodes[makers.name]
        like = [
            node.outputs[0]
            for node in graph.nodes
            if node.outputs and layers.nodes.get(node.name) == first
        ]
        assert sum(users[other] == users[value] for other in like) >= number


def test_a_pin_on_one_layer_sets_it_apart_with_what_uses_it():
    _, layers = found((16,) * 6, {"use:layers.2.weight": "B"})

    assert layers.nodes["layers.2.mm"] == "layers.2.mm"
    assert layers.nodes["layers.3.mm"] == "layers.0.mm"
    _, stored = found((16,) * 6, {"layers.2.weight": "B"})
    assert stored.inputs["layers.2.weight"] == "layers.2.weight"
    assert stored.inputs["layers.4.weight"] == "layers.0.weight"


def test_equal_nodes_are_of_one_phase_and_operator():
    graph, layers = found((16,) * 6)

    for name, first in layers.nodes.items():
        node, other = graph.by_name[name], graph.by_name[first]
        assert (node.op, node.phase, node.rate) == (other.op, other.phase, other.rate)
    phases = {graph.by_name[name].phase for name in layers.nodes}
    assert phases == {Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER}
    assert max(sizes_of(layers.nodes)) == 5


def test_equal_layers_of_a_strategy_share_their_signatures():
    request = PlanRequest(
        graph=mlp((16,) * 6, batch=8),
        mesh=Placement.grid((2, 2), ("data", "tensor")),
        cluster=cluster(),
    )

    strategy = infer_strategy(request, planner="test")

    signatures = [one.signature for one in strategy.nodes.values()]
    assert len({id(one) for one in signatures}) < len(signatures) / 2


ENTRIES = st.sampled_from([B, S(0), S(1), P("sum"), P("max")])
PARTS = st.builds(
    lambda inputs, outputs: Signature1d(inputs=inputs, outputs=outputs, origin="test"),
    st.tuples(ENTRIES, ENTRIES),
    st.tuples(ENTRIES),
)


@settings(max_examples=30)
@given(st.lists(st.lists(PARTS, min_size=1, max_size=3), min_size=1, max_size=5))
def test_known_tie_breaks_are_those_of_each_signature(options):
    breaks = SignatureTieBreaks()

    for passes_on in (True, False, True):
        for parts in options:
            wanted = sum(signature_tie_break(passes_on, part) for part in parts)
            assert breaks.of(parts, passes_on) == wanted


def two_blocks():
    """Return two blocks that transpose their weights, and a head that takes the second again."""
    b = Builder()
    value = b.add_input("x", InputKind.BATCH, (8, 16))
    for at in range(2):
        weight = b.add_input(f"blocks.{at}.weight", InputKind.PARAMETER, (16, 16))
        turned = b.op(f"blocks.{at}.t", "t.default", (Ref(weight),), (16, 16))
        value = b.op(f"blocks.{at}.mm", "mm.default", (Ref(value), Ref(turned)), (8, 16))
    last = b.op("head.mm", "mm.default", (Ref(value), Ref(turned)), (8, 16))
    b.op("sum", "sum.default", (Ref(last),), ())
    b.outputs.append(GraphOutput(name="loss", kind=OutputKind.LOSS, value="sum"))
    return b.graph("two_blocks")


def test_what_a_view_of_a_pinned_value_is_holds_for_users_that_only_one_layer_has():
    request = PlanRequest(
        graph=two_blocks(),
        mesh=Placement.grid((2,), ("data",)),
        cluster=cluster(),
        pins={"use:blocks.*.weight": "S(0)"},
    )

    once, each = (joint_problem(request, from_axes=False, tied=tied) for tied in (True, False))

    assert len(once.unary) < len(each.unary)
    for name in ("head.mm", "blocks.1.mm"):
        assert [part.inputs[1] for (part,) in once.parts[name]] == [S(1)] * len(once.parts[name])
        assert once.parts[name] == each.parts[name]

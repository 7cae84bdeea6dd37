from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sbp_core.errors import ConfigError, PlanError
from sbp_core.graph.ir import InputKind, Phase, Ref
from sbp_core.infer.stages import assign_stages, balanced_cuts
from sbp_core.testing.graphs import Builder, mlp


def test_one_stage_holds_everything():
    graph = mlp()

    found = assign_stages(graph, 1)

    assert set(found.nodes.values()) == {0}
    assert set(found.inputs) == {entry.name for entry in graph.inputs}


def test_patterns_place_modules_and_the_rest_follows():
    graph = mlp((4, 4, 4), num_micro_batches=2)

    found = assign_stages(graph, 2, [["layers.0"], ["layers.1"]])

    by_layer = {f"layers.{i}": i for i in (0, 1)}
    for node in graph.nodes:
        expected = by_layer.get(node.module, 1)  # the loss follows the last layer
        assert found.nodes[node.name] == expected, node.name


def test_states_live_with_their_parameter():
    found = assign_stages(mlp((4, 4, 4)), 2, [["layers.0"], ["layers.1"]])

    assert found.inputs["layers.1.weight"] == 1
    assert found.inputs["layers.1.weight.exp_avg"] == 1
    assert found.inputs["layers.0.weight.exp_avg_sq"] == 0


def test_batch_inputs_live_with_their_first_user():
    assert assign_stages(mlp((4, 4, 4)), 2, [["layers.0"], ["layers.1"]]).inputs["x"] == 0


def test_without_patterns_blocks_are_split_evenly():
    graph = mlp((4, 4, 4, 4, 4))

    found = assign_stages(graph, 2)

    stages = [found.nodes[f"layers.{i}.mm"] for i in range(4)]
    assert stages == [0, 0, 1, 1]


def blocks_that_share_a_module(num_blocks):
    """Blocks that each call one module of all, and count their calls beside."""
    b = Builder()
    b.add_input("x", InputKind.BATCH, (4, 4))
    value = "x"
    for index in range(num_blocks):
        block = f"blocks.{index}"
        b.add_input(f"{block}.count", InputKind.BUFFER, (4, 4))
        for at, module in enumerate((block, "rotary", block)):
            name = f"{block}.{at}"
            b.op(name, "relu.default", (Ref(value),), (4, 4), module=module, pointwise=True)
            value = name
        counted = (Ref(f"{block}.count"),)
        b.op(f"{block}.counted", "relu.default", counted, (4, 4), module=block, pointwise=True)
    return b.graph()


def test_a_block_stays_in_one_piece_with_what_it_calls():
    found = assign_stages(blocks_that_share_a_module(3), 2).nodes

    stages = [{found[f"blocks.{i}.{at}"] for at in range(3)} for i in range(3)]
    assert stages in ([{0}, {0}, {1}], [{0}, {1}, {1}])


def test_what_reads_no_batch_and_is_used_nowhere_is_where_its_module_is():
    found = assign_stages(blocks_that_share_a_module(2), 2)

    assert [found.nodes[f"blocks.{i}.counted"] for i in range(2)] == [0, 1]
    assert [found.inputs[f"blocks.{i}.count"] for i in range(2)] == [0, 1]


def test_blocks_are_cut_in_pieces_where_there_are_more_stages():
    found = assign_stages(blocks_that_share_a_module(2), 3)

    assert set(found.nodes.values()) == {0, 1, 2}


def test_a_heavy_block_gets_a_stage_of_its_own():
    found = assign_stages(mlp((4, 4, 64, 64)), 2)

    assert [found.nodes[f"layers.{i}.mm"] for i in range(3)] == [0, 0, 1]


def test_accumulation_stays_with_its_gradient():
    graph = mlp((4, 4, 4), num_micro_batches=4)

    found = assign_stages(graph, 2)

    assert found.nodes["layers.0.grad.mm.mean"] == 0
    assert found.nodes["layers.1.grad.mm.mean"] == 1


def test_constants_go_to_their_users():
    b = Builder()
    b.add_input("x", InputKind.BATCH, (4, 4))
    b.op("a.relu", "relu.default", (Ref("x"),), (4, 4), module="a", pointwise=True)
    b.op("ones", "ones.default", ((4, 4),), (4, 4))
    b.op("b.add", "add.Tensor", (Ref("a.relu"), Ref("ones")), (4, 4), module="b", pointwise=True)

    assert assign_stages(b.graph(), 2, [["a"], ["b"]]).nodes["ones"] == 1


def test_an_edge_to_an_earlier_stage_is_named():
    with pytest.raises(PlanError, match=r"'layers.0.relu' is made on stage 1 .* by 'layers.1.mm'"):
        assign_stages(mlp((4, 4, 4)), 2, [["layers.1"], ["layers.0"]])


def test_a_parameter_of_two_stages_lives_on_the_first():
    b = Builder()
    b.add_input("x", InputKind.BATCH, (4, 4))
    b.add_input("w", InputKind.PARAMETER, (4, 4))
    b.op("a.mm", "mm.default", (Ref("x"), Ref("w")), (4, 4), module="a")
    b.op("b.mm", "mm.default", (Ref("a.mm"), Ref("w")), (4, 4), module="b")

    assert assign_stages(b.graph(), 2, [["a"], ["b"]]).inputs["w"] == 0


def test_a_pattern_that_matches_no_module_is_named():
    with pytest.raises(ConfigError, match=r"'layer.0' of stage 0 matches no module") as caught:
        assign_stages(mlp(), 2, [["layer.0"], ["layers.1"]])

    assert "layers.0" in caught.value.accepted


def test_a_module_on_two_stages_is_named():
    with pytest.raises(ConfigError, match=r"'layers.0' is on stage 0 and on stage 1"):
        assign_stages(mlp(), 2, [["layers.0"], ["layers.*"]])


def test_the_number_of_lists_must_fit_the_stages():
    with pytest.raises(ConfigError, match="3 lists for 2 stages"):
        assign_stages(mlp(), 2, [["layers.0"], ["layers.1"], ["sum"]])


def test_more_stages_than_blocks_are_refused():
    with pytest.raises(PlanError, match="2 blocks for 3 stages"):
        assign_stages(mlp((4, 4, 4)), 3)


def test_forward_stages_never_decrease_along_an_edge():
    graph = mlp((4, 8, 4, 16, 4))

    found = assign_stages(graph, 3)

    for node in graph.nodes:
        for value in node.inputs():
            before = graph.producers.get(value)
            if before is not None and node.phase is Phase.FORWARD:
                assert found.nodes[before.name] <= found.nodes[node.name]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=7), st.integers(1, 4))
def test_cuts_have_the_least_largest_part(work, num_parts):
    if num_parts > len(work):
        return
    bounds = [(0, *cuts, len(work)) for cuts in combinations(range(1, len(work)), num_parts - 1)]

    found = balanced_cuts(work, num_parts)

    def largest(edges):
        return max(sum(work[a:b]) for a, b in pairwise(edges))

    assert largest((0, *found, len(work))) == min(map(largest, bounds))


def test_gradients_are_added_where_they_are_made_so_that_their_sum_crosses():
    b = Builder()
    b.add_input("x", InputKind.BATCH, (4, 4))
    b.add_input("w", InputKind.PARAMETER, (4, 4))
    b.op("y", "mm.default", (Ref("x"), Ref("w")), (4, 4), module="first")
    b.op("z", "relu.default", (Ref("y"),), (4, 4), module="second", pointwise=True)
    backward = {"phase": Phase.BACKWARD}
    b.op("dz", "neg.default", (Ref("z"),), (4, 4), module="second", pointwise=True, **backward)
    b.op("dy", "neg.default", (Ref("z"),), (4, 4), module="second", pointwise=True, **backward)
    b.op(
        "sum", "add.Tensor", (Ref("dz"), Ref("dy")), (4, 4), module="first", pointwise=True,
        **backward,
    )  # fmt: skip
    b.op("dw", "mm.default", (Ref("x"), Ref("sum")), (4, 4), module="first", **backward)

    found = assign_stages(b.graph("residual"), 2, [["first"], ["second"]])

    assert found.nodes["sum"] == 1
    assert found.nodes["dw"] == 0


def test_a_gradient_that_its_own_stage_takes_for_other_ends_too_is_not_reduced_elsewhere():
    b = Builder()
    b.add_input("x", InputKind.BATCH, (4, 4))
    b.add_input("w", InputKind.PARAMETER, (4, 4))
    b.op("y", "mm.default", (Ref("x"), Ref("w")), (4, 4), module="first")
    b.op("z", "relu.default", (Ref("y"),), (4, 4), module="second", pointwise=True)
    backward = {"phase": Phase.BACKWARD}
    b.op("dy", "neg.default", (Ref("z"),), (4, 4), module="second", pointwise=True, **backward)
    b.op("bias", "sum.dim_IntList", (Ref("dy"), (0,)), (4,), module="first", **backward)
    b.op("dw", "mm.default", (Ref("x"), Ref("dy")), (4, 4), module="first", **backward)

    found = assign_stages(b.graph("bias"), 2, [["first"], ["second"]])

    assert found.nodes["bias"] == 0

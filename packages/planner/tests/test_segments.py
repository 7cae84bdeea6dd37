"""The part of a step that some blocks are."""

from itertools import combinations

import pytest
from plan_requests import cluster, gpt_step, request

from sbp_core.cluster import Cluster
from sbp_core.graph import LogicalGraph, Phase
from sbp_core.infer import joint_problem, resolve_pins
from sbp_core.placement import Placement
from sbp_core.testing import graphs
from sbp_core.testing.graphs import mlp
from sbp_planner.model_blocks import model_blocks
from sbp_planner.segment_search import SegmentSearch
from sbp_planner.segments import StepSegments, grouped, merged
from sbp_planner.submeshes import stage_ranks

AXES = ("data", "tensor")


def segments_of(graph: LogicalGraph, machine: Cluster | None = None) -> StepSegments:
    machine = machine or cluster()
    return StepSegments(
        graph=graph,
        groups=grouped(model_blocks(graph, machine), 16),
        pins=resolve_pins(graph, AXES, {}),
        cluster=machine,
    )


def search(segments, blocks, shape, *, start=0, size=None):
    mesh = Placement.grid((size or shape[0] * shape[1],), ("data",))
    segment = segments.segment(frozenset(blocks))
    return SegmentSearch(segments, segment, stage_ranks(mesh, start, shape, AXES))


def test_segments_of_all_blocks_have_every_operator_and_state_once():
    graph = gpt_step()
    segments = segments_of(graph)

    found = [segments.segment(frozenset((at,))) for at in range(len(segments.groups))]

    nodes = [name for segment in found for name in segment.nodes]
    inputs = [name for segment in found for name in segment.inputs]
    assert sorted(nodes) == sorted(node.name for node in graph.nodes if not node.is_host)
    assert sorted(inputs) == sorted(e.name for e in graph.inputs if graph.is_tensor(e.name))


def test_what_arrives_and_leaves_is_what_other_blocks_make_and_use():
    graph = mlp((4, 4, 4, 4), num_micro_batches=2)

    middle = segments_of(graph).segment(frozenset((1,)))

    phases = {name: graph.producers[name].phase for name in middle.arriving}
    assert sorted(phases.values()) == [Phase.BACKWARD, Phase.FORWARD]
    assert {phases[name]: before for name, before in middle.arriving.items()} == {
        Phase.FORWARD: True,
        Phase.BACKWARD: False,
    }
    assert {graph.producers[name].phase: before for name, before in middle.leaving.items()} == {
        Phase.FORWARD: False,
        Phase.BACKWARD: True,
    }


def test_equal_layers_have_equal_keys_and_others_have_not():
    segments = segments_of(mlp((4, 4, 4, 4, 8), num_micro_batches=2))

    keys = [segments.segment(frozenset((at,))).key for at in range(4)]

    assert keys[1] == keys[2]
    assert all(keys[a] != keys[b] for a, b in combinations(range(4), 2) if (a, b) != (1, 2))


def test_pins_tell_equal_layers_apart():
    graph = mlp((4, 4, 4, 4), num_micro_batches=2)
    segments = segments_of(graph)
    pinned = StepSegments(
        graph=graph,
        groups=segments.groups,
        pins=resolve_pins(graph, AXES, {"layers.1.weight": "B"}),
        cluster=cluster(),
    )

    assert pinned.segment(frozenset((1,))).key != segments.segment(frozenset((1,))).key
    assert pinned.segment(frozenset((2,))).key == segments.segment(frozenset((2,))).key


@pytest.mark.parametrize("shape", [(1, 1), (2, 1), (2, 2)])
def test_the_segment_of_all_blocks_costs_what_the_step_does(shape):
    graph = mlp((8, 16, 8), num_micro_batches=2)
    segments = segments_of(graph)

    found, values = search(segments, range(2), shape).free()

    asked = request(shape, AXES)
    whole = joint_problem(type(asked)(graph=graph, mesh=asked.mesh, cluster=asked.cluster))
    assert found.cost_s == pytest.approx(whole.cost(values))
    assert sorted(found.kept(segments.segment(frozenset(range(2)))).nodes) == sorted(
        node.name for node in graph.nodes if not node.is_host
    )


@pytest.mark.slow
def test_work_in_equal_parts_is_never_more_than_a_program_takes():
    segments = segments_of(mlp((8, 16, 16, 8), num_micro_batches=2))

    for blocks in ((0,), (1,), (1, 2)):
        for shape, start in (((1, 1), 1), ((2, 1), 1), ((2, 2), 0)):
            found, _ = search(segments, blocks, shape, start=start, size=4).free()
            least = sum(segments.least_s(at, shape[0] * shape[1]) for at in blocks)
            assert least <= found.cost_s


def test_a_program_within_a_limit_holds_no_more_and_takes_no_less():
    # On fast links a replicated parameter is fastest, and a split one holds half.
    graph, machine = mlp((64, 64, 64, 64), num_micro_batches=4), graphs.cluster()
    posed = search(segments_of(graph, machine), (1,), (2, 1), start=2, size=4)
    free, values = posed.free()
    limit = 0.8 * free.memory_bytes(2)

    found = posed.within(limit, 2, values)

    assert found is not None
    assert found.memory_bytes(2) <= limit
    assert found.cost_s >= free.cost_s
    assert free.memory_bytes(2) > limit


@pytest.mark.slow
def test_more_micro_batches_in_flight_hold_more_activations():
    segments = segments_of(gpt_step())
    found, _ = search(segments, (1,), (2, 1)).free()

    held = [found.memory_bytes(count) for count in (1, 2, 3)]

    assert held[2] - held[1] >= held[1] - held[0] > 0


def test_many_blocks_are_grouped_to_about_equal_work():
    graph = mlp((8,) * 10, num_micro_batches=2)
    blocks = model_blocks(graph, cluster())

    groups = grouped(blocks, 3)

    assert groups == tuple(
        tuple(f"layers.{at}" for at in part) for part in (range(3), range(3, 6), range(6, 9))
    )
    found = merged(blocks.graph, groups)
    assert [block.name for block in found.blocks] == ["0", "1", "2"]
    assert [(flow.producer, flow.consumers) for flow in found.flows] == [
        ("0", ("1",)),
        ("1", ("2",)),
    ]
    assert sum(block.compute_s for block in found.blocks) == pytest.approx(
        sum(block.compute_s for block in blocks.graph.blocks)
    )


def test_segments_of_more_equal_layers_are_posed_as_ones_of_few():
    segments = segments_of(mlp((16,) * 10, num_micro_batches=2))

    few, many = (search(segments, range(1, end), (2, 1), start=2, size=6).problem for end in (4, 8))

    assert few.sizes == many.sizes
    assert len(few.groups) == len(many.groups)
    assert len(many.work.nodes) > 2 * len(few.work.nodes)


@pytest.mark.slow
def test_a_segment_with_very_much_to_price_is_split_near_what_is_found_axis_by_axis(monkeypatch):
    segments = segments_of(mlp((16, 16, 16, 16, 16), num_micro_batches=2))

    def posed():
        return search(segments, range(1, 3), (2, 2), start=4, size=12)

    whole = posed()
    monkeypatch.setattr(SegmentSearch, "max_prices", 0)
    near = posed()

    best, found = whole.free()[0], near.free()[0]
    assert (whole.is_limited, near.is_limited) == (False, True)
    assert sum(near.problem.sizes) < 0.8 * sum(whole.problem.sizes)
    assert near.problem.num_prices < whole.problem.num_prices
    # What crosses to other stages may still come, and go, in as many parts as can be.
    for name in near.segment.elsewhere:
        stored = [one.problem.storage_entries[name] for one in (near, whole)]
        assert stored[0] == stored[1]
    started_s = near.problem.cost(near.problem.start)
    assert best.cost_s * (1 - 1e-9) <= found.cost_s <= started_s * (1 + 1e-9)
    assert not found.is_exact

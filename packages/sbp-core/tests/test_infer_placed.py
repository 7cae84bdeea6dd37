"""Parts of a step on ranks of their own, whatever sets of ranks these are."""

import pytest

from sbp_core.compile import check_strategy, compile_plan
from sbp_core.graph import Phase
from sbp_core.infer import infer_placed
from sbp_core.placement import Placement
from sbp_core.plan_check import check
from sbp_core.planning import PlanRequest
from sbp_core.testing.graphs import cluster, mlp

GRAPH = mlp((8, 16, 16, 8), batch=32)
PINS = {"batch": "S(0)", "activations": "S(0)", "parameters": "B", "optimizer_states": "B"}


def placed(first, second):
    """The strategy with the first layer on some ranks and the others on others."""
    request = PlanRequest(graph=GRAPH, mesh=Placement.grid((4,), ("data",)), cluster=cluster())
    forward = [n for n in GRAPH.nodes if n.phase is Phase.FORWARD and not n.is_host and n.module]
    return infer_placed(
        request,
        planner="test",
        placements=(Placement(first, ("data",)), Placement(second, ("data",))),
        stage_of={node.name: int(not node.module.startswith("layers.0")) for node in forward},
        pins=PINS,
    )


@pytest.mark.parametrize(
    ("first", "second"),
    [([0, 1, 2], [3]), ([0, 1, 2, 3], [3]), ([0], [0, 1, 2, 3]), ([0, 1], [1, 2]), ([0], [0])],
)
def test_any_two_sets_of_ranks_make_a_plan_that_is_live(first, second):
    strategy = placed(first, second)

    check_strategy(GRAPH, strategy)
    check(compile_plan(GRAPH, strategy), types=False)
    assert strategy.storage["layers.0.weight"].stage == 0
    assert strategy.storage["layers.2.weight"].stage == 1


def test_backward_and_update_are_where_their_forward_is():
    strategy = placed([0, 1, 2], [3])

    for node in GRAPH.nodes:
        if node.forward and not node.is_host:
            assert strategy.nodes[node.name].stage == strategy.nodes[node.forward].stage


@pytest.mark.parametrize(("first", "second"), [([0, 1, 2, 3], [3]), ([0, 1], [1, 2])])
def test_every_rank_gives_the_loss_once(first, second):
    plan = compile_plan(GRAPH, placed(first, second))

    for part in plan.ranks:
        emitted = [name for actor in part.actors for name, _ in actor.emits]
        assert sorted(emitted) == sorted(set(emitted))
        assert "loss" in emitted

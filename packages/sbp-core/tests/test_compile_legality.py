from __future__ import annotations

from dataclasses import replace

import pytest

from sbp_core.compile import compile_plan
from sbp_core.compile.legality import check_strategy
from sbp_core.errors import PlanError, SbpValueError, SignatureError
from sbp_core.placement import Placement
from sbp_core.sbp import NdSbp
from sbp_core.strategy import Assignment, Storage, Strategy
from sbp_core.testing.graphs import mlp
from sbp_core.testing.plans import diamond, strategy_of


def test_a_legal_strategy_passes() -> None:
    check_strategy(diamond(), strategy_of(diamond(), signatures={"y": "S(1) | S(0) -> P"}))


def test_partial_values_that_are_called_whole_are_refused() -> None:
    # Each rank would go on with its own addend as if it were the sum.
    strategy = strategy_of(diamond(), signatures={"y": "S(1) | S(0) -> B"})

    with pytest.raises(SignatureError, match=r"aten\.mm\.default does not give") as caught:
        compile_plan(diamond(), strategy)

    assert "S(1), S(0) -> P" in caught.value.accepted


def test_partial_values_in_an_op_that_is_not_linear_are_refused() -> None:
    strategy = strategy_of(diamond(), signatures={"y": "S(1) | S(0) -> P", "a": "P -> P"})

    with pytest.raises(SignatureError, match="cannot take P of 'y'"):
        compile_plan(diamond(), strategy)


def test_an_sbp_that_a_state_cannot_have_is_refused() -> None:
    with pytest.raises(SbpValueError, match="splits a dim that a tensor of shape") as caught:
        compile_plan(diamond(), strategy_of(diamond(), storage={"w": "S(2)"}))

    assert caught.value.accepted == "B, S(0), S(1)"


def _on_stage(strategy: Strategy, stage: int) -> Strategy:
    """Return the strategy with an op and a state of the diamond on a stage."""
    node, state = strategy.nodes["a"], strategy.storage["w"]
    return replace(
        strategy,
        nodes={**strategy.nodes, "a": Assignment(stage=stage, signature=node.signature)},
        storage={**strategy.storage, "w": Storage(stage=stage, sbp=NdSbp(*state.sbp))},
    )


@pytest.mark.parametrize("stage", [-1, 1])
def test_a_stage_that_is_not_there_is_refused(stage: int) -> None:
    with pytest.raises(PlanError, match=f"'a' is on stage {stage}") as caught:
        compile_plan(diamond(), _on_stage(strategy_of(diamond()), stage))

    assert caught.value.accepted == "stages 0 .. 0"


def test_a_strategy_for_another_graph_is_refused() -> None:
    with pytest.raises(PlanError, match="does not cover the graph"):
        compile_plan(mlp(), strategy_of(diamond()))


def test_ranks_that_would_draw_numbers_of_their_own_are_refused() -> None:
    graph = diamond()
    seeded = tuple(
        replace(node, tags=(*node.tags, "seeded")) if node.name == "a" else node
        for node in graph.nodes
    )
    random = graph.with_nodes(seeded)

    with pytest.raises(PlanError, match="other random numbers on each of 2 ranks") as caught:
        check_strategy(random, strategy_of(random))

    assert "sbp.random_bernoulli" in caught.value.accepted
    check_strategy(random, strategy_of(random, stages=[Placement.grid((1,))]))

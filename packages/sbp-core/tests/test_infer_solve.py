from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sbp_core.cluster import Link
from sbp_core.compile import compile_plan
from sbp_core.errors import ConfigError, PlanError
from sbp_core.graph import InputKind
from sbp_core.infer import (
    conversions,
    infer_strategy,
    joint_problem,
    predict_cost,
    stage_placements,
)
from sbp_core.placement import Placement
from sbp_core.plan_check import check
from sbp_core.planning import PlanRequest
from sbp_core.sbp import B, NdSbp, S, all_entries
from sbp_core.signatures.axes import enumerate_signatures
from sbp_core.signatures.call import OpCall
from sbp_core.strategy import Assignment, Storage, Strategy
from sbp_core.testing.graphs import chain, cluster, mlp

DATA_PARALLEL = {
    "batch": "S(0)",
    "activations": "S(0)",
    "parameters": "B",
    "optimizer_states": "B",
    "gradients": "B",
    "updates": "B",
}


def infer(graph, mesh_shape=(4,), axes=None, machine=None, user=None, **settings):
    request = PlanRequest(
        graph=graph,
        mesh=Placement.grid(mesh_shape, axes),
        cluster=machine or cluster(),
        pins=user or {},
    )
    return infer_strategy(request, planner="test", **settings)


def assert_legal(graph, strategy):
    for node in graph.nodes:
        found = strategy.nodes[node.name]
        legal = enumerate_signatures(
            OpCall.of(graph, node), strategy.stages[found.stage].mesh_shape
        )
        assert found.signature in set(legal), node.name
    for entry in graph.inputs:
        assert not strategy.storage[entry.name].sbp.has_partial


def test_data_parallel_pins_give_one_all_reduce_a_gradient():
    graph = mlp((4, 8, 4), batch=16)

    strategy = infer(graph, pins=DATA_PARALLEL)

    found = {c.value: (str(c.source[1]), str(c.target[1])) for c in conversions(graph, strategy)}
    assert found == {
        "layers.0.grad.mm": ("P", "B"),
        "layers.1.grad.mm": ("P", "B"),
        "sum": ("P", "B"),
    }


def test_data_parallel_moves_the_bytes_of_ring_all_reduces():
    graph = mlp((4, 8, 4), batch=16)

    strategy = infer(graph, pins=DATA_PARALLEL)

    weights, loss, commit = 4 * (4 * 8 + 8 * 4), 4, 4
    assert strategy.report["predicted_boxing_bytes"] == 2 * 3 * (weights + loss + commit)


def test_gradients_are_reduced_after_accumulation_not_before():
    graph = mlp((4, 8, 4), batch=16, num_micro_batches=4)

    strategy = infer(graph, pins=DATA_PARALLEL)

    reduced = {c.value for c in conversions(graph, strategy)}
    assert {"layers.0.grad.mm.mean", "layers.1.grad.mm.mean"} <= reduced
    assert "layers.0.grad.mm" not in reduced


def test_sharded_states_are_gathered_and_their_gradients_reduce_scattered():
    graph = mlp((4, 8, 4), batch=64)
    pins = {**DATA_PARALLEL, **dict.fromkeys(("parameters", "optimizer_states"), "S(0)")}

    strategy = infer(graph, pins={**pins, "gradients": "S(0)", "updates": "S(0)"})

    found = {(c.value, str(c.source[1]), str(c.target[1])) for c in conversions(graph, strategy)}
    assert ("layers.0.weight", "S(0)", "B") in found
    assert ("layers.0.grad.mm", "P", "S(0)") in found


def test_a_split_weight_makes_a_column_then_row_parallel_pair():
    graph = mlp((4, 8, 4), batch=16)
    pins = {"batch": "B", "use:layers.0.weight": "S(1)", "use:layers.1.weight": "S(0)"}

    strategy = infer(graph, (2,), ("tensor",), pins=pins)

    assert str(strategy.nodes["layers.0.mm"].signature) == "(B) (S(1)) -> (S(1))"
    assert str(strategy.nodes["layers.1.mm"].signature) == "(S(1)) (S(0)) -> (P)"


def test_a_pin_of_use_reaches_through_views():
    graph = mlp((4, 8, 4), batch=16)

    strategy = infer(graph, (2,), ("tensor",), pins={"use:layers.1.weight": "S(0)"})

    assert str(strategy.nodes["layers.1.grad.t_1"].signature) == "(S(0)) -> (S(1))"
    assert strategy.nodes["layers.1.grad.mm_1"].signature.inputs[1] == NdSbp(S(1))


def test_every_user_of_a_pinned_value_takes_it_so():
    graph = mlp((4, 8, 4), batch=16)

    strategy = infer(graph, pins={"layers.0.relu": "S(1)"})

    for user in graph.users["layers.0.relu"]:
        at = graph.tensor_inputs(user).index("layers.0.relu")
        assert strategy.nodes[user.name].signature.inputs[at] == NdSbp(S(1))


def test_the_users_pins_override_the_planners():
    strategy = infer(mlp(), pins=DATA_PARALLEL, user={"layers.0.weight": "S(1)"})

    assert strategy.storage["layers.0.weight"].sbp == NdSbp(S(1))
    assert strategy.storage["layers.1.weight"].sbp == NdSbp(B)


def test_a_state_without_a_pin_follows_its_parameter():
    strategy = infer(mlp(), pins={"parameters": "S(1)"})

    assert strategy.storage["layers.0.weight.exp_avg"].sbp == NdSbp(S(1))


def test_a_state_with_a_pin_does_not():
    strategy = infer(mlp(), pins={"parameters": "B", "optimizer_states": "S(0)"})

    assert strategy.storage["layers.0.weight"].sbp == NdSbp(B)
    assert strategy.storage["layers.0.weight.exp_avg"].sbp == NdSbp(S(0))


@pytest.mark.parametrize("mesh_shape", [(3,), (2, 2), (2, 3)])
def test_every_node_is_legal_on_all_axes_together(mesh_shape):
    graph = mlp((6, 8, 4), batch=12, num_micro_batches=2)

    strategy = infer(graph, mesh_shape)

    assert_legal(graph, strategy)


def test_an_axis_of_one_rank_is_all_b_whatever_is_pinned():
    strategy = infer(mlp(), (1, 2), ("data", "tensor"), pins={"batch": {"data": "S(0)"}})

    assert all(entry.sbp[0] == B for entry in strategy.storage.values())
    for node in strategy.nodes.values():
        assert all(sbp[0] == B for sbp in (*node.signature.inputs, *node.signature.outputs))


def test_planning_twice_gives_the_same_file():
    graph = mlp(num_micro_batches=2)

    assert infer(graph, (2, 2)).to_json() == infer(graph, (2, 2)).to_json()


def test_the_plan_says_that_each_axis_is_optimal():
    assert infer(mlp(), (2, 2)).report["optimal_by_axis"] == {"axis0": True, "axis1": True}


def test_progress_ends_at_one():
    heard = []
    request = PlanRequest(
        graph=mlp(),
        mesh=Placement.grid((2,)),
        cluster=cluster(),
        progress=lambda what, done: heard.append(done),
    )

    infer_strategy(request, planner="test")

    assert heard == sorted(heard)
    assert heard[-1] == 1


def test_the_report_keeps_what_the_planner_adds():
    assert infer(mlp(), report={"why": "because"}).report["why"] == "because"


def test_a_pin_that_a_user_of_the_value_cannot_take_is_explained():
    with pytest.raises(PlanError, match=r"'layers.0.mm: P' asks that 'layers.0.mm' is used as P"):
        infer(mlp(), pins={"layers.0.mm": "P"})


def test_pipe_positions_become_stages_without_that_axis():
    mesh = Placement.grid((2, 3), ("pipe", "data"))

    first, second = stage_placements(mesh)

    assert (first.axes, first.rank_list, second.rank_list) == (("data",), (0, 1, 2), (3, 4, 5))


def test_two_stages_send_only_between_layers():
    graph = mlp((4, 4, 4), num_micro_batches=2)

    strategy = infer(graph, (2,), ("pipe",))

    crossing = {c.value for c in conversions(graph, strategy) if c.source[0] != c.target[0]}
    assert crossing == {"layers.0.relu", "layers.1.grad.mm_1"}
    assert strategy.in_flight == (2, 1)


def test_stages_of_several_ranks_split_data_inside():
    graph = mlp((4, 4, 4), batch=16, num_micro_batches=2)

    strategy = infer(graph, (2, 2), ("pipe", "data"), pins=DATA_PARALLEL)

    assert_legal(graph, strategy)
    assert strategy.nodes["layers.1.mm"].stage == 1
    assert strategy.nodes["layers.1.mm"].signature.outputs == (NdSbp(S(0)),)


def test_quotas_may_be_given():
    strategy = infer(mlp(num_micro_batches=4), (2,), ("pipe",), in_flight=(4, 4))

    assert strategy.in_flight == (4, 4)


def test_stages_may_have_different_numbers_of_ranks():
    graph, stages = mlp((4, 8, 8, 4)), (Placement([0, 1, 2]), Placement([3]))

    strategy = infer(graph, stages=stages, pins={"batch": "S(0)"})

    assert_legal(graph, strategy)
    assert strategy.storage["x"].sbp == NdSbp(S(0))
    check(compile_plan(graph, strategy))


def test_stages_with_other_mesh_axes_are_refused():
    stages = (Placement([[0, 1]], ("data", "tensor")), Placement([[2, 3]], ("tensor", "data")))

    with pytest.raises(ConfigError, match="unequal meshes"):
        infer(mlp(), stages=stages)


def exhaustive(graph, mesh, machine):
    """Return the least predicted time over all strategies of a small graph."""
    entries = {
        entry.name: [e for e in all_entries(2, ()) if e == B or e.dim < 2] for entry in graph.inputs
    }
    signatures = [
        list(enumerate_signatures(OpCall.of(graph, node), mesh.mesh_shape)) for node in graph.nodes
    ]
    best = float("inf")
    for storage in product(*entries.values()):
        for chosen in product(*signatures):
            strategy = Strategy(
                planner="exhaustive",
                graph_hash="",
                stages=(mesh,),
                num_micro_batches=1,
                nodes={
                    node.name: Assignment(stage=0, signature=signature)
                    for node, signature in zip(graph.nodes, chosen, strict=True)
                },
                storage={
                    name: Storage(stage=0, sbp=NdSbp(sbp))
                    for name, sbp in zip(entries, storage, strict=True)
                },
                in_flight=(1,),
            )
            best = min(best, predict_cost(graph, strategy, machine)["predicted_step_s"])
    return best


@pytest.mark.slow
@settings(max_examples=6, deadline=None, derandomize=True)
@given(
    batch=st.integers(2, 64),
    width=st.integers(2, 64),
    speed=st.sampled_from([1e6, 1e8, 1e10]),
    launch_s=st.sampled_from([0.0, 1e-5]),
)
def test_no_strategy_of_a_small_graph_is_faster(batch, width, speed, launch_s):
    graph, mesh = chain(batch, width), Placement.grid((2,))
    machine = cluster(bytes_per_s=speed, latency_s=1e-6, launch_s=launch_s)

    found = infer(graph, (2,), machine=machine).report["predicted_step_s"]

    assert found == pytest.approx(exhaustive(graph, mesh, machine), rel=1e-9)


def test_a_mesh_of_more_ranks_than_the_cluster_has_devices_is_refused():
    machine = replace(cluster(), num_devices=2)

    with pytest.raises(ConfigError, match=r"has rank 3: .* has 2 devices"):
        infer(chain(), (4,), machine=machine)
    with pytest.raises(ConfigError, match="has rank 3"):
        infer(chain(), (2,), machine=machine, stages=(Placement([2, 3], ["data"]),))


@pytest.mark.parametrize("stored", ["B", "S(0)"])
def test_copies_of_states_in_host_memory_are_part_of_the_cost(stored):
    machine = cluster()
    link = Link(latency_s=0.5, bytes_per_s=16.0)
    device = replace(machine.device, launch_s=0.0, host_memory_bytes=1 << 30, host_link=link)
    graph = mlp((8, 8), batch=16)
    states = [e.name for e in graph.inputs if e.kind is InputKind.OPTIMIZER_STATE]
    request = PlanRequest(
        graph=graph,
        mesh=Placement.grid((2,), ("data",)),
        cluster=replace(machine, device=device),
        pins={"parameters": stored, "optimizer_states": stored},
    )

    here, there = (
        joint_problem(replace(request, offloaded=frozenset(names))) for names in ((), states)
    )

    more = [a - b for a, b in zip(there.unary, here.unary, strict=True)]
    copied = sum(graph.tensor(name).size_bytes for name in states)
    share = 1 if stored == "B" else 0.5
    wanted = len(states) * 0.5 + share * copied / 16.0
    assert states
    assert sum(float(table[0]) for table in more) == pytest.approx(wanted)

import pytest

from sbp_core.compile import CompileOptions, compile_plan
from sbp_core.graph.ir import GraphOutput, InputKind, OutputKind, Ref
from sbp_core.infer import conversions, infer_strategy, predict_cost
from sbp_core.infer.predict import predict_stages
from sbp_core.placement import Placement
from sbp_core.planning import PlanRequest
from sbp_core.simulation import simulate
from sbp_core.testing.graphs import Builder, cluster, mlp


def plan(graph, mesh_shape=(2,), axes=None, **settings):
    request = PlanRequest(
        graph=graph, mesh=Placement.grid(mesh_shape, axes), cluster=cluster(launch_s=1e-6)
    )
    return infer_strategy(request, planner="test", **settings)


def test_users_of_one_target_share_a_conversion():
    graph = mlp((4, 8, 4))
    strategy = plan(graph, pins={"parameters": "S(0)", "use:layers.1.weight": "B"})

    found = [c for c in conversions(graph, strategy) if c.value == "layers.1.weight"]

    assert len(found) == 1
    assert {user.name for user in found[0].users} >= {"layers.1.mm", "layers.1.grad.t_1"}


def test_states_are_counted_as_they_are_stored():
    graph = mlp((4, 8))
    whole = plan(graph, pins={"parameters": "B", "optimizer_states": "B"})
    sharded = plan(graph, pins={"parameters": "B", "optimizer_states": "S(0)"})

    sizes = [s.report["predicted_by_stage"][0]["states_bytes"] for s in (whole, sharded)]

    assert sizes == [3 * 128, 128 + 2 * 64]


def test_new_values_of_states_are_counted_where_they_live_beside_the_old_ones():
    graph = mlp((4, 8))
    strategy = plan(graph, pins={"parameters": "B"})

    over, beside = (
        predict_cost(graph, strategy, cluster(), CompileOptions(in_place_states=in_place))[
            "predicted_by_stage"
        ][0]
        for in_place in (True, False)
    )

    assert (over["updates_bytes"], beside["updates_bytes"]) == (0, 3 * 128)
    assert beside["memory_bytes"] == over["memory_bytes"] + 3 * 128


def test_new_values_that_the_forward_phase_makes_are_counted_beside_the_old_ones():
    b = Builder()
    b.add_input("mean", InputKind.BUFFER, (8,))
    b.add_input("x", InputKind.BATCH, (8,))
    b.op("new", "lerp.Scalar", (Ref("mean"), Ref("x"), 0.1), (8,), pointwise=True)
    b.outputs.append(GraphOutput(name="mean", kind=OutputKind.STATE, value="new"))

    (stage,) = plan(b.graph(), pins={"batch": "B"}).report["predicted_by_stage"]

    assert (stage["states_bytes"], stage["updates_bytes"]) == (32, 32)


def test_gathered_copies_of_states_are_counted():
    graph = mlp((4, 8))

    strategy = plan(graph, pins={"parameters": "S(0)", "use:parameters": "B"})

    assert strategy.report["predicted_by_stage"][0]["gathered_bytes"] == 128


def test_accumulated_gradients_are_counted_where_there_are_micro_batches():
    pins = {"batch": "B", "activations": "B", "gradients": "B", "updates": "B"}

    one, two = (
        plan(mlp((4, 8), num_micro_batches=m), pins=pins).report["predicted_by_stage"][0]
        for m in (1, 2)
    )

    assert one["gradients_bytes"] == 128
    assert two["gradients_bytes"] == 2 * 128 + 4  # the weight's, its sum, and the mean loss


def test_more_micro_batches_in_flight_need_more_memory():
    graph = mlp((4, 8, 4), num_micro_batches=4)

    few, many = (
        plan(graph, (2,), ("pipe",), in_flight=quotas).report["predicted_memory_bytes_per_rank"]
        for quotas in ((2, 1), (4, 4))
    )

    assert many > few


def test_a_step_of_one_stage_is_its_micro_batches_and_its_update():
    graph = mlp((4, 8, 4), num_micro_batches=3)

    report = plan(graph).report

    (stage,) = report["predicted_by_stage"]
    micro = stage["micro_compute_s"] + stage["micro_boxing_s"]
    once = stage["step_compute_s"] + stage["step_boxing_s"]
    assert report["predicted_step_s"] == pytest.approx(3 * micro + once)


def test_a_pipeline_fills_then_runs_at_its_slowest_stage():
    graph = mlp((4, 8, 64), batch=64, num_micro_batches=5)
    strategy = plan(graph, (2,), ("pipe",))

    stages, _ = predict_stages(graph, strategy, cluster(launch_s=1e-6))

    micro = [stage.micro_s for stage in stages]
    expected = sum(micro) + 4 * max(micro) + max(stage.step_s for stage in stages)
    assert strategy.report["predicted_step_s"] == pytest.approx(expected)


def test_activations_are_what_the_backward_pass_uses():
    strategy = plan(mlp((4, 8), batch=16), pins={"batch": "B", "activations": "B"})

    # relu's output and the loss; x is stored anyway, relu's input is not needed again.
    assert strategy.report["predicted_by_stage"][0]["activations_bytes"] == 4 * (16 * 8 + 1)


@pytest.mark.parametrize("bucket_bytes", [None, 0])
@pytest.mark.parametrize("num_micro_batches", [1, 3])
@pytest.mark.parametrize("parameters", ["B", "S(0)"])
def test_the_prediction_is_the_time_of_the_compiled_plan(
    parameters, num_micro_batches, bucket_bytes
):
    graph = mlp((4, 8, 4), num_micro_batches=num_micro_batches)
    machine = cluster(launch_s=1e-6)
    strategy = plan(graph, pins={"batch": "S(0)", "parameters": parameters})
    options = CompileOptions(cluster=machine, bucket_bytes=bucket_bytes)

    found = predict_cost(graph, strategy, machine, options)["predicted_step_s"]

    assert found == pytest.approx(
        simulate(compile_plan(graph, strategy, options)).step_s, rel=1e-12
    )


def test_what_travels_in_one_bucket_is_priced_as_one_call():
    graph, machine = mlp((4, 8, 4)), cluster(latency_s=1e-3)
    pins = {"batch": "S(0)", "activations": "S(0)", "parameters": "B", "gradients": "B"}
    strategy = plan(graph, pins=pins)
    apart, together = (
        predict_cost(graph, strategy, machine, CompileOptions(bucket_bytes=size))[
            "predicted_step_s"
        ]
        for size in (0, 1 << 20)
    )

    # Of two all-reduces of gradients, one is left.
    assert apart - together == pytest.approx(1e-3, rel=0.05)


def test_a_pipeline_of_more_micro_batches_in_flight_waits_less():
    graph = mlp((4, 8, 64), batch=64, num_micro_batches=5)
    machine = cluster(launch_s=1e-6)
    one, two = (
        simulate(
            compile_plan(
                graph,
                plan(graph, (2,), ("pipe",), in_flight=quotas),
                CompileOptions(cluster=machine),
            )
        ).step_s
        for quotas in ((1, 1), (2, 1))
    )

    assert two < one

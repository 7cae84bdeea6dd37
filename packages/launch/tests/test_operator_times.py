"""Times of operators: from a trace to a run folder, and from there into a cluster file."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from traces import FIRING_NS, TracingRuntime, operators_of, spans_of
from trainable import planned, registry, run_config

from sbp_core.calibration import Calibration, Measurement
from sbp_core.cluster import Cluster
from sbp_core.compile import Compute
from sbp_core.compile.rank_calls import RANK_CALLS, rank_calls
from sbp_core.cost import op_time_s
from sbp_core.errors import ConfigError
from sbp_core.graph import TensorType
from sbp_core.operators import MeasuredOperator
from sbp_core.placement import Placement
from sbp_core.plugins import discover
from sbp_core.runtime import Span, SpanKind, measured_operators
from sbp_core.signatures import OpCall
from sbp_launch.calibrate import command
from sbp_launch.calibrate.calibration_config import CalibrateRun, check_calibrate
from sbp_launch.calibrate.operators import merge_operators
from sbp_launch.clusters.local import MeasuredConfig, load
from sbp_launch.machine import describe_machine
from sbp_launch.run.folder import RUN_FILES
from sbp_launch.settings.config import ComposedConfig
from sbp_launch.tracing.events import Traced, trace_json
from sbp_launch.tracing.operator_times import OPERATOR_TIMES, OperatorTimes
from sbp_launch.tracing.times import rank_times
from sbp_launch.trainer import session as session_module
from sbp_launch.trainer import trainer
from sbp_torch.runtime.configs import ReferenceConfig
from sbp_torch.runtime.reference import ReferenceRuntime


def times(spans: Iterable[Span]) -> dict[str, float]:
    made = planned()
    found = measured_operators(made.graph, made.strategy, spans)
    return {one.call: one.time_s for one in found}


def firing_of(rank: int, step: int, took_ns: int) -> list[Span]:
    """Return a firing of the first segment of two operators, of which the first takes a quarter."""
    actor = next(
        one
        for one in planned().plan.by_rank[rank].actors
        if isinstance(one, Compute) and len(one.instructions) > 1
    )
    whose = rank, "compute", step, actor.name, 0
    names = [one.node for one in actor.instructions][:2]
    return [
        Span(SpanKind.OPERATOR, *whose, 10, 20, node=names[0]),
        Span(SpanKind.OPERATOR, *whose, 20, 50, node=names[1]),
        Span(SpanKind.FIRING, *whose, 0, took_ns),
    ]


@pytest.mark.slow
def test_the_time_of_a_firing_is_shared_out_to_its_operators() -> None:
    assert sorted(times(firing_of(0, 0, 400_000)).values()) == pytest.approx([1e-4, 3e-4])


@pytest.mark.slow
def test_of_each_rank_the_median_counts_and_of_ranks_the_slowest() -> None:
    took_ns = {0: (400, 400, 9000), 1: (800, 1, 800)}

    spans = [
        span
        for rank, of in took_ns.items()
        for step, took in enumerate(of)
        for span in firing_of(rank, step, took * 1000)
    ]

    assert sorted(times(spans).values()) == pytest.approx([2e-4, 6e-4])


@pytest.mark.slow
def test_without_operators_nothing_is_found() -> None:
    assert times(spans_of(planned().plan)) == {}


@pytest.mark.slow
def test_what_was_measured_of_a_plan_is_what_its_operators_take() -> None:
    made = planned()
    spans = list(spans_of(made.plan))
    found = measured_operators(made.graph, made.strategy, [*spans, *operators_of(made.plan, spans)])

    machine = Cluster.nominal(2)
    machine = replace(machine, device=replace(machine.device, operators=found))

    known = {one.call: one.time_s for one in found}
    for name, assigned in made.strategy.nodes.items():
        call = OpCall.of(made.graph, made.graph.by_name[name])
        stage = made.strategy.stages[assigned.stage]
        if all(isinstance(made.graph.types[out], TensorType) for out in call_outputs(name)):
            assert op_time_s(call, assigned.signature, stage, machine) in known.values()


def call_outputs(node: str) -> tuple[str, ...]:
    return planned().graph.by_name[node].outputs


def test_operators_are_slices_in_their_firing_and_no_time_of_their_own() -> None:
    made = planned()
    spans = list(spans_of(made.plan))
    operators = list(operators_of(made.plan, spans))

    value = trace_json(Traced(plan=made.plan, graph=made.graph, spans=[*spans, *operators]))

    slices = [event for event in value["traceEvents"] if event.get("cat") == "operator"]
    assert len(slices) == len(operators)
    assert {event["args"]["node"] for event in slices} >= set(made.strategy.nodes)
    assert any(event["name"] == "aten.mm" for event in slices)
    assert rank_times(made.plan, [*spans, *operators]) == rank_times(made.plan, spans)


@pytest.fixture
def tracing(monkeypatch: pytest.MonkeyPatch) -> type[ReferenceRuntime]:
    """Let runs have a runtime that traces."""
    make = session_module.Run.make

    def traced(run: session_module.Run, kind: str) -> object:
        return TracingRuntime(ReferenceConfig()) if kind == "runtime" else make(run, kind)

    monkeypatch.setattr(session_module.Run, "make", traced)
    return TracingRuntime


@pytest.mark.slow
def test_a_run_leaves_the_times_and_says_what_to_do_with_them(
    tmp_path: Path, tracing: type, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer.train(run_config(trace="2..3", trace_operators=True), registry(), tmp_path)

    found = OPERATOR_TIMES.read(tmp_path / "operators.json")
    assert (found.backend, found.num_ranks) == ("local", 2)
    assert any(one.call.startswith("aten.mm.default(float32") for one in found.operators)
    assert all(0 < one.time_s <= FIRING_NS * 1e-9 for one in found.operators)
    out = capsys.readouterr().out
    assert f"sbp-calibrate ops={tmp_path}" in " ".join(out.split())
    assert "operators.json" in RUN_FILES  # another run does not overwrite it


def test_operators_of_no_steps_are_refused() -> None:
    with pytest.raises(ConfigError, match="no step is traced") as caught:
        run_config(trace_operators=True)

    assert "trainer.trace=5..14" in caught.value.todo


def test_a_runtime_that_compiles_is_refused_before_anything_else(
    tmp_path: Path, tracing: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracing, "traces_operators", False)

    with pytest.raises(ConfigError, match="trace_operators=true"):
        trainer.train(run_config(trace="1", trace_operators=True), registry(), tmp_path)

    assert not list(tmp_path.iterdir())


def operator(call: str = "aten.relu.default(float32[2])->float32[2]", time_s: float = 1e-6):
    return MeasuredOperator(call=call, dtype="float32", flop=2.0, num_bytes=16, time_s=time_s)


def write_times(folder: Path, *operators: MeasuredOperator, **changed: Any) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    given = {"backend": "local", "num_ranks": 2, "machine": describe_machine("1.0")} | changed
    OPERATOR_TIMES.write(OperatorTimes(operators=operators, **given), folder / "operators.json")
    return str(folder)


def write_cluster(path: Path, *backends: str) -> str:
    sample = Measurement(
        backend="", kind="all-reduce", group_size=2, shared_bytes=1000, times_s=(1e-4,)
    )
    calibrations = {name: Calibration.of([replace(sample, backend=name)]) for name in backends}
    replace(
        Cluster.nominal(2 if backends else 1),
        calibrations=calibrations,
        backend=backends[0] if backends else "",
        machine=describe_machine("1.0"),
    ).save(path)
    return str(path)


def check(out: str, ops: Any, time_s: float = 120.0) -> CalibrateRun:
    values = {"boxing": {"name": "local"}, "runtime": {"name": "reference"}, "out": out}
    given = {**values, "ops": ops, "time_s": time_s}
    composed = ComposedConfig(values=given, files={}, overrides=())
    return check_calibrate(composed, discover())


def add(out: str, ops: Any, folder: Path, time_s: float = 120.0) -> None:
    command._calibrate(check(out, ops, time_s), discover(), folder)


def test_times_are_added_to_a_cluster_file_for_their_backend(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = write_cluster(tmp_path / "c.json", "local", "mpi")
    before = Cluster.load(Path(out))

    add(out, write_times(tmp_path / "run", operator()), tmp_path)

    after = Cluster.load(Path(out))
    assert after.calibrations["local"].operators == (operator(),)
    assert after.calibrations["mpi"] == before.calibrations["mpi"]
    assert replace(after, calibrations=before.calibrations) == before
    assert "times of 1 calls of operators of boxing=local" in capsys.readouterr().out
    assert load(MeasuredConfig(file=out), 2).device.operators == (operator(),)
    assert load(MeasuredConfig(file=out, backend="mpi"), 2).device.operators == ()


def test_of_one_rank_they_are_the_device_s(tmp_path: Path) -> None:
    out = write_cluster(tmp_path / "c.json")

    add(out, [write_times(tmp_path / "run", operator(), num_ranks=1)], tmp_path)

    assert Cluster.load(Path(out)).device.operators == (operator(),)


def test_the_newest_time_of_a_call_counts_and_no_other_is_lost() -> None:
    old, new = operator(), operator(time_s=2e-6)
    others = [operator(call=f"aten.{name}.default()->") for name in ("a", "z")]

    assert merge_operators([old, others[0]], [new, others[1]]) == (others[0], new, others[1])


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"num_ranks": 4}, "operators of 4 ranks"),
        ({"machine": {**describe_machine("1.0"), "cores": "1000"}}, "another machine"),
        ({"backend": "gloo"}, "boxing=gloo, which out="),
    ],
)
def test_times_that_do_not_fit_are_refused_and_the_file_is_left_alone(
    tmp_path: Path, changed: dict[str, Any], says: str
) -> None:
    out = write_cluster(tmp_path / "c.json", "local")
    before = Path(out).read_bytes()

    with pytest.raises(ConfigError, match=says):
        check(out, write_times(tmp_path / "run", operator(), **changed))

    assert Path(out).read_bytes() == before


def test_a_file_or_a_folder_that_is_not_there_is_refused_with_what_makes_it(
    tmp_path: Path,
) -> None:
    with pytest.raises(ConfigError, match="does not exist") as no_file:
        check(str(tmp_path / "c.json"), write_times(tmp_path / "run", operator()))
    with pytest.raises(ConfigError, match=r"operators\.json") as no_times:
        check(write_cluster(tmp_path / "c.json", "local"), str(tmp_path))

    assert "sbp-calibrate boxing=local ranks=2" in no_file.value.todo
    assert "trace_operators=true" in no_times.value.todo
    assert json.loads((tmp_path / "c.json").read_text())["name"] == "nominal"


def write_calls(path: Path) -> str:
    graph = planned().graph
    calls = rank_calls([graph], [Placement.grid((2,), ("data",))], Cluster.nominal(2).device)
    RANK_CALLS.write(calls, path)
    return str(path)


@pytest.mark.slow
def test_the_calls_of_a_list_are_measured_and_added(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    calls, out = write_calls(tmp_path / "calls.json"), write_cluster(tmp_path / "c.json", "local")

    add(out, calls, tmp_path, time_s=5.0)

    known = Cluster.load(Path(out)).calibrations["local"].operators
    listed = RANK_CALLS.read(Path(calls)).calls
    assert {one.call for one in known} == {one.call for one in listed}
    assert all(one.time_s > 0 for one in known)
    said = capsys.readouterr().out
    assert f"measured {len(listed)} calls, " in said
    assert f"{out} has the times of {len(listed)} calls of operators of boxing=local" in said


@pytest.mark.slow
def test_a_list_needs_a_cluster_file_of_the_same_backend(tmp_path: Path) -> None:
    calls = write_calls(tmp_path / "calls.json")

    with pytest.raises(ConfigError, match="does not exist") as caught:
        check(str(tmp_path / "none.json"), calls)
    assert "sbp-calibrate boxing=local ranks=2" in caught.value.todo
    out = write_cluster(tmp_path / "c.json", "mpi")
    with pytest.raises(ConfigError, match="boxing=local, which out="):
        check(out, calls)


@pytest.mark.slow
def test_a_list_is_measured_alone_on_as_many_ranks_as_the_file_is_for(tmp_path: Path) -> None:
    calls, out = write_calls(tmp_path / "calls.json"), write_cluster(tmp_path / "c.json", "local")

    assert check(out, calls).settings.ranks == 2
    with pytest.raises(ConfigError, match="mixes a file of calls with other files"):
        check(out, [calls, write_times(tmp_path / "run", operator())])
    (tmp_path / "no_list.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"no_list\.json"):
        check(out, str(tmp_path / "no_list.json"))

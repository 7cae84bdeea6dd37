"""What ranks may be asked to call, and what that takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from threading import Barrier, Thread
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sbp_aten.passes import prepare_step
from sbp_core.compile.rank_calls import RANK_CALLS, RankCall, RankCalls, rank_calls
from sbp_core.cost import is_free, local_call
from sbp_core.errors import ConfigError
from sbp_core.graph import LogicalGraph
from sbp_core.infer import infer_strategy
from sbp_core.placement import Placement
from sbp_core.planning import PlanRequest
from sbp_core.signatures import OpCall, work_flop
from sbp_torch import call_times
from sbp_torch.call_times import CallTimer, TimedCalls
from sbp_torch.graph_capture import capture
from sbp_torch.segments import segment_function
from sbp_torch.testing.models import PROGRAMS
from sbp_torch.testing.programs import capture_tiny, small_cluster

MESHES = {(2,): ("data",), (2, 2): ("data", "tensor")}


@cache
def captured(name: str) -> LogicalGraph:
    program = PROGRAMS[name]
    torch.manual_seed(0)
    model = program.model()
    return prepare_step(capture(model, program.loss, program.batch(4), program.optimizer(model)))


def listed(graph: LogicalGraph, shape: tuple[int, ...] = (2,)) -> RankCalls:
    mesh = Placement.grid(shape, MESHES[shape])
    return rank_calls([graph], [mesh], small_cluster(mesh.size).device)


def call_of(op: str, calls: RankCalls) -> RankCall:
    return next(one for one in calls.calls if one.call.startswith(op + "("))


def timer(**changed: object) -> CallTimer:
    given: dict[str, object] = {
        "device": torch.device("cpu"),
        "ready": lambda: None,
        "slowest": list,
        "time_s": 20.0,
        "max_bytes": 1e9,
    }
    return CallTimer(**(given | changed))  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("shape", MESHES)
@pytest.mark.parametrize("name", ["gpt", "buffers"])
def test_every_call_of_a_plan_is_in_the_list(name: str, shape: tuple[int, ...]) -> None:
    graph, mesh = captured(name), Placement.grid(shape, MESHES[shape])
    request = PlanRequest(graph=graph, mesh=mesh, cluster=small_cluster(mesh.size))
    strategy = infer_strategy(request, planner="test", pins={"batch": "S(0)"})

    known = {one.call for one in listed(graph, shape).calls}

    for node in graph.nodes:
        if node.is_host:
            continue
        call, signature = OpCall.of(graph, node), strategy.nodes[node.name].signature
        if not is_free(call, work_flop(call)):
            assert local_call(call, signature, shape) in known, node.name


def test_the_slowest_by_prediction_come_first_and_each_call_comes_once() -> None:
    calls = listed(captured("gpt")).calls

    assert len({one.call for one in calls}) == len(calls)
    predicted = [one.predicted_s for one in calls]
    assert predicted == sorted(predicted, reverse=True)
    assert predicted[0] > predicted[-1]


def test_a_list_is_a_file(tmp_path: Path) -> None:
    calls = listed(captured("gpt"))
    RANK_CALLS.write(calls, tmp_path / "calls.json")

    assert RANK_CALLS.read(tmp_path / "calls.json") == calls
    (tmp_path / "other.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"other\.json"):
        RANK_CALLS.read(tmp_path / "other.json")


@pytest.mark.slow
def test_what_is_timed_computes_what_the_operator_does() -> None:
    call = call_of("aten.mm.default", listed(captured("mlp")))
    a, b = (torch.randn(entry.shape) for entry in call.inputs)

    (made,) = segment_function(call.segment, 0, ())(a, b)

    assert torch.equal(made, a @ b)


def test_updates_write_the_new_states_over_the_old_ones_as_in_plans() -> None:
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
    batch = {"x": torch.ones(8, 8)}
    graph = capture(model, lambda of, given: of(given["x"]).mean(), batch, optimizer)

    call = call_of("sbp.fused_sgd.default", listed(prepare_step(graph)))

    assert call.instructions[0].op == "sbp.fused_sgd_.default"


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("name", ["gpt", "buffers"])
def test_all_calls_of_a_step_are_timed(name: str) -> None:
    calls = listed(captured(name))

    found = timer().run(calls.calls)

    assert found.failed == () and found.left_out == 0
    assert found.rounds >= 3
    by_call = {one.call: one for one in found.operators}
    assert set(by_call) == {one.call for one in calls.calls}
    assert all(one.time_s > 0 for one in found.operators)
    for one in calls.calls:
        measured = by_call[one.call]
        assert (measured.flop, measured.num_bytes) == (one.flop, one.num_bytes)


def test_each_call_has_its_own_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The list of one call in two sizes, on a clock that goes on by a microsecond a row."""
    calls = [call_of("aten.mm.default", listed(product(side))) for side in (32, 320)]
    now_s = [0.0]

    def clocked(*args: Any, **settings: Any) -> Callable[..., Any]:
        function = segment_function(*args, **settings)

        def run(values: list[torch.Tensor]) -> Any:
            now_s[0] += values[0].shape[0] * 1e-6
            return function(values)

        return run

    clock = SimpleNamespace(monotonic=lambda: now_s[0], perf_counter=lambda: now_s[0])
    monkeypatch.setattr(call_times, "time", clock)
    monkeypatch.setattr(call_times, "segment_function", clocked)

    small, large = timer(time_s=0.1).run(calls).operators

    assert large.flop == 1000 * small.flop
    assert (small.time_s, large.time_s) == pytest.approx((32e-6, 320e-6))


def product(side: int) -> LogicalGraph:
    model = torch.nn.Linear(side, side, bias=False)
    batch = {"x": torch.ones(2 * side, side)}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return prepare_step(capture(model, lambda of, given: of(given["x"]).mean(), batch, optimizer))


@pytest.mark.slow
def test_indices_point_into_the_table_that_they_are_for() -> None:
    """Into all of its rows, as far as rows on a rank go: a few rows would lie in the cache."""
    graph = capture_tiny(num_rows=50).graph
    call = call_of("aten.embedding.default", listed(graph))
    table = call.inputs[0].shape
    seen: list[int] = []

    class Looking(CallTimer):
        def _bounds(self, call: RankCall) -> int:
            seen.append(super()._bounds(call))
            return seen[-1]

    given = {"ready": lambda: None, "slowest": list, "time_s": 5.0, "max_bytes": 1e9}
    found = Looking(device=torch.device("cpu"), **given).run([call])

    assert found.failed == ()
    assert seen == [max(table)]


def test_what_fails_on_one_rank_is_left_out_on_all() -> None:
    good, bad = listed(captured("mlp")).calls[:2]
    meeting, given = Barrier(2, timeout=20), [[0.0], [0.0]]
    found: dict[int, TimedCalls] = {}

    class Failing(CallTimer):
        def _inputs(self, timed: Any) -> list[Any]:
            if timed.call is bad:
                raise RuntimeError("no memory\nat all")
            return super()._inputs(timed)

    def work(rank: int) -> None:
        def slowest(values: Sequence[float]) -> list[float]:
            given[rank] = list(values)
            meeting.wait()
            largest = list(map(max, *given))
            meeting.wait()
            return largest

        kind = Failing if rank == 1 else CallTimer
        made = kind(
            device=torch.device("cpu"), ready=meeting.wait, slowest=slowest, time_s=5, max_bytes=1e9
        )
        found[rank] = made.run([good, bad])

    threads = [Thread(target=work, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert found[0].operators == found[1].operators
    assert [one.call for one in found[0].operators] == [good.call]
    assert found[0].failed == ((bad.call, "another rank cannot make it"),)
    assert found[1].failed == ((bad.call, "no memory"),)


def test_an_error_of_a_kernel_is_told() -> None:
    good = call_of("aten.mm.default", listed(captured("mlp")))
    wrong = RankCall(
        call="aten.mm.default(wrong)",
        dtype=good.dtype,
        flop=good.flop,
        num_bytes=good.num_bytes,
        predicted_s=good.predicted_s,
        instructions=good.instructions,
        inputs=(good.inputs[0], good.inputs[0]),
        outputs=good.outputs,
    )

    found = timer().run([wrong, good])

    assert [one.call for one in found.operators] == [good.call]
    ((call, why),) = found.failed
    assert call == "aten.mm.default(wrong)"
    assert "mat1 and mat2" in why


@pytest.mark.slow
def test_what_needs_too_much_memory_is_left_out() -> None:
    calls = listed(captured("gpt")).calls
    limit = sorted(one.num_bytes for one in calls)[len(calls) // 2]

    found: TimedCalls = timer(max_bytes=limit).run(calls)

    assert all(one.num_bytes <= limit for one in found.operators)
    assert found.left_out == sum(one.num_bytes > limit for one in calls) > 0


def test_little_time_is_for_the_calls_that_come_first() -> None:
    calls = listed(captured("gpt")).calls

    found = timer(time_s=1e-9).run(calls)

    measured = {one.call for one in found.operators}
    assert measured == {one.call for one in calls[: len(measured)]}
    assert found.left_out == len(calls) - len(measured) > 0

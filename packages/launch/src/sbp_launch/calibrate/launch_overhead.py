"""Measure the overhead to start an operator and a boxing step (collective) inside a training step.

A benchmark loop underestimates both: in a step, different operators follow each other, ranks that
are threads compete for the interpreter, and ranks enter a collective at different moments. So two
plans of one small model are timed:

    apart       replicated: each rank computes a small batch; operators only, and the commit
    together    sharded: each rank has such a batch, and a slice of each parameter; the same
                operators, an all-gather for each use of a parameter, and a reduce-scatter of each
                gradient

The predicted step time is linear in `Device.launch_s` and `Device.boxing_launch_s`. So the two
measured times give both, after the predicted times for compute, copies and communication are
subtracted; these are short, because the tensors are small.

Large all-reduces, too, take longer in a step than in a loop, where the processor's caches and the
transport are warm. `measure_large` times them between the segments of a model of a few large
matrices, by a trace; `in_steps` returns the ratio to the loop, for `Calibration.in_steps`.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

import torch
from torch import Tensor, nn

from sbp_aten.passes import prepare_step
from sbp_core.boxing import BoxingBackend, Communicator, StepKind
from sbp_core.calibration import Calibration
from sbp_core.cluster import Cluster
from sbp_core.compile import Collective, CompileOptions, PhysicalPlan, compile_plan
from sbp_core.graph import TensorType
from sbp_core.infer import infer_strategy
from sbp_core.placement import Placement
from sbp_core.planning import PlanRequest
from sbp_core.runtime import Runtime, SpanKind, Trace
from sbp_core.simulation import simulate
from sbp_launch.calibrate.measuring import Stopwatch
from sbp_torch.graph_capture import capture, initial_states

#: Plan -> SBPs: of batch and activations; of parameters, optimizer states, gradients and updates.
_PLANS = {"apart": ("B", "B"), "together": ("S(0)", "S(0)")}

_WIDTH, _TOKENS, _SAMPLES = 64, 16, 2
_WARM_UP_STEPS = 3

#: The model of large matrices: their width and number, samples of a rank, and steps. The model is
#: small, because each all-reduce takes a transport some milliseconds.
_LARGE_WIDTH, _LARGE_LAYERS, _LARGE_SAMPLES, _LARGE_STEPS = 1024, 3, 32, 24

#: Seconds that a call may wait for other ranks.
_DEADLINE_S = 60.0

#: Upper bound of `in_steps`; a larger ratio is a disturbed measurement.
_MOST_IN_STEPS = 2.5


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallModel:
    """Size of the small model, and number of its steps.

    Args:
        layers: Layers of the model, >= 1; each has some 200 operators in a step.
        steps: Timed steps of each plan, >= 1, after the warm-up.
    """

    layers: int = 4
    steps: int = 30

    @classmethod
    def within(cls, time_s: float) -> SmallModel:
        """Return the size for a calibration that may take `time_s` seconds."""
        return cls() if time_s >= _LONG_S else cls(layers=2, steps=10)


#: A calibration of at least this many seconds uses the full model. A smaller one is planned faster,
#: but the constant cost of a step is then a larger part of it, and counted as launches.
_LONG_S = 20.0


def _model(layers: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(
        _WIDTH, nhead=2, dim_feedforward=2 * _WIDTH, dropout=0.0, batch_first=True, norm_first=True
    )
    model = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def _loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    return nn.functional.mse_loss(model(batch["inputs"]), batch["targets"])


def _batch(name: str, num_ranks: int) -> dict[str, Tensor]:
    shape = (_SAMPLES if name == "apart" else _SAMPLES * num_ranks, _TOKENS, _WIDTH)
    return {"inputs": torch.ones(shape), "targets": torch.zeros(shape)}


def make_plans(
    num_ranks: int, clusters: Sequence[Cluster], size: SmallModel = SmallModel()
) -> Mapping[str, list[PhysicalPlan]]:
    """Return the plans, each compiled for every cluster; with one rank, only `apart`."""
    model, optimizer = _model(size.layers)
    plans: dict[str, list[PhysicalPlan]] = {}
    for name, (batch, states) in _PLANS.items():
        if name == "together" and num_ranks == 1:
            continue
        pins = dict.fromkeys(("batch", "use:batch", "activations"), batch)
        pins |= dict.fromkeys(("parameters", "optimizer_states", "gradients", "updates"), states)
        pins["use:parameters"] = "B"
        options = [CompileOptions(cluster=cluster, bucket_bytes=0) for cluster in clusters]
        step = model, optimizer, _batch(name, num_ranks)
        plans[name] = _compiled(step, num_ranks, pins, options)
    return plans


def _compiled(
    step: tuple[nn.Module, torch.optim.Optimizer, Mapping[str, Tensor]],
    num_ranks: int,
    pins: Mapping[str, str],
    options: Sequence[CompileOptions],
) -> list[PhysicalPlan]:
    """Compile a step with the strategy that pins (given SBPs) determine, with each option."""
    model, optimizer, batch = step
    graph = prepare_step(capture(model, _loss, batch, optimizer))
    mesh = Placement.grid((num_ranks,), ("data",))
    # One nominal cluster, so that the strategy does not depend on measurements.
    request = PlanRequest(graph=graph, mesh=mesh, cluster=Cluster.nominal(num_ranks))
    strategy = infer_strategy(request, planner="calibrate", pins=pins)
    return [compile_plan(graph, strategy, one) for one in options]


def measure_steps(
    backend: BoxingBackend, runtime: Runtime, num_ranks: int, size: SmallModel = SmallModel()
) -> Mapping[str, float]:
    """Return the median time of a step of each plan, in seconds, on the ranks of this process.

    The result is empty if the runtime, such as `reference`, moves data without the backend.

    Args:
        backend: The backend, open on all ranks; it stays open.
        runtime: The runtime that runs the plans.
        num_ranks: Number of ranks of the run.
        size: Size of the model and number of steps; the same in every process.
    """
    found: dict[str, float] = {}
    for name, (plan,) in make_plans(num_ranks, [Cluster.nominal(num_ranks)], size).items():
        sent_before = _sent_bytes(backend)
        times_s: list[float] = []
        states, batch = initial_states(*_model(size.layers)), _batch(name, num_ranks)
        with runtime.start(plan, states, _Open(backend)) as session:
            for index in range(_WARM_UP_STEPS + size.steps):
                began = time.perf_counter()
                result = session.step(batch, {"lr": 1e-3, "seed": 0, "step": index})
                result.loss.item()
                times_s.append(time.perf_counter() - began)
        if plan.boxing_bytes and _sent_bytes(backend) == sent_before:
            return {}
        found[name] = median(times_s[_WARM_UP_STEPS:])
    return found


def _sent_bytes(backend: BoxingBackend) -> int:
    return sum(backend.communicator(rank).sent_bytes for rank in backend.local_ranks())


def launches(
    cluster: Cluster, step_s: Mapping[str, float], size: SmallModel = SmallModel()
) -> tuple[float, float]:
    """Return `launch_s` and `boxing_launch_s`, in seconds, that explain the measured steps.

    Args:
        cluster: Cluster with measured rates and calls, and the `launch_s` of a loop as lower bound.
        step_s: Result of `measure_steps`, not empty.
        size: Size of the model of these steps.
    """
    none, operators, boxing = (
        replace(cluster, device=replace(cluster.device, launch_s=one, boxing_launch_s=other))
        for one, other in ((0.0, 0.0), (1.0, 0.0), (0.0, 1.0))
    )
    plans = make_plans(cluster.num_devices, (none, operators, boxing), size)
    # For each plan: step time - rest_s = launch_s * l + boxing_launch_s * b, with the numbers l and
    # b of starts on the critical path. Even `apart` has boxing: its ranks commit.
    known = {}
    for name, took_s in step_s.items():
        rest_s, operators_s, boxing_s = (simulate(one).step_s for one in plans[name])
        known[name] = took_s - rest_s, operators_s - rest_s, boxing_s - rest_s
    (apart_s, apart_l, apart_b), least_s = known["apart"], cluster.device.launch_s
    if "together" not in known:
        return max(least_s, apart_s / apart_l), 0.0
    together_s, together_l, together_b = known["together"]
    solved_s = (apart_s * together_b - together_s * apart_b) / (
        apart_l * together_b - together_l * apart_b
    )
    launch_s = max(least_s, solved_s)
    return launch_s, max(0.0, (together_s - launch_s * together_l) / together_b)


def measure_large(
    backend: BoxingBackend, runtime: Runtime, num_ranks: int
) -> Mapping[int, tuple[float, ...]]:
    """Measure the times of all-reduces of large tensors between the segments of steps.

    Args:
        backend: The backend, open on all ranks; it stays open.
        runtime: The runtime that runs the plan.
        num_ranks: Number of ranks of the run, >= 2.

    Returns:
        Bytes -> seconds of each all-reduce, from the begin on the last rank to the end on the last
        rank; empty if the runtime moves data without the backend.
    """
    torch.manual_seed(0)
    layers = [nn.Linear(_LARGE_WIDTH, _LARGE_WIDTH, bias=False) for _ in range(_LARGE_LAYERS)]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    shape = (_LARGE_SAMPLES * num_ranks, _LARGE_WIDTH)
    batch = {"inputs": torch.ones(shape), "targets": torch.zeros(shape)}
    pins = dict.fromkeys(("batch", "use:batch", "activations"), "S(0)")
    pins |= dict.fromkeys(("parameters", "optimizer_states", "updates"), "B")
    options = CompileOptions(bucket_bytes=0)
    (plan,) = _compiled((model, optimizer, batch), num_ranks, pins, [options])
    sent_before, trace = _sent_bytes(backend), Trace()
    with runtime.start(plan, initial_states(model, optimizer), _Open(backend)) as session:
        for index in range(_WARM_UP_STEPS + _LARGE_STEPS):
            session.trace = trace if index >= _WARM_UP_STEPS else None
            session.step(batch, {"lr": 1e-3, "seed": 0, "step": index}).loss.item()
    if _sent_bytes(backend) == sent_before:
        return {}
    first, *others = backend.local_ranks()
    large: dict[str, int] = {}  # the bytes of each actor that reduces a large tensor
    for actor in plan.by_rank[first].actors:
        if isinstance(actor, Collective):
            step = plan.steps[actor.step]
            size = TensorType(step.shape, step.dtype).size_bytes
            if step.kind is StepKind.ALL_REDUCE and size >= 4 * _LARGE_WIDTH**2:
                large[actor.name] = size
    spans: dict[tuple[str, int], list[tuple[float, float]]] = defaultdict(list)
    for span in trace.spans:
        if span.kind is SpanKind.FIRING and span.actor in large:
            spans[span.actor, span.step].append((1e-9 * span.begin_ns, 1e-9 * span.end_ns))
    of_ranks = [(max(s for s, _ in of), max(s for _, s in of)) for of in spans.values()]
    if not others:  # each rank has a process
        watch = Stopwatch(backend.communicator(first), num_ranks, torch.device("cpu"), _DEADLINE_S)
        times_s = watch.durations(of_ranks)
    else:
        times_s = [end_s - begin_s for begin_s, end_s in of_ranks]
    found: dict[int, list[float]] = defaultdict(list)
    for (name, _), time_s in zip(spans, times_s, strict=True):
        found[large[name]].append(time_s)
    return {size: tuple(times) for size, times in found.items()}


def in_steps(
    calibration: Calibration, num_ranks: int, large: Mapping[int, Sequence[float]]
) -> float:
    """Return `Calibration.in_steps` from the result of `measure_large`.

    Args:
        calibration: Times of calls in a loop, and `boxing_launch_s`.
        num_ranks: Number of ranks of the run.
        large: Bytes -> seconds of all-reduces; may be empty.
    """
    ratios: list[float] = []
    for size, times_s in large.items():
        none_s, call_s = (
            calibration.time_s(StepKind.ALL_REDUCE.value, num_ranks, 1, of) for of in (0, size)
        )
        if none_s is not None and call_s is not None and call_s > none_s:
            # The first quartile, as for calls in a loop.
            took_s = sorted(times_s)[(len(times_s) - 1) // 4] - (calibration.boxing_launch_s or 0.0)
            ratios.append((took_s - none_s) / (call_s - none_s))
    return min(_MOST_IN_STEPS, max(1.0, median(ratios))) if ratios else 1.0


class _Open(BoxingBackend):
    """A wrapper of an open backend that ignores `open` and `close`, so a session leaves it open."""

    def __init__(self, backend: BoxingBackend) -> None:
        self._backend = backend
        self.spans_processes = backend.spans_processes

    def open(self, ranks: Sequence[int]) -> None:
        """Do nothing."""

    def local_ranks(self) -> tuple[int, ...]:
        return self._backend.local_ranks()

    def communicator(self, rank: int) -> Communicator:
        return self._backend.communicator(rank)

    def fail(self, error: BaseException) -> None:
        self._backend.fail(error)

    def close(self) -> None:
        """Do nothing."""

"""How long a runtime takes to start operators and boxing steps: from steps of a small model.

A tight loop starts an operator in far less time than a training step does, where many different
ones follow each other and threads of one process wait for its interpreter; and a collective that
ranks call at one moment is over sooner than one between two segments, which they reach and leave
one after the other. So two plans of one small model are run and timed as training would run them:

    apart       every rank computes the step of a small batch: operators, and the commit of a step
    together    every rank has such a batch, and a slice of each parameter: the same operators, and
                between them an all-gather for each use of a parameter and a reduce-scatter of its
                gradient

The cost model is linear in `Device.launch_s` and `Device.boxing_launch_s`, so the two times give
both, less what the model says of computing, copying and calls, which small tensors keep short.

Large tensors take longer in steps, too: calls that follow each other find their data in the
processor's caches, and a transport that is warm. So the all-reduces of a model of a few large
matrices are timed between its segments, by a trace, and what their bytes take there over what they
take in a loop is `Calibration.in_steps`.
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

#: Plan -> SBP of batch and activations, and of parameters, their states, gradients and updates.
_PLANS = {"apart": ("B", "B"), "together": ("S(0)", "S(0)")}

_WIDTH, _TOKENS, _SAMPLES = 64, 16, 2
_WARM_UP_STEPS = 3

#: Of the model of large matrices: their width and number, samples of a rank, and steps. They are
#: few, because each takes a transport some milliseconds.
_LARGE_WIDTH, _LARGE_LAYERS, _LARGE_SAMPLES, _LARGE_STEPS = 1024, 3, 32, 24

#: Seconds that a call may wait for others.
_DEADLINE_S = 60.0

#: More than that is no matter of caches: the machine was disturbed.
_MOST_IN_STEPS = 2.5


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallModel:
    """How large the small model is, and how many of its steps are timed.

    Args:
        layers: Of the model, >= 1: its step has some 200 operators for each.
        steps: Of each plan, >= 1, after those that do not count.
    """

    layers: int = 4
    steps: int = 30

    @classmethod
    def within(cls, time_s: float) -> SmallModel:
        """Return the one for a calibration that may take so many seconds."""
        return cls() if time_s >= _LONG_S else cls(layers=2, steps=10)


#: A calibration of so many seconds has the time for a model of all layers: to plan one of fewer is
#: quicker, but what a step takes once is then a larger part of it, and counted as launches.
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
    """Return the plans, each compiled for every cluster; one rank has no boxing to run."""
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
    """Return the plan of a step, whose strategy is that of the pins, for each of the options."""
    model, optimizer, batch = step
    graph = prepare_step(capture(model, _loss, batch, optimizer))
    mesh = Placement.grid((num_ranks,), ("data",))
    # The same strategies, whatever the clusters say.
    request = PlanRequest(graph=graph, mesh=mesh, cluster=Cluster.nominal(num_ranks))
    strategy = infer_strategy(request, planner="calibrate", pins=pins)
    return [compile_plan(graph, strategy, one) for one in options]


def measure_steps(
    backend: BoxingBackend, runtime: Runtime, num_ranks: int, size: SmallModel = SmallModel()
) -> Mapping[str, float]:
    """Return the median time of a step of each plan, in seconds, on the ranks of this process.

    Nothing is returned where the runtime, such as `reference`, moves data without the backend.

    Args:
        backend: Open on all ranks; stays open.
        runtime: Runs the plans.
        num_ranks: Of the run.
        size: Of the model, and how many steps; the same in every process.
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
        cluster: With measured rates and calls, and the `launch_s` of a loop, which a step exceeds.
        step_s: Of `measure_steps`, not empty.
        size: Of the model whose steps they are.
    """
    none, operators, boxing = (
        replace(cluster, device=replace(cluster.device, launch_s=one, boxing_launch_s=other))
        for one, other in ((0.0, 0.0), (1.0, 0.0), (0.0, 1.0))
    )
    plans = make_plans(cluster.num_devices, (none, operators, boxing), size)
    # Of each plan: what its step takes besides rest_s, = launch_s * l + boxing_launch_s * b, and
    # the counts l and b of starts that follow one another. Even `apart` boxes: its ranks commit.
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
    """Return what all-reduces of large tensors take between the segments of steps.

    Args:
        backend: Open on all ranks; stays open.
        runtime: Runs the plan.
        num_ranks: Of the run, >= 2.

    Returns:
        By their bytes, the seconds of each, from the last rank's beginning to the last one's end;
        nothing where the runtime moves data without the backend.
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
    """Return `Calibration.in_steps` from what `measure_large` found.

    Args:
        calibration: What calls take that follow each other, and `boxing_launch_s`.
        num_ranks: Of the run.
        large: Seconds of all-reduces by their bytes; empty if there are none.
    """
    ratios: list[float] = []
    for size, times_s in large.items():
        none_s, call_s = (
            calibration.time_s(StepKind.ALL_REDUCE.value, num_ranks, 1, of) for of in (0, size)
        )
        if none_s is not None and call_s is not None and call_s > none_s:
            # The first quartile, as of calls that follow each other.
            took_s = sorted(times_s)[(len(times_s) - 1) // 4] - (calibration.boxing_launch_s or 0.0)
            ratios.append((took_s - none_s) / (call_s - none_s))
    return min(_MOST_IN_STEPS, max(1.0, median(ratios))) if ratios else 1.0


class _Open(BoxingBackend):
    """A backend that is open already and stays open: a session neither opens nor closes it."""

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

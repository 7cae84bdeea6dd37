"""Measure how much longer a large all-reduce takes inside a step than in a loop.

In a loop, the processor's caches and the transport are warm. `measure_large` times all-reduces
between the segments of a model of a few large matrices, by a trace. `in_steps` returns the ratio to
the loop, for `Calibration.in_steps`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import median

import torch
from torch import nn

from sbp_core.boxing import BoxingBackend, StepKind
from sbp_core.calibration import Calibration
from sbp_core.compile import Collective, CompileOptions
from sbp_core.graph import TensorType
from sbp_core.runtime import Runtime, SpanKind, Trace
from sbp_launch.calibrate.launch_overhead import (
    WARM_UP_STEPS,
    OpenBackend,
    compile_with_pins,
    total_sent_bytes,
)
from sbp_launch.calibrate.measuring import Stopwatch
from sbp_torch.graph_capture import initial_states

#: Width and number of the matrices, samples of a rank, and steps. The model is small, because each
#: all-reduce takes a transport some milliseconds.
_WIDTH, _LAYERS, _SAMPLES, _STEPS = 1024, 3, 32, 24

#: Seconds that a call may wait for other ranks.
_DEADLINE_S = 60.0

#: Upper bound of `in_steps`; a larger ratio is a disturbed measurement.
_MOST_IN_STEPS = 2.5


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
    layers = [nn.Linear(_WIDTH, _WIDTH, bias=False) for _ in range(_LAYERS)]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    shape = (_SAMPLES * num_ranks, _WIDTH)
    batch = {"inputs": torch.ones(shape), "targets": torch.zeros(shape)}
    pins = dict.fromkeys(("batch", "use:batch", "activations"), "S(0)")
    pins |= dict.fromkeys(("parameters", "optimizer_states", "updates"), "B")
    options = CompileOptions(bucket_bytes=0)
    (plan,) = compile_with_pins((model, optimizer, batch), num_ranks, pins, [options])
    sent_before, trace = total_sent_bytes(backend), Trace()
    with runtime.start(plan, initial_states(model, optimizer), OpenBackend(backend)) as session:
        for index in range(WARM_UP_STEPS + _STEPS):
            session.trace = trace if index >= WARM_UP_STEPS else None
            session.step(batch, {"lr": 1e-3, "seed": 0, "step": index}).loss.item()
    if total_sent_bytes(backend) == sent_before:
        return {}
    first, *others = backend.local_ranks()
    large: dict[str, int] = {}  # the bytes of each actor that reduces a large tensor
    for actor in plan.by_rank[first].actors:
        if isinstance(actor, Collective):
            step = plan.steps[actor.step]
            size = TensorType(step.shape, step.dtype).size_bytes
            if step.kind is StepKind.ALL_REDUCE and size >= 4 * _WIDTH**2:
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

"""Find the best pipeline stages, given the price of every possible stage as a table.

It is the exact search of `flushed`, and of `lazy`, which improves prices and searches again. Places
to cut are numbered 0 ... S - 1, such as the order ideals of a graph or the gaps between layers;
stage (i, j) holds the blocks between two places. Stages take all devices, one range after the
other. With t the seconds of stages and transfers for one micro-batch,

    steady     minimise  max t
    flushed    minimise  (m - 1) max t + sum t       m micro-batches, then the pipeline is empty
    such that  memory of each stage, with its micro-batches in flight, <= the limit

The steady problem is one pass of the recurrence below with + read as max. The flushed problem is
solved exactly: let f(T) be the least sum with no t above T. It falls as T grows, and one pass gives
f(T) for one T. Over an interval [L, U] of T, the objective is at least (m - 1) L + f(U). Intervals
are halved until that bound is no better than the best result, up to a billionth.

    f(i, d, r)   the stages after place i, on d devices, the first of which takes r
               = min over j of t(i, j, r) + min over r' of (transfer(j, r, r') + f(j, d - r, r'))

If micro-batches in flight depend on the number of later stages, or that number is fixed, it is one
more index. Complexity: O(S^2 D^2 / 2 + S D^3 / 6) a pass, vectorised; times the number of stages in
the latter cases; up to a hundred passes when flushed, usually far fewer.

Source: Zheng et al., "Alpa", OSDI 2022, section 5.2 (the objective, and the sum under a bound on
the largest; there each bound is tried).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from math import ceil, inf
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from sbp_core.errors import SbpValueError

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

#: Improvements below this relative amount are not looked for.
_TOLERANCE = 1e-9


class InFlightLimits(Enum):
    """How many micro-batches a stage has begun and not finished, at most."""

    ROUND_ROBIN = "round_robin"  #: ceil(devices from here on / devices of the stage), as PipeDream
    STAGES = "stages"  #: stages from here on: 1F1B, all devices of a stage share a micro-batch
    ALL = "all"  #: all of the step, as in GPipe


@dataclass(frozen=True, slots=True, kw_only=True)
class TableStage:
    """A stage.

    Args:
        start: Place where it begins.
        stop: Place where it ends.
        devices: Number of its devices.
    """

    start: int
    stop: int
    devices: int


@dataclass(frozen=True, kw_only=True)
class TableProblem:
    """The step to cut, and its costs.

    Args:
        num_places: The number S; a pipeline goes from place 0 to place S - 1.
        devices: The number D of devices, all of which are used.
        seconds: (devices of the stage, devices after it) -> float (S, S), one micro-batch; infinite
            where no stage is possible, such as where j <= i. A stage begins at device D minus the
            two numbers.
        device_counts: Allowed numbers of devices of a stage; None for any number.
        transfer_s: (devices before the cut, devices after it in the next stage, all devices
            after it) -> float (S,), the transfer at each place; None if transfers take no time.
        memory: (devices of the stage, micro-batches in flight) -> float (S, S), bytes of a device;
            None if memory does not count.
        memory_bytes: The limit for `memory`.
        held_seconds: (devices of the stage, devices after it, micro-batches in flight) -> float
            (S, S), the seconds if they depend on the memory of the stage: never less than
            `seconds`, and infinite where it does not fit. None if they do not depend on it.
        in_flight: How many micro-batches a stage holds.
        micro_batches: The number m if the pipeline is flushed; None if it is steady.
        num_stages: Required number of stages; None for any number.
    """

    num_places: int
    devices: int
    seconds: Callable[[int, int], Floats]
    device_counts: Sequence[int] | None = None
    transfer_s: Callable[[int, int, int], Floats] | None = None
    memory: Callable[[int, int], Floats] | None = None
    memory_bytes: float = inf
    held_seconds: Callable[[int, int, int], Floats] | None = None
    in_flight: InFlightLimits = InFlightLimits.STAGES
    micro_batches: int | None = None
    num_stages: int | None = None

    def __post_init__(self) -> None:
        if self.num_places < 2 or self.devices < 1:
            raise SbpValueError(
                f"{self.num_places} places and {self.devices} devices",
                accepted="at least 2 places and 1 device",
            )
        if self.micro_batches is not None and self.micro_batches < 1:
            raise SbpValueError(f"{self.micro_batches} micro-batches", accepted="at least 1")
        if self.in_flight is InFlightLimits.ALL and self.micro_batches is None:
            raise SbpValueError(
                "a steady pipeline has no number of all micro-batches",
                accepted="micro_batches, or another in_flight",
            )

    @property
    def is_limited(self) -> bool:
        """Whether memory counts."""
        return self.memory is not None or self.held_seconds is not None

    def times(self, own: int, behind: int, stages: int) -> Floats:
        """Return the seconds of stages, as `seconds`, with so many stages from there on."""
        if self.held_seconds is None:
            return self.seconds(own, behind)
        return self.held_seconds(own, behind, self.held(own, behind, stages))

    def walk(self, stages: Sequence[TableStage]) -> Iterator[tuple[TableStage, int, int]]:
        """Yield each stage of a pipeline, all devices after it, and the stages from it on."""
        behind = self.devices
        for at, stage in enumerate(stages):
            behind -= stage.devices
            yield stage, behind, len(stages) - at

    def held(self, stage: int, behind: int, stages: int) -> int:
        """Return the micro-batches in flight of a stage.

        Args:
            stage: Number of its devices.
            behind: Number of all devices after it.
            stages: Number of stages from here on, including this one.
        """
        most = self.micro_batches or inf
        if self.in_flight is InFlightLimits.ALL:
            return int(most)
        if self.in_flight is InFlightLimits.STAGES:
            return int(min(stages, most))
        return int(min(ceil((stage + behind) / stage), most))


@dataclass(frozen=True, slots=True, kw_only=True)
class TablePlan:
    """The best pipeline.

    Args:
        stages: The stages, in order.
        objective_s: The minimised objective.
        slowest_s: The maximum of t.
        sum_s: The sum of t.
    """

    stages: tuple[TableStage, ...]
    objective_s: float
    slowest_s: float
    sum_s: float


def cut_table(problem: TableProblem) -> TablePlan | None:
    """Return the best pipeline; None if none is possible."""
    if problem.is_limited:
        # Without the limit, stages need not be counted, and the best result often fits.
        roomy = cut_table(replace(problem, memory=None, held_seconds=None))
        if roomy is None or _fits(problem, roomy.stages):
            return roomy
    fastest = _Pass(problem, steady=True).best(inf)
    if fastest is None or problem.micro_batches is None:
        return None if fastest is None else price_table(problem, fastest)
    lowest = price_table(problem, fastest)
    search = _Pass(problem, steady=False)
    longest = search.best(inf)
    assert longest is not None  # a pipeline is possible, because the fastest one was found
    highest = price_table(problem, longest)
    best = min(lowest, highest, key=lambda plan: plan.objective_s)
    intervals = [(lowest.slowest_s, highest)]
    while intervals:
        lower, upper = intervals.pop()
        bound = (problem.micro_batches - 1) * lower + upper.sum_s
        if bound >= best.objective_s * (1 - _TOLERANCE):
            continue
        middle = (lower + upper.slowest_s) / 2
        found = search.best(middle)
        if found is None:  # the lower end is the least T up to rounding
            intervals.append((middle, upper))
            continue
        plan = price_table(problem, found)
        best = min(best, plan, key=lambda plan: plan.objective_s)
        intervals += [(middle, upper), (lower, plan)]
    return best


def _fits(problem: TableProblem, stages: Sequence[TableStage]) -> bool:
    for stage, behind, count in problem.walk(stages):
        if _memory(problem, stage, behind, count) > problem.memory_bytes:
            return False
        held = problem.times(stage.devices, behind, count)[stage.start, stage.stop]
        if held > problem.seconds(stage.devices, behind)[stage.start, stage.stop]:
            return False
    return True


def _memory(problem: TableProblem, stage: TableStage, behind: int, stages: int) -> float:
    if problem.memory is None:
        return 0.0
    in_flight = problem.held(stage.devices, behind, stages)
    return float(problem.memory(stage.devices, in_flight)[stage.start, stage.stop])


def price_table(problem: TableProblem, stages: Sequence[TableStage]) -> TablePlan:
    """Return the cost of given stages.

    Raises:
        SbpValueError: They are no pipeline, or a stage is impossible or does not fit.
    """
    ends = [0, *(stage.stop for stage in stages)]
    joined = all(stage.start == end for stage, end in zip(stages, ends, strict=False))
    if not joined or ends[-1] != problem.num_places - 1:
        raise SbpValueError(f"{stages} do not go from the first place to the last, one by one")
    if sum(stage.devices for stage in stages) != problem.devices:
        raise SbpValueError(f"{stages} do not take {problem.devices} devices")
    if problem.num_stages not in (None, len(stages)):
        raise SbpValueError(f"{len(stages)} stages", accepted=f"{problem.num_stages}")
    times: list[float] = []
    for stage, behind, count in problem.walk(stages):
        needed = _memory(problem, stage, behind, count)
        if needed > problem.memory_bytes:
            raise SbpValueError(f"{stage} needs {needed} bytes")
        taken = problem.times(stage.devices, behind, count)[stage.start, stage.stop]
        times.append(float(taken))
        if problem.transfer_s is not None and count > 1:
            after = stages[-count + 1].devices
            times.append(float(problem.transfer_s(stage.devices, after, behind)[stage.stop]))
    if inf in times:
        raise SbpValueError(f"a stage of {stages} is impossible: it takes infinitely long")
    slowest, total = max(times), sum(times)
    objective = slowest
    if problem.micro_batches is not None:
        objective = (problem.micro_batches - 1) * slowest + total
    return TablePlan(stages=tuple(stages), objective_s=objective, slowest_s=slowest, sum_s=total)


#: (stages from here on, 0 if not counted; devices from here on; devices of the first stage)
_Key: TypeAlias = tuple[int, int, int]


class _Suffix(NamedTuple):
    """f(i, d, r) for all i, and the next stage that attains it.

    Args:
        seconds: Float (S,), the values of f.
        stop: Int (S,), where the first stage ends.
        following: Int (S,), devices of the stage that begins there; 0 after the last one.
    """

    seconds: Floats
    stop: Ints
    following: Ints


class _Pass:
    """The recurrence of the module.

    Args:
        problem: The step to cut, and its costs.
        steady: Whether times are combined by max instead of +.
    """

    def __init__(self, problem: TableProblem, *, steady: bool) -> None:
        self._problem = problem
        self._combine = np.maximum if steady else np.add
        self._counted = problem.num_stages is not None or (
            problem.in_flight is InFlightLimits.STAGES and problem.is_limited
        )
        most = min(problem.devices, problem.num_places - 1)
        self._most_stages = min(problem.num_stages or most, most)

    def best(self, slowest_s: float) -> list[TableStage] | None:
        """Return the best stages with no stage or transfer longer than a time; None if none."""
        found: dict[_Key, _Suffix] = {}
        for key in self._keys():
            found[key] = self._suffix(key, slowest_s, found)
        devices = self._problem.devices
        wanted = self._problem.num_stages
        whole = [key for key in found if key[1] == devices and wanted in (None, key[0])]
        first = min(whole, key=lambda key: (found[key].seconds[0], key), default=None)
        if first is None or found[first].seconds[0] == inf:
            return None
        return list(self._unfold(found, first))

    def _suffix(self, key: _Key, slowest_s: float, found: dict[_Key, _Suffix]) -> _Suffix:
        """Return f of one key."""
        problem, (stages, devices, own) = self._problem, key
        behind = devices - own
        # Infinite if a stage takes too long, or memory is not enough.
        table = problem.times(own, behind, stages)
        fits = table <= slowest_s
        if problem.memory is not None:
            held = problem.memory(own, problem.held(own, behind, stages))
            fits &= held <= problem.memory_bytes
        table = np.where(fits, table, inf)
        size = len(table)
        if not behind:
            last, nothing = np.full(size, size - 1), np.zeros(size, dtype=int)
            return _Suffix(seconds=table[:, -1], stop=last, following=nothing)
        tail, following = np.full(size, inf), np.zeros(size, dtype=int)
        for after in self._counts(behind):
            suffix = found.get((max(stages - 1, 0), behind, after))
            if suffix is None:
                continue
            value = suffix.seconds
            if problem.transfer_s is not None:
                transfer = problem.transfer_s(own, after, behind)
                value = self._combine(np.where(transfer <= slowest_s, transfer, inf), value)
            following = np.where(value < tail, after, following)
            tail = np.minimum(tail, value)
        value = self._combine(table, tail[None, :])
        stop = value.argmin(axis=1)
        return _Suffix(seconds=value[np.arange(size), stop], stop=stop, following=following[stop])

    def _unfold(self, found: dict[_Key, _Suffix], key: _Key) -> Iterator[TableStage]:
        place, (stages, devices, own) = 0, key
        while own:
            suffix = found[stages, devices, own]
            stop, following = int(suffix.stop[place]), int(suffix.following[place])
            yield TableStage(start=place, stop=stop, devices=own)
            place, stages, devices, own = stop, max(stages - 1, 0), devices - own, following

    def _keys(self) -> Iterator[_Key]:
        """Yield the keys, each after the keys of shorter suffixes."""
        for devices in range(1, self._problem.devices + 1):
            for own in self._counts(devices):
                if not self._counted:
                    yield 0, devices, own
                elif own == devices:
                    yield 1, devices, own
                else:
                    for stages in range(2, min(self._most_stages, devices) + 1):
                        yield stages, devices, own

    def _counts(self, devices: int) -> list[int]:
        counts = self._problem.device_counts
        every = range(1, devices + 1) if counts is None else sorted(set(counts))
        return [count for count in every if 1 <= count <= devices]

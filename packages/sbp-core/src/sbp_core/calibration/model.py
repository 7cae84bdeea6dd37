"""`Calibration`: predicts the times of a backend's collectives and messages from measurements.

Planners price boxing with it (`boxing.price`). It holds the samples, the fits and their errors.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from math import inf

from sbp_core.calibration.curve import Curve, fit_curve, through
from sbp_core.calibration.held_out import FitError
from sbp_core.calibration.sample import MeasuredCase, Measurement
from sbp_core.calibration.structure import TransportModel
from sbp_core.errors import SbpValueError
from sbp_core.operators import MeasuredOperator

#: Kind, group size, groups at once, nodes.
_Key = tuple[str, int, int, int]

#: The knots of curves of cases that were not measured.
_GRID_BYTES = (0, *(2**power for power in range(8, 33)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """The known times of a boxing backend; make one with `calibrate(samples)`.

    A call that was measured is predicted by its own curve; any other by the structural model,
    including the correction of each measured kind. See `curve` and `structure`.

    Args:
        backend: Name of the transport.
        samples: The raw measurements, all of this backend.
        curves: The fitted curve of each case that was measured in two sizes or more.
        errors: The errors of such fits on samples that they did not see, by `cross_validate`.
        launch_s, boxing_launch_s: See `Device`; measured in steps that box through this backend, in
            seconds; None if no step was measured.
        operators: Measured times of operators in steps with this backend.
        in_steps: The factor by which the bytes of a call take longer between the segments of a step
            than in the samples, whose calls follow each other; >= 1. Predictions are for steps.
        busy: `boxing_busy` of `Device`, for this backend; None if it was not measured.
    """

    backend: str
    # Thousands of numbers: they would clutter the text of a cluster.
    samples: tuple[Measurement, ...] = field(repr=False)
    curves: Mapping[MeasuredCase, Curve] = field(repr=False)
    errors: tuple[FitError, ...] = ()
    launch_s: float | None = None
    boxing_launch_s: float | None = None
    operators: tuple[MeasuredOperator, ...] = field(default=(), repr=False)
    in_steps: float = 1.0
    busy: float | None = None
    #: The structural model of groups within a node (False), and of groups on several nodes (True);
    #: made when it is needed, because most plans only need the curves. None without samples of such
    #: groups.
    _structures: dict[bool, TransportModel | None] = field(
        init=False, repr=False, compare=False, default_factory=dict
    )
    #: Curves and origins of the calls that were requested so far.
    _found: dict[_Key, tuple[Curve | None, str | None]] = field(
        init=False, repr=False, compare=False, default_factory=dict
    )

    def __post_init__(self) -> None:
        launches = (self.launch_s, self.boxing_launch_s)
        if not all(time_s is None or 0 <= time_s < inf for time_s in launches):
            raise SbpValueError(f"launches of {launches}", accepted="seconds >= 0, or none")
        if self.busy is not None and not 0 <= self.busy <= 1:
            raise SbpValueError(f"busy={self.busy}", accepted="from 0 to 1, or none")
        if not 1 <= self.in_steps < inf:
            raise SbpValueError(f"in_steps={self.in_steps}", accepted="a number from 1 on")
        if not self.samples or {sample.backend for sample in self.samples} != {self.backend}:
            names = sorted({sample.backend for sample in self.samples})
            raise SbpValueError(
                f"a calibration of {self.backend!r} from samples of {names}",
                accepted="at least one sample, all of the one backend",
            )

    @classmethod
    def of(cls, samples: Iterable[Measurement]) -> Calibration:
        """Fit the samples of one backend, without `errors`.

        Raises:
            SbpValueError: there are none, or they are of several backends.
        """
        given = tuple(samples)
        by_case: dict[MeasuredCase, list[Measurement]] = defaultdict(list)
        for sample in given:
            by_case[sample.case].append(sample)
        curves = {
            case: fit_curve([s.shared_bytes for s in of], [s.time_s for s in of])
            for case, of in by_case.items()
            if len({s.shared_bytes for s in of}) > 1
        }
        return cls(backend=given[0].backend if given else "", samples=given, curves=curves)

    def time_s(
        self,
        kind: str,
        group_size: int,
        concurrent_groups: int,
        shared_bytes: float,
        *,
        num_nodes: int = 1,
    ) -> float | None:
        """Predict the time of one whole call, in seconds.

        Args:
            kind: One of `CALL_KINDS`.
            group_size: Ranks of one group; below 2 there is nothing to do, which takes 0 s.
            concurrent_groups: Groups at work at the same time, >= 1; see `Measurement`.
            shared_bytes: S of `Measurement`, >= 0.
            num_nodes: Nodes that one group spans.

        Returns:
            Seconds; None if nothing was measured on as many nodes (one, or several).

        Raises:
            SbpError: no such kind or group.
        """
        if group_size < 2:
            return 0.0
        curve, _ = self._look_up(kind, group_size, concurrent_groups, num_nodes)
        return curve.time_s(shared_bytes) if curve is not None else None

    def origin(
        self, kind: str, group_size: int, concurrent_groups: int, *, num_nodes: int = 1
    ) -> str | None:
        """Describe the data from which `time_s` predicts this call; None if there are none."""
        return self._look_up(kind, group_size, concurrent_groups, num_nodes)[1]

    def _look_up(
        self, kind: str, group_size: int, concurrent_groups: int, num_nodes: int
    ) -> tuple[Curve | None, str | None]:
        """Return the curve of a case, measured or not, and a description of its origin."""
        key = (kind, group_size, concurrent_groups, num_nodes)
        found = self._found.get(key)
        if found is None:
            case = MeasuredCase(
                kind=kind,
                group_size=group_size,
                num_nodes=num_nodes,
                concurrent_groups=concurrent_groups,
            )
            measured = self.curves.get(case)
            curve, origin = (measured, "measured") if measured is not None else self._derive(case)
            if curve is not None and self.in_steps > 1:
                curve = curve.stretched(self.in_steps)
            found = self._found[key] = curve, origin
        return found

    def _derive(self, case: MeasuredCase) -> tuple[Curve | None, str | None]:
        """Return the curve of a case that was not measured, and a description of its origin."""
        structure = self._structure(case.num_nodes > 1)
        if structure is None:
            return None, None
        times_s = [structure.time_s(case, size) for size in _GRID_BYTES]
        curve = through(_GRID_BYTES, list(accumulate(times_s, max)))
        like = f"{case.kind} in other groups" if structure.knows(case.kind) else "other kinds"
        return curve, f"derived from {like}"

    def _structure(self, several_nodes: bool) -> TransportModel | None:
        if several_nodes not in self._structures:
            samples = [of for of in self.samples if (of.num_nodes > 1) == several_nodes]
            self._structures[several_nodes] = TransportModel(samples) if samples else None
        return self._structures[several_nodes]

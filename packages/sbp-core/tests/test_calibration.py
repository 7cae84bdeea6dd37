"""Calibrations: samples, curves, what was not measured, and how far off the predictions are."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from statistics import median

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sbp_core.calibration import (
    CALL_KINDS,
    HELD_OUT_BY,
    Calibration,
    Curve,
    FitError,
    HeldOut,
    MeasuredCase,
    Measurement,
    calibrate,
    cross_validate,
)
from sbp_core.calibration.curve import fit_curve, through
from sbp_core.calibration.nonnegative import solve
from sbp_core.calibration.structure import volumes
from sbp_core.errors import SbpError, SbpLookupError, SbpValueError
from sbp_core.serialize import dump, load

quick = settings(derandomize=True, deadline=None, max_examples=60)

SIZES = tuple(2**power for power in range(10, 29))


#: How much longer calls of a kind take than others of as many bytes.
OWN = {"all-reduce": 1.1, "reduce-scatter": 0.95, "all-gather": 0.9, "all-to-all": 1.05}


def true_time_s(case: MeasuredCase, size: float) -> float:
    """Return the time on a made-up transport: two regimes, new memory for results, and sharing."""
    n = case.group_size
    sent, result = volumes(case.kind, n, size)
    crowd = 1 + 0.25 * (n * case.concurrent_groups - 2)
    moving_s = 1e-9 * min(sent, 2**16) + 3e-10 * max(0.0, sent - 2**16)
    fresh_s = 2e-10 * result if result >= 2**25 else 0.0
    rounds = (n - 1).bit_length()
    # Messages of this transport take three times as long as collectives of as many bytes.
    return OWN.get(case.kind, 3.0) * (3e-5 + crowd * (1e-5 * rounds + moving_s + fresh_s))


def made_up(
    noise: float = 0.0, *, sizes: tuple[int, ...] = SIZES, seed: int = 1
) -> list[Measurement]:
    draw = random.Random(seed)
    cases = [
        MeasuredCase(kind=kind, group_size=n, concurrent_groups=groups)
        for kind in CALL_KINDS
        for n, groups in ((2, 1), (2, 2), (4, 1))
        if kind != "transfer" or n == 2
    ]
    return [
        Measurement(
            backend="torch",
            kind=case.kind,
            group_size=case.group_size,
            concurrent_groups=case.concurrent_groups,
            shared_bytes=size,
            times_s=tuple(true_time_s(case, size) * draw.lognormvariate(0, noise) for _ in "12345"),
        )
        for case in cases
        for size in sizes
    ]


def sample(**changes: object) -> Measurement:
    fields: dict[str, object] = {
        "backend": "torch",
        "kind": "all-reduce",
        "group_size": 2,
        "shared_bytes": 1024,
        "times_s": (3e-3, 1e-3, 2e-3, 4e-3, 9e-3),
    }
    return Measurement(**(fields | changes))  # type: ignore[arg-type]


def test_a_sample_knows_its_quartile_and_median() -> None:
    given_sample = sample()

    assert given_sample.time_s == 2e-3
    assert given_sample.median_s == 3e-3


def test_repetitions_that_disagree_put_a_sample_in_doubt() -> None:
    assert sample(times_s=(1e-3,)).doubt == 0
    assert sample(times_s=(1e-3, 3e-3, 2e-3, 6e-3)).doubt == pytest.approx(2)
    assert sample(times_s=(2e-3, 2e-3, 2e-3)).doubt == 0


@pytest.mark.parametrize(
    "changes",
    [
        {"group_size": 1},
        {"kind": "transfer", "group_size": 3},
        {"shared_bytes": 0},
        {"times_s": ()},
        {"times_s": (0.0,)},
        {"times_s": (float("inf"),)},
        {"concurrent_groups": 0},
        {"num_nodes": 3},
    ],
)
def test_a_sample_that_cannot_be_meant_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises(SbpValueError) as caught:
        sample(**changes)

    assert caught.value.accepted


def test_an_unknown_kind_is_answered_with_the_known_ones() -> None:
    with pytest.raises(SbpLookupError, match="all-reduce"):
        sample(kind="allreduce")


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("all-reduce", (150.0, 100.0)),
        ("reduce-scatter", (75.0, 25.0)),
        ("all-gather", (75.0, 100.0)),
        ("all-to-all", (18.75, 25.0)),
        ("transfer", (100.0, 100.0)),
    ],
)
def test_four_ranks_send_and_get_what_their_kind_of_call_moves(
    kind: str, expected: tuple[float, float]
) -> None:
    assert volumes(kind, 4, 100.0) == expected


def test_a_curve_adds_its_segments() -> None:
    curve = Curve(latency_s=5.0, knots_bytes=(0, 10, 30), s_per_byte=(1.0, 0.0, 2.0))

    assert [curve.time_s(size) for size in (0, 4, 10, 20, 30, 31)] == [5, 9, 15, 15, 15, 17]


@pytest.mark.parametrize(
    ("knots", "rates"),
    [((), ()), ((1,), (1.0,)), ((0, 5, 5), (1.0,) * 3), ((0,), (1.0, 1.0)), ((0,), (-1.0,))],
)
def test_a_curve_that_falls_or_has_no_segments_is_refused(
    knots: tuple[int, ...], rates: tuple[float, ...]
) -> None:
    with pytest.raises(SbpValueError):
        Curve(latency_s=0.0, knots_bytes=knots, s_per_byte=rates)


def test_a_curve_goes_through_given_points() -> None:
    curve = through((0, 10, 20), (1.0, 1.0, 3.0))

    assert [curve.time_s(size) for size in (0, 5, 10, 15, 20, 30)] == [1, 1, 1, 2, 3, 5]


def test_one_line_is_found_as_one_segment() -> None:
    curve = fit_curve(SIZES, [2e-5 + 1e-9 * size for size in SIZES])

    assert curve.knots_bytes == (0,)
    assert curve.latency_s == pytest.approx(2e-5)
    assert curve.s_per_byte == pytest.approx((1e-9,))


@quick
@given(
    st.floats(1e-6, 1e-3),
    st.lists(st.floats(1e-11, 1e-8), min_size=1, max_size=3),
    st.integers(0, 10**6),
)
def test_piecewise_curves_are_recovered_from_noisy_times(
    latency_s: float, rates: list[float], seed: int
) -> None:
    knots = (0, 2**16, 2**22)[: len(rates)]
    true = Curve(latency_s=latency_s, knots_bytes=knots, s_per_byte=tuple(rates))
    draw = random.Random(seed)
    sizes = SIZES[::2]
    times = [
        median(true.time_s(size) * draw.lognormvariate(0, 0.03) for _ in range(9)) for size in sizes
    ]

    found = fit_curve(sizes, times)

    # Sizes in between that the fit did not see.
    errors = [abs(found.time_s(size) / true.time_s(size) - 1) for size in SIZES[1::2]]
    assert median(errors) < 0.05
    assert max(errors) < 0.35


@quick
@given(
    st.lists(st.tuples(st.sampled_from(SIZES), st.floats(1e-6, 1e2)), min_size=1, max_size=20),
    st.lists(st.floats(0, 1e10), min_size=2, max_size=5),
)
def test_no_fit_falls_with_size_whatever_was_measured(
    points: list[tuple[int, float]], sizes: list[float]
) -> None:
    curve = fit_curve(*zip(*points, strict=True))

    times = [curve.time_s(size) for size in sorted(sizes)]

    assert times == sorted(times)
    assert times[0] >= 0


@quick
@given(st.integers(0, 10**6))
def test_nonnegative_least_squares_meets_its_optimality_conditions(seed: int) -> None:
    draw = np.random.default_rng(seed)
    rows, columns = draw.integers(1, 12), draw.integers(1, 8)
    matrix, target = draw.normal(size=(rows, columns)), draw.normal(size=rows)

    found = solve(matrix, target)

    gradient = matrix.T @ (matrix @ found - target)
    assert (found >= 0).all()
    assert (gradient > -1e-6).all()
    assert np.abs(gradient[found > 0]).max(initial=0) < 1e-6


def test_predictions_pass_near_the_samples() -> None:
    samples = made_up(0.03)
    calibration = Calibration.of(samples)

    errors = [
        abs(
            calibration.time_s(one.kind, one.group_size, one.concurrent_groups, one.shared_bytes)
            / one.time_s
            - 1
        )
        for one in samples
    ]

    assert median(errors) < 0.05
    assert max(errors) < 0.25


def test_group_sizes_and_collectives_that_were_not_measured_are_predicted() -> None:
    samples = [one for one in made_up(0.02) if one.kind != "reduce-scatter"]
    calibration = Calibration.of(samples)

    for kind, n, groups in (("reduce-scatter", 4, 1), ("all-reduce", 3, 1), ("all-gather", 6, 1)):
        case = MeasuredCase(kind=kind, group_size=n, concurrent_groups=groups)
        for size in SIZES:
            predicted_s = calibration.time_s(kind, n, groups, size)
            assert predicted_s == pytest.approx(true_time_s(case, size), rel=0.3)


def test_what_messages_take_says_nothing_of_collectives() -> None:
    samples = [one for one in made_up() if one.kind != "all-gather"]
    free = [replace(one, times_s=(1e-6,)) if one.kind == "transfer" else one for one in samples]

    known, other = Calibration.of(samples), Calibration.of(free)

    for size in SIZES:
        assert known.time_s("all-gather", 4, 1, size) == other.time_s("all-gather", 4, 1, size)


def test_ranks_that_share_memory_are_priced_by_what_they_share() -> None:
    def time_s(size: int) -> float:
        return 1e-4 + 1e-9 * size

    samples = [
        sample(kind=kind, shared_bytes=size, times_s=(time_s(size),))
        for kind in ("all-reduce", "all-gather", "all-to-all")
        for size in SIZES
    ]

    calibration = Calibration.of(samples)

    for size in SIZES:
        predicted_s = calibration.time_s("reduce-scatter", 2, 1, size)
        assert predicted_s == pytest.approx(time_s(size), rel=0.05)


def test_a_kind_that_was_measured_alone_says_something_of_all() -> None:
    calibration = Calibration.of([one for one in made_up() if one.kind == "transfer"])

    assert calibration.origin("all-gather", 2, 1) == "derived from other kinds"
    assert calibration.time_s("all-gather", 2, 1, 2**20) > calibration.time_s(
        "all-gather", 2, 1, 2**10
    )


def test_where_a_prediction_comes_from_is_told() -> None:
    calibration = Calibration.of([one for one in made_up() if one.kind != "reduce-scatter"])

    assert calibration.origin("all-reduce", 4, 1) == "measured"
    assert calibration.origin("all-reduce", 8, 1) == "derived from all-reduce in other groups"
    assert calibration.origin("reduce-scatter", 4, 1) == "derived from other kinds"
    assert calibration.origin("all-reduce", 4, 1, num_nodes=2) is None


def test_bytes_take_longer_in_steps_and_the_latency_does_not() -> None:
    calibration = Calibration.of(made_up())
    stretched = replace(calibration, in_steps=2.5)

    for kind, group_size in (("all-reduce", 4), ("all-reduce", 8)):  # the second is derived
        none_s, call_s, in_steps_s = (
            of.time_s(kind, group_size, 1, size)
            for of, size in ((calibration, 0), (calibration, 1 << 20), (stretched, 1 << 20))
        )
        assert none_s is not None
        assert call_s is not None
        assert in_steps_s == pytest.approx(none_s + 2.5 * (call_s - none_s))
    with pytest.raises(SbpValueError, match=r"in_steps=0\.5"):
        replace(calibration, in_steps=0.5)


def test_nothing_is_said_of_several_nodes_if_none_were_measured() -> None:
    calibration = Calibration.of(made_up())

    assert calibration.time_s("all-reduce", 4, 1, 1024, num_nodes=2) is None


def test_one_rank_takes_no_time() -> None:
    assert Calibration.of(made_up()).time_s("all-reduce", 1, 1, 2**30) == 0.0


@quick
@given(
    st.sampled_from(CALL_KINDS[:4]),
    st.integers(2, 16),
    st.integers(1, 4),
    st.lists(st.floats(0, 2e9), min_size=2, max_size=6),
)
def test_predictions_never_fall_with_size(
    kind: str, n: int, groups: int, sizes: list[float]
) -> None:
    times = [CALIBRATION.time_s(kind, n, groups, size) for size in sorted(sizes)]

    assert times == sorted(times)


CALIBRATION = Calibration.of(made_up(0.3))


def test_the_largest_size_goes_on_at_its_rate() -> None:
    calibration = Calibration.of(made_up())
    case = MeasuredCase(kind="all-gather", group_size=4)

    predicted_s = calibration.time_s("all-gather", 4, 1, 2**32)

    assert predicted_s == pytest.approx(true_time_s(case, 2**32), rel=0.05)


def test_a_calibration_of_nothing_or_of_two_backends_is_refused() -> None:
    with pytest.raises(SbpValueError, match="at least one sample"):
        Calibration.of([])
    with pytest.raises(SbpValueError, match="one backend"):
        Calibration.of([sample(), sample(backend="mpi")])


@pytest.mark.slow
def test_a_calibration_survives_json() -> None:
    calibration = calibrate(made_up(0.05, sizes=SIZES[::3]))

    restored = load(json.loads(json.dumps(dump(calibration, Calibration))), Calibration)

    assert restored == calibration
    assert restored.time_s("all-reduce", 8, 1, 5e5) == calibration.time_s("all-reduce", 8, 1, 5e5)


def test_errors_are_of_samples_that_the_fit_did_not_see() -> None:
    samples = made_up(sizes=SIZES[::3])
    wrong = samples[3]
    samples[3] = sample(shared_bytes=wrong.shared_bytes, times_s=(10 * wrong.time_s,))

    _, held_out = cross_validate(samples, ["size"])

    (entry,) = (entry for entry in held_out if entry.sample is samples[3])
    assert entry.error == pytest.approx(0.9, abs=0.05)


@pytest.mark.slow
def test_every_inner_size_every_case_and_every_collective_is_left_out_once() -> None:
    samples = made_up(sizes=SIZES[::6])

    errors, held_out = cross_validate(samples)

    num_cases = len({one.case for one in samples})
    left_out = {way: [e.sample for e in held_out if e.way == way] for way in HELD_OUT_BY}
    collectives = [one for one in samples if one.kind != "transfer"]
    assert [(error.way, error.num_samples) for error in errors] == [
        ("size", len(samples) - 2 * num_cases),
        ("group", len(samples)),
        ("collective", len(collectives)),
    ]
    assert sorted(map(id, left_out["collective"])) == sorted(map(id, collectives))
    assert sorted(map(id, left_out["group"])) == sorted(map(id, samples))
    assert not {SIZES[0], SIZES[18]} & {one.shared_bytes for one in left_out["size"]}


@pytest.mark.slow
def test_the_errors_of_a_quiet_machine_are_small_in_every_way() -> None:
    errors, _ = cross_validate(made_up(0.03))

    assert all(error.median < 0.15 and error.p90 < 0.35 for error in errors), errors


def test_errors_are_summed_up_by_median_percentile_and_worst() -> None:
    one = sample(times_s=(1.0,))
    held_out = [
        HeldOut(way="size", sample=one, predicted_s=1 + percent / 100) for percent in range(1, 101)
    ]

    error = FitError.of("size", held_out)

    assert (error.median, error.p90, error.worst) == pytest.approx((0.505, 0.90, 1.0), abs=0.011)
    assert str(error).startswith("left out by size: median 50.5%, 90th percentile 9")


def test_an_error_far_beyond_is_told_as_how_many_times() -> None:
    held_out = HeldOut(way="size", sample=sample(times_s=(1.0,)), predicted_s=3257.0)

    assert str(held_out).endswith("3,257 times off")
    assert "worst 3,257 times of 1" in str(FitError.of("size", [held_out]))


@pytest.mark.slow
def test_a_calibration_shows_itself_without_its_samples() -> None:
    shown = repr(calibrate(made_up(sizes=SIZES[::9])))

    assert "times_s" not in shown
    assert len(shown) < 1000


def test_an_unknown_way_to_leave_out_is_refused() -> None:
    with pytest.raises(SbpError, match="collective"):
        cross_validate(made_up(sizes=SIZES[::9]), ["nothing"])

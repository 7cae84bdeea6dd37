"""The measured times, as rows and as a table."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from matrix import Comparison

from sbp_core.units import format_bytes

#: Largest relative difference of a loss from the first peer's: float32, and AdamW's first updates.
TOLERANCE = 1e-5

#: The results of one rank, by way.
Found = Mapping[str, Mapping[str, Any]]


#: Fraction of rounds in which one way must be slower than another to count as clearly slower.
_CLEAR = 0.75


@dataclass(frozen=True, kw_only=True)
class Row:
    """One way of a comparison.

    Args:
        step_s: Median time of the slower rank.
        ratio: Median over rounds of the ratio of its time to the first peer's in the same round;
            with the lower and the upper quartile.
        cpu_s: Median of the processor time of all ranks, which includes waiting of MPI, not gloo.
        loss_error: Largest relative difference of a loss from the first peer's.
        predicted_s: Time of a step that the plan predicts; None for a peer.
    """

    comparison: str
    way: str
    is_peer: bool
    step_s: float
    ratio: float
    quartiles: tuple[float, float]
    cpu_s: float
    loss_error: float
    sent_bytes: int
    start_s: float
    predicted_s: float | None
    target: float | None
    is_met: bool | None


def rows(name: str, comparison: Comparison, ranks: Sequence[Found]) -> list[Row]:
    """Return a row for each way.

    Args:
        ranks: The results of each rank.

    Raises:
        ValueError: the losses of a way differ from those of the first peer.
    """
    base, *_ = comparison.peers
    base_times, base_losses = _slower(ranks, base), _losses(ranks, base)
    made = []
    for way in ranks[0]:
        times = _slower(ranks, way)
        ratios = [one / other for one, other in zip(times, base_times, strict=True)]
        error = max(
            abs(one - other) / abs(other)
            for one, other in zip(_losses(ranks, way), base_losses, strict=True)
        )
        if error > TOLERANCE and not comparison.own_statistics:
            raise ValueError(
                f"{name}: {way} trains something else than {base}: its losses are "
                f"{_losses(ranks, way)}, those of {base} are {base_losses}"
            )
        ratio = statistics.median(ratios)
        quartiles = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else [ratio] * 3
        is_ours = way in comparison.ours
        target = comparison.target if is_ours and _is_mpi(way) == comparison.over_mpi else None
        made.append(
            Row(
                comparison=name,
                way=way,
                is_peer=way in comparison.peers,
                step_s=statistics.median(times),
                ratio=ratio,
                quartiles=(quartiles[0], quartiles[2]),
                cpu_s=statistics.median(map(sum, _by_round(ranks, way, "cpu"))),
                loss_error=error,
                sent_bytes=max(rank[way]["sent"] for rank in ranks),
                start_s=max(rank[way]["start_s"] for rank in ranks),
                predicted_s=ranks[0][way]["predicted_s"],
                target=target,
                is_met=None if target is None else ratio <= target,
            )
        )
    return made


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The choice of `auto` for a model over one backend, compared with all other ways.

    Args:
        way: Name of the chosen way.
        fastest: The fastest other way.
        ratio: Median over rounds of the ratio of the time of `auto` to that of `fastest`.
        tau: Kendall's correlation of predicted and measured times of all ways.
        num_ways: Number of ways.
        clear_tau: The correlation for pairs of ways of which one was slower in three quarters of
            the rounds; 0 without such pairs.
        num_clear: Number of such pairs.
    """

    way: str
    fastest: str
    ratio: float
    tau: float
    num_ways: int
    clear_tau: float
    num_clear: int

    def __str__(self) -> str:
        return (
            f"  sbp, {self.way}: {self.ratio:.2f} of the fastest other way, {self.fastest}; the "
            f"order of the {self.num_ways} ways by prediction is that by measurement to "
            f"{self.tau:+.2f} (Kendall), of the {self.num_clear} pairs that three quarters of the "
            f"rounds tell apart {self.clear_tau:+.2f}"
        )


def made_choices(comparison: Comparison, ranks: Sequence[Found]) -> list[Choice]:
    """Return, for each backend, the choice of `auto`, compared with the fastest other way."""
    found = []
    for chosen, one in comparison.ours.items():
        others = [
            way
            for way, ours in comparison.ours.items()
            if ours.boxing == one.boxing and way != chosen
        ]
        if one.preset != "auto" or not others:
            continue
        fastest = min(others, key=lambda way: statistics.median(_slower(ranks, way)))
        pairs = zip(_slower(ranks, chosen), _slower(ranks, fastest), strict=True)
        ways = [chosen, *others]
        predicted_s = [ranks[0][way]["predicted_s"] for way in ways]
        rounds_s = [_slower(ranks, way) for way in ways]
        clear = clear_pairs(predicted_s, rounds_s)
        found.append(
            Choice(
                way=chosen,
                fastest=fastest,
                ratio=statistics.median(mine / other for mine, other in pairs),
                tau=kendall(list(zip(predicted_s, map(statistics.median, rounds_s), strict=True))),
                num_ways=len(ways),
                clear_tau=sum(clear) / max(1, len(clear)),
                num_clear=len(clear),
            )
        )
    return found


def summary_lines(made: Sequence[Row], choices: Sequence[Choice]) -> list[str]:
    """Return the errors of predictions for each backend, and the quality of `auto`'s choices."""
    printed = ["all models"]
    for boxing in ("gloo", "MPI"):
        off = [
            abs(row.predicted_s / row.step_s - 1)
            for row in made
            if row.predicted_s is not None and row.way.startswith(boxing)
        ]
        of = [choice for choice in choices if choice.way.startswith(boxing)]
        if not off or not of:
            continue
        ratios = ", ".join(f"{choice.ratio:.2f}" for choice in of)
        printed.append(
            f"  {boxing}: predictions of {len(off)} ways are off by {statistics.median(off):.0%} "
            f"in the median; Kendall's correlation, median of {len(of)} models: "
            f"{statistics.median(choice.tau for choice in of):+.2f}, of pairs that are told apart "
            f"{statistics.median(choice.clear_tau for choice in of):+.2f}; auto takes {ratios} of "
            "the fastest other way"
        )
    return printed


def joined(starts: Sequence[Sequence[Any]]) -> list[Any]:
    """Return the results of each rank: those of the first start, with the times of all starts."""
    first, *others = starts
    for other in others:
        for rank, again in zip(first, other, strict=True):
            for way, found in again.items():
                for what in ("times", "cpu"):
                    rank[way][what] += found[what]
    return list(first)


def kendall(times: Sequence[tuple[float, float]]) -> float:
    """Return the rank correlation of pairs: Kendall's tau a."""
    products = [(one[0] - other[0]) * (one[1] - other[1]) for one, other in combinations(times, 2)]
    return sum((product > 0) - (product < 0) for product in products) / len(products)


def clear_pairs(predicted_s: Sequence[float], rounds_s: Sequence[Sequence[float]]) -> list[int]:
    """Compare predicted and measured order for each pair of ways that differ clearly.

    Args:
        predicted_s: The predicted time of each way.
        rounds_s: The times of all rounds of each way; the ways took turns.

    Returns:
        For each pair of which one way was slower in at least three quarters of the rounds: 1 for
        the same order, -1 for the reverse, 0 for equal predictions.
    """
    found = []
    for one, other in combinations(range(len(predicted_s)), 2):
        pairs = list(zip(rounds_s[one], rounds_s[other], strict=True))
        slower = sum(a > b for a, b in pairs) / len(pairs)
        if 1 - _CLEAR < slower < _CLEAR:
            continue
        way = 1 if slower >= _CLEAR else -1
        ahead = predicted_s[one] - predicted_s[other]
        found.append(way * ((ahead > 0) - (ahead < 0)))
    return found


def _is_mpi(way: str) -> bool:
    return way.startswith("MPI")


def _slower(ranks: Sequence[Found], way: str) -> list[float]:
    """Return the time of each round on its slower rank, in seconds."""
    return [max(times) for times in _by_round(ranks, way, "times")]


def _by_round(ranks: Sequence[Found], way: str, what: str) -> list[tuple[float, ...]]:
    return list(zip(*(rank[way][what] for rank in ranks), strict=True))


def _losses(ranks: Sequence[Found], way: str) -> list[float]:
    """Return the loss of all samples of each step: the mean over the ranks that have a loss."""
    found = []
    for losses in zip(*(rank[way]["losses"] for rank in ranks), strict=True):
        parts = [loss for loss in losses if loss is not None]
        found.append(sum(parts) / len(parts))
    return found


HEADER = (
    f"{'way':44} {'step ms':>8} {'ratio':>6} {'quartiles':>11} {'target':>7} {'':6} "
    f"{'predicted':>10} {'cpu ms':>7} {'loss differs':>12} {'sent':>9} {'start s':>7}"
)


def lines(made: Sequence[Row]) -> list[str]:
    """Return one comparison as text: a line for each way, its peer first."""
    printed = [made[0].comparison]
    for row in made:
        low, high = row.quartiles
        target = "" if row.target is None else f"{row.target:.2f}"
        predicted = "" if row.predicted_s is None else f"{row.predicted_s * 1e3:.1f}"
        verdict = {None: "", True: "met", False: "missed"}[row.is_met]
        name = row.way if row.is_peer else f"sbp, {row.way}"
        printed.append(
            f"  {name:42} {row.step_s * 1e3:8.1f} {row.ratio:6.2f} {low:5.2f}-{high:5.2f} "
            f"{target:>7} {verdict:6}{predicted:>10} {row.cpu_s * 1e3:7.0f} {row.loss_error:12.0e} "
            f"{format_bytes(row.sent_bytes):>9} {row.start_s:7.1f}".rstrip()
        )
    return printed

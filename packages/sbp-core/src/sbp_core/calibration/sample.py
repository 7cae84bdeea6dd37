"""`Measurement`: the seconds of one collective or message, repeated, measured by `sbp-calibrate`.

`curve` and `structure` are fitted to such samples, which a cluster's file keeps.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

from sbp_core.errors import SbpValueError, unknown_name

#: Kinds of steps that can be measured: the values of `boxing.StepKind`, except the local one.
CALL_KINDS = ("all-reduce", "reduce-scatter", "all-gather", "all-to-all", "transfer")

#: Limits that no real measurement exceeds; within them, no fit overflows.
_MOST_RANKS = 2**24
_MOST_BYTES = 2**60
_LEAST_S, _MOST_S = 1e-12, 1e9


@dataclass(frozen=True, slots=True, order=True, kw_only=True)
class MeasuredCase:
    """A kind of call with its groups, but without its size in bytes.

    Args:
        kind: One of `CALL_KINDS`.
        group_size: n, ranks of one group, >= 2; 2 for a transfer.
        num_nodes: Nodes that one group spans.
        concurrent_groups: Groups (messages, for a transfer) of this kind at work at the same time.
    """

    kind: str
    group_size: int
    num_nodes: int = 1
    concurrent_groups: int = 1

    def __post_init__(self) -> None:
        if self.kind not in CALL_KINDS:
            raise unknown_name("kind of step that can be measured", str(self.kind), CALL_KINDS)
        transfer = self.kind == "transfer"
        if not 2 <= self.group_size <= (2 if transfer else _MOST_RANKS):
            raise SbpValueError(
                f"{self.kind} among {self.group_size} ranks",
                accepted="2 ranks (who sends, who receives)"
                if transfer
                else f"2 to {_MOST_RANKS} ranks",
            )
        at_once = 1 <= self.concurrent_groups <= _MOST_RANKS
        if not 1 <= self.num_nodes <= self.group_size or not at_once:
            raise SbpValueError(
                f"{self.concurrent_groups} groups of {self.group_size} ranks on {self.num_nodes} "
                "nodes each",
                accepted="at least one group, on at least one node and at most one for each rank",
            )

    def __str__(self) -> str:
        """Return a description, such as `all-reduce of 4 ranks, 2 groups at once`."""
        words = f"{self.kind} of {self.group_size} ranks"
        if self.num_nodes > 1:
            words += f" on {self.num_nodes} nodes"
        return words + (f", {self.concurrent_groups} at once" * (self.concurrent_groups > 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """The seconds of one call of a backend, from all ranks being ready to all having finished.

    Args:
        backend: Name of the transport, such as `torch`.
        kind: One of `CALL_KINDS`.
        group_size: n, ranks of one group, >= 2; 2 for a transfer.
        num_nodes: Nodes that one group spans.
        concurrent_groups: Groups at work at the same time. For a transfer: messages in transit at
            the same time; two ranks that send to each other are 2.
        shared_bytes: S, the bytes of the tensor piece that the ranks of one group hold together:

            * all-reduce, reduce-scatter: the input of each rank, its whole addend;
            * all-gather: the result of each rank, the whole tensor;
            * all-to-all: the sum of the inputs of all ranks of the group;
            * transfer: the one message.
        times_s: The time of each repetition on the slowest rank, in seconds.
    """

    backend: str
    kind: str
    group_size: int
    shared_bytes: int
    times_s: tuple[float, ...]
    concurrent_groups: int = 1
    num_nodes: int = 1

    def __post_init__(self) -> None:
        assert self.case, "the case checks itself"
        if not 1 <= self.shared_bytes <= _MOST_BYTES or not self.times_s:
            raise SbpValueError(
                f"a sample of {self.shared_bytes} bytes and {len(self.times_s)} repetitions",
                where=f"{self.backend}: {self.case}",
                accepted=f"1 to {_MOST_BYTES} bytes, and at least one repetition",
            )
        if not all(_LEAST_S <= time_s <= _MOST_S for time_s in self.times_s):
            raise SbpValueError(
                f"a sample that took {list(self.times_s)} s",
                where=f"{self.backend}: {self.case}",
                accepted=f"{_LEAST_S} to {_MOST_S} s",
            )

    @property
    def case(self) -> MeasuredCase:
        """The case of the call, without the size."""
        return MeasuredCase(
            kind=self.kind,
            group_size=self.group_size,
            num_nodes=self.num_nodes,
            concurrent_groups=self.concurrent_groups,
        )

    @property
    def time_s(self) -> float:
        """First quartile of the repetitions, in seconds: used by fits and their errors.

        Other work on a machine only ever adds to a time. The quartile is disturbed less than the
        median, and depends less on one lucky repetition than the minimum.
        """
        return _quartile(self.times_s)

    @property
    def median_s(self) -> float:
        """Median of the repetitions, in seconds."""
        return median(self.times_s)

    @property
    def doubt(self) -> float:
        """The relative difference of `time_s` between every other repetition and the rest.

        It shows how well a measurement predicts the same call: no model can be much more precise.
        """
        halves = [_quartile(half) for half in (self.times_s[::2], self.times_s[1::2]) if half]
        return max(halves) / min(halves) - 1


def _quartile(times_s: tuple[float, ...]) -> float:
    return sorted(times_s)[(len(times_s) - 1) // 4]

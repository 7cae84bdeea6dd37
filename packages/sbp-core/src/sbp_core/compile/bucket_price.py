"""Price the transfer of a small tensor that shares a flat buffer, a bucket, with other tensors.

Planners price conversions with it (`sbp_core.infer.prices`). `buckets` forms the buckets when a
plan is compiled, by default of the size that `most_bucket_bytes` gives.

    price of a small tensor = b / F * (time of the step of F bytes + copying them into a buffer)
                              + copying b bytes out of it, where they are gathered               [s]

b is the number of bytes of the tensor that a rank puts into the buffer, F the size of its bucket in
bytes. All tensors that could travel together are assumed to do so. They are distributed over as few
buckets as `most_bucket_bytes` allows, of F bytes each. So tensors that fill buckets cost together
what the buckets cost, with one latency and one start for each bucket; and no tensor costs more than
alone. When one tensor is priced, it is not known which others travel: if only few of them do, they
take up to one latency more than predicted here, and never less.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from itertools import accumulate
from math import prod

from sbp_core.boxing import BoxingStep, StepKind
from sbp_core.boxing.price import step_time_s
from sbp_core.boxing.slices import itemsize, uniform_bytes
from sbp_core.cluster import Cluster
from sbp_core.compile.packing import PackedPart, flat_step
from sbp_core.cost import boxing_step_time_s, copy_time_s

#: The most that latency may take of a call's time; below this share, packing more gains little.
_LATENCY_SHARE = 0.1

#: The bucket for an unknown machine: the bytes that take ten latencies of 100 us at 10 GB/s.
_ROUGH_BUCKET_BYTES = 10_000_000

#: Sizes of which prices are computed: powers of two.
_SMALLEST, _LARGEST = 1 << 12, 1 << 28

#: Kinds of steps that buckets are made of.
_KINDS = (StepKind.ALL_REDUCE, StepKind.REDUCE_SCATTER, StepKind.ALL_GATHER)


def packed_part(step: BoxingStep) -> PackedPart | None:
    """Return the layout of a step's tensor in a buffer; None if it cannot be packed."""
    if step.kind not in _KINDS or uniform_bytes(step) is None:
        return None
    return PackedPart.of(step)


def most_bucket_bytes(step: BoxingStep, cluster: Cluster | None) -> int:
    """Return the least size of a buffer at which latency takes only a small part of the time.

    Args:
        step: A step that may travel in a bucket; its size does not matter.
        cluster: The machine; None for a rough number.
    """
    if cluster is None:
        return _ROUGH_BUCKET_BYTES
    unit, mesh = itemsize(step.dtype), step.source[0]

    def time_s(size_bytes: int) -> float:
        flat = flat_step(step.kind, mesh, step.axes, step.dtype, size_bytes // unit)
        return step_time_s(flat, cluster)

    # So large that latency is negligible: the time of the bytes alone.
    per_byte_s = time_s(_LARGEST) / _LARGEST
    size = _SMALLEST
    # Sizes are tried, because the algorithm of a collective may change with the size.
    while size < _LARGEST and time_s(size) * (1 - _LATENCY_SHARE) > size * per_byte_s:
        size *= 2
    return size


@dataclass(frozen=True, slots=True, eq=False)
class Companions:
    """Tensors that could travel in buckets together.

    Args:
        kinds: Kinds of the steps that box them.
        sizes: Bytes of each, ascending.
    """

    kinds: frozenset[StepKind]
    sizes: tuple[int, ...]
    _sums: tuple[int, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_sums", (0, *accumulate(self.sizes)))

    def bytes_within(self, limit_bytes: int) -> int:
        """Return the total bytes of the tensors that are no larger than a bucket."""
        return self._sums[bisect_right(self.sizes, limit_bytes)]


class BucketPrices:
    """Prices of steps as shares of the time of buckets, on one machine.

    Args:
        cluster: Links and rates.
        bucket_bytes: As in the compiler's options: most bytes of a bucket, 0 for no buckets, None
            for the size that the price of the step suggests.
    """

    def __init__(self, cluster: Cluster, bucket_bytes: int | None = None) -> None:
        self._cluster, self._bucket_bytes = cluster, bucket_bytes
        self._limits: dict[object, int] = {}
        self._flat_s: dict[object, float] = {}

    def step_time_s(self, step: BoxingStep, companions: Companions | None) -> float:
        """Return the time of a step in seconds; if it travels in a bucket, its share of that.

        Args:
            step: The step of one tensor.
            companions: The tensors that could travel with it; None for none.
        """
        alone_s, limit = boxing_step_time_s(step, self._cluster), self._limit(step, companions)
        part = packed_part(step) if limit else None
        if companions is None or part is None:
            return alone_s
        own_bytes = part.num_elements * itemsize(step.dtype)
        if not 0 < own_bytes <= limit:
            return alone_s
        # A rank puts the same fraction of each companion into the buffer as of this tensor.
        whole_bytes = prod(step.shape) * itemsize(step.dtype)
        together = companions.bytes_within(limit * whole_bytes // own_bytes)
        together_bytes = max(own_bytes, together * own_bytes // whole_bytes)
        num_buckets = -(-together_bytes // limit)
        full_bytes = max(own_bytes, together_bytes // num_buckets)
        share_s = own_bytes / full_bytes * self._bucket_s(step, full_bytes)
        if step.kind is StepKind.ALL_GATHER:  # other kinds are unpacked as views
            share_s += copy_time_s(2 * own_bytes, 1, self._cluster.device)
        return min(alone_s, share_s)

    def _limit(self, step: BoxingStep, companions: Companions | None) -> int:
        if companions is None or step.kind not in companions.kinds:
            return 0
        if self._bucket_bytes is not None:
            return self._bucket_bytes
        what = step.kind, step.source[0], step.axes, step.dtype
        if what not in self._limits:
            self._limits[what] = most_bucket_bytes(step, self._cluster)
        return self._limits[what]

    def _bucket_s(self, step: BoxingStep, size_bytes: int) -> float:
        """Return the time of a bucket for steps like this one, and of the copies into it."""
        mesh = step.source[0]
        what = step.kind, mesh, step.axes, step.dtype, size_bytes
        if what not in self._flat_s:
            elements = -(-size_bytes // itemsize(step.dtype))
            rows = len(mesh.groups(*step.axes)[0]) if step.kind is StepKind.ALL_GATHER else 1
            flat = flat_step(step.kind, mesh, step.axes, step.dtype, elements)
            packing_s = copy_time_s(2 * size_bytes // rows, 1, self._cluster.device)
            self._flat_s[what] = boxing_step_time_s(flat, self._cluster) + packing_s
        return self._flat_s[what]

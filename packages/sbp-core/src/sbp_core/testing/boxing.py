"""The conformance suite of boxing backends: subclass `BoxingConformance` and supply one method.

The seam between the suite and a backend is `run_ranks`:

    class TestMyBackend(BoxingConformance):
        def run_ranks(self, num_ranks, program):
            # Make ranks 0 .. num_ranks - 1 (threads, or processes), open one backend over all of
            # them, and on each rank call, all at the same time,
            #     result = program(rank, backend.communicator(rank))
            # Wait for all ranks, close the backend, return the results in rank order.

* `program` is picklable (a `functools.partial` of a module-level function), so it can be sent to a
  spawned process, or written to a file for `mpiexec`; what it returns is plain picklable Python
  (tuples, lists, numbers, strings), never a tensor.
* `program` catches the `BoxingError`s that a test expects. If it raises, `run_ranks` raises too.
* A program may leave a rank out of a step (that is one of the tests): the rank still returns, later
  than the others. Do not put a barrier of your own transport between the ranks after `program`.
* Every method below that starts with `test_` calls `run_ranks` once, with 2, 3 or 4 ranks; a
  subclass may keep its processes alive between calls.

A subclass may set `deadline_s` (time one step may take on a slow machine), `missing_deadline_s`
(how long ranks wait for one that never comes), `dtypes` and `device`.

Each case converts one tensor along its route and compares *every rank's* shard with the slice of
the logical tensor, and the bytes counted with the bytes predicted. The values are small integers,
so that sums are exact in any order. Needs torch.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any

import torch

from sbp_core.boxing.execute import assemble, local_step
from sbp_core.boxing.router import route
from sbp_core.boxing.step import Route, StepKind
from sbp_core.errors import BoxingError
from sbp_core.placement import Placement
from sbp_core.sbp import B, Broadcast, NdSbp, P, S, Split, all_entries, local_bounds, split_bounds

if TYPE_CHECKING:
    from sbp_core.boxing.backend import Communicator

#: What a rank runs: (rank, its communicator) -> picklable result.
Program = Callable[[int, "Communicator"], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class BoxingCase:
    """One conversion to try: a logical tensor of `shape` and `dtype` from `source` to `target`."""

    shape: tuple[int, ...]
    dtype: str
    source: tuple[Placement, NdSbp]
    target: tuple[Placement, NdSbp]

    @property
    def route(self) -> Route:
        """The route that the backend has to run."""
        return route(self.shape, self.dtype, self.source, self.target)

    def __str__(self) -> str:
        return f"{self.source[0].ranks} to {self.target[0].ranks}:\n{self.route}"


#: What one rank has after one case: local shape and flat values (None: not a target rank), bytes.
CaseResult = tuple[tuple[int, ...] | None, list[Any] | None, int]


def logical_tensor(case: BoxingCase) -> torch.Tensor:
    """Return the logical tensor of a case: small integers, equal on every call and process."""
    generator = torch.Generator().manual_seed(1 + sum(case.shape))
    low, high = (0, 2) if case.dtype == "bool" else (-8, 9)
    values = torch.randint(low, high, case.shape, generator=generator)
    return values.to(getattr(torch, case.dtype))


def scatter(
    tensor: torch.Tensor,
    sbp: NdSbp,
    mesh_shape: Sequence[int],
    generator: torch.Generator,
    axis: int = 0,
) -> dict[tuple[int, ...], torch.Tensor]:
    """Take a logical tensor apart, axis by axis, into random shards that mean it.

    Written straight from the definition (each mesh axis takes apart what the one before left), and
    independent of the geometry in `sbp_core.sbp`.

    Returns:
        The shard at each coordinate of axes `axis` and on; partial values are random.
    """
    if axis == len(sbp):
        return {(): tensor}
    entry, extent = sbp[axis], mesh_shape[axis]
    if isinstance(entry, Broadcast):
        inner = scatter(tensor, sbp, mesh_shape, generator, axis + 1)
        return {(index, *at): part for index in range(extent) for at, part in inner.items()}
    if isinstance(entry, Split):
        bounds = split_bounds(tensor.shape[entry.dim], extent)
        parts = [tensor.narrow(entry.dim, start, stop - start) for start, stop in bounds]
    else:
        parts = _partials(tensor, entry.reduction, extent, generator)
    return {
        (index, *at): inner
        for index, part in enumerate(parts)
        for at, inner in scatter(part, sbp, mesh_shape, generator, axis + 1).items()
    }


def _partials(
    tensor: torch.Tensor, reduction: str, count: int, generator: torch.Generator
) -> list[torch.Tensor]:
    """Return `count` random tensors whose reduction is `tensor`."""

    def noise() -> torch.Tensor:
        return torch.randint(0, 5, tensor.shape, generator=generator).to(tensor.dtype)

    if reduction == "sum":
        parts = [noise() for _ in range(count - 1)]
        rest = tensor.clone()
        for part in parts:
            rest -= part
        return [*parts, rest]
    if tensor.dtype == torch.bool:
        parts = [
            tensor & noise() if reduction == "max" else tensor | noise() for _ in range(count - 1)
        ]
    else:
        sign = -1 if reduction == "max" else 1
        parts = [tensor + sign * noise() for _ in range(count - 1)]
    return [*parts, tensor]


def source_shards(case: BoxingCase) -> dict[int, torch.Tensor]:
    """Return the shard that each source rank starts with."""
    placement, sbp = case.source
    parts = scatter(
        logical_tensor(case), sbp, placement.mesh_shape, torch.Generator().manual_seed(7)
    )
    return {rank: parts[at].contiguous() for rank, at in placement.coordinates()}


def run_cases(
    rank: int,
    communicator: Communicator,
    *,
    cases: tuple[BoxingCase, ...],
    deadline_s: float,
    device: str = "cpu",
) -> list[CaseResult]:
    """Convert every case in order, as one rank: the program that the suite gives to `run_ranks`."""
    results: list[CaseResult] = []
    for number, case in enumerate(cases):
        shard = source_shards(case).get(rank)
        before = communicator.sent_bytes
        if shard is not None:
            shard = shard.to(device)
        after = run_route(
            rank, communicator, case.route, shard, tag=f"case {number}", deadline_s=deadline_s
        )
        sent = communicator.sent_bytes - before
        if after is None:
            results.append((None, None, sent))
        else:
            results.append((tuple(after.shape), after.cpu().flatten().tolist(), sent))
    return results


def run_route(
    rank: int,
    communicator: Communicator,
    route: Route,
    shard: torch.Tensor | None,
    *,
    tag: str,
    deadline_s: float,
) -> torch.Tensor | None:
    """Take one rank's shard along a route.

    Args:
        rank: The rank that calls.
        communicator: Its communicator.
        route: Equal on all ranks.
        shard: The rank's part under `route.source`; None on a rank outside the source placement.
        tag: Equal on all ranks; each step gets its own tag made of it.
        deadline_s: Seconds that each step may wait for the others.

    Returns:
        The rank's part under `route.target`; None on a rank outside the target placement.
    """
    for number, step in enumerate(route.steps):
        name = f"{tag}, step {number}"
        if step.kind is StepKind.TRANSFER:
            if rank in step.source[0]:
                assert shard is not None, "a source rank starts with a shard"
                communicator.send(step, shard, tag=name, deadline_s=deadline_s)
            if rank in step.target[0]:
                shard = communicator.receive(step, shard, tag=name, deadline_s=deadline_s)
            else:
                shard = None
        elif rank in step.source[0]:
            assert shard is not None, "a rank of the mesh holds a shard"
            if step.kind is StepKind.LOCAL:
                shard = local_step(step, rank, shard)
            else:
                shard = communicator.collective(step, shard, tag=name, deadline_s=deadline_s)
    return shard if rank in route.target[0] else None


def skip_step(
    rank: int,
    communicator: Communicator,
    *,
    case: BoxingCase,
    missing: int,
    deadline_s: float,
) -> tuple[str, float]:
    """Run one case without rank `missing`, and return (what the error said, seconds it took)."""
    if rank == missing:
        time.sleep(2 * deadline_s)
        return "missing", 0.0
    shard = source_shards(case).get(rank)
    start = time.monotonic()
    try:
        run_route(rank, communicator, case.route, shard, tag="lost", deadline_s=deadline_s)
    except BoxingError as error:
        return str(error), time.monotonic() - start
    return "completed", time.monotonic() - start


def check_case(case: BoxingCase, results: Sequence[CaseResult]) -> None:
    """Compare what every rank has after one case with the logical tensor and the route.

    Args:
        case: What was converted.
        results: What each rank has after it, in rank order.

    Raises:
        AssertionError: a shard or the count of bytes is wrong; names the case and the rank.
    """
    logical = logical_tensor(case)
    placement, sbp = case.target
    shards: dict[int, torch.Tensor] = {}
    for rank, at in placement.coordinates():
        shape, values, _ = results[rank]
        bounds = local_bounds(case.shape, sbp, placement.mesh_shape, at)
        expected = logical[tuple(slice(start, stop) for start, stop in bounds)]
        assert shape == tuple(expected.shape), f"rank {rank} holds shape {shape} after\n{case}"
        shards[rank] = torch.tensor(values, dtype=logical.dtype).reshape(expected.shape)
        if not sbp.has_partial:
            assert torch.equal(shards[rank], expected), f"rank {rank} holds wrong values\n{case}"
    whole = assemble(shards, placement, sbp, case.shape, check=True)
    assert torch.equal(whole, logical), f"the shards do not make the tensor after\n{case}"
    outside = [
        rank
        for rank, (shape, _, _) in enumerate(results)
        if shape is not None and rank not in placement
    ]
    assert not outside, f"ranks {outside} hold a shard that they should not hold\n{case}"
    sent = sum(count for _, _, count in results)
    assert sent == case.route.bytes, f"{sent} bytes sent, {case.route.bytes} predicted\n{case}"


def pairs_1d(
    num_ranks: int, shapes: Iterable[tuple[int, ...]], dtype: str = "float32"
) -> tuple[BoxingCase, ...]:
    """Return every pair of S(0), S(1), B, P on one axis over ranks 0 .. num_ranks - 1."""
    mesh = Placement.grid((num_ranks,), ("x",))
    return tuple(
        BoxingCase(shape=shape, dtype=dtype, source=(mesh, NdSbp(a)), target=(mesh, NdSbp(b)))
        for shape in shapes
        for a, b in product(all_entries(2), repeat=2)
        if a != b
    )


def pairs_2d(shape: tuple[int, ...], dtype: str = "float32") -> tuple[BoxingCase, ...]:
    """Return a fixed part of the pairs of 2-D SBPs on a 2 x 2 mesh, uneven dims included."""
    mesh = Placement.grid((2, 2), ("x", "y"))
    states = [NdSbp(*entries) for entries in product(all_entries(2), repeat=2)]
    chosen = [
        (a, b)
        for number, (a, b) in enumerate(product(states, repeat=2))
        if a != b and number % 5 == 0
    ]
    chosen += [
        (NdSbp(S(0), S(0)), NdSbp(B, S(0))),
        (NdSbp(S(0), B), NdSbp(B, S(0))),
        (NdSbp(P, S(0)), NdSbp(S(0), S(0))),
        (NdSbp(P, P("max")), NdSbp(B, S(1))),
        (NdSbp(P, B), NdSbp(B, P)),
    ]
    return tuple(
        BoxingCase(shape=shape, dtype=dtype, source=(mesh, a), target=(mesh, b)) for a, b in chosen
    )


def pairs_across(
    sources: Sequence[int], targets: Sequence[int], shape: tuple[int, ...], dtype: str = "float32"
) -> tuple[BoxingCase, ...]:
    """Return every pair of S(0), S(1), B, P from one 1-D placement to another."""
    before, after = Placement(list(sources), ("x",)), Placement(list(targets), ("x",))
    return tuple(
        BoxingCase(shape=shape, dtype=dtype, source=(before, NdSbp(a)), target=(after, NdSbp(b)))
        for a, b in product(all_entries(2), repeat=2)
    )


class BoxingConformance(ABC):
    """What every boxing backend must do. See the module's docstring for how to use it."""

    #: Seconds that one step may wait for the others when all of them come.
    deadline_s: float = 30.0

    #: Seconds that ranks wait for a rank that never comes.
    missing_deadline_s: float = 1.0

    #: Seconds, on top of the deadline, until the error must have arrived.
    grace_s: float = 5.0

    #: Dtypes of the tensors to convert; the first must be a floating one.
    dtypes: tuple[str, ...] = ("float32", "float64", "int64")

    #: Where the shards live.
    device: str = "cpu"

    @abstractmethod
    def run_ranks(self, num_ranks: int, program: Program) -> Sequence[Any]:
        """Run `program(rank, communicator)` on ranks 0 .. num_ranks - 1; results in rank order."""

    def convert(self, num_ranks: int, cases: tuple[BoxingCase, ...]) -> None:
        """Run the cases on `num_ranks` ranks and check every rank's shards and bytes."""
        program = partial(run_cases, cases=cases, deadline_s=self.deadline_s, device=self.device)
        results = self.run_ranks(num_ranks, program)
        assert len(results) == num_ranks, "run_ranks returns one result for each rank"
        for number, case in enumerate(cases):
            check_case(case, [result[number] for result in results])

    def test_every_pair_on_two_ranks(self) -> None:
        """Even, uneven and empty shards, every dtype; and 1 -> 1 between the two ranks."""
        cases = pairs_1d(2, [(4, 6), (5, 3), (1, 3)], self.dtypes[0])
        for dtype in self.dtypes[1:]:
            cases += pairs_1d(2, [(4, 2)], dtype)
        self.convert(2, cases + pairs_across([0], [1], (3, 2), self.dtypes[0]))

    def test_every_pair_on_three_ranks(self) -> None:
        """Even, uneven and empty shards; 1 -> 2, 2 -> 1, and overlapping 2 -> 2."""
        cases = pairs_1d(3, [(6, 3), (7, 2), (0, 4)], self.dtypes[0])
        cases += pairs_across([0], [1, 2], (4, 2), self.dtypes[0])
        cases += pairs_across([0, 2], [1], (4, 2), self.dtypes[0])
        self.convert(3, cases + pairs_across([0, 1], [2, 1], (5, 2), self.dtypes[0]))

    def test_pairs_on_four_ranks(self) -> None:
        """1-D pairs on four ranks, 2-D pairs on 2 x 2, disjoint 2 -> 2, other dtypes."""
        cases = pairs_1d(4, [(8, 4), (6, 3)], self.dtypes[0])
        cases += pairs_2d((4, 8), self.dtypes[0])
        for dtype in self.dtypes[1:]:
            cases += pairs_2d((5, 3), dtype)[::3]
        self.convert(4, cases + pairs_across([0, 1], [2, 3], (4, 6), self.dtypes[0]))

    def test_a_rank_that_does_not_arrive_at_a_collective_is_named(self) -> None:
        """Every rank that waits gets a BoxingError in time that names the rank and the tag."""
        mesh = Placement.grid((3,), ("x",))
        case = BoxingCase(
            shape=(6, 2),
            dtype=self.dtypes[0],
            source=(mesh, NdSbp(P)),
            target=(mesh, NdSbp(B)),
        )
        self._lose(3, case, missing=1, waiting=(0, 2))

    def test_a_sender_that_does_not_arrive_is_named(self) -> None:
        """A receiver gets a BoxingError in time that names the sender and the tag."""
        case = BoxingCase(
            shape=(4, 2),
            dtype=self.dtypes[0],
            source=(Placement([0], ("x",)), NdSbp(B)),
            target=(Placement([1], ("x",)), NdSbp(B)),
        )
        self._lose(2, case, missing=0, waiting=(1,))

    def _lose(
        self, num_ranks: int, case: BoxingCase, *, missing: int, waiting: tuple[int, ...]
    ) -> None:
        program = partial(skip_step, case=case, missing=missing, deadline_s=self.missing_deadline_s)

        results = self.run_ranks(num_ranks, program)

        for rank in waiting:
            message, took_s = results[rank]
            assert f"did not arrive: {missing}" in message, f"rank {rank} was told: {message}"
            assert "lost" in message, f"rank {rank} was not told the tag: {message}"
            assert took_s < self.missing_deadline_s + self.grace_s, f"rank {rank}: {took_s} s"

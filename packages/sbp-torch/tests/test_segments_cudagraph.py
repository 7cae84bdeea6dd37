from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from test_segments_host_parts import call, segment
from torch import Tensor

from sbp_core.compile import Compute
from sbp_core.errors import ConfigError, RunError
from sbp_core.graph.ir import Ref
from sbp_torch.runtime.configs import ReferenceConfig
from sbp_torch.runtime.reference import ReferenceSession
from sbp_torch.segments.codegen import segment_function
from sbp_torch.segments.cudagraph import (
    CudaGraphDevice,
    GraphSegments,
    Work,
)
from sbp_torch.segments.execution import segment_maker
from sbp_torch.testing.cases import CASES, compile_case

needs_gpu = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="records on a GPU, and torch sees none here"
)


class Tape:
    """A recording: runs the work again, and fills the same memory."""

    def __init__(self, work: Work, made: list[Tensor]) -> None:
        self.work, self.made, self.num_replays = work, made, 0

    def replay(self) -> None:
        self.num_replays += 1
        for static, value in zip(self.made, self.work(), strict=True):
            static.copy_(value)


class FakeDevice:
    """Stands in for a GPU: what is recorded has no values until it is replayed."""

    kind = "cpu"

    def __init__(self) -> None:
        self.num_asides = 0
        self.tapes: list[Tape] = []

    def problem(self) -> str:
        return ""

    def aside(self, work: Work) -> list[Tensor]:
        self.num_asides += 1
        return work()

    def record(self, rank: int, work: Work) -> tuple[Any, list[Tensor]]:
        tape = Tape(work, [torch.full_like(value, 77) for value in work()])
        self.tapes.append(tape)
        return tape, tape.made


#: A segment of tensors only.
PLAIN = segment(
    call("aten.mm.default", Ref("x"), Ref("w"), outputs=("a",)),
    call("aten.relu.default", Ref("a"), outputs=("y",)),
    reads=("w",),
)


def test_the_third_firing_is_recorded_and_later_ones_replayed() -> None:
    device = FakeDevice()
    fire = GraphSegments(device)(PLAIN, 0, ())
    w = torch.randn(3, 2)

    for _ in range(5):
        x = torch.randn(4, 3)
        (y,) = fire([x, w])
        assert torch.equal(y, (x @ w).relu())

    assert (device.num_asides, len(device.tapes), device.tapes[0].num_replays) == (2, 1, 3)


def test_what_a_firing_made_outlives_the_next_ones() -> None:
    fire = GraphSegments(FakeDevice())(PLAIN, 0, ())
    inputs = [torch.randn(4, 3) for _ in range(6)]
    w = torch.randn(3, 2)

    made = [fire([x, w])[0] for x in inputs]

    assert all(torch.equal(y, (x @ w).relu()) for x, y in zip(inputs, made, strict=True))


def test_inputs_are_not_changed_and_may_be_views() -> None:
    fire = GraphSegments(FakeDevice())(PLAIN, 0, ())
    x, w = torch.randn(1, 3).expand(4, 3), torch.randn(2, 3).T
    before = x.clone(), w.clone()

    made = [fire([x, w])[0] for _ in range(4)]

    assert all(torch.allclose(y, (x @ w).relu()) for y in made)
    assert torch.equal(x, before[0])
    assert torch.equal(w, before[1])


def test_other_shapes_are_recorded_anew() -> None:
    device = FakeDevice()
    fire = GraphSegments(device)(PLAIN, 0, ())

    for rows in (4, 5) * 4:
        x, w = torch.randn(rows, 3), torch.randn(3, 2)
        assert torch.equal(fire([x, w])[0], (x @ w).relu())

    assert len(device.tapes) == 2


def test_a_segment_lets_go_of_what_it_takes() -> None:
    fire = GraphSegments(FakeDevice())(PLAIN, 0, ())

    for _ in range(4):
        values: list[Any] = [torch.randn(4, 3), torch.randn(3, 2)]
        fire(values)
        assert values == []


@pytest.mark.parametrize(
    ("calls", "why"),
    [
        ([call("aten.mul.Tensor", Ref("x"), Ref("n"), outputs=("y",))], "take the number 'n'"),
        (
            [
                call("aten.sum.default", Ref("x"), outputs=("s",)),
                call("host.item", Ref("s"), outputs=("i",)),
                call("aten.mul.Tensor", Ref("x"), Ref("i"), outputs=("y",)),
            ],
            "computes the number 'i'",
        ),
        ([call("host.add", Ref("n"), 1, outputs=("y",))], "holds no operator on tensors"),
    ],
)
def test_a_segment_that_needs_numbers_is_not_recorded(
    calls: list[Any], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    device = FakeDevice()
    actor = segment(*calls, reads=("n",))
    fire, eager = GraphSegments(device)(actor, 0, ()), segment_function(actor, 0, ())

    with caplog.at_level(logging.INFO, "sbp_torch.segments.cudagraph"):
        for number in range(5):
            x = torch.randn(3)
            assert torch.equal(
                torch.as_tensor(fire([x, number])[0]), torch.as_tensor(eager(x, number)[0])
            )

    assert device.tapes == []
    assert [why in record.getMessage() for record in caplog.records] == [True]


def test_a_draw_is_made_before_what_is_recorded() -> None:
    actor = segment(
        call("sbp.random_uniform.default", (4,), Ref("seed"), Ref("step"), 0, outputs=("u",)),
        call("aten.add.Tensor", Ref("x"), Ref("u"), outputs=("y",)),
        reads=("seed", "step"),
    )
    device = FakeDevice()
    fire = GraphSegments(device)(actor, 0, ())

    for step in range(5):
        (y,) = fire([torch.zeros(4), 9, step])
        assert torch.equal(y, torch.ops.sbp.random_uniform([4], 9, step, 0))

    assert device.tapes[0].num_replays == 3


def test_a_tensor_that_is_elsewhere_keeps_a_segment_from_being_recorded() -> None:
    device = FakeDevice()
    device.kind = "cuda"
    fire = GraphSegments(device)(PLAIN, 0, ())

    for _ in range(4):
        fire([torch.randn(4, 3), torch.randn(3, 2)])

    assert (device.num_asides, device.tapes) == (0, [])


def test_a_recording_that_fails_names_the_segment() -> None:
    class Failing(FakeDevice):
        def record(self, rank: int, work: Work) -> tuple[Any, list[Tensor]]:
            raise RuntimeError("operation not permitted when stream is capturing")

    fire = GraphSegments(Failing())(PLAIN, 5, ())
    given = torch.randn(4, 3), torch.randn(3, 2)
    fire([*given])
    fire([*given])

    with pytest.raises(RunError, match=r"segment 'forward\.0\.0' cannot be recorded") as caught:
        fire([*given])

    assert "operation not permitted" in str(caught.value)
    assert "rank 5" in str(caught.value)


@pytest.mark.parametrize(
    ("version", "available", "why"),
    [(None, False, "was built without CUDA"), ("13.0", False, "torch sees no GPU")],
)
def test_a_machine_without_a_gpu_is_refused_before_anything_starts(
    version: str | None, available: bool, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "cuda", version)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)

    with pytest.raises(ConfigError, match=f"needs a GPU: .*{why}"):
        segment_maker("cudagraph")


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("case", list(CASES))
def test_a_plan_of_recorded_segments_trains_as_the_eager_one(case: str) -> None:
    step, plan = CASES[case].step, compile_case(case)
    eager = ReferenceSession(plan, step.states, ReferenceConfig())
    recorded = ReferenceSession(plan, step.states, ReferenceConfig())
    device = FakeDevice()
    make = GraphSegments(device)
    recorded.segments = {
        (part.rank, actor.name): make(actor, part.rank, plan.steps)
        for part in plan.ranks
        for actor in part.actors
        if isinstance(actor, Compute)
    }

    for batch in (*step.batches, *step.batches):
        expected = eager.step(batch, step.scalars).loss
        assert torch.equal(recorded.step(batch, step.scalars).loss, expected)

    states = recorded.state_dict()
    assert device.tapes
    assert all(torch.equal(states[name], value) for name, value in eager.state_dict().items())


def test_the_gpu_is_a_device() -> None:
    device = CudaGraphDevice()

    assert device.kind == "cuda"


@pytest.mark.gpu
@needs_gpu
def test_a_gpu_records_and_replays() -> None:
    fire = GraphSegments()(PLAIN, 0, ())
    eager = segment_function(PLAIN, 0, ())
    kept = []

    for _ in range(6):
        x, w = torch.randn(64, 32, device="cuda"), torch.randn(32, 16, device="cuda")
        kept.append((fire([x, w])[0], eager(x, w)[0]))

    assert all(torch.equal(made, expected) for made, expected in kept)


@pytest.mark.gpu
@needs_gpu
def test_a_recording_reads_its_memory_anew_at_each_replay() -> None:
    device = CudaGraphDevice()
    static = torch.ones(8, device="cuda")
    device.aside(lambda: [static * 2])

    recording, (made,) = device.record(0, lambda: [static * 2])
    static.fill_(5)
    recording.replay()

    assert made.tolist() == [10.0] * 8

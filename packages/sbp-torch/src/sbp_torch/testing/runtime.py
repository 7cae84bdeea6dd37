"""The conformance suite of runtimes: subclass `RuntimeConformance` and supply one method.

    class TestMyRuntime(RuntimeConformance):
        def make_runtime(self):
            return build(MyConfig())

Every case captures, plans, compiles and checks a training step of a small MLP, runs it, and
compares every loss and every rank's shard of every state, bit for bit with the reference runtime
and within 1e-9 (float64) with one device. If the runtime sets `uses_backend`, the bytes that the
backend moves are compared with the bytes in the plan.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise, product
from typing import Any

import torch

from sbp_core.boxing import BoxingBackend
from sbp_core.compile import Compute, PhysicalPlan, RankPlan
from sbp_core.errors import RunError, SbpError, SbpTypeError, SbpValueError
from sbp_core.runtime import NotFiniteStepError, Span, SpanKind, Trace, batch_parts
from sbp_torch.testing.cases import (
    CASES,
    check_shards,
    compile_case,
    local_batch,
    reference_run,
    run_steps,
    shards_of,
)
from sbp_torch.testing.failing_plans import REFUSAL, plan_with, refuse_large, too_large
from sbp_torch.testing.loading import LoadingCases
from sbp_torch.testing.programs import assert_equal, assert_near, one_device_run, raises
from sbp_torch.testing.snapshot_suite import SnapshotCases
from sbp_torch.testing.state_suite import StateCases

__all__ = ["RuntimeConformance"]


class RuntimeConformance(StateCases, LoadingCases, SnapshotCases):
    """Tests of a runtime. See the module's docstring for how to use it."""

    #: Largest deviation from one device, in float64; relative for values above 1.
    tolerance: float = 1e-9

    #: Time limit in seconds until a failure has ended the step on all ranks.
    failure_s: float = 2.0

    def check_case(self, name: str) -> None:
        """Compare losses and shards of a case, bit for bit and within the tolerance, and bytes."""
        plan, step, backend = compile_case(name), CASES[name].step, self.make_backend()
        with self.start(name, backend) as session:
            losses = run_steps(session, step)
            shards = shards_of(session, plan)
            sent = self._sent_bytes(backend, plan)

        reference_losses, reference_shards = reference_run(name)
        for index, (loss, wanted) in enumerate(zip(losses, reference_losses, strict=True)):
            assert_equal(f"the loss of step {index}", loss, wanted)
        for (state, rank), value in reference_shards.items():
            assert_equal(f"{state} of rank {rank}", shards[(state, rank)], value)
        single_losses, states = one_device_run(step, plan.staleness)
        for index, (loss, wanted) in enumerate(zip(losses, single_losses, strict=True)):
            assert_near(f"the loss of step {index}", loss, wanted, self.tolerance)
        check_shards(plan, shards, states, self.tolerance)
        if self.make_runtime().uses_backend:
            assert sent == plan.boxing_bytes * len(step.batches), "bytes are not as predicted"

    def test_one_rank_equals_the_reference_and_one_device(self) -> None:
        """There is no boxing (communication)."""
        self.check_case("one rank")

    def test_data_parallel_equals_the_reference_and_one_device(self) -> None:
        """Gradients are all-reduced."""
        self.check_case("data parallel")

    def test_an_uneven_batch_equals_the_reference_and_one_device(self) -> None:
        """Five samples on four ranks."""
        self.check_case("uneven batch")

    def test_tensor_parallel_equals_the_reference_and_one_device(self) -> None:
        """Partial sums leave a layer."""
        self.check_case("tensor parallel")

    def test_data_and_tensor_parallel_equals_the_reference_and_one_device(self) -> None:
        """A mesh of two axes."""
        self.check_case("data and tensor parallel")

    def test_sharded_states_equals_the_reference_and_one_device(self) -> None:
        """Gathers and reduce-scatters of uneven shards."""
        self.check_case("sharded states")

    def test_accumulation_equals_the_reference_and_one_device(self) -> None:
        """Three micro-batches a step."""
        self.check_case("accumulation")

    def test_a_pipeline_under_gpipe_quotas_equals_the_reference_and_one_device(self) -> None:
        """All micro-batches in flight."""
        self.check_case("pipeline, GPipe")

    def test_a_pipeline_under_1f1b_quotas_equals_the_reference_and_one_device(self) -> None:
        """A stage has as many micro-batches in flight as there are stages from it to the last."""
        self.check_case("pipeline, 1F1B")

    def test_a_pipeline_of_data_parallel_stages_equals_the_reference_and_one_device(self) -> None:
        """Transfers between two meshes."""
        self.check_case("pipeline of data parallel stages")

    def test_a_pipeline_of_chunks_equals_the_reference_and_one_device(self) -> None:
        """Each rank holds several stages (interleaved schedule)."""
        self.check_case("pipeline of chunks")

    def test_a_pipeline_with_weight_gradients_apart_equals_the_reference(self) -> None:
        """Input gradients are computed first, weight gradients when a rank would wait."""
        self.check_case("pipeline with weight gradients apart")

    def test_a_pipeline_that_turns_back_equals_the_reference_and_one_device(self) -> None:
        """The last rank sends to itself, and the first rank has the last stage."""
        self.check_case("pipeline that turns back")

    def test_a_pipeline_in_both_directions_equals_the_reference_and_one_device(self) -> None:
        """Forward work of one chunk and backward work of the other chunk alternate."""
        self.check_case("pipeline in both directions")

    def test_an_asynchronous_pipeline_equals_the_reference_and_delayed_updates(self) -> None:
        """Each micro-batch uses stale parameters and ends with an update."""
        self.check_case("asynchronous pipeline")

    def test_an_asynchronous_pipeline_of_sharded_states_equals_delayed_updates(self) -> None:
        """Stale parameters are gathered for each micro-batch, in parallel with compute."""
        self.check_case("asynchronous pipeline with overlap")

    def test_updates_by_several_micro_batches_equal_the_reference_and_delayed_updates(self) -> None:
        """2BW: two versions of the parameters on each stage."""
        self.check_case("two versions of parameters")

    def test_updates_by_several_micro_batches_of_sharded_states_equal_delayed_updates(self) -> None:
        """The same with ZeRO-3 inside the stages, with boxing in parallel with compute."""
        self.check_case("two versions of parameters with overlap")

    def test_a_pipeline_of_unequal_stages_equals_the_reference_and_one_device(self) -> None:
        """Three ranks share the micro-batches of the first stage, one rank has the second stage."""
        self.check_case("pipeline of unequal stages")

    def test_boxing_threads_equals_the_reference_and_one_device(self) -> None:
        """Each rank has two threads."""
        self.check_case("boxing threads")

    def test_overlap_equals_the_reference_and_one_device(self) -> None:
        """Collectives are begun early, and waited for when their results are used."""
        self.check_case("overlap")

    def test_sharded_states_and_overlap_equals_the_reference_and_one_device(self) -> None:
        """Gathers are begun before their use, over several micro-batches."""
        self.check_case("sharded states and overlap")

    def test_a_pipeline_with_overlap_equals_the_reference_and_one_device(self) -> None:
        """Transfers run while collectives are in progress."""
        self.check_case("pipeline with overlap")

    def test_a_pipeline_with_boxing_threads_equals_the_reference_and_one_device(self) -> None:
        """Transfers run on separate threads."""
        self.check_case("pipeline with boxing threads")

    def _sent_bytes(self, backend: BoxingBackend, plan: PhysicalPlan) -> int:
        if not self.make_runtime().uses_backend:
            return 0
        return sum(backend.communicator(part.rank).sent_bytes for part in plan.ranks)

    def test_a_run_repeated_is_bit_identical(self) -> None:
        """Results do not depend on the order of threads."""
        for name in ("sharded states", "pipeline with boxing threads"):
            runs = []
            for _ in range(3):
                with self.start(name) as session:
                    runs.append((run_steps(session, CASES[name].step), session.state_dict()))

            (losses, states), *others = runs
            for again_losses, again_states in others:
                assert all(map(torch.equal, losses, again_losses)), f"{name}: losses differ"
                for state, value in states.items():
                    assert_equal(f"{name}: {state}", again_states[state], value)

    def test_a_session_counts_its_steps_and_names_its_ranks(self) -> None:
        """`local_ranks` are the ranks of the plan; a refused step does not count."""
        step = CASES["data parallel"].step
        with self.start("data parallel") as session:
            counts = [session.steps_done]
            with raises(SbpValueError):
                session.step({}, step.scalars)
            for batch in step.batches[:2]:
                session.step(batch, step.scalars)
                counts.append(session.steps_done)

        assert counts == [0, 1, 2]
        assert session.local_ranks == tuple(compile_case("data parallel").by_rank)

    def test_a_bad_batch_is_refused_and_does_no_harm(self) -> None:
        """Missing, unknown or misshapen tensors and other types are refused; the next step runs."""
        step = CASES["data parallel"].step
        good = step.batches[0]
        bad: list[tuple[Any, Any, type[SbpError]]] = [
            ({"features": good["features"]}, step.scalars, SbpValueError),
            ({**good, "features": good["features"][:3]}, step.scalars, SbpValueError),
            ({**good, "features": good["features"].float()}, step.scalars, SbpValueError),
            (good, {}, SbpValueError),
            ([good["features"]], step.scalars, SbpTypeError),
            ({**good, "features": good["features"].tolist()}, step.scalars, SbpTypeError),
            ({**good, "unknown": good["features"]}, step.scalars, SbpValueError),
            ({**good, "count": 3}, step.scalars, SbpValueError),
            (good, dict.fromkeys(step.scalars, torch.tensor(0.1)), SbpTypeError),
            (good, 0.1, SbpTypeError),
        ]
        with self.start("data parallel") as session:
            for batch, scalars, kind in bad:
                with raises(kind):
                    session.step(batch, scalars)
            losses = run_steps(session, step)

        for loss, wanted in zip(losses, reference_run("data parallel")[0], strict=True):
            assert_equal("a loss after bad batches", loss, wanted)

    def test_parts_of_a_batch_give_what_the_whole_gives(self) -> None:
        """`batch_is="local"` takes the parts of the local ranks, in their order."""
        for name in ("uneven batch", "accumulation", "pipeline of data parallel stages"):
            step, losses = CASES[name].step, reference_run(name)[0]
            with self.start(name) as session:
                parts = batch_parts(compile_case(name), session.local_ranks)
                for batch, wanted in zip(step.batches, losses, strict=True):
                    local = local_batch(batch, parts)
                    found = session.step(local, step.scalars, batch_is="local").loss
                    assert_equal(f"{name}: the loss", found, wanted)
                with raises(SbpValueError, match="batch_is='all'"):
                    session.step(batch, step.scalars, batch_is="all")  # type: ignore[arg-type] # on purpose

    def test_a_closed_session_takes_no_step(self) -> None:
        """RunError; states can still be read."""
        step = CASES["data parallel"].step
        with self.start("data parallel") as session:
            session.step(step.batches[0], step.scalars)
            states = session.state_dict()

        with raises(RunError, match="closed"):
            session.step(step.batches[1], step.scalars)
        for name, value in session.state_dict().items():
            assert_equal(f"{name} after closing", value, states[name])

    def test_a_traced_step_notes_each_firing_once_and_in_order(self) -> None:
        """If the runtime `traces`; spans of a thread overlap only inside of a firing."""
        cases = ("accumulation", "pipeline with boxing threads")
        for name, operators in product(cases, {False, self.make_runtime().traces_operators}):
            plan, step, trace = compile_case(name), CASES[name].step, Trace(operators=operators)
            with self.start(name) as session:
                losses = [session.step(step.batches[0], step.scalars).loss]
                session.trace = trace
                losses.append(session.step(step.batches[1], step.scalars).loss)
                session.trace = None
                losses.append(session.step(step.batches[2], step.scalars).loss)

            for loss, wanted in zip(losses, reference_run(name)[0], strict=True):
                assert_equal(f"the loss of {name}, traced", loss, wanted)
            if self.make_runtime().traces:
                check_trace(plan, trace, step_index=1)
            else:
                assert not trace.spans, "the runtime traces, and says that it does not"

    def test_a_step_whose_loss_is_not_finite_is_undone(self) -> None:
        """With `only_finite`, the session continues as if the step had not been taken.

        If a thread may overwrite states before all threads know the loss, the step may return it.
        """
        for name in ("one rank", "data parallel", "accumulation", "pipeline with boxing threads"):
            for in_place in (True, False):
                plan = compile_case(name, in_place_states=in_place)
                self._undo(name, plan, always=not (in_place and CASES[name].boxing_thread))

    def _undo(self, name: str, plan: PhysicalPlan, *, always: bool) -> None:
        step, (losses, _) = CASES[name].step, reference_run(name)
        bad = {
            key: value * torch.nan if value.is_floating_point() else value
            for key, value in step.batches[1].items()
        }
        with self.make_runtime().start(plan, step.states, self.make_backend()) as session:
            session.only_finite = True
            assert_equal("a loss", session.step(step.batches[0], step.scalars).loss, losses[0])
            before = {key: value.clone() for key, value in session.state_dict().items()}
            try:
                loss = session.step(bad, step.scalars).loss
            except NotFiniteStepError as error:
                loss = error.outputs["loss"]
                for state, value in session.state_dict().items():
                    assert_equal(f"{name}: {state}, undone", value, before[state])
                assert session.steps_done == 1, "the step counts"
                for batch, wanted in zip(step.batches[1:], losses[1:], strict=True):
                    assert_equal("a later loss", session.step(batch, step.scalars).loss, wanted)
            else:
                assert not always, f"the step of {name} was not undone"
            assert torch.isnan(loss), f"the loss of {name} is {loss}"

    def test_closing_twice_is_safe_and_leaves_no_thread(self) -> None:
        """The session is closed before or after a step."""
        before = set(threading.enumerate())
        for name in ("data parallel", "pipeline with boxing threads"):
            for num_steps in (0, 1):
                session = self.start(name)
                for batch in CASES[name].step.batches[:num_steps]:
                    session.step(batch, CASES[name].step.scalars)
                session.close()
                session.close()

        assert set(threading.enumerate()) <= before, "threads are left"

    def test_a_rank_that_fails_is_named_and_the_states_are_kept(self) -> None:
        """RunError names rank and actor in time, with its cause; no thread is left."""
        for name in ("uneven batch", "data and tensor parallel", "pipeline with boxing threads"):
            for rank in (0, 3):
                self._fail(name, rank)

    def _fail(self, name: str, rank: int) -> None:
        step = CASES[name].step
        plan, actor = plan_with(compile_case(name), rank, refuse_large())
        before = set(threading.enumerate())
        with self.make_runtime().start(plan, step.states, self.make_backend()) as session:
            session.step(step.batches[0], step.scalars)
            states = session.state_dict()
            start = time.monotonic()
            with raises(RunError, match=f"rank {rank} failed in actor {actor!r}") as caught:
                session.step(too_large(step.batches[1]), step.scalars)
            took_s = time.monotonic() - start
            after = session.state_dict()

        assert REFUSAL in str(caught[0]), str(caught[0])
        assert isinstance(caught[0].__cause__, ArithmeticError), "the cause is lost"
        assert took_s < self.failure_s, f"the failure took {took_s} s"
        for state, value in states.items():
            assert_equal(f"{state} after the failure", after[state], value)
        assert set(threading.enumerate()) <= before, "threads are left"


def check_trace(plan: PhysicalPlan, trace: Trace, step_index: int) -> None:
    """Check that a trace has each firing of one step once, in the plan's order."""
    for part in plan.ranks:
        for thread, order in part.orders.items():
            own = [span for span in trace.spans if (span.rank, span.thread) == (part.rank, thread)]
            assert all(span.step == step_index for span in own), "spans of other steps"
            firings = [span for span in own if span.kind is SpanKind.FIRING]
            found = [(span.actor, span.micro_batch) for span in firings]
            assert found == list(order), f"the firings of rank {part.rank}, thread {thread!r}"
            inside = SpanKind.TURN, SpanKind.OPERATOR
            outside = [span for span in own if span.kind not in inside]
            for before, after in pairwise(outside):
                assert before.begin_ns <= before.end_ns <= after.begin_ns, "spans overlap"
            waits = [span for span in own if span.kind in (SpanKind.BLOCKED, SpanKind.TURN)]
            assert all(span.waits_for for span in waits)
            check_operators(part, own, is_noted=trace.operators)


def check_operators(part: RankPlan, spans: Sequence[Span], *, is_noted: bool) -> None:
    """Check that each firing of a thread has its operators, one after the other, if it has any."""
    noted: dict[tuple[str, int], list[Span]] = defaultdict(list)
    for span in spans:
        if span.kind is SpanKind.OPERATOR:
            noted[span.actor, span.micro_batch].append(span)
    for firing in spans:
        if firing.kind is not SpanKind.FIRING:
            continue
        actor = part.by_name[firing.actor]
        nodes = [one.node for one in actor.instructions] if isinstance(actor, Compute) else []
        found = noted[firing.actor, firing.micro_batch]
        assert [span.node for span in found] == (nodes if is_noted else []), "other operators"
        times_ns = [firing.begin_ns, firing.end_ns]
        times_ns[1:1] = [time_ns for span in found for time_ns in (span.begin_ns, span.end_ns)]
        assert times_ns == sorted(times_ns), "operators overlap, or are outside of their firing"

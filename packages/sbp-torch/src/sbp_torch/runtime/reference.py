"""The reference runtime: all ranks in lock-step in one thread, to test other runtimes.

It replays a plan (`sbp_core.interpreter`) on real tensors, one instruction at a time, without
threads, generated code or a boxing backend. A collective is one call of
`boxing.execute.apply_step` for all ranks. It is slow and simple; with the setting `compile`, it
runs compiled segments instead.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from sbp_core.boxing import BoxingBackend
from sbp_core.compile import (
    LOCAL_BOX,
    Accumulate,
    Actor,
    ActorId,
    Collective,
    Compute,
    Instruction,
    PhysicalPlan,
    Receive,
    keys_out,
)
from sbp_core.errors import RunError
from sbp_core.interpreter import Firing, InstructionDomain, Interpreter, ticks
from sbp_core.runtime import (
    BatchIs,
    NotFiniteStepError,
    Number,
    Runtime,
    Session,
    Snapshot,
    StatePiece,
    StepResult,
    check_destination,
)
from sbp_torch.boxing.execute import apply_step, check_shard, local_step, transferred_shard
from sbp_torch.ops.operators import bind, operator_of, results_of
from sbp_torch.runtime.accumulation import accumulate
from sbp_torch.runtime.configs import ReferenceConfig
from sbp_torch.runtime.feeding import Feeder
from sbp_torch.runtime.finite import not_finite, undone_error
from sbp_torch.runtime.partial_update import overwrite, partially_updated, step_failure
from sbp_torch.runtime.sharing import store_of
from sbp_torch.runtime.state_layout import Values
from sbp_torch.segments.execution import OwningSegment, segment_maker

Value = Tensor | Number
Segments = Mapping[ActorId, OwningSegment]


class ReferenceRuntime(Runtime):
    """Runs every rank in the calling thread; the backend is neither opened nor used."""

    has_forms = True
    uses_backend = False

    def __init__(self, config: ReferenceConfig) -> None:
        self.config = config

    def start(
        self,
        plan: PhysicalPlan,
        states: Mapping[str, Tensor] | Session,
        backend: BoxingBackend | None = None,
        ranks: Sequence[int] | None = None,
        *,
        keeps: bool = False,
    ) -> Session:
        """See `Runtime.start`; all ranks of the plan are here."""
        return ReferenceSession(plan, states, self.config, keeps=keeps)


class ReferenceSession(Session):
    """A session of the reference runtime: the states of all ranks, and the replay of steps."""

    def __init__(
        self,
        plan: PhysicalPlan,
        states: Mapping[str, Tensor] | Session,
        config: ReferenceConfig = ReferenceConfig(),  # noqa: B008 - frozen
        *,
        keeps: bool = False,
    ) -> None:
        self.plan, self.config = plan, config
        #: Whether a step failed after it had overwritten a state.
        self.is_partially_updated = False
        self.closed = False
        #: Functions of segments by rank and actor; None to run their instructions one by one.
        self.segments: Segments | None = None
        if config.compile != "eager":
            make = segment_maker(config.compile, fallback=config.compile_fallback)
            self.segments = {
                (part.rank, actor.name): make(actor, part.rank, plan.steps)
                for part in plan.ranks
                for actor in part.actors
                if isinstance(actor, Compute)
            }
        self.local_ranks = tuple(part.rank for part in plan.ranks)
        self.steps_done = 0
        self.store = store_of(plan, self.local_ranks, states, keeps=keeps)
        self.feeder = Feeder(plan, self.local_ranks)

    def step(
        self,
        batch: Mapping[str, Tensor],
        scalars: Mapping[str, Number],
        *,
        batch_is: BatchIs = "global",
    ) -> StepResult:
        """See `Session.step`."""
        if self.closed:
            raise RunError("the session is closed", todo="start a new one from state_dict()")
        self._check_whole()
        fed = self.store.device.put_batches(self.feeder.feed(batch, scalars, batch_is))
        with torch.no_grad(), _intra_op_threads(self.config.threads_per_rank):
            before = self.store.values
            domain = _Tensors(self, before)
            try:
                _replay(self.plan, domain, before, fed)
                if not domain.has_overwritten:
                    domain.check_finite()
                # One assignment, so that an interrupt leaves the states before it or after it.
                self.store.commit(
                    {rank: held | domain.new_states.get(rank, {}) for rank, held in before.items()}
                )
            finally:
                self.is_partially_updated = domain.has_overwritten and self.store.values is before
        self.steps_done += 1
        return StepResult(outputs=domain.results)

    def _check_whole(self) -> None:
        """Raise an error if states belong to two steps; else refresh the store."""
        if self.is_partially_updated:
            raise partially_updated()
        self.store.refresh()

    def shard(self, name: str, rank: int) -> Tensor | Number:
        """See `Session.shard`."""
        self.store.refresh()
        return self.store.shard(name, rank)

    def pieces(self, *, among: Collection[int] | None = None) -> Iterator[StatePiece]:
        """See `Session.pieces`."""
        self._check_whole()
        return self.store.pieces(among)

    def snapshot(self, *, limit_bytes: int | None = None) -> Snapshot:
        """See `Session.snapshot`; all states are copied at once, and the limit is ignored."""
        self._check_whole()
        return self.store.snapshot(self.steps_done, at_once=True)

    def gather(self, name: str, *, to: int | None = None) -> Tensor | None:
        """See `Session.gather`; nothing is sent, because all ranks are in this process."""
        self._check_whole()
        check_destination(self.plan, to)
        return self.store.whole(name)

    def state_dict(self, *, to: int | None = None) -> dict[str, Tensor]:
        """See `Session.state_dict`."""
        self._check_whole()
        check_destination(self.plan, to)
        return {name: self.store.whole(name) for name in self.store.layout.names}

    def load_state_dict(self, states: Mapping[str, Tensor]) -> None:
        """See `Session.load_state_dict`."""
        self.store.load(states)
        self.is_partially_updated = False

    def replace(self, states: Mapping[str, Tensor]) -> None:
        """See `Session.replace`; nothing is sent."""
        self._check_whole()
        self.store.replace(states)

    def close(self) -> None:
        """See `Session.close`. States can still be read."""
        self.closed = True
        self.store.close()


@contextmanager
def _intra_op_threads(count: int) -> Iterator[None]:
    """Let operators use `count` threads, because the number of parts of a sum affects rounding."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _replay(
    plan: PhysicalPlan,
    domain: _Tensors,
    states: Mapping[int, Values],
    fed: Mapping[int, list[Values]],
) -> None:
    """Replay a step.

    Raises:
        RunError: an actor failed, or all threads wait for each other.
    """
    replay = Interpreter(plan, domain, states, fed)
    try:
        is_done = replay.run()
    except NotFiniteStepError:
        raise
    except Exception as error:
        assert replay.at is not None, "what failed is a firing"
        raise step_failure(
            replay.at.rank,
            domain.step,
            replay.at.actor.name,
            error,
            is_partial=domain.has_overwritten,
        ) from error
    if not is_done:
        heads = map(replay.firings.head, replay.firings.waiting())
        stuck = [f"rank {rank}: {name}" for rank, name in filter(None, heads)]
        raise RunError("the step deadlocked", where=stuck, todo="check the plan")


class _Tensors(InstructionDomain[Value]):
    """The domain of a replay whose values are tensors and host numbers.

    Python frees values without references, so holding and dropping a value needs no action.

    Args:
        session: The session whose plan is replayed.
        states: Rank -> states from before the step, which some segments overwrite.
    """

    def __init__(self, session: ReferenceSession, states: Mapping[int, Values]) -> None:
        super().__init__()
        self.plan, self.watch, self.segments = session.plan, session.watch, session.segments
        self.states, self.step, self.only_finite = states, session.steps_done, session.only_finite
        self.results: dict[str, Tensor] = {}
        self._ranks_of_results: dict[str, int] = {}
        self.new_states: dict[int, Values] = defaultdict(dict)
        self.has_overwritten = False
        offloads = any(slot.offloaded for part in self.plan.ranks for slot in part.slots)
        self._ticks = ticks(self.plan) if offloads else None

    def duration(self, actor_id: ActorId) -> float:
        """See `Domain.duration`: copies to and from the host go on in parallel with compute."""
        return 0.0 if self._ticks is None else self._ticks(actor_id)

    def check_finite(self) -> None:
        """Undo the step, before a state is overwritten, if its loss is not finite.

        Raises:
            NotFiniteStepError: the loss is not finite.
        """
        if self.only_finite and not_finite(self.results):
            raise undone_error(self.results, self.step)

    def _overwrite(self) -> None:
        """Note that a state is about to be overwritten."""
        if not self.has_overwritten:
            self.check_finite()
        self.has_overwritten = True

    def compute(self, firing: Firing[Compute], taken: Values) -> Values:
        """See `Domain.compute`."""
        actor = firing.actor
        # Segments overwrite states while they run.
        if actor.in_place:
            self._overwrite()
        with self.watch(firing.rank):
            if self.segments is None:
                return super().compute(firing, taken)
            given = [taken.pop(key) for key in (*actor.inputs, *actor.reads)]
            return dict(zip(keys_out(actor), self.segments[firing.id](given), strict=True))

    def call(
        self, firing: Firing[Compute], instruction: Instruction, values: Values
    ) -> Sequence[Any]:
        """See `InstructionDomain.call`."""
        if instruction.op == LOCAL_BOX:
            source, index = instruction.args
            step = self.plan.steps[index]
            return results_of(local_step(step, firing.rank, _tensor(values[source.name])))
        args = bind(instruction.args, values.__getitem__)
        kwargs = {key: bind(arg, values.__getitem__) for key, arg in instruction.kwargs.items()}
        return results_of(operator_of(instruction.op)(*args, **kwargs))

    def collective(
        self, firings: Sequence[Firing[Collective]], shards: Mapping[int, Value]
    ) -> dict[int, Value]:
        """See `Domain.collective`."""
        step = self.plan.steps[firings[0].actor.step]
        made = apply_step(step, {rank: _tensor(shard) for rank, shard in shards.items()})
        return {firing.rank: self._own(firing.rank, made) for firing in firings}

    def receive(self, firing: Firing[Receive], shards: Mapping[int, Value]) -> Tensor:
        """See `Domain.receive`."""
        step = self.plan.steps[firing.actor.step]
        sent = {rank: _tensor(shard) for rank, shard in shards.items()}
        for rank, shard in sent.items():
            check_shard(step, rank, shard)
        return self._own(firing.rank, {firing.rank: transferred_shard(step, firing.rank, sent)})

    def _own(self, rank: int, made: Mapping[int, Tensor]) -> Tensor:
        """Return a rank's result of a boxing step, as a new tensor that the rank's watch sees."""
        with self.watch(rank):
            return made[rank].detach()

    def add(
        self,
        firing: Firing[Accumulate],
        term: tuple[str, str, float | str | None],
        total: Value | None,
        part: Value,
    ) -> Tensor:
        """See `Domain.add`."""
        with self.watch(firing.rank):
            return accumulate(None if total is None else _tensor(total), _tensor(part), term[2])

    def emit(self, firing: Firing[Actor], result: str, value: Value) -> None:
        """See `Domain.emit`; if several ranks have a result, the lowest rank's result counts."""
        if firing.rank <= self._ranks_of_results.setdefault(result, firing.rank):
            self._ranks_of_results[result] = firing.rank
            self.results[result] = _tensor(value)

    def write(self, firing: Firing[Actor], state: str, value: Value) -> None:
        """See `Domain.write`."""
        if state in firing.actor.in_place:
            self._overwrite()
            overwrite(self.states[firing.rank][state], value)
        else:
            self.new_states[firing.rank][state] = value


def _tensor(value: Value) -> Tensor:
    assert isinstance(value, Tensor), "boxing, sums and results are of tensors"
    return value

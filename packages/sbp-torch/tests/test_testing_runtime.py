"""The suite of runtimes: passed by the reference runtime, failed by broken ones."""

from collections.abc import Callable, Collection, Iterator, Mapping
from copy import copy
from itertools import chain
from typing import Any

import pytest
import torch

from sbp_core.compile import PhysicalPlan
from sbp_core.runtime import Runtime, StatePiece, StepResult
from sbp_torch.boxing.local import LocalBackend
from sbp_torch.runtime import undone_error
from sbp_torch.runtime.configs import ReferenceConfig
from sbp_torch.runtime.reference import ReferenceRuntime, ReferenceSession
from sbp_torch.testing.runtime import RuntimeConformance


class TestReferenceRuntime(RuntimeConformance):
    def make_runtime(self) -> ReferenceRuntime:
        return ReferenceRuntime(ReferenceConfig())


class BrokenRuntime(Runtime):
    """The reference runtime with sessions of another class."""

    uses_backend = False

    def __init__(self, session: type[ReferenceSession]) -> None:
        self.session = session

    def start(
        self, plan: PhysicalPlan, states: Any, backend: Any = None, ranks: Any = None
    ) -> ReferenceSession:
        return self.session(plan, states, ReferenceConfig())


def suite_of(session: type[ReferenceSession]) -> RuntimeConformance:
    class Suite(RuntimeConformance):
        def make_runtime(self) -> Runtime:
            return BrokenRuntime(session)

    return Suite()


class RoundsLosses(ReferenceSession):
    def step(self, batch: Mapping[str, Any], scalars: Mapping[str, Any]) -> StepResult:
        loss = super().step(batch, scalars).loss
        return StepResult(outputs={"loss": loss.float().double()})


class LeavesOneRankBehind(ReferenceSession):
    def step(self, batch: Mapping[str, Any], scalars: Mapping[str, Any]) -> StepResult:
        before = self.store.values[1]["up.bias.exp_avg"].clone()
        result = super().step(batch, scalars)
        self.store.values[1]["up.bias.exp_avg"] = before
        return result


class ChangesStatesOfAFailedStep(ReferenceSession):
    def step(self, batch: Mapping[str, Any], scalars: Mapping[str, Any]) -> StepResult:
        try:
            return super().step(batch, scalars)
        except Exception:
            self.store.values[0]["step_counter"] += 1
            raise


class HidesTheCause(ReferenceSession):
    def step(self, batch: Mapping[str, Any], scalars: Mapping[str, Any]) -> StepResult:
        try:
            return super().step(batch, scalars)
        except Exception as error:
            raise RuntimeError("something went wrong") from error


class HandsOutItsOwnStates(ReferenceSession):
    def state_dict(self) -> dict[str, torch.Tensor]:
        whole = super().state_dict()
        held = self.store.values[0]
        return {name: held.get(name, value) for name, value in whole.items()}


class HandsOutItsOwnStatesOneByOne(ReferenceSession):
    def gather(self, name: str, *, to: int | None = None) -> Any:
        whole, own = super().gather(name, to=to), self.store.values[0].get(name)
        return own if torch.is_tensor(own) and own.shape == whole.shape else whole


class OwnsPiecesTwice(ReferenceSession):
    def pieces(self, *, among: Collection[int] | None = None) -> Iterator[StatePiece]:
        return chain(super().pieces(among=among), super().pieces(among=among))


class LeavesPiecesToTheLost(ReferenceSession):
    def pieces(self, *, among: Collection[int] | None = None) -> Iterator[StatePiece]:
        return super().pieces()


class CountsRefusedSteps(ReferenceSession):
    def step(self, batch: Mapping[str, Any], scalars: Mapping[str, Any]) -> StepResult:
        before = self.steps_done
        try:
            return super().step(batch, scalars)
        finally:
            self.steps_done = before + 1


class SharesCopies(ReferenceSession):
    def shard(self, name: str, rank: int) -> Any:
        return copy(super().shard(name, rank))


class NeverUndoes(ReferenceSession):
    only_finite = property(lambda self: False, lambda self, value: None)


class UndoesWhatItHasDone(ReferenceSession):
    only_finite = property(lambda self: False, lambda self, value: None)

    def step(self, batch: Mapping[str, Any], scalars: Mapping[str, Any]) -> StepResult:
        result = super().step(batch, scalars)
        if result.loss.isnan():
            self.steps_done -= 1
            raise undone_error(result.outputs, self.steps_done)
        return result


class HoldsWhatIsReplaced(ReferenceSession):
    def load_state_dict(self, states: Mapping[str, torch.Tensor]) -> None:
        before = self.store.values
        super().load_state_dict(states)
        del before


class ReplacesStatesBeforeItLooks(ReferenceSession):
    def load_state_dict(self, states: Mapping[str, torch.Tensor]) -> None:
        self.store.values = {rank: {} for rank in self.store.values}
        super().load_state_dict(states)


class HandsOutWhatIsReplacedInPart(ReferenceSession):
    def load_state_dict(self, states: Mapping[str, torch.Tensor]) -> None:
        before = self.store.values
        try:
            super().load_state_dict(states)
        except OSError:
            self.store._lost_by = ""
            self.store.values = {
                rank: {**held, **self.store.values[rank]} for rank, held in before.items()
            }
            raise


class IsRandom(ReferenceSession):
    def step(self, batch: Mapping[str, Any], scalars: Mapping[str, Any]) -> StepResult:
        loss = super().step(batch, scalars).loss
        return StepResult(outputs={"loss": loss + 1e-15 * torch.randint(1, 1000, ())})


BROKEN: list[tuple[type[ReferenceSession], Callable[[RuntimeConformance], None]]] = [
    (
        RoundsLosses,
        lambda s: s.test_data_parallel_equals_the_reference_and_one_device(),
    ),
    (
        LeavesOneRankBehind,
        lambda s: s.test_data_parallel_equals_the_reference_and_one_device(),
    ),
    (IsRandom, lambda s: s.test_a_run_repeated_is_bit_identical()),
    (
        ChangesStatesOfAFailedStep,
        lambda s: s.test_a_rank_that_fails_is_named_and_the_states_are_kept(),
    ),
    (
        HidesTheCause,
        lambda s: s.test_a_rank_that_fails_is_named_and_the_states_are_kept(),
    ),
    (HandsOutItsOwnStates, lambda s: s.test_saved_states_are_copies()),
    (HandsOutItsOwnStatesOneByOne, lambda s: s.test_a_state_is_gathered_whole()),
    (
        LeavesPiecesToTheLost,
        lambda s: s.test_pieces_can_be_dealt_out_among_ranks_that_are_left(),
    ),
    (OwnsPiecesTwice, lambda s: s.test_pieces_are_every_element_of_every_state_once()),
    (CountsRefusedSteps, lambda s: s.test_a_session_counts_its_steps_and_names_its_ranks()),
    (
        HoldsWhatIsReplaced,
        lambda s: s.test_what_is_loaded_is_read_when_what_it_replaces_is_let_go_of(),
    ),
    (
        ReplacesStatesBeforeItLooks,
        lambda s: s.test_states_that_do_not_fit_are_refused_and_do_no_harm(),
    ),
    (
        HandsOutWhatIsReplacedInPart,
        lambda s: s.test_states_that_were_replaced_in_part_are_not_handed_out(),
    ),
    (SharesCopies, lambda s: s.test_a_session_shares_the_states_of_another_as_they_are()),
    (NeverUndoes, lambda s: s.test_a_step_whose_loss_is_not_finite_is_undone()),
    (UndoesWhatItHasDone, lambda s: s.test_a_step_whose_loss_is_not_finite_is_undone()),
]


@pytest.mark.parametrize(("session", "test"), BROKEN, ids=[kind.__name__ for kind, _ in BROKEN])
def test_a_broken_runtime_fails_the_suite(
    session: type[ReferenceSession], test: Callable[[RuntimeConformance], None]
) -> None:
    suite = suite_of(session)

    # A test fails with AssertionError; what a broken session raises itself may pass through.
    with pytest.raises((AssertionError, LookupError, RuntimeError)):
        test(suite)


@pytest.mark.slow
def test_the_unbroken_runtime_passes_what_the_broken_ones_fail() -> None:
    suite = suite_of(ReferenceSession)

    for _, test in BROKEN:
        test(suite)


def test_a_runtime_that_moves_no_bytes_may_not_claim_to_use_the_backend() -> None:
    class Suite(RuntimeConformance):
        def make_runtime(self) -> Runtime:
            runtime = ReferenceRuntime(ReferenceConfig())
            runtime.uses_backend = True
            return runtime

        def make_backend(self) -> LocalBackend:
            backend = LocalBackend()
            backend.open(range(4))
            return backend

    with pytest.raises(AssertionError, match="bytes"):
        Suite().test_data_parallel_equals_the_reference_and_one_device()

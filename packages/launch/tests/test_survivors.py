"""What is saved of a run that has lost a rank, and what is said where that cannot be."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sbp_core.boxing import bounds_of
from sbp_core.compile.physical import PhysicalPlan, RankPlan, StateSlot
from sbp_core.errors import RunError, SbpError
from sbp_core.graph import InputKind
from sbp_core.placement import Placement
from sbp_core.plugins import TrainerState
from sbp_core.runtime import StatePiece, state_owners
from sbp_core.sbp import B, NdSbp, S
from sbp_launch.checkpoint import saving, survivors
from sbp_launch.checkpoint.folder_storage import LocalStorage
from sbp_launch.checkpoint.manifest import Metadata
from sbp_launch.checkpoint.reading import Checkpoint
from sbp_launch.checkpoint.saving import Processes
from sbp_launch.trainer.survivor_saving import save_with_survivors

MESH = Placement.grid((3,), ("data",))
WHOLE = torch.arange(12.0).reshape(6, 2)


def plan_of(sbp: NdSbp) -> PhysicalPlan:
    """Return a plan of one state on three ranks, with no actors."""
    bounds = bounds_of(WHOLE.shape, MESH, sbp)
    slots = {
        rank: StateSlot(
            name="weight",
            kind=InputKind.PARAMETER,
            shape=tuple(WHOLE.shape),
            dtype="float32",
            stage=0,
            sbp=sbp,
            local_shape=tuple(stop - start for start, stop in bounds[rank]),
        )
        for rank in MESH.rank_list
    }
    return PhysicalPlan(
        graph_hash="",
        planner="",
        num_micro_batches=1,
        ties={},
        stages=(MESH,),
        steps=(),
        links=(),
        ranks=tuple(
            RankPlan(rank=rank, slots=(slot,), actors=(), registers=(), orders={})
            for rank, slot in slots.items()
        ),
    )


class Talk:
    """What ranks 1 and 2 say to each other: threads of the test."""

    def __init__(self) -> None:
        self.barrier, self.texts = threading.Barrier(2), dict[int, str]()

    def of(self, rank: int) -> Any:
        def gather(text: str, limit_s: float) -> list[str]:
            self.texts[rank] = text
            self.barrier.wait(20.0)
            found = [self.texts[one] for one in (1, 2)]
            self.barrier.wait(20.0)
            return found

        return SimpleNamespace(ranks=(1, 2), gather=gather, leave=lambda: None)


class Checkpoints:
    """Those of one process."""

    def __init__(self, root: Path, under_way: str = "", saved: int = -1) -> None:
        self.storage, self.under_way, self.saved = LocalStorage(root), under_way, saved

    def has(self, step: int) -> bool:
        return step == self.saved

    def place(self, step: int) -> str:
        return f"step {step}"

    def abandon(self) -> str:
        return self.under_way

    def save_pieces(self, pieces: Any, state: TrainerState, cursor: Any, processes: Any) -> str:
        saving.save(self.storage, "step-3", Metadata(step=state.step, seed=0), pieces, processes)
        return self.place(state.step)


def fail(
    root: Path,
    sbp: NdSbp,
    steps: tuple[int, int] = (3, 3),
    problem: str = "",
    steps_done: int = 3,
    **checkpoints: Any,
) -> list[str]:
    """Let rank 0 of three be lost; return where ranks 1 and 2 have saved, or why not."""
    talk, plan = Talk(), plan_of(sbp)

    def pieces(rank: int, among: Any) -> list[StatePiece]:
        if problem and rank == 2:
            raise RunError(problem)
        owned = state_owners(plan, among)["weight"].get(rank)
        if owned is None:
            return []
        value = WHOLE[tuple(slice(*dim) for dim in owned)]
        piece = StatePiece(name="weight", shape=(6, 2), dtype="float32", bounds=owned, value=value)
        return [piece]

    def rank(number: int, step: int) -> str:
        loop: Any = SimpleNamespace(
            team=SimpleNamespace(survivors=lambda error, limit_s: talk.of(number)),
            count_done=lambda: None,
            checkpoints=Checkpoints(root, **checkpoints),
            step=SimpleNamespace(
                session=SimpleNamespace(
                    pieces=lambda among: pieces(number, among), steps_done=steps_done
                ),
                processes=Processes(rank=number, ranks=(0, 1, 2)),
            ),
            planned=SimpleNamespace(plan=plan),
            state=TrainerState(step=step),
            saved_state=lambda: TrainerState(step=step),
            cursor=None,
        )
        world = SimpleNamespace(rank=number)
        run: Any = SimpleNamespace(say=lambda lines: None, world=world, is_first=False)
        try:
            return save_with_survivors(run, loop, RunError("rank 0 has ended"))
        except SbpError as error:
            return str(error)

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(rank, (1, 2), steps, timeout=60.0))


def test_replicas_are_saved_whole_by_those_that_are_left(tmp_path: Path) -> None:
    assert fail(tmp_path, NdSbp(B)) == ["step 3", "step 3"]

    with Checkpoint(LocalStorage(tmp_path), "step-3") as checkpoint:
        assert torch.equal(checkpoint["weight"], WHOLE)


def test_a_part_that_only_the_lost_rank_held_is_named_and_nothing_is_saved(tmp_path: Path) -> None:
    said = fail(tmp_path, NdSbp(S(0)))

    assert said == ["rank 0 alone held a part of 1 state, such as 'weight'"] * 2
    assert LocalStorage(tmp_path).names() == []


def test_ranks_behind_different_steps_save_nothing(tmp_path: Path) -> None:
    said = fail(tmp_path, NdSbp(B), steps=(3, 4))

    wanted = "the surviving ranks have not taken the same steps (step 3: 1; step 4: 2)"
    assert said == [wanted] * 2
    assert LocalStorage(tmp_path).names() == []


def test_a_rank_in_the_middle_of_its_update_says_so_for_all(tmp_path: Path) -> None:
    said = fail(tmp_path, NdSbp(B), problem="states are of two steps")

    assert said == ["rank 2 says: states are of two steps"] * 2


def test_before_the_first_step_there_is_nothing_to_save(tmp_path: Path) -> None:
    assert fail(tmp_path, NdSbp(B), steps_done=0) == ["no step has been done"] * 2
    assert LocalStorage(tmp_path).names() == []


def test_what_is_saved_already_is_not_saved_again(tmp_path: Path) -> None:
    assert fail(tmp_path, NdSbp(B), saved=3) == ["step 3", "step 3"]
    assert LocalStorage(tmp_path).names() == []


def test_what_the_lost_rank_had_begun_is_removed(tmp_path: Path) -> None:
    begun = LocalStorage(tmp_path).stage("step-2")
    with begun.create("rank-00000.safetensors") as file:
        file.write(b"half")

    fail(tmp_path, NdSbp(B), under_way="step-2")

    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "step-3"]


def test_the_lock_of_the_lost_rank_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(survivors, "_LOCK_S", 600.0)
    with ThreadPoolExecutor(1) as pool, ExitStack() as lock:
        lock.enter_context(LocalStorage(tmp_path).claim())
        said = pool.submit(fail, tmp_path, NdSbp(B))
        time.sleep(0.1)
        assert not said.done()
        lock.close()

        assert said.result(60.0) == ["step 3", "step 3"]


def test_without_the_lock_nothing_is_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(survivors, "_LOCK_S", 0.1)
    with LocalStorage(tmp_path).claim():
        said = fail(tmp_path, NdSbp(B))

    assert "another run writes its checkpoints" in said[0]
    assert "rank 1 says: another run writes its checkpoints" in said[1]

"""A run whose loss becomes no number says which operator made it so."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from saved_states import states_of_run
from trainable import planned, registry, run_config

from sbp_core.compile import Compute
from sbp_core.graph import LogicalGraph
from sbp_core.runtime import NotFiniteStepError
from sbp_launch.settings.config import EvaluateConfig, PluginChoice
from sbp_launch.step.first_bad_value import first_bad_value
from sbp_launch.trainer import trainer
from sbp_launch.trainer.finite_loss import NotFiniteError
from sbp_torch.segments import segment_function


def diverging(**settings: Any) -> Any:
    """Return a run whose second step overflows."""
    optimizer = PluginChoice(name="sgd", settings={"lr": 1e30})
    return replace(run_config(steps=4, **settings), optimizer=optimizer)


@pytest.mark.slow
def test_the_step_is_undone_and_the_operator_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(NotFiniteError) as caught:
        trainer.train(diverging(micro_batches=2), registry(), tmp_path)

    step, *where = caught.value.where
    assert step == "step 2 of 4 steps (lr 1e+30)"
    assert any("makes the first " in line and "of float32 (" in line for line in where)
    assert "the states so far are in checkpoints/step-00000001" in capsys.readouterr().out
    states = states_of_run(tmp_path)
    assert all(torch.isfinite(value).all() for value in states.values())
    assert [path.name for path in (tmp_path / "checkpoints").glob("[!.]*")] == ["step-00000001"]
    records = (tmp_path / "metrics.jsonl").read_text("utf-8").splitlines()
    assert [json.loads(line)["step"] for line in records] == [1, 2]


@pytest.mark.slow
def test_a_run_that_warns_goes_on_with_what_it_has(tmp_path: Path) -> None:
    trainer.train(
        diverging(on_nan="warn", evaluate=EvaluateConfig(batches=0)), registry(), tmp_path
    )

    states = states_of_run(tmp_path)
    assert not all(torch.isfinite(value).all() for value in states.values())


class OneSegment:
    """A session whose step runs the segment of the head on rank 0, and is undone."""

    watch: Callable[[int], AbstractContextManager[object]] = staticmethod(
        lambda rank: nullcontext()
    )

    def __init__(self, states: dict[str, torch.Tensor]) -> None:
        made = planned()
        actor = next(
            actor
            for actor in made.plan.by_rank[0].actors
            if isinstance(actor, Compute) and "head.weight" in actor.reads
        )
        self.graph: LogicalGraph = made.graph
        batch = {name: torch.zeros(2, 4, dtype=torch.int64) for name in ("tokens", "targets")}
        assert not actor.inputs, "it takes what it computes with from the batch and the states"
        self.states = states
        self.taken = [(states | batch)[name] for name in actor.reads]
        self.run = segment_function(actor, 0, made.plan.steps)

    def pieces(self) -> Iterator[SimpleNamespace]:
        for name, value in self.states.items():
            yield SimpleNamespace(name=name, value=value)

    def step(self, batch: dict[str, torch.Tensor], scalars: object, *, batch_is: str) -> None:
        with self.watch(0):
            self.run(*self.taken)
        raise NotFiniteStepError("loss is nan")


def states_of(embed: float) -> dict[str, torch.Tensor]:
    return {
        "embed.weight": torch.full((8, 6), embed),
        "head.weight": torch.full((8, 6), embed),
        "head.bias": torch.zeros(8),
    }


BATCH = {name: torch.zeros(2, 4, dtype=torch.int64) for name in ("tokens", "targets")}


def lines_of(states: dict[str, torch.Tensor], batch: Any = BATCH, **more: Any) -> Sequence[str]:
    session = OneSegment(states)
    lines = first_bad_value(session, session.graph, batch, {}, **more)  # type: ignore[arg-type]
    assert "watch" not in vars(session), "later steps are watched, too"
    return lines


def test_the_line_names_the_module_its_source_and_what_it_took() -> None:
    lines = lines_of(states_of(3e38))

    assert any(
        "module 'head'" in line
        and "trainable.py:" in line
        and "makes the first infinity, on rank 0, micro-batch 0, of float32" in line
        and "(8, 6) from 3e+38 to 3e+38; float32 (6, 8) from 3e+38 to 3e+38" in line
        for line in lines
    ), lines


def test_states_that_were_bad_before_the_step_are_named_instead() -> None:
    (line,) = lines_of({**states_of(1.0), "head.bias": torch.full((8,), math.nan)})

    assert line.startswith("states: head.bias not finite before the step began")


def test_of_several_ranks_the_operator_that_comes_first_is_told_with_its_ranks() -> None:
    def gather(text: str) -> list[str]:
        other = json.loads(text)
        other["found"] = [{**one, "rank": 1} for one in other["found"]]
        return [text, json.dumps(other), json.dumps({"states": [], "batch": [], "found": []})]

    lines = lines_of(states_of(3e38), gather=gather)

    assert any("on ranks 0-1, micro-batch 0" in line for line in lines), lines


@pytest.mark.slow
def test_what_came_first_is_told_whichever_rank_is_heard_first() -> None:
    first, *_, last = (node.name for node in planned().graph.nodes)

    def gather(text: str) -> list[str]:
        own = json.loads(text)
        later = [{"node": first, "micro_batch": 1}, {"node": last, "micro_batch": 0}]
        found = [{**one, **change, "rank": 1} for change in later for one in own["found"]]
        return [json.dumps({**own, "found": found}), text]

    lines = lines_of(states_of(3e38), gather=gather)

    assert lines and all("on rank 0, micro-batch 0" in line for line in lines), lines


def test_where_no_operator_can_be_watched_that_is_said() -> None:
    (line,) = lines_of(states_of(1.0))

    assert "operator by operator, is finite" in line

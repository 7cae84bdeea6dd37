"""The plan as rows of modules and of ops: what travels, for which module, and when."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from math import prod

import pytest
from trainable import plan_step, planned, run_config, run_of

from sbp_core.compile import COMMIT
from sbp_core.graph import InputKind, Phase
from sbp_launch.planning.flow import Planned
from sbp_launch.planning.moves import MoveTime
from sbp_launch.planning.rows import ModuleRow, plan_text
from sbp_launch.planning.utilization import num_parameters
from sbp_launch.settings.config import PluginChoice, RunConfig
from sbp_launch.trainer.run_program import make_program
from sbp_torch.update_options import UpdateOptions


def plan_of(config: RunConfig) -> Planned:
    return plan_step(run_of(config), make_program(run_of(config)))


def wide(planner: str, *, mesh=(2,), axes=("data",), **trainer) -> Planned:
    """Return the plan of the model of residual blocks."""
    config = run_config(mesh, axes, dtype="float64", batch_size=32, **trainer)
    return plan_of(
        replace(
            config,
            model=PluginChoice(name="wide"),
            data=PluginChoice(name="rows"),
            planner=PluginChoice(name=planner),
        )
    )


def moves_of(found: Planned, module: str) -> list[tuple[str, str, str]]:
    """Return when what travels how around a module."""
    row = next(row for row in found.module_rows if row.module == module)
    return [
        (f"{move.when} {move.phase}", move.what, f"{move.kind} {move.how}")
        for move in row.moves
        if move.sent_bytes
    ]


#: Layouts whose tables must account for every byte: of which model, and how it is planned.
PLANS = {
    "replicated": lambda: planned(),
    "micro-batches": lambda: planned(micro_batches=2),
    "clipped": lambda: planned(update=UpdateOptions(clip_norm=1.0)),
    "sharded": lambda: wide("sharding"),
    "two axes": lambda: wide("sharding", mesh=(2, 2), axes=("data", "tensor")),
    "columns and rows": lambda: wide("megatron", axes=("tensor",)),
    "pipeline": lambda: wide("even", axes=("pipe",), micro_batches=4),
    "pipeline of meshes": lambda: wide("even", mesh=(2, 2), axes=("pipe", "data"), micro_batches=2),
}


@cache
def found_plan(name: str) -> Planned:
    """Return the plan of a layout in `PLANS`, made once."""
    return PLANS[name]()


def _bytes_without_commit(plan):
    """The commit of a step belongs to no op."""
    (commit,) = {actor.step for part in plan.ranks for actor in part.actors if actor.name == COMMIT}
    return plan.boxing_bytes - plan.steps[commit].size_bytes


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("name", PLANS)
def test_the_bytes_of_all_rows_are_the_bytes_of_the_plan(name):
    found = found_plan(name)

    of_modules = sum(move.sent_bytes for row in found.module_rows for move in row.moves)
    of_ops = sum(row.sent_bytes for row in found.op_rows)

    assert of_modules == of_ops == _bytes_without_commit(found.plan) > 0


@pytest.mark.parametrize("name", PLANS)
def test_the_parameters_of_all_rows_are_those_of_the_model(name):
    found = found_plan(name)
    parameters = [e.name for e in found.graph.inputs if e.kind is InputKind.PARAMETER]

    of_rows = sum(row.num_parameters for row in found.module_rows)

    assert of_rows == num_parameters(found.graph)
    assert of_rows == sum(prod(found.graph.tensor(name).shape) for name in parameters) > 0


@pytest.mark.parametrize("name", PLANS)
def test_every_module_with_a_parameter_has_one_row(name):
    found = found_plan(name)

    rows = [(row.module, key) for row in found.module_rows for key, _ in row.parameters]
    parameters = [e.name for e in found.graph.inputs if e.kind.value == "parameter"]

    assert sorted(f"{module}.{key}" for module, key in rows) == sorted(parameters)


def test_gradients_travel_before_the_update_of_their_module():
    found = found_plan("replicated")

    assert ("before optimizer", "gradient", "all-reduce over data: P -> B") in moves_of(
        found, "embed"
    )


def test_sharded_parameters_are_gathered_before_both_passes_and_gradients_scattered():
    found = found_plan("sharded")

    head = [move for move in moves_of(found, "head") if move[1] != "output gradient"]
    assert head == [
        ("before forward", "2 parameters", "all-gather over data: S(0) -> B"),
        ("before backward", "parameter", "all-gather over data: S(0) -> B"),
        ("before optimizer", "2 gradients", "reduce-scatter over data: P -> S(0)"),
    ]


def test_sums_of_parts_travel_after_the_module_that_made_the_parts():
    found = found_plan("columns and rows")

    up, down = (moves_of(found, f"blocks.1.{index}") for index in (0, 2))

    assert up == [("after backward", "input gradient", "all-reduce over tensor: P -> B")]
    assert down == [("after forward", "output", "all-reduce over tensor: P -> B")]
    row = next(row for row in found.module_rows if row.module == "blocks.1.2")
    assert row.output == "(B)"  # as it leaves, not as it is made
    assert dict(row.parameters) == {"weight": "(S(1))", "bias": "(B)"}


def test_a_stage_sends_its_output_to_the_next_and_gradients_back():
    found = found_plan("pipeline")

    sent = [
        (row.stage, move.when, move.phase, move.what, move.how)
        for row in found.module_rows
        for move in row.moves
        if move.sent_bytes
    ]

    assert (0, MoveTime.AFTER, Phase.FORWARD, "output", "to stage 1 (rank 1)") in sent
    assert (1, MoveTime.AFTER, Phase.BACKWARD, "input gradient", "to stage 0 (rank 0)") in sent
    assert all(when is MoveTime.AFTER for _, when, *_ in sent)


def test_modules_come_in_the_order_of_the_forward_pass():
    rows = found_plan("sharded").module_rows

    leaves = [row.module for row in rows if row.parameters]

    blocks = [f"blocks.{block}.{index}" for block in range(3) for index in (0, 2)]
    assert leaves == ["first", *blocks, "head"]


def test_a_module_that_only_looks_at_tensors_has_no_row():
    rows: tuple[ModuleRow, ...] = found_plan("replicated").module_rows

    assert [row.module for row in rows] == ["embed", "", "head"]


def test_there_is_a_row_for_every_op_with_its_signature():
    found = found_plan("replicated")

    rows = found.op_rows

    assert [row.name for row in rows] == [n.name for n in found.graph.nodes if not n.is_host]
    embedding = next(row for row in rows if row.op == "embedding.default")
    assert (embedding.inputs, embedding.outputs) == ("(B) (S(0))", "(S(0))")


def test_every_op_is_written_as_text_below_names_that_say_what_is_there():
    found = found_plan("replicated")

    names, *lines = (line.split("\t") for line in plan_text(found.op_rows).splitlines())

    assert names[-3:] == ["boxing_before", "boxing_after", "sent_bytes_all_ranks"]
    assert {len(line) for line in lines} == {len(names)}
    assert sum(int(line[-1]) for line in lines) == _bytes_without_commit(found.plan)
    assert any("all-reduce (P) -> (B)" in line[-3] for line in lines)

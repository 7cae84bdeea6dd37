"""Run edited plans on both runtimes if the checker accepts them.

A plan may name other operators, in any place, with any arguments, and other steps between ranks in
another order. An accepted plan must give the same results on both runtimes, or an error of ours,
and the operators that it calls may only make tensors.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sbp_aten.passes import prepare_step
from sbp_core.cluster import Cluster
from sbp_core.compile import (
    PLAN,
    Actor,
    CompileOptions,
    Compute,
    Instruction,
    PhysicalPlan,
    compile_plan,
)
from sbp_core.errors import SbpError
from sbp_core.graph import Ref, map_refs
from sbp_core.infer import PinValue, infer_strategy
from sbp_core.placement import Placement
from sbp_core.plan_check import check
from sbp_core.planning import PlanRequest
from sbp_core.plugins import discover
from sbp_core.runtime import Number, Runtime, batch_slots, state_slots
from sbp_core.serialize import Document
from sbp_core.testing import files
from sbp_torch.boxing import LocalBackend
from sbp_torch.graph_capture import capture

#: Most elements of a state or batch tensor: plans with larger ones may be correct, but are not run.
MOST_ELEMENTS = 1 << 20

#: Messages of errors that depend on values, not on types; and of kernels that refuse calls which
#: their fake implementations accept.
_OF_VALUES = (
    "out of range",
    "out of bounds",
    "not enough memory",
    "this machine has",
    "GPUs",
    "expected scalar type",
    "must have the same dtype",
    "division by zero",
    "math domain error",
    "Result too large",
)

#: Operators with uninitialized or random results.
_UNDEFINED = ("empty", "rand", "normal", "bernoulli", "multinomial", "resize", "as_strided", "new_")

#: Seconds that an actor may wait for other actors.
_DEADLINE_S = 20.0


class _Block(nn.Module):
    """A small block with the parts of a transformer: tables, norms, softmax, dropout, views."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 4)
        self.norm = nn.LayerNorm(4)
        self.qkv = nn.Linear(4, 12)
        self.head = nn.Linear(4, 8)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.table(tokens)
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        weights = nn.functional.dropout((q @ k.transpose(1, 2)).softmax(dim=-1), 0.1)
        made: torch.Tensor = self.head(x + weights @ v)
        return made


def _loss(model: nn.Module, batch: Any) -> torch.Tensor:
    scores = model(batch["tokens"])
    return nn.functional.cross_entropy(scores.flatten(0, 1), batch["tokens"].flatten())


def plans() -> Sequence[bytes]:
    """Return files of plans: those of the core, and of a captured step, sharded in several ways."""
    model = _Block()
    batch = {"tokens": torch.arange(12).reshape(4, 3) % 8}
    graph = prepare_step(capture(model, _loss, batch, torch.optim.AdamW(model.parameters())), 2)
    found = list(files.KINDS["plan"].originals())
    line, square = Placement.grid((2,), ("data",)), Placement.grid((2, 2), ("data", "tensor"))
    usual, beside = CompileOptions(), CompileOptions(in_place_states=False, boxing_thread=True)
    cut: Mapping[str, PinValue] = {
        "batch": "S(0), B",
        "qkv.weight": "B, S(0)",
        "head.weight": "S(1), S(0)",
    }
    for mesh, pins, options in (
        (line, {"batch": "S(0)"}, usual),
        (line, {"batch": "B", "*.weight": "S(0)"}, usual),
        (line, {"batch": "S(0)", "*.weight": "S(0)"}, beside),
        (square, cut, usual),
    ):
        asked = PlanRequest(graph=graph, mesh=mesh, cluster=Cluster.nominal(mesh.size))
        plan = compile_plan(graph, infer_strategy(asked, planner="fuzz", pins=pins), options)
        found.append(json.dumps(Document.dump(PLAN, plan)).encode())
    return found


class NotRunError(Exception):
    """A plan that the checker accepts does not run."""


def run_plan(path: Path) -> None:
    """Read a plan, check it, and run two steps on each runtime.

    Raises:
        SbpError: the plan is refused.
        NotRunError: it is accepted, but does not run, or the runtimes give different values.
    """
    plan = PLAN.read(path)
    check(plan)
    if not _is_small(plan):
        return
    found = [_ran(plan, name) for name in ("reference", "actor")]
    if any(isinstance(one, SbpError) for one in found) or not _is_defined(plan):
        # If one runtime refuses a value, the other may not have reached it.
        return
    if not _are_equal(*found):
        raise NotRunError("the runtimes come to different values")
    if not _are_equal(found[0], _ran(_beside(plan), "reference")):
        raise NotRunError("values depend on which states are overwritten in place")


def _beside(plan: PhysicalPlan) -> PhysicalPlan:
    """Return the plan with new states in new memory, which must not change its results.

    before: w <- mul_(w, 2)       after: c = clone(w); w <- mul_(c, 2)
    """
    ranks = (replace(part, actors=tuple(map(_on_copies, part.actors))) for part in plan.ranks)
    return replace(plan, ranks=tuple(ranks))


def _on_copies(actor: Actor) -> Actor:
    """Return an actor that overwrites copies of states."""
    if not isinstance(actor, Compute):
        return replace(actor, in_place=()) if actor.in_place else actor
    copies = {state: f"copy of {state}" for state in actor.in_place if state in actor.reads}

    def copied(ref: Ref) -> Ref:
        return Ref(copies.get(ref.name, ref.name))

    calls = [
        Instruction(op="aten.clone.default", args=(Ref(state),), outputs=(copy,))
        for state, copy in copies.items()
    ]
    for call in actor.instructions:
        kwargs = {name: map_refs(value, copied) for name, value in call.kwargs.items()}
        calls.append(replace(call, args=map_refs(call.args, copied), kwargs=kwargs))
    return replace(actor, in_place=(), instructions=tuple(calls))


def _ran(plan: PhysicalPlan, name: str) -> Mapping[str, torch.Tensor] | SbpError:
    """Return the states after two steps and their results, or the error for refused values."""
    made: dict[str, torch.Tensor] = {}
    try:
        with _runtime(name).start(plan, _states(plan), LocalBackend()) as session:
            for step in range(2):
                came = session.step(_batch(plan), {**_scalars(plan), "seed": 1, "step": step})
                made |= {f"{key} of step {step}": value for key, value in came.outputs.items()}
            made |= session.state_dict()
    except SbpError as error:
        if not any(word in str(error) for word in _OF_VALUES):
            raise NotRunError(f"on the runtime {name!r}: {error}") from error
        return error
    return made


def _is_defined(plan: PhysicalPlan) -> bool:
    ops = {
        call.op
        for part in plan.ranks
        for actor in part.actors
        if isinstance(actor, Compute)
        for call in actor.instructions
    }
    return not any(word in op for op in ops for word in _UNDEFINED)


def _are_equal(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(value.nan_to_num(), other[name].nan_to_num()) for name, value in one.items()
    )


@cache
def _runtime(name: str) -> Runtime:
    settings = {"first_deadline_s": _DEADLINE_S, "deadline_s": _DEADLINE_S}
    made = discover().make("runtime", name, settings if name == "actor" else {})
    assert isinstance(made, Runtime)
    return made


def _is_small(plan: PhysicalPlan) -> bool:
    slots = [slot for part in plan.ranks for slot in part.slots]
    shapes = [*(slot.shape for slot in slots), *(step.shape for step in plan.steps)]
    return all(prod(shape) <= MOST_ELEMENTS for shape in shapes)


def _states(plan: PhysicalPlan) -> dict[str, torch.Tensor]:
    return {
        tied: _ramp(slot.shape, slot.dtype)
        for name, slot in state_slots(plan).items()
        for tied in plan.ties.get(name, (name,))
    }


def _batch(plan: PhysicalPlan) -> dict[str, torch.Tensor]:
    count = plan.num_micro_batches
    return {
        name: _ramp((slot.shape[0] * count, *slot.shape[1:]) if slot.shape else (), slot.dtype)
        for name, slot in batch_slots(plan).items()
    }


def _scalars(plan: PhysicalPlan) -> dict[str, Number]:
    return {slot.name: 1.0 for part in plan.ranks for slot in part.slots if slot.sbp is None}


def _ramp(shape: tuple[int, ...], dtype: str) -> torch.Tensor:
    """Return numbers whose neighbours differ: 0 and 1, or small ones that divide exactly."""
    places = torch.arange(prod(shape)).reshape(shape)
    is_whole = dtype.startswith(("int", "uint", "bool"))
    return (places % 2 if is_whole else (places % 7 + 1) / 8).to(getattr(torch, dtype))

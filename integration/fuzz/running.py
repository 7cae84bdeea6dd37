"""Plans that somebody edited, run on the reference runtime if the checker accepts them.

A plan may name other operators, in any place, with any arguments: what is accepted gives a result
or an error of ours, and what it may call makes tensors and nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from copy import deepcopy
from functools import cache
from math import prod
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import nn

from sbp_aten.passes import prepare_step
from sbp_core.check import check
from sbp_core.cluster import Cluster
from sbp_core.compile import PLAN, PhysicalPlan, compile_plan
from sbp_core.errors import SbpError
from sbp_core.infer import infer_strategy
from sbp_core.placement import Placement
from sbp_core.plugins import PlanRequest, discover
from sbp_core.runtime import Number, Runtime, batch_slots, state_slots
from sbp_core.testing import files
from sbp_core.testing.edits import edited
from sbp_torch.capture import capture

#: Elements of a state or batch tensor, at most: larger ones are right, and not run here.
MOST_ELEMENTS = 1 << 20

#: What runs may refuse for the values that they meet, which no type says; and what kernels do not
#: take although PyTorch calls them without data.
_OF_VALUES = (
    "out of range",
    "out of bounds",
    "not enough memory",
    "this machine has",
    "GPUs",
    "expected scalar type",
    "division by zero",
    "math domain error",
    "Result too large",
)

#: What an operator might be made to reach.
_REACHING = (
    "aten.save.default", "aten.from_file.default", "aten.copy_.default",
    "aten.resize_.default", "aten.set_.source_Tensor", "aten._foobar.default",
    "prim.Print.default", "host.pow", "host.eval", "host.item", "c10d.barrier.default",
    "sbp.local_box", "profiler._record_function_enter.default", "sbp.accumulate",
    "sbp.after", "sbp.fused_adam_", "aten.add_.Tensor", "os.system", "__import__",
    "aten.as_strided.default", "aten.empty.memory_format", "aten.nonzero.default",
    "aten.mm.default",
)  # fmt: skip

_ARGUMENTS: tuple[Any, ...] = (
    0, 1, -1, 2**40, 2**63 - 1, 1.5, None, True, "x", "/etc/passwd", [], [1 << 40], [[]],
    {"dtype": "float32"}, {"dtype": "os"}, {"device": "meta"}, {"device": "cuda"},
    {"layout": "sparse_coo"}, {"memory_format": "channels_last"}, {"dtype": "nothing; import os"},
)  # fmt: skip


@cache
def _operators() -> tuple[str, ...]:
    """Return operators of all kinds that torch has."""
    names = [schema.replace("::", ".") for schema in torch._C._dispatch_get_all_op_names()]
    aten = [name if name.count(".") > 1 else f"{name}.default" for name in names]
    return (*sorted(aten), *_REACHING * 20)


class _Block(nn.Module):
    """Of all that transformers have, a little: tables, norms, softmax, dropout, views."""

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
    """Return files of plans: of the core, and of a captured step with and without a split batch."""
    model = _Block()
    batch = {"tokens": torch.arange(12).reshape(4, 3) % 8}
    graph = prepare_step(capture(model, _loss, batch, torch.optim.AdamW(model.parameters())), 2)
    found = list(files.KINDS["plan"].originals())
    for pins in ({"batch": "S(0)"}, {"batch": "B", "*.weight": "S(0)"}):
        mesh = Placement.grid((2,), ("data",))
        asked = PlanRequest(graph=graph, mesh=mesh, cluster=Cluster.nominal(2))
        plan = compile_plan(graph, infer_strategy(asked, planner="fuzz", pins=pins))
        found.append(json.dumps(PLAN.dump(plan)).encode())
    return found


def edited_plan(value: Any, random: Random) -> Any:
    """Return a plan with one edit: of an operator or its arguments, or of anything."""
    if not isinstance(value, dict) or random.random() < 0.4:
        return edited(value, random)
    copy = deepcopy(value)
    calls = list(_calls(copy))
    if not calls:
        return edited(value, random)
    call, other = random.choice(calls), random.choice(calls)
    args = call.setdefault("args", [])
    kind = random.randrange(6)
    if kind == 0:
        call["op"] = random.choice(_operators())
    elif kind == 1:
        call["op"] = other.get("op", "")
    elif kind == 2 and isinstance(args, list) and args:
        args[random.randrange(len(args))] = random.choice(_ARGUMENTS)
    elif kind == 3 and isinstance(args, list):
        args.insert(random.randrange(len(args) + 1), random.choice(_ARGUMENTS))
    elif kind == 4:
        call["kwargs"] = {random.choice(["dim", "out", "dtype", "size", "x; y"]): 0}
    else:
        call["args"] = deepcopy(other.get("args", []))
    return copy


def _calls(value: Any) -> Iterator[dict[str, Any]]:
    """Yield the instructions of a plan, whatever it has become."""
    if isinstance(value, dict):
        if "op" in value:
            yield value
        for part in value.values():
            yield from _calls(part)
    elif isinstance(value, list):
        for part in value:
            yield from _calls(part)


class NotRunError(Exception):
    """A plan that the checker accepts, and that does not run."""


def run_plan(path: Path) -> None:
    """Read a plan, check it, and run two steps.

    Raises:
        SbpError: it is refused.
        NotRunError: it is accepted, and does not run.
    """
    plan = PLAN.read(path)
    check(plan)
    if not _is_small(plan):
        return
    try:
        _run(plan)
    except SbpError as error:
        if not any(word in str(error) for word in _OF_VALUES):
            raise NotRunError(str(error)) from error


def _run(plan: PhysicalPlan) -> None:
    with _runtime().start(plan, _states(plan)) as session:
        for step in range(2):
            session.step(_batch(plan), {**_scalars(plan), "seed": 1, "step": step})
        session.state_dict()


@cache
def _runtime() -> Runtime:
    made: Runtime = discover().make("runtime", "reference")
    return made


def _is_small(plan: PhysicalPlan) -> bool:
    slots = [slot for part in plan.ranks for slot in part.slots]
    shapes = [*(slot.shape for slot in slots), *(step.shape for step in plan.steps)]
    return all(prod(shape) <= MOST_ELEMENTS for shape in shapes)


def _states(plan: PhysicalPlan) -> dict[str, torch.Tensor]:
    return {
        tied: _ones(slot.shape, "float32" if slot.sbp is None else slot.dtype)
        for name, slot in state_slots(plan).items()
        for tied in plan.ties.get(name, (name,))
    }


def _batch(plan: PhysicalPlan) -> dict[str, torch.Tensor]:
    count = plan.num_micro_batches
    return {
        name: _ones((slot.shape[0] * count, *slot.shape[1:]) if slot.shape else (), slot.dtype)
        for name, slot in batch_slots(plan).items()
    }


def _scalars(plan: PhysicalPlan) -> dict[str, Number]:
    return {slot.name: 1.0 for part in plan.ranks for slot in part.slots if slot.sbp is None}


def _ones(shape: tuple[int, ...], dtype: str) -> torch.Tensor:
    return torch.ones(shape, dtype=getattr(torch, dtype))

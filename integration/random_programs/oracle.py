"""Decide whether a refusal is right: by the flags of a program's blocks, and by execution.

A block without a flag keeps samples apart or adds them up, so the loss is a mean, a sum or a ratio
of sums over samples: refusing it is wrong. Execution is more precise. The gradient of the whole
batch may be a linear combination of the gradients of its parts although a block has a flag, for
example for the root of a mean:

    d sqrt(mean(e)) = sum_i c_i d sqrt(mean(e_i)),    c_i = sqrt(mean(e_i)) / (M sqrt(mean(e)))
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from random_programs.program import ONE_RANK, Program
from random_programs.trial import Outcome, attempt, executed, quiet

#: Largest fraction of a gradient that no combination of the gradients of parts explains.
_RESIDUAL = 1e-7


def judged(program: Program, outcome: Outcome) -> Outcome:
    """Return an outcome whose kind classifies a refusal.

    It stays `refused` if the loss does not follow from its parts. It is `possible` if execution
    shows that the loss does follow although blocks have flags. It is `refused here` if one rank
    runs the program, but its layout does not fit; and a `wrong refusal` otherwise.
    """
    if outcome.kind != "refused":
        return outcome
    meanings = program.meanings
    if "capture" in meanings:
        return outcome
    if meanings and program.micro_batches > 1:
        return replace(outcome, kind="possible") if follows(program) else outcome
    alone = replace(program, layout=ONE_RANK)
    if program.layout != ONE_RANK and attempt(alone).kind == "equal":
        return replace(outcome, kind="refused here")
    return replace(outcome, kind="wrong refusal")


def follows(program: Program) -> bool | None:
    """Return whether gradients of each term are combinations of the gradients of batch parts.

    Returns:
        None if this cannot be decided: there are fewer elements of parameters than parts, a part
        has no valid sample, or there are only penalties on parameters, which each part has whole.
    """
    terms = [term for term in program.terms if "model" not in term.value]
    found = [_term_follows(replace(program, terms=(term,), metrics=())) for term in terms]
    return None if None in found or not found else all(found)


def _term_follows(program: Program) -> bool | None:
    num_parts = program.micro_batches
    with quiet():
        names = executed(program.source)
        batch = names["make_batch"](0)
        whole = _gradient(names, batch)
        try:
            parts = [
                _gradient(names, tree_map(lambda v, at=at: _part(v, at, num_parts), batch))
                for at in range(num_parts)
            ]
        except Exception:  # for example an index of a sample in another part
            return False
    found = torch.stack(parts, 1)
    if len(whole) <= num_parts or not (whole.isfinite().all() and found.isfinite().all()):
        return None
    found = found / found.norm(dim=0).clamp(min=1e-300)  # large and small parts count equally
    weights = torch.linalg.lstsq(found, whole[:, None], driver="gelsd").solution
    residual = (found @ weights - whole[:, None]).norm()
    return bool(residual <= _RESIDUAL * whole.norm().clamp(min=1e-6))


def _part(value: Tensor, at: int, num_parts: int) -> Tensor:
    return value.chunk(num_parts)[at] if value.dim() else value


def _gradient(names: Mapping[str, Any], batch: Any) -> Tensor:
    model = names["make_model"]()
    parameters = [p for p in model.parameters() if p.requires_grad]
    loss = names["loss"](model, batch)
    if not loss.requires_grad:
        return torch.zeros(1)
    grads = torch.autograd.grad(loss, parameters, allow_unused=True)
    pairs = zip(parameters, grads, strict=True)
    return torch.cat(
        [torch.zeros_like(p).flatten() if g is None else g.flatten() for p, g in pairs]
    )

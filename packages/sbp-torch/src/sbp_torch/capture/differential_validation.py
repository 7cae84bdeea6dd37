"""Whether what we made of a user's optimizer does what the optimizer does: a few steps of both.

Whose code we do not know may keep what we would not see, or begin otherwise than its first step
shows. So it steps on small stand-ins, as eager PyTorch would run it, beside our function of its
states; any difference is refused before anything starts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sbp_core.errors import CaptureError
from sbp_torch.capture.optimizer_clones import (
    PLAIN,
    SMALL,
    check_states,
    is_known,
    over,
    own_attributes,
    plain_step,
    small_shape,
    snapshot,
)
from sbp_torch.capture.optimizer_states import failed_step
from sbp_torch.capture.parameter_group import ParameterGroup
from sbp_torch.capture.user_optimizer import OwnCode, in_place
from sbp_torch.update_options import UpdateOptions

#: Extent of the dims of stand-ins, at most: more than what first states were told from.
_EXTENT = SMALL + 2

#: What the learning rate is multiplied by, step by step.
_RATES = (1.0, 0.5, 2.0, 1.0, 0.25, 1.0)

#: Steps that an optimizer takes before, if the user's has stepped.
_BEFORE = 2

#: Largest difference, in units in the last place of the largest number: both do the same, but ours
#: counts in float64.
_ULPS = 256.0


def rehearse(optimizer: torch.optim.Optimizer) -> None:
    """Step an optimizer of the user's own code beside our function of its states.

    Args:
        optimizer: Over parameters that may lie on the `meta` device; stays as it is.

    Raises:
        CaptureError: they differ; a step fails; or it changes what is no state of a parameter.
    """
    if is_known(optimizer):
        return
    trained = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    stepped = [bool(optimizer.state.get(parameter)) for parameter in trained]
    with torch.random.fork_rng(devices=()), torch.no_grad():
        if not all(stepped):
            _Rehearsal(optimizer, before=0).run()
        if any(stepped):
            _Rehearsal(optimizer, before=_BEFORE).run()


@dataclass(frozen=True, slots=True)
class _Cast:
    """An optimizer over small stand-ins, by name."""

    optimizer: torch.optim.Optimizer
    members: dict[str, Tensor]


def _cast(optimizer: torch.optim.Optimizer) -> _Cast:
    """Return a twin over one stand-in for each shape, dtype and group; always the same numbers."""
    source = torch.Generator().manual_seed(0)
    members: dict[str, Tensor] = {}

    def swapped(parameters: list[Tensor]) -> list[Tensor]:
        found: dict[object, Tensor] = {}
        for parameter in parameters:
            shape = small_shape(parameter.shape, _EXTENT)
            kind = (shape, parameter.dtype, parameter.requires_grad)
            if kind not in found:
                values = torch.randn(shape, generator=source).to(parameter.dtype)
                found[kind] = members[f"p{len(members)}"] = values.requires_grad_(kind[2])
        return list(found.values())

    twin = over(optimizer, swapped)
    for group in twin.param_groups:
        group |= {key: value for key, value in PLAIN.items() if key in group}
    return _Cast(twin, members)


class _Rehearsal:
    """Both on stage.

    Args:
        optimizer: The user's.
        before: Steps that it has taken when ours begins.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, before: int) -> None:
        self.name = type(optimizer).__name__
        self.theirs, self.ours = _cast(optimizer), _cast(optimizer)
        self.source = torch.Generator().manual_seed(1)
        self.before = before
        self.rates = [
            {"lr": group["lr"]} if group.get("lr") is not None else {}
            for group in self.theirs.optimizer.param_groups
        ]

    def run(self) -> None:
        for index in range(self.before):
            self._step_theirs(index, self._gradients())
        groups = self._groups()
        code = OwnCode(self.ours.optimizer, groups)
        held = dict(self.ours.members)
        states = {
            f"{name}.{key}": value.clone()
            for group in groups
            for name, own in group.states.items()
            for key, value in own.items()
        }
        for index in range(self.before, len(_RATES)):
            grads = self._gradients()
            self._step_theirs(index, grads)
            scalars = {
                name: torch.tensor(value * _RATES[index], dtype=torch.float64)
                for group in groups
                for name, value in group.scalar_values().items()
            }
            torch.manual_seed(index)
            code.step(held, {name: grad.clone() for name, grad in grads.items()}, states, scalars)
            self._compare(index, held, states)

    def _groups(self) -> list[ParameterGroup]:
        """Return our groups, over copies of what theirs are now."""
        ours, theirs = self.ours, self.theirs
        names = {id(p): name for name, p in ours.members.items()}
        for name, member in theirs.members.items():
            own = ours.members[name]
            own.copy_(member)
            if member in theirs.optimizer.state:
                ours.optimizer.state[own] = {
                    key: value.clone() if isinstance(value, Tensor) else value
                    for key, value in theirs.optimizer.state[member].items()
                }
        return [
            ParameterGroup(
                ours.optimizer,
                index,
                {names[id(p)]: p for p in group["params"]},
                f".{index}",
                UpdateOptions(),
            )
            for index, group in enumerate(ours.optimizer.param_groups)
        ]

    def _gradients(self) -> dict[str, Tensor]:
        return {
            name: torch.randn(member.shape, generator=self.source).to(member.dtype)
            for name, member in self.theirs.members.items()
            if member.requires_grad
        }

    def _step_theirs(self, index: int, grads: Mapping[str, Tensor]) -> None:
        optimizer, members = self.theirs.optimizer, self.theirs.members
        for name, member in members.items():
            member.grad = grads[name].clone() if name in grads else None
        for group, rates in zip(optimizer.param_groups, self.rates, strict=True):
            group |= {key: value * _RATES[index] for key, value in rates.items()}
        before = self._beside_states()
        torch.manual_seed(index)
        with in_place(self.name, list(members.values())):
            try:
                plain_step(optimizer)(optimizer)
            except Exception as error:
                raise failed_step(optimizer, next(iter(members.values())), error) from error
        check_states(optimizer)
        self._check_beside(before)

    def _beside_states(self) -> dict[str, Any]:
        """Return what a step must not change, by what it is called."""
        optimizer = self.theirs.optimizer
        found = {
            f"{self.name}.{name}": snapshot(value)
            for name, value in own_attributes(optimizer).items()
        }
        for index, group in enumerate(optimizer.param_groups):
            for key, value in group.items():
                kept = [id(p) for p in value] if key == "params" else snapshot(value)
                found[f"the setting {key!r} of group {index} of {self.name}"] = kept
        return found

    def _check_beside(self, before: Mapping[str, Any]) -> None:
        after = self._beside_states()
        for what in before.keys() | after.keys():
            if what in before and what in after and before[what] == after[what]:
                continue
            raise CaptureError(
                f"a step changes {what}, which no graph keeps",
                accepted="steps that change parameters and self.state[parameter]",
                todo="keep what changes in self.state[parameter], such as the number of the step",
            )

    def _compare(
        self, index: int, held: Mapping[str, Tensor], states: Mapping[str, Tensor]
    ) -> None:
        for name, member in self.theirs.members.items():
            shape = tuple(member.shape)
            for what, theirs, ours in self._pairs(name, held, states):
                apart = _apart(theirs, ours)
                if not apart:
                    continue
                raise CaptureError(
                    f"{self.name} cannot be captured: after {index - self.before + 1} steps {what} "
                    f"of shape {shape} {apart}, told from its first step"
                    + (" now" if self.before else ""),
                    where=f"group {self._group_of(member)} of the optimizer",
                    accepted="a first step that makes states as later steps would find them, and "
                    "is then like any other",
                    todo="write `if not state: state[key] = torch.zeros_like(p)` before the states "
                    "are used; or take one step with it before capture",
                )

    def _pairs(
        self, name: str, held: Mapping[str, Tensor], states: Mapping[str, Tensor]
    ) -> Iterator[tuple[str, Any, Any]]:
        """Return what is to be equal: what it is, theirs, and ours."""
        member = self.theirs.members[name]
        kept = self.theirs.optimizer.state.get(member, {}) if member.requires_grad else {}
        for key, value in kept.items():
            ours = states.get(f"{name}.{key}")
            if isinstance(value, Tensor) or ours is not None:
                yield f"the state {key!r} of a parameter", value, ours
        yield "a parameter", member, held[name]

    def _group_of(self, member: Tensor) -> int:
        groups = self.theirs.optimizer.param_groups
        return next(
            at for at, group in enumerate(groups) if any(p is member for p in group["params"])
        )


def _apart(theirs: Any, ours: Any) -> str:
    """Return how two values differ, beyond rounding; or nothing."""
    if ours is None:
        return "is missing"
    left, right = torch.as_tensor(theirs).detach(), torch.as_tensor(ours).detach()
    if left.shape != right.shape:
        return f"has shape {tuple(right.shape)} instead of {tuple(left.shape)}"
    if not left.numel() or left.equal(right):
        return ""
    dtype = left.dtype if left.is_floating_point() or left.is_complex() else torch.float64
    wide = torch.complex128 if left.is_complex() else torch.float64
    left, right = left.to(wide), right.to(wide)
    most = left.abs()[left.isfinite()].amax() if left.isfinite().any() else left.abs().new_zeros(())
    tolerance = _ULPS * torch.finfo(dtype).eps * float(most)
    if torch.allclose(left, right, rtol=0.0, atol=tolerance, equal_nan=True):
        return ""
    return f"is off by {float((left - right).abs().max()):.3g} of {float(most):.3g}"

"""Differential validation of users' optimizers: a few steps in eager PyTorch and as our function.

An unknown optimizer may keep hidden state, or begin differently from what its first step shows. So
before training, two clones of it take the same steps on equal small stand-ins of parameters, with
equal gradients and learning rates. Any difference is an error:

    step              0    1    2    3    4    5
    eager clone       x    x    x    x    x    x       run by PyTorch
    traced clone      x    x    x    x    x    x       as a function of its states
    if the optimizer has stepped, from copies of the eager clone's states after step 1:
    traced clone                x    x    x    x
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from sbp_core.errors import CaptureError
from sbp_torch.graph_capture.optimizer_clones import (
    PLAIN,
    SMALL,
    attributes_of,
    check_states,
    clone_over,
    is_known,
    plain_step,
    small_shape,
    snapshot,
)
from sbp_torch.graph_capture.optimizer_states import failed_step
from sbp_torch.graph_capture.traced_optimizer import ParameterGroup, TracedOptimizer, in_place_only
from sbp_torch.update_options import UpdateOptions

#: Largest extent of a dim of stand-ins: larger than in the derivation of initial states.
_EXTENT = SMALL + 2

#: The factors of the learning rate, step by step.
_RATES = (1.0, 0.5, 2.0, 1.0, 0.25, 1.0)

#: Eager steps before the traced clone begins, if the user's optimizer has stepped.
_WARM_UP = 2

#: Largest difference, in units in the last place of the largest number. Both clones compute the
#: same, but the traced clone counts steps in float64.
_ULPS = 256.0


def check_against_eager(optimizer: torch.optim.Optimizer) -> None:
    """Check that our function of an optimizer's states computes the same as the eager optimizer.

    Optimizers of `torch.optim` and of `sbp_torch.optim` are known to, and are not run.

    Args:
        optimizer: The optimizer, which is not changed. Its parameters may be on the `meta` device.

    Raises:
        CaptureError: the results differ; a step fails; or a step changes an object that is no state
            of a parameter.
    """
    if is_known(optimizer):
        return
    trained = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    stepped = [bool(optimizer.state.get(parameter)) for parameter in trained]
    with torch.random.fork_rng(devices=()), torch.no_grad():
        # Parameters without states will take a first step, parameters with states will not. If an
        # optimizer has both kinds, both cases are tried.
        if not all(stepped):
            _Comparison(optimizer, warm_up=0).run()
        if any(stepped):
            _Comparison(optimizer, warm_up=_WARM_UP).run()


#: An optimizer over small stand-ins, and the stand-ins by name.
_SmallClone = tuple[torch.optim.Optimizer, dict[str, Tensor]]


def _small_clone(optimizer: torch.optim.Optimizer) -> _SmallClone:
    """Return a clone over one stand-in for each shape, dtype and group, with fixed numbers."""
    random = torch.Generator().manual_seed(0)
    members: dict[str, Tensor] = {}

    def stand_ins(parameters: list[Tensor]) -> list[Tensor]:
        found: dict[object, Tensor] = {}
        for parameter in parameters:
            shape = small_shape(parameter.shape, _EXTENT)
            # Optimizers depend on shapes, dtypes and groups: one stand-in of each kind is enough
            # for a model of any size. Both clones draw from generators of the same seed.
            kind = (shape, parameter.dtype, parameter.requires_grad)
            if kind not in found:
                values = torch.randn(shape, generator=random).to(parameter.dtype)
                found[kind] = members[f"p{len(members)}"] = values.requires_grad_(kind[2])
        return list(found.values())

    clone = clone_over(optimizer, stand_ins)
    for group in clone.param_groups:
        group |= {key: value for key, value in PLAIN.items() if key in group}
    return clone, members


class _Comparison:
    """The steps of an eager and a traced clone, side by side.

    Args:
        optimizer: The user's optimizer.
        warm_up: Steps of the eager clone before the traced clone begins.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, warm_up: int) -> None:
        self.name = type(optimizer).__name__
        self.eager, self.members = _small_clone(optimizer)
        self.traced, self.traced_members = _small_clone(optimizer)
        self.random = torch.Generator().manual_seed(1)
        self.warm_up = warm_up
        self.rates = [
            {"lr": group["lr"]} if group.get("lr") is not None else {}
            for group in self.eager.param_groups
        ]

    def run(self) -> None:
        for index in range(self.warm_up):
            self._step_eager(index, self._gradients())
        # The traced clone begins with copies of the present states of the eager clone.
        names = {id(p): name for name, p in self.traced_members.items()}
        for name, member in self.members.items():
            own = self.traced_members[name]
            own.copy_(member)
            if member in self.eager.state:
                self.traced.state[own] = {
                    key: value.clone() if isinstance(value, Tensor) else value
                    for key, value in self.eager.state[member].items()
                }
        groups = [
            ParameterGroup(
                self.traced,
                index,
                {names[id(p)]: p for p in group["params"]},
                f".{index}",
                UpdateOptions(),
            )
            for index, group in enumerate(self.traced.param_groups)
        ]
        traced = TracedOptimizer(self.traced, groups)
        parameters = dict(self.traced_members)
        states = {
            f"{name}.{key}": value.clone()
            for group in groups
            for name, own in group.states.items()
            for key, value in own.items()
        }
        for index in range(self.warm_up, len(_RATES)):
            grads = self._gradients()
            self._step_eager(index, grads)
            scalars = {
                name: torch.tensor(value * _RATES[index], dtype=torch.float64)
                for group in groups
                for name, value in group.scalar_values().items()
            }
            # Both get the same random numbers, if a step draws any.
            torch.manual_seed(index)
            # A step may write to gradients, so the eager clone gets its own copies, too.
            copies = {name: grad.clone() for name, grad in grads.items()}
            traced.step(parameters, copies, states, scalars)
            self._compare(index, parameters, states)

    def _gradients(self) -> dict[str, Tensor]:
        return {
            name: torch.randn(member.shape, generator=self.random).to(member.dtype)
            for name, member in self.members.items()
            if member.requires_grad
        }

    def _step_eager(self, index: int, grads: Mapping[str, Tensor]) -> None:
        optimizer, members = self.eager, self.members
        for name, member in members.items():
            member.grad = grads[name].clone() if name in grads else None
        # Changing rates reveal an optimizer that reads its setting only in the first step.
        for group, rates in zip(optimizer.param_groups, self.rates, strict=True):
            group |= {key: value * _RATES[index] for key, value in rates.items()}
        before = self._not_states()
        torch.manual_seed(index)
        with in_place_only(self.name, list(members.values())):
            try:
                plain_step(optimizer)(optimizer)
            except Exception as error:
                raise failed_step(optimizer, next(iter(members.values())), error) from error
        check_states(optimizer)
        after = self._not_states()
        for what in before.keys() | after.keys():
            if what in before and what in after and before[what] == after[what]:
                continue
            raise CaptureError(
                f"a step changes {what}, which no graph keeps",
                accepted="steps that change parameters and self.state[parameter]",
                todo="keep what changes in self.state[parameter], such as the number of the step",
            )

    def _not_states(self) -> dict[str, Any]:
        """Return the objects that a step must not change, by name."""
        optimizer = self.eager
        found = {
            f"{self.name}.{name}": snapshot(value)
            for name, value in attributes_of(optimizer).items()
        }
        for index, group in enumerate(optimizer.param_groups):
            for key, value in group.items():
                now = [id(p) for p in value] if key == "params" else snapshot(value)
                found[f"the setting {key!r} of group {index} of {self.name}"] = now
        return found

    def _compare(
        self, index: int, parameters: Mapping[str, Tensor], states: Mapping[str, Tensor]
    ) -> None:
        for name, member in self.members.items():
            own = self.eager.state.get(member, {}) if member.requires_grad else {}
            # Values to compare: the name, the eager clone's value, the traced clone's value.
            pairs = [
                (f"the state {key!r} of a parameter", value, states.get(f"{name}.{key}"))
                for key, value in own.items()
            ]
            pairs = [one for one in pairs if isinstance(one[1], Tensor) or one[2] is not None]
            pairs.append(("a parameter", member, parameters[name]))
            for what, eager, traced in pairs:
                difference = _difference(eager, traced)
                if not difference:
                    continue
                groups = enumerate(self.eager.param_groups)
                at = next(at for at, g in groups if any(p is member for p in g["params"]))
                raise CaptureError(
                    f"{self.name} cannot be captured: after {index - self.warm_up + 1} steps "
                    f"{what} of shape {tuple(member.shape)} {difference}, predicted from its first "
                    + ("step now" if self.warm_up else "step"),
                    where=f"group {at} of the optimizer",
                    accepted="a first step that makes states as later steps would find them, and "
                    "is then like any other",
                    todo="write `if not state: state[key] = torch.zeros_like(p)` before the states "
                    "are used; or take one step with it before capture",
                )


def _difference(eager: Any, traced: Any) -> str:
    """Return how two values differ beyond rounding, or ""."""
    if traced is None:
        return "is missing"
    left, right = torch.as_tensor(eager).detach(), torch.as_tensor(traced).detach()
    if left.shape != right.shape:
        return f"has shape {tuple(right.shape)} instead of {tuple(left.shape)}"
    if not left.numel() or left.equal(right):
        return ""
    dtype = left.dtype if left.is_floating_point() or left.is_complex() else torch.float64
    wide = torch.complex128 if left.is_complex() else torch.float64
    left, right = left.to(wide), right.to(wide)
    # Relative to the largest number, because sums that cancel may lose all their digits.
    most = left.abs()[left.isfinite()].amax() if left.isfinite().any() else left.abs().new_zeros(())
    tolerance = _ULPS * torch.finfo(dtype).eps * float(most)
    if torch.allclose(left, right, rtol=0.0, atol=tolerance, equal_nan=True):
        return ""
    return f"is off by {float((left - right).abs().max()):.3g} of {float(most):.3g}"

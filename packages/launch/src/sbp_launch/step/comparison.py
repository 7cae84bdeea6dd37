"""Compare the first training steps with the same program on one device, which rank 0 runs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from sbp_core.errors import ConfigError
from sbp_launch.planning.flow import Planned
from sbp_launch.planning.one_device import EagerReference
from sbp_launch.step.engine import Engine
from sbp_launch.step.program import OneDeviceProgram
from sbp_torch.interchange.torch_states import copy_to_model, to_optimizer_state

#: Settings of a parameter group that are single numbers, and scalars of an update.
_NUMBERS = ("lr", "weight_decay", "momentum")


class OneDeviceComparison:
    """Copies of model and optimizer that take the first steps too, on one device.

    Args:
        program: The program that is copied; it is not changed.
        planned: Its plan.
        engine: The ranks that train it.
        num_steps: Number of steps to compare.
        make: Returns a new model and optimizer of the same structure, with any values; None to
            copy those of the program. With it, the caller also provides whole batches.

    Raises:
        ConfigError: the model has no values to be copied, or rank 0 is not given whole batches.
    """

    def __init__(
        self,
        program: OneDeviceProgram,
        planned: Planned,
        engine: Engine,
        num_steps: int,
        make: Callable[[], tuple[nn.Module, torch.optim.Optimizer]] | None = None,
    ) -> None:
        has_values = not any(one.is_meta for one in program.model.parameters())
        if make is None and (engine.gives_parts or not has_values):
            what = "each process gives its own part" if has_values else "the model has no values"
            raise ConfigError(
                f"compare_steps={num_steps}, and {what}",
                where="the argument compare_steps",
                accepted="a model with values, and batch_is='global'",
                todo="leave out compare_steps, or make a run of few steps so",
            )
        self._program, self._planned, self._engine = program, planned, engine
        self._left, self._make = num_steps, make
        #: Whether rank 0 has made the copies; the same value on all ranks.
        self.has_begun = False
        self._reference: EagerReference | None = None

    @property
    def is_due(self) -> bool:
        """Whether the next step is compared."""
        return self._left > 0

    def begin(self, states: Mapping[str, Tensor], num_done: int) -> None:
        """Make the copies, on rank 0.

        Args:
            states: The whole states with which the next step begins; empty on other ranks.
            num_done: Number of steps taken before.
        """
        self.has_begun = True
        if not states:
            return
        if self._make is not None:
            model, optimizer = self._make()
        else:
            model, optimizer = copy.deepcopy((self._program.model, self._program.optimizer))
            # Schedulers put a `step` there that is bound to the original optimizer.
            vars(optimizer).pop("step", None)
        copy_to_model(states, model)
        optimizer.load_state_dict(to_optimizer_state(states, model, optimizer))
        self._reference = EagerReference(
            model,
            self._program.loss_of_step,
            optimizer,
            self._planned.settings,
            self._engine.seed,
            self._planned.plan.staleness,
            num_done,
        )

    def forget(self) -> None:
        """Make new copies, with the then current states, before the next step is compared."""
        self.has_begun = False

    def step(self, batch: Callable[[], Any], loss: float, scalars: Mapping[str, float]) -> None:
        """Take the step of the ranks with the copies, too, if this process has them.

        Args:
            batch: Returns the whole batch.
            loss: The loss that the ranks computed.
            scalars: The scalars of the update, by name.
        """
        self._left -= 1
        if self._reference is None:
            return
        groups = self._program.optimizer.param_groups
        self._reference.step(
            batch(),
            loss,
            [
                _settings(group, "" if len(groups) == 1 else f".{index}", scalars)
                for index, group in enumerate(groups)
            ],
        )

    def lines(self) -> list[str]:
        """Return the lines of the report; none before the first step."""
        if self._reference is None or not self._reference.losses:
            return []
        return self._reference.verdict().splitlines()


def _settings(
    group: Mapping[str, Any], suffix: str, scalars: Mapping[str, float]
) -> dict[str, Any]:
    """Return the settings of a parameter group in a step."""
    found = {key: value for key, value in group.items() if key != "params"}
    found |= {key: scalars[key + suffix] for key in _NUMBERS if key + suffix in scalars}
    if "betas" in found:
        names = (f"beta1{suffix}", f"beta2{suffix}")
        pairs = zip(names, found["betas"], strict=True)
        found["betas"] = tuple(scalars.get(name, value) for name, value in pairs)
    return found

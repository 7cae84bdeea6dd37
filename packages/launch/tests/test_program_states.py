"""What is known of the states of several programs."""

from __future__ import annotations

import torch
from torch import nn

from sbp_launch.step.program import OneDeviceProgram
from sbp_launch.step.states import ProgramStates
from sbp_torch.graph_capture import UpdateOptions


def test_states_of_frozen_layers_are_in_the_order_that_is_given() -> None:
    """All processes add them in one order, which that of a set is not."""
    model = nn.ModuleDict({name: nn.Linear(2, 2) for name in "abcdef"})
    model["a"].requires_grad_(False)
    optimizer = torch.optim.Adam(model.parameters())
    states = ProgramStates()
    states.programs.append(
        OneDeviceProgram(model=model, loss=model, optimizer=optimizer, update=UpdateOptions())
    )
    keys = ("step", "exp_avg_sq", "exp_avg", "max_exp_avg_sq", "ema")
    names = [f"{name}.weight.{key}" for name in "abc" for key in keys]

    assert states.frozen_states(names) == names[:5]
    assert states.frozen_states(reversed(names)) == names[4::-1]

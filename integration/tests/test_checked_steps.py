"""What steps of `parallelize` check and evaluate: losses that are no number, averages, memory."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sbp_core.infer import infer_strategy
from sbp_core.planning import PlanRequest, offloaded_states
from sbp_core.runtime import NotFiniteStepError
from sbp_core.strategy import Strategy
from sbp_launch import parallelize
from sbp_torch.graph_capture import UpdateOptions


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(4, 2).double()
    return model, torch.optim.Adam(model.parameters(), lr=0.1)


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().exp().mean()


def batch(scale: float = 1.0) -> Tensor:
    return scale * torch.ones(8, 4, dtype=torch.float64)


@pytest.mark.parametrize("mesh", [1, 2])
def test_a_step_whose_loss_is_not_finite_changes_nothing_and_names_the_operator(mesh: int) -> None:
    model, optimizer = make()
    plain, own = make()
    for index in range(2):
        own.zero_grad()
        loss(plain, batch(1.0 + index)).backward()
        own.step()

    with parallelize(model, loss, batch(), optimizer, mesh=mesh) as step:
        step.only_finite = True
        step(batch(1.0))
        before = step.state_dict()
        with pytest.raises(NotFiniteStepError) as caught:
            step(batch(1e6))
        after, done = step.state_dict(), step.steps_done
        step(batch(2.0))
        found = step.model_state_dict()

    told = "\n".join(caught.value.where)
    assert "aten.exp" in told and "makes the first infinity" in told, told
    assert "test_checked_steps.py" in told
    assert done == 1
    assert all(torch.equal(before[name], after[name]) for name in before)
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-12)


def test_without_that_a_step_goes_on_as_pytorch_does() -> None:
    model, optimizer = make()

    with parallelize(model, loss, batch(), optimizer, mesh=2) as step:
        assert float(step(batch(1e6))) == float("inf")
        assert step.steps_done == 1


def test_averages_are_evaluated_in_place_of_their_parameters() -> None:
    model, optimizer = make()
    plain, own = make()
    average = copy.deepcopy(plain)
    for index in range(3):
        own.zero_grad()
        loss(plain, batch()).backward()
        own.step()
        for kept, new in zip(average.parameters(), plain.parameters(), strict=True):
            kept.data = new.detach().clone() if index == 0 else 0.5 * kept + 0.5 * new.detach()
    update = UpdateOptions(ema_decay=0.5)

    with parallelize(model, loss, batch(), optimizer, mesh=2, update=update) as step:
        for _ in range(3):
            step(batch())
        trained = float(step.evaluate(batch()))
        averaged = float(step.evaluate(batch(), averaged=True))

    assert trained == pytest.approx(loss(plain, batch()).item(), abs=1e-12)
    assert averaged == pytest.approx(loss(average, batch()).item(), abs=1e-12)
    assert abs(averaged - trained) > 1e-6


class Plain:
    """A planner of somebody else's, that knows neither limits nor hosts."""

    def plan(self, request: PlanRequest) -> Strategy:
        return infer_strategy(request, planner="plain", pins={"batch": "S(0)", "parameters": "B"})


def test_what_a_planner_without_limits_plans_is_fitted_with_states_on_the_host() -> None:
    def planned(**cluster: Any) -> Any:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).double()
        optimizer = torch.optim.Adam(model.parameters())
        example = torch.ones(8, 64, dtype=torch.float64)
        profile = {"name": "local", "host_memory_bytes": 1e9, **cluster}
        return parallelize(
            model, loss, example, optimizer, mesh=2, planner=Plain(), cluster=profile
        )

    roomy = planned()
    needed = roomy.planned.memory.peak

    tight = planned(memory_bytes=needed - 1)

    assert not offloaded_states(roomy.strategy)
    assert offloaded_states(tight.strategy)
    assert tight.planned.memory.peak < needed

"""Our own optimizers as they train eagerly, several as one, and schedules of torch."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch.optim import SGD, AdamW, Optimizer, lr_scheduler

from sbp_core.errors import SbpValueError
from sbp_torch.optim import CombinedOptimizer, Lamb, Lars, Lion, RowWiseAdagrad, TorchSchedule


def parameter(*numbers: float) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.tensor(numbers, dtype=torch.float64))


def test_lion_steps_by_the_sign_of_its_direction() -> None:
    p = parameter(1.0, -2.0, 3.0)
    p.grad = torch.tensor([0.5, -3.0, 0.0], dtype=torch.float64)
    optimizer = Lion([p], lr=0.1, betas=(0.9, 0.5), weight_decay=0.1)

    optimizer.step()

    wanted = torch.tensor([0.99 - 0.1, -1.98 + 0.1, 2.97], dtype=torch.float64)
    assert torch.allclose(p.detach(), wanted, atol=1e-15)
    assert torch.equal(optimizer.state[p]["exp_avg"], p.grad / 2)


def test_lars_goes_by_the_ratio_of_norms() -> None:
    p = parameter(3.0, 4.0)
    p.grad = torch.tensor([0.0, 2.0], dtype=torch.float64)
    optimizer = Lars([p], lr=0.5, momentum=0.9, trust=0.1, eps=0.0)

    optimizer.step()  # ratio 0.1 * 5 / 2
    optimizer.step()

    second = 0.1 * math.hypot(3.0, 3.75) / 2
    wanted = 3.75 - 0.9 * 0.25 - 0.5 * second * 2
    assert p.tolist() == pytest.approx([3.0, wanted], abs=1e-15)


def test_lamb_moves_by_its_rate_times_the_norm() -> None:
    p = parameter(3.0, 4.0)
    p.grad = torch.tensor([1.0, -2.0], dtype=torch.float64)
    before = p.detach().clone()

    Lamb([p], lr=0.1, eps=0.0).step()

    moved = p.detach() - before
    assert float(moved.norm()) == pytest.approx(0.1 * 5.0)
    assert moved.sign().tolist() == [-1.0, 1.0]


def test_lamb_that_does_not_adapt_is_adamw() -> None:
    left, right = parameter(3.0, 4.0), parameter(3.0, 4.0)
    ours = Lamb([left], lr=0.1, eps=1e-8, weight_decay=0.2, adapt=False)
    theirs = AdamW([right], lr=0.1, eps=1e-8, weight_decay=0.2)

    for number in (1.0, -0.5, 2.0):
        for p, optimizer in ((left, ours), (right, theirs)):
            p.grad = torch.tensor([number, -2.0], dtype=torch.float64)
            optimizer.step()

    assert torch.allclose(left, right, atol=1e-14)


def table(sparse: bool) -> torch.nn.Embedding:
    values = torch.arange(15, dtype=torch.float64).reshape(5, 3)
    return torch.nn.Embedding.from_pretrained(values, freeze=False, sparse=sparse)


def test_row_wise_adagrad_keeps_the_mean_square_of_each_row() -> None:
    own = table(sparse=False)
    optimizer = RowWiseAdagrad(own.parameters(), lr=0.5, lr_decay=1.0, eps=0.0)
    gradient = torch.tensor([[3.0, 0.0, -3.0]], dtype=torch.float64)

    for _ in range(2):
        own.weight.grad = torch.zeros_like(own.weight).index_add(0, torch.tensor([2]), gradient)
        before = own.weight.detach().clone()
        own.weight.grad[[0, 1, 3, 4]] = 1.0
        optimizer.step()

    total = optimizer.state[own.weight]["sum"]
    assert total.flatten().tolist() == pytest.approx([2.0, 2.0, 12.0, 2.0, 2.0])
    moved = (before - own.weight.detach())[2]
    assert moved.tolist() == pytest.approx((0.25 * gradient[0] / math.sqrt(12.0)).tolist())


def test_row_wise_adagrad_takes_sparse_gradients_and_leaves_other_rows_alone() -> None:
    dense, sparse = table(sparse=False), table(sparse=True)
    optimizers = [RowWiseAdagrad(one.parameters(), lr=0.5) for one in (dense, sparse)]

    for places in ([1, 3, 1], [0, 1, 1]):
        for one, optimizer in zip((dense, sparse), optimizers, strict=True):
            optimizer.zero_grad()
            one(torch.tensor(places)).pow(2).sum().backward()
            optimizer.step()

    assert torch.allclose(dense.weight, sparse.weight, atol=1e-14)
    assert torch.equal(dense.weight[4], torch.tensor([12.0, 13.0, 14.0], dtype=torch.float64))


@pytest.mark.parametrize("kind", [Lamb, Lars])
def test_a_parameter_of_zeros_moves(kind: type[Optimizer]) -> None:
    settings: dict[str, Any] = {"lr": 0.1}
    p = parameter(0.0, 0.0)
    p.grad = torch.tensor([1.0, 1.0], dtype=torch.float64)

    kind([p], **settings).step()

    assert bool((p < 0).all())


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (Lion, {"lr": -1.0}),
        (Lion, {"betas": (0.9, 1.0)}),
        (Lars, {"momentum": math.nan}),
        (Lars, {"trust": -1.0}),
        (Lamb, {"eps": -1.0}),
        (RowWiseAdagrad, {"lr_decay": -1.0}),
    ],
)
def test_settings_out_of_range_are_refused(kind: type[Optimizer], settings: dict[str, Any]) -> None:
    with pytest.raises(SbpValueError, match=next(iter(settings))):
        kind([parameter(1.0)], **settings)


def several() -> tuple[list[torch.nn.Parameter], CombinedOptimizer]:
    held = [parameter(1.0), parameter(2.0)]
    for p in held:
        p.grad = torch.ones_like(p)
    return held, CombinedOptimizer(
        [SGD([held[0]], lr=0.5, momentum=0.9), AdamW([held[1]], lr=0.25)]
    )


def test_several_optimizers_step_and_forget_gradients_together() -> None:
    held, optimizer = several()

    optimizer.step()
    optimizer.zero_grad()

    assert held[0].item() == 0.5
    assert held[1].item() < 2.0
    assert [p.grad for p in held] == [None, None]


def test_learning_rates_set_on_the_groups_of_several_reach_each() -> None:
    held, optimizer = several()

    optimizer.param_groups[0]["lr"] = 0.25
    optimizer.step()

    assert held[0].item() == 0.75


def test_several_optimizers_are_copied_with_their_parameters() -> None:
    held, optimizer = several()

    (twins, twin) = copy.deepcopy((held, optimizer))
    twin.param_groups[0]["lr"] = 1.0
    twins[0].grad = torch.ones_like(twins[0])
    twin.step()

    assert [p.item() for p in held] == [1.0, 2.0]
    assert twins[0].item() == 0.0


def test_states_of_several_optimizers_can_be_loaded() -> None:
    _, optimizer = several()
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    held, other = several()

    other.load_state_dict(saved)
    other.step()

    assert held[0].item() == 1.0 - 0.5 * 1.9
    with pytest.raises(SbpValueError, match="1 optimizers"):
        other.load_state_dict({"optimizers": saved["optimizers"][:1]})


def test_several_optimizers_share_no_parameter() -> None:
    p = parameter(1.0)

    with pytest.raises(SbpValueError, match="hold one parameter"):
        CombinedOptimizer([SGD([p]), AdamW([p])])
    with pytest.raises(SbpValueError, match="no optimizers"):
        CombinedOptimizer([])


def grouped() -> Optimizer:
    groups = [{"params": [parameter(1.0)]}, {"params": [parameter(2.0)], "lr": 0.5}]
    return AdamW(groups, lr=0.1)


def test_a_schedule_of_torch_gives_the_rates_of_any_step_in_any_order() -> None:
    optimizer, eager = grouped(), grouped()
    scheduler = lr_scheduler.CosineAnnealingLR(eager, T_max=10)
    wanted = []
    for _ in range(6):
        wanted.append([group["lr"] for group in eager.param_groups])
        eager.step()
        scheduler.step()

    schedule = TorchSchedule(optimizer, lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=10))

    for step in (5, 0, 3, 3):
        assert list(schedule(step)) == ["lr.0", "lr.1"]
        assert list(schedule(step).values()) == wanted[step]
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.5]
    assert all("initial_lr" not in group for group in optimizer.param_groups)


def test_a_schedule_may_change_momenta_too() -> None:
    optimizer = AdamW([parameter(1.0)], lr=0.1)

    schedule = TorchSchedule(
        optimizer,
        lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=10),
        scheduled=("beta1", "momentum"),
    )

    assert set(schedule(0)) == {"lr", "beta1"}
    assert schedule(0)["beta1"] > schedule(3)["beta1"]


def test_a_schedule_that_wants_losses_is_refused() -> None:
    with pytest.raises(SbpValueError, match="ReduceLROnPlateau"):
        TorchSchedule(grouped(), lambda o: lr_scheduler.ReduceLROnPlateau(o))  # type: ignore[arg-type, return-value]
    schedule = TorchSchedule(grouped(), lambda o: lr_scheduler.ConstantLR(o))
    with pytest.raises(SbpValueError, match="step -1"):
        schedule(-1)

"""What a mask of sizes alone chooses: as eager PyTorch, in forward and backward."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from sbp_core.errors import CaptureError
from sbp_torch.graph_capture import capture, initial_states
from sbp_torch.runtime.single import run_graph
from sbp_torch.testing.models import eager_states


def _others(z: Tensor) -> Tensor:
    """Compare each sample with all others, as SimCLR does."""
    same = torch.cat([torch.arange(4)] * 2)
    same = same[None] == same[:, None]
    off = ~torch.eye(8, dtype=torch.bool)
    similar, same = (z @ z.T)[off].view(8, -1), same[off].view(8, -1)
    return similar[~same].view(8, -1).logsumexp(1).mean() - similar[same].mean()


def _written(z: Tensor) -> Tensor:
    z = z * 2
    z[:, torch.arange(4) % 3 == 0] = 0.5
    z[torch.eye(8, dtype=torch.bool)[:, :4]] += 1
    return z.square().mean()


def _found(z: Tensor) -> Tensor:
    row, column = torch.ones(4, 4).tril(-1).nonzero(as_tuple=True)
    which, of = torch.unique(torch.arange(8) % 3, return_inverse=True)
    sums = torch.zeros(which.numel(), 4).index_add(0, of, z)
    return (sums[:, row] * sums[:, column]).mean()


CASES: dict[str, Callable[[Tensor], Tensor]] = {
    "others": _others,
    "written": _written,
    "found": _found,
    "masked_select": lambda z: z.masked_select(torch.arange(4) > 1).square().mean(),
    "both": lambda z: z[torch.arange(8) < 6][:, torch.arange(4) < 3].square().mean(),
}


def _loss(choose: Callable[[Tensor], Tensor]) -> Callable[[nn.Module, dict[str, Tensor]], Tensor]:
    return lambda model, batch: choose(model(batch["x"]))


@pytest.mark.parametrize("name", CASES)
def test_a_mask_of_sizes_alone_chooses_as_in_eager(name: str) -> None:
    torch.manual_seed(0)
    model, loss, batch = nn.Linear(6, 4), _loss(CASES[name]), {"x": torch.randn(8, 6)}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    graph = capture(model, loss, batch, optimizer)

    outputs, states = run_graph(graph, initial_states(model, optimizer), [batch], {"lr": 0.1})

    wanted = loss(model, batch)
    wanted.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    torch.testing.assert_close(outputs["loss"], wanted.detach())
    torch.testing.assert_close(states, eager_states(model, optimizer))


@pytest.mark.parametrize(
    ("choose", "op"),
    [
        (lambda z: z[z > 0].mean(), "aten.index.Tensor"),
        (lambda z: (z * torch.bincount(z.argmax(1), minlength=4)).mean(), "aten.bincount.default"),
        (lambda z: z.mean() if z.argmax(1).unique().numel() > 3 else z.sum(), "_unique2"),
    ],
)
def test_what_goes_by_values_is_named_with_the_op_that_makes_it(
    choose: Callable[[Tensor], Tensor], op: str
) -> None:
    model, batch = nn.Linear(6, 4), {"x": torch.randn(8, 6)}

    with pytest.raises(CaptureError) as caught:
        capture(model, _loss(choose), batch)

    assert "the shape of a tensor depends on the values of another" in caught.value.what
    assert op in caught.value.what
    assert "test_capture_constant_masks.py" in caught.value.where[0]


@pytest.mark.parametrize(
    "choose",
    [
        lambda z: z[torch.arange(6) < 3].mean(),
        lambda z: z[:, torch.arange(3) < 2].mean(),
        lambda z: (z * 1).index_put((torch.eye(4, dtype=torch.bool),), torch.ones(())).mean(),
    ],
)
def test_a_mask_of_another_shape_is_refused_as_by_eager(choose: Callable[[Tensor], Tensor]) -> None:
    model, batch = nn.Linear(6, 4), {"x": torch.randn(8, 6)}
    with pytest.raises(IndexError, match="mask"):
        choose(model(batch["x"]))

    with pytest.raises(CaptureError, match="mask"):
        capture(model, _loss(choose), batch)

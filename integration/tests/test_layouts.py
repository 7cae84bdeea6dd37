"""Layouts of named dims, on the models of the zoo: the weights of one device, in float64."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sbp_core.plugins import discover
from sbp_launch import parallelize

_SIZES = {"vocabulary": 32, "context": 8, "num_layers": 2, "num_heads": 4, "hidden": 16}

#: Of each model: its settings, and the dims that layouts name.
MODELS = {
    "gpt": (
        _SIZES,
        {"hidden": "blocks.*.mlp.up.weight[0]", "heads": "blocks.*.attention.qkv.weight[0]"},
    ),
    "llama": (
        {**_SIZES, "num_key_heads": 2, "mlp_hidden": 24},
        {"hidden": "blocks.*.mlp.up.weight[0]", "heads": "blocks.*.attention.query.weight[0]"},
    ),
}

LAYOUTS = [
    "batch:data",
    "hidden:tensor; heads:tensor; vocabulary:tensor",
    "batch:data; hidden:tensor; heads:tensor",
    "batch:tensor; hidden:data",
]


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", MODELS)
def test_a_model_trains_in_any_layout_as_on_one_device(name: str, layout: str) -> None:
    torch.manual_seed(0)
    settings, names = MODELS[name]
    made: Any = discover().make("model", name, settings)
    model: nn.Module = made.double()
    twin = copy.deepcopy(model)
    optimizers = [torch.optim.AdamW(one.parameters(), lr=1e-2) for one in (model, twin)]
    tokens = torch.randint(32, (3, 4, 9))
    planner = {
        "name": "manual/layout",
        "layout": layout,
        "names": {**names, "vocabulary": "head.weight[0]"},
    }

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(
            model(batch["tokens"][:, :-1]).flatten(0, 1), batch["tokens"][:, 1:].flatten()
        )

    with parallelize(
        model, loss, {"tokens": tokens[0]}, optimizers[0], mesh={"data": 2, "tensor": 2},
        planner=planner,
    ) as step:  # fmt: skip
        for batch in tokens:
            found = step({"tokens": batch}).loss
            wanted = loss(twin, {"tokens": batch})
            optimizers[1].zero_grad()
            wanted.backward()
            optimizers[1].step()
            torch.testing.assert_close(found, wanted.detach(), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(model.state_dict(), twin.state_dict(), rtol=1e-9, atol=1e-11)

"""Other people's models with the weights of ours, to compare results with."""

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn


def renamed(names: Mapping[str, str]) -> Callable[[str], str]:
    """Return a function that replaces whole patterns, each at most once, in their order."""

    def rename(name: str) -> str:
        for pattern, new in names.items():
            name = re.sub(pattern, new, name, count=1)
        return name

    return rename


def take_weights(own: nn.Module, other: nn.Module, names: Mapping[str, str]) -> None:
    """Give our model the parameters and buffers of the other, by our names; none may be left."""
    rename = renamed(names)
    values = {rename(name): value for name, value in other.state_dict().items()}
    own.load_state_dict({name: value for name, value in values.items() if name != "(tied)"})


def randomised(model: nn.Module, seed: int = 0) -> Any:
    """Move every parameter and floating buffer off its start, so that none can be left out."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if tensor.is_floating_point() and "running_var" not in name:
                tensor += 0.1 * torch.randn(tensor.shape, generator=generator)
    return model.eval()


def num_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def assert_equal_results(found: Tensor, expected: Tensor) -> None:
    assert expected.std() > 1e-2, "the reference says too little"
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-5)

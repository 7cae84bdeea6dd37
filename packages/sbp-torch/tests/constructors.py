"""Constructors of many kinds, for the tests of deferred initialisation."""

from __future__ import annotations

import io
import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import orthogonal, spectral_norm, weight_norm


class Held(nn.Module):
    """Holds parameters and buffers, and has no forward."""

    def __init__(self, *shapes: tuple[int, ...]) -> None:
        super().__init__()
        for index, shape in enumerate(shapes):
            self.register_parameter(f"p{index}", nn.Parameter(torch.empty(shape)))


def _filled(fill: Callable[[Tensor], object], *shapes: tuple[int, ...]) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        held = Held(*shapes)
        for parameter in held.parameters():
            fill(parameter)
        return held

    return build


def refilled() -> nn.Module:
    """Fill everything once more, as `post_init` and `apply(_init_weights)` do."""
    model = nn.Sequential(nn.Embedding(17, 6, padding_idx=2), nn.Linear(6, 7), nn.Linear(7, 3))
    for module in model:
        nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear):
            nn.init.zeros_(module.bias)
    model[0].weight.data[2].zero_()
    nn.init.normal_(model[2].weight, std=0.01)
    return model


def resnet() -> nn.Module:
    """Convolutions by `kaiming_normal_`, norms of which the last starts at zero."""
    model = nn.Sequential()
    for index in range(3):
        model.append(nn.Conv2d(3, 3, 3, bias=False))
        model.append(nn.BatchNorm2d(3))
        nn.init.kaiming_normal_(model[2 * index].weight, mode="fan_out", nonlinearity="relu")
    nn.init.zeros_(model[5].weight)
    return model


def recurrent() -> nn.Module:
    return nn.ModuleList([nn.LSTM(5, 6, num_layers=2), nn.GRU(6, 3, bidirectional=True)])


def copies() -> nn.Module:
    """Layers that are deep copies, tied weights, and a weight copied into another."""
    encoder = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 3, enable_nested_tensor=False
    )
    model = nn.ModuleList([encoder, nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(6, 8)])
    model[2].weight = model[1].weight
    model[3].weight.data.copy_(model[1].weight.data * 2)
    model[3].load_state_dict({"weight": model[3].weight, "bias": model[1].bias})
    return model


def rotary() -> nn.Module:
    """Buffers that are computed; one is not saved, one is a plain attribute."""
    model = nn.Linear(4, 4)
    frequency = 1.0 / (10_000.0 ** (torch.arange(0, 8, 2, dtype=torch.int64).float() / 8))
    angle = torch.outer(torch.arange(6).float(), frequency)
    model.register_buffer("inv_freq", frequency, persistent=False)
    model.register_buffer("cos", torch.cat((angle, angle), -1).cos())
    model.register_buffer("mask", torch.tril(torch.ones(5, 5, dtype=torch.bool)).view(1, 1, 5, 5))
    model.scale = torch.tensor([0.5, 2.0])
    return model


def reads() -> nn.Module:
    """Look at values: of constants, and of random numbers between other draws."""
    rates = [rate.item() for rate in torch.linspace(0, 0.3, 3)] + torch.linspace(0, 1, 2).tolist()
    model = nn.Sequential(*(nn.Linear(4, 3 + int(10 * rate)) for rate in rates))
    largest = float(model[1].weight.detach().abs().max())
    with torch.no_grad():
        model[2].weight.mul_(largest)
    if model[0].weight.sum() > 0:
        nn.init.uniform_(model[0].bias, -largest, largest)
    nn.init.ones_(model[3].bias[: int(torch.randint(1, 3, ()))])
    model.register_buffer("table", torch.from_numpy(model[4].weight.detach().numpy() * 2))
    return model


def converted() -> nn.Module:
    return nn.ModuleList(
        [nn.Linear(3, 4).to(torch.bfloat16), nn.Linear(4, 3).double(), nn.Linear(2, 9).half()]
    ).to("cpu")


def wide_by_default() -> nn.Module:
    """Build in another default dtype, which decides what `torch.randn` and divisions make."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        model = nn.Linear(3, 4)
        model.register_buffer("drawn", torch.randn(5))
        model.register_buffer("thirds", torch.arange(6) / 3)
    finally:
        torch.set_default_dtype(before)
    return model


def parametrized() -> nn.Module:
    return nn.ModuleList(
        [
            weight_norm(nn.Linear(5, 4)),
            spectral_norm(nn.Linear(4, 6)),
            orthogonal(nn.Linear(5, 5)),
            nn.Linear(3, 3),
        ]
    )


def seeded_inside() -> nn.Module:
    """Set the generator in between, and come back to where it was."""
    first = nn.Linear(3, 5)
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(7)
        second = nn.Linear(3, 5)
    before = torch.get_rng_state()
    third = nn.Linear(5, 2)
    torch.set_rng_state(before)
    own = torch.Generator().manual_seed(11)
    fourth = nn.Linear(5, 2)
    fourth.bias.data = torch.randn(2, generator=own)
    nn.init.uniform_(third.bias, generator=own)
    nn.init.trunc_normal_(second.bias, generator=own)
    return nn.ModuleList([first, second, third, fourth, nn.Linear(2, 2)])


def _saved() -> bytes:
    file = io.BytesIO()
    torch.save({"0.weight": torch.linspace(0, 1, 12).view(3, 4), "1.bias": torch.ones(5)}, file)
    return file.getvalue()


_FILE = _saved()


def from_a_file() -> nn.Module:
    """Load weights that were saved; some parameters are not in the file."""
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 5))
    model.load_state_dict(torch.load(io.BytesIO(_FILE)), strict=False)
    return model


def assigned() -> nn.Module:
    """Take over the tensors of a file as they are."""
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 5))
    model.load_state_dict(torch.load(io.BytesIO(_FILE)), strict=False, assign=True)
    nn.init.normal_(model[1].bias)
    return model


def from_numpy() -> nn.Module:
    """Take values of NumPy, one of which is changed after it was taken."""
    values = torch.from_numpy(np.arange(6.0, dtype=np.float32).reshape(2, 3))
    model = nn.Linear(3, 2)
    with torch.no_grad():
        model.weight.copy_(values)
        values += 1
        model.bias.add_(values[:, 0])
    model.register_buffer("kept", values)
    model.assigned = nn.Parameter(torch.empty(2, 3))
    model.assigned.data = values * 2
    return model


def interleaved() -> nn.Module:
    """Draw for one parameter, then for another, then for the first again."""
    held = Held((40, 3), (7, 5), (4, 4), (6,))
    first, second, third, fourth = (parameter.data for parameter in held.parameters())
    first.normal_()
    second.uniform_()
    first[3:9].uniform_(-1, 1)
    third.copy_(torch.randn(4, 4) @ second[:4, :4])
    fourth.copy_(torch.bernoulli(torch.rand(6)))
    first += torch.randn(40, 3)
    first.mul_(torch.tensor(0.5))
    torch.multinomial(torch.rand(5), 2)
    second.add_(torch.randn_like(second).t().contiguous().t())
    return held


def flat() -> nn.Module:
    """Parameters that are views of one flat tensor, and one that lies transposed."""
    whole = torch.randn(30)
    held = Held()
    held.left, held.right = nn.Parameter(whole[:10].view(2, 5)), nn.Parameter(whole[10:])
    held.turned = nn.Parameter(torch.empty(4, 6).uniform_().t())
    return held


def _timm_trunc_normal(tensor: Tensor) -> None:
    """Fill by the inverse of the error function, as `timm` does."""
    low, high = (1 + math.erf(-2 / math.sqrt(2))) / 2, (1 + math.erf(2 / math.sqrt(2))) / 2
    with torch.no_grad():
        tensor.uniform_(2 * low - 1, 2 * high - 1).erfinv_().mul_(0.02 * math.sqrt(2.0))
        tensor.clamp_(-0.04, 0.04)


_MATRICES = ((7, 5), (16, 4), (3, 3))

CONSTRUCTORS: dict[str, Callable[[], nn.Module]] = {
    "uniform_": _filled(nn.init.uniform_, (3,), (17, 2), (0, 4), ()),
    "normal_": _filled(nn.init.normal_, (3,), (17, 2), (5,), (16,), ()),
    "trunc_normal_": _filled(nn.init.trunc_normal_, (40, 7), (5,)),
    "trunc_normal_ far": _filled(lambda t: nn.init.trunc_normal_(t, a=1.5, b=3.0), (40, 7)),
    "trunc_normal_ of timm": _filled(_timm_trunc_normal, (40, 7), (5,)),
    "xavier_uniform_": _filled(nn.init.xavier_uniform_, *_MATRICES),
    "xavier_normal_": _filled(nn.init.xavier_normal_, *_MATRICES),
    "kaiming_uniform_": _filled(nn.init.kaiming_uniform_, *_MATRICES),
    "orthogonal_": _filled(nn.init.orthogonal_, *_MATRICES),
    "sparse_": _filled(lambda t: nn.init.sparse_(t, 0.4), *_MATRICES),
    "eye_": _filled(nn.init.eye_, *_MATRICES),
    "dirac_": _filled(nn.init.dirac_, (4, 4, 3), (6, 2, 3, 3)),
    "refilled": refilled,
    "resnet": resnet,
    "recurrent": recurrent,
    "copies": copies,
    "rotary": rotary,
    "reads": reads,
    "converted": converted,
    "wide by default": wide_by_default,
    "parametrized": parametrized,
    "seeded inside": seeded_inside,
    "from a file": from_a_file,
    "assigned": assigned,
    "from numpy": from_numpy,
    "interleaved": interleaved,
    "flat": flat,
}

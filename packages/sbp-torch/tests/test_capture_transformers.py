"""`nn.Transformer` and its parts, whose masks PyTorch looks at while they run."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from sbp_torch.capture import capture, initial_states
from sbp_torch.runtime.single import run_graph

SIZES = {"d_model": 8, "nhead": 2, "dim_feedforward": 8, "dropout": 0.0, "batch_first": True}


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(**SIZES), 2)
        self.register_buffer("causal", nn.Transformer.generate_square_subsequent_mask(4))
        self.register_buffer("banded", torch.ones(4, 4).triu(2) + torch.ones(4, 4).tril(-2) > 0)


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Transformer(num_encoder_layers=1, num_decoder_layers=1, **SIZES)


def causal_buffer(model: nn.Module, x: Tensor, padding: Tensor) -> Tensor:
    return model.encoder(x, model.causal)


def another_mask(model: nn.Module, x: Tensor, padding: Tensor) -> Tensor:
    return model.encoder(x, model.banded)


def made_in_the_loss(model: nn.Module, x: Tensor, padding: Tensor) -> Tensor:
    return model.encoder(x, nn.Transformer.generate_square_subsequent_mask(x.shape[1]).double())


def said_to_be_causal(model: nn.Module, x: Tensor, padding: Tensor) -> Tensor:
    return model.encoder(x, model.causal, is_causal=True)


def padded(model: nn.Module, x: Tensor, padding: Tensor) -> Tensor:
    return model.encoder(x, model.causal != 0, src_key_padding_mask=padding)


def encoder_and_decoder(model: nn.Module, x: Tensor, padding: Tensor) -> Tensor:
    causal = nn.Transformer.generate_square_subsequent_mask(x.shape[1]) != 0
    return model.both(
        x, x, tgt_mask=causal, src_key_padding_mask=padding, memory_key_padding_mask=padding
    )


CALLS = [
    (Encoder, causal_buffer),
    (Encoder, another_mask),
    (Encoder, made_in_the_loss),
    (Encoder, said_to_be_causal),
    (Encoder, padded),
    (Decoder, encoder_and_decoder),
]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")  # of plain PyTorch
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(("build", "call"), CALLS, ids=[call.__name__ for _, call in CALLS])
def test_masks_may_have_any_values(
    build: Callable[[], nn.Module], call: Callable[..., Tensor], training: bool
) -> None:
    torch.manual_seed(0)
    model = build().double()
    padding = torch.arange(4) >= torch.tensor([[4], [3], [2]])
    batch = {"x": torch.randn(3, 4, 8, dtype=torch.double), "padding": padding}

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        found = call(model, batch["x"], batch["padding"])
        return torch.where(batch["padding"][..., None], 0.0, found).square().sum()

    model.train(training)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plain = copy.deepcopy(model)
    graph = capture(model, loss, batch, optimizer if training else None)

    outputs, states = run_graph(graph, initial_states(model), [batch], {"lr": 0.1})

    with torch.set_grad_enabled(training):
        wanted = loss(plain, batch)
    torch.testing.assert_close(next(iter(outputs.values())), wanted.detach())
    if training:
        wanted.backward()
        for name, parameter in plain.named_parameters():
            torch.testing.assert_close(states[name], parameter.detach() - 0.1 * parameter.grad)
    assert torch.backends.mha.get_fastpath_enabled()

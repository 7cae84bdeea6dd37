"""`nn.Transformer` and its parts, whose masks PyTorch looks at while they run."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from sbp_torch.graph_capture import capture, initial_states
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


@pytest.mark.parametrize(
    ("training", "nests", "with_mask", "says"),
    [
        (False, True, False, 1),
        (True, True, False, 0),
        (False, False, False, 0),
        (False, True, True, 0),
    ],
)
def test_that_the_output_at_padded_positions_may_differ_is_said_once(
    training: bool, nests: bool, with_mask: bool, says: int, caplog: pytest.LogCaptureFixture
) -> None:
    layer = nn.TransformerEncoderLayer(**SIZES)
    model = nn.TransformerEncoder(layer, 1, enable_nested_tensor=nests).train(training)
    mask = torch.zeros(4, 4, dtype=torch.bool) if with_mask else None
    padding = torch.arange(4) >= torch.tensor([[4], [2]])
    forward = nn.TransformerEncoder.forward

    for _ in range(2):
        capture(
            model,
            lambda model, x: model(x, mask, src_key_padding_mask=padding).sum(),
            torch.randn(2, 4, 8),
            None,
        )

    assert caplog.text.count("fill its output at padded positions with zeros") == says
    assert nn.TransformerEncoder.forward is forward

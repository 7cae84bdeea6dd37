"""Recurrent networks and layers that are one operator, under every split, against one device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import pytest
import torch
from needed_operators import skip_without

from sbp_aten.rules import layers
from sbp_core.sbp import B, P, S
from sbp_core.signatures import legal_signatures
from sbp_core.signatures.derivations import derivation
from sbp_torch.signatures.verification import abstract_call, call_of
from sbp_torch.testing.signatures import Sample, check_rule, sample

with suppress(ImportError):  # before 2.13 there are none
    import torch.nn.modules.linear_cross_entropy  # registers the operators of `torch_nn`

_draw = torch.Generator().manual_seed(31)

CHUNKED = "torch_nn._linear_cross_entropy_batch_chunked"


def real(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=_draw)


def weights(gates: int, *, bias: bool = True) -> list[torch.Tensor]:
    """Return the weights of a layer with 3 inputs and 4 hidden features."""
    made = [real(gates * 4, 3), real(gates * 4, 4)]
    return [*made, real(gates * 4), real(gates * 4)] if bias else made


def network(gates: int, *, first: bool = False) -> list[Any]:
    """Return what follows the states: weights, flags, one layer without dropout."""
    return [weights(gates), True, 1, 0.0, False, False, first]


def _cross_entropy(reduction: str, *, wanted: bool = True) -> Sample:
    target = torch.randint(7, (5,), generator=_draw)
    given = [real(5, 4), real(7, 4), target, real(7), None]
    chunks = [-100, 0.0, 2, "balanced", torch.float64]
    return sample(*given, reduction, *chunks, False, wanted, True, True)


TRANSFORMER = [real(24, 8), real(24), real(8, 8), real(8)]
ENCODER = [real(8), real(8), real(8), real(8), real(16, 8), real(16), real(8, 16), real(8)]

CASES: dict[str, list[Sample]] = {
    "aten._native_multi_head_attention.default": [
        sample(real(5, 3, 8), real(5, 3, 8), real(5, 3, 8), 8, 2, *TRANSFORMER)
    ],
    "aten._transformer_encoder_layer_fwd.default": [
        sample(real(5, 3, 8), 8, 2, *TRANSFORMER, True, False, 1e-5, *ENCODER)
    ],
    "aten.gru.input": [sample(real(3, 5, 3), real(1, 5, 4), *network(3))],
    "aten.gru_cell.default": [sample(real(5, 3), real(5, 4), *weights(3, bias=False))],
    "aten.lstm.input": [
        sample(real(3, 5, 3), [real(1, 5, 4), real(1, 5, 4)], *network(4)),
        sample(real(5, 2, 3), [real(1, 5, 4), real(1, 5, 4)], *network(4, first=True)),
    ],
    "aten.lstm_cell.default": [sample(real(5, 3), [real(5, 4), real(5, 4)], *weights(4))],
    "aten.rnn_relu.input": [sample(real(3, 5, 3), real(1, 5, 4), *network(1))],
    "aten.rnn_relu_cell.default": [sample(real(5, 3), real(5, 4), *weights(1))],
    "aten.rnn_tanh.input": [sample(real(3, 5, 3), real(1, 5, 4), *network(1))],
    "aten.rnn_tanh_cell.default": [sample(real(5, 3), real(5, 4), *weights(1))],
    f"{CHUNKED}.default": [
        _cross_entropy("sum"),
        _cross_entropy("sum", wanted=False),
        _cross_entropy("mean"),
    ],
    f"{CHUNKED}_no_reduction.default": [
        sample(*_cross_entropy("none")[0][:5], -100, 2, "balanced", torch.float64)
    ],
}


def _lstm(inputs: Any, hidden: Any, cell: Any, *bias: Any) -> tuple[torch.Tensor, ...]:
    """Gates in, forget, cell, out; they are kept for the backward."""
    gates = sum((inputs, hidden, *(entry for entry in bias if entry is not None)))
    enter, forget, new, leave = gates.chunk(4, 1)
    enter, forget, new, leave = enter.sigmoid(), forget.sigmoid(), new.tanh(), leave.sigmoid()
    after = forget * cell + enter * new
    return leave * after.tanh(), after, torch.cat([enter, forget, new, leave], 1)


def _lstm_backward(
    outer: Any, later: Any, cell: Any, after: Any, kept: Any, has_bias: bool
) -> tuple[torch.Tensor | None, ...]:
    enter, forget, new, leave = kept.chunk(4, 1)
    outer = torch.zeros_like(cell) if outer is None else outer
    later = torch.zeros_like(cell) if later is None else later
    total = later + outer * leave * (1 - after.tanh() ** 2)
    gates = torch.cat(
        [
            total * new * enter * (1 - enter),
            total * cell * forget * (1 - forget),
            total * enter * (1 - new**2),
            outer * after.tanh() * leave * (1 - leave),
        ],
        1,
    )
    return gates, total * forget, gates.sum(0) if has_bias else None


def _gru(inputs: Any, hidden: Any, state: Any, *bias: Any) -> tuple[torch.Tensor, ...]:
    """Gates reset, update, new; they, the state and the hidden part of new are kept."""
    inputs = inputs if not bias else inputs + bias[0]
    hidden = hidden if not bias else hidden + bias[1]
    (reset, update, new), (reset_, update_, new_) = inputs.chunk(3, 1), hidden.chunk(3, 1)
    reset, update = (reset + reset_).sigmoid(), (update + update_).sigmoid()
    new = (new + reset * new_).tanh()
    kept = torch.cat([reset, update, new, state, new_], 1)
    return (state - new) * update + new, kept


def _gru_backward(outer: Any, kept: Any, has_bias: bool) -> tuple[torch.Tensor | None, ...]:
    reset, update, new, state, new_ = kept.chunk(5, 1)
    fresh = outer * (1 - update) * (1 - new**2)
    updated = outer * (state - new) * update * (1 - update)
    restart = fresh * new_ * reset * (1 - reset)
    inputs = torch.cat([restart, updated, fresh], 1)
    hidden = torch.cat([restart, updated, fresh * reset], 1)
    sums = (inputs.sum(0), hidden.sum(0)) if has_bias else (None, None)
    return inputs, hidden, outer * update, *sums


#: What kernels that CPUs lack compute.
MODELS = {
    "aten._thnn_fused_gru_cell.default": _gru,
    "aten._thnn_fused_gru_cell_backward.default": _gru_backward,
    "aten._thnn_fused_lstm_cell.default": _lstm,
    "aten._thnn_fused_lstm_cell_backward_impl.default": _lstm_backward,
}

MODELLED: dict[str, list[Sample]] = {
    "aten._thnn_fused_gru_cell.default": [
        sample(real(5, 12), real(5, 12), real(5, 4)),
        sample(real(5, 12), real(5, 12), real(5, 4), real(12), real(12)),
    ],
    "aten._thnn_fused_gru_cell_backward.default": [
        sample(real(5, 4), real(5, 20), True),
        sample(real(5, 4), real(5, 20), False),
    ],
    "aten._thnn_fused_lstm_cell.default": [
        sample(real(5, 16), real(5, 16), real(5, 4)),
        sample(real(5, 16), real(5, 16), real(5, 4), real(16), real(16)),
    ],
    "aten._thnn_fused_lstm_cell_backward_impl.default": [
        sample(real(5, 4), real(5, 4), real(5, 4), real(5, 4), real(5, 16), True),
        sample(real(5, 4), None, real(5, 4), real(5, 4), real(5, 16), False),
    ],
}

WHOLE = {
    "aten._cudnn_rnn.default",
    "aten._cudnn_rnn_backward.default",
    "aten.gru.data",
    "aten.lstm.data",
    "aten.mkldnn_rnn_layer.default",
    "aten.mkldnn_rnn_layer_backward.default",
    "aten.rnn_relu.data",
    "aten.rnn_tanh.data",
}


def _modelled(op: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    return MODELS[op](*args, **kwargs)


@pytest.mark.parametrize("op", CASES)
def test_every_claimed_cut_of_a_layer_gives_what_one_device_gives(op: str) -> None:
    check_rule(op, CASES[op], axis_sizes=(2, 7))


@pytest.mark.parametrize("op", MODELLED)
def test_every_claimed_cut_of_an_accelerator_cell_gives_what_its_model_gives(op: str) -> None:
    check_rule(op, MODELLED[op], axis_sizes=(2, 7), execute=_modelled)


def test_every_rule_of_layers_is_tested() -> None:
    assert {*CASES, *MODELLED} | WHOLE == {*layers.RULES}


def test_packed_sequences_are_whole_and_say_why() -> None:
    given = [real(6, 3), torch.tensor([3, 2, 1]), [real(1, 3, 4), real(1, 3, 4)], weights(4)]
    call, _ = call_of("aten.lstm.data", [*given, True, 1, 0.0, False, False], {})

    found = derivation(call)

    assert [part.origin for part in found.legal] == ["all B"]
    assert found.notation.why == "sequences of several lengths are packed into one dim"


def test_a_layer_of_onednn_says_how_to_capture_one_that_can_be_split() -> None:
    data = [(3, 5, 3), (16, 3), (16, 4), (16,), (16,), (5, 4), (5, 4)]
    flags = [False, [], 2, 4, 1, True, False, False, True]
    call = abstract_call("aten.mkldnn_rnn_layer.default", [*data, *flags], {})

    found = derivation(call)

    assert [part.origin for part in found.legal] == ["all B"]
    assert "torch.backends.mkldnn" in found.notation.why


def test_dropout_between_layers_keeps_the_batch_whole() -> None:
    layers = [[*weights(3), *[real(12, 4), real(12, 4), real(12), real(12)]], True, 2]

    found = legal_signatures(
        "aten.gru.input", real(3, 5, 3), real(2, 5, 4), *layers, 0.5, True, False, False
    )

    assert [part.origin for part in found] == ["all B"]


def test_gradients_of_a_chunked_loss_are_partial_sums_over_the_batch() -> None:
    skip_without(f"{CHUNKED}.default")

    found = legal_signatures(f"{CHUNKED}.default", *_cross_entropy("sum")[0])

    by_label = {part.label: (part.inputs, part.outputs) for part in found}
    assert by_label["b"] == ((S(0), B, S(0), B), (P, S(0), P, P))


def test_a_mean_of_targets_that_count_keeps_the_batch_whole() -> None:
    skip_without(f"{CHUNKED}.default")

    found = legal_signatures(f"{CHUNKED}.default", *_cross_entropy("mean")[0])

    assert [part.origin for part in found] == ["all B"]

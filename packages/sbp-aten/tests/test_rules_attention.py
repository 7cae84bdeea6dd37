"""Attention split by batch, heads, queries and keys, forward and backward, against one device.

Kernels that CPUs lack are stood in for by a model in plain products, with the outputs (padding,
seeds) that the kernels document.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch

from sbp_aten.rules.attention import RULES
from sbp_core.placement import Placement
from sbp_core.sbp import B, NdSbp, P, S, Sbp
from sbp_core.signatures import combine, derive, enumerate_signatures, legal_signatures, localize
from sbp_core.signatures.derivations import derivation
from sbp_torch.signatures.torch_call import describe
from sbp_torch.signatures.verification import abstract_call, call_of, overload, run_op
from sbp_torch.testing.signatures import Sample, check_rule, sample

_draw = torch.Generator().manual_seed(37)

CPU = "aten._scaled_dot_product_flash_attention_for_cpu.default"
CPU_BACKWARD = "aten._scaled_dot_product_flash_attention_for_cpu_backward.default"
MATH = "aten._scaled_dot_product_attention_math.default"


def real(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=_draw)


def given(heads: int = 3, keys: int = 5, *, shared: int = 1) -> list[torch.Tensor]:
    """Return queries, keys and values: a batch of 2, 4 queries, head dim 4."""
    return [
        real(2, heads * shared, 4, 4),
        real(2, heads, keys, 4),
        real(2, heads, keys, 4),
    ]


def backward(
    tensors: Sequence[torch.Tensor], *, causal: bool = False, mask: torch.Tensor | None = None
) -> Sample:
    """Return the gradient of the CPU kernel."""
    made, rows = run_op(CPU, [*tensors, 0.0, causal], {"attn_mask": mask})
    return sample(torch.randn_like(made), *tensors, made, rows, 0.0, causal, attn_mask=mask)


CASES: dict[str, list[Sample]] = {
    CPU: [
        sample(*given()),
        sample(*given(shared=2)),
        sample(*given(1, shared=3)),
        sample(*given(), 0.0, True),
        sample(*given(shared=2), is_causal=True),
        sample(*given(), attn_mask=real(2, 1, 4, 5), scale=0.3),
        sample(*given(), attn_mask=real(4, 5)),
    ],
    CPU_BACKWARD: [
        backward(given()),
        backward(given(shared=2)),
        backward(given(1, shared=3)),
        backward(given(), causal=True),
        backward(given(), mask=real(1, 3, 4, 5)),
    ],
    MATH: [
        sample(*given()),
        sample(*given(shared=2), enable_gqa=True),
        sample(*given(), None, 0.0, True),
        sample(real(3, 4, 6), real(3, 5, 6), real(3, 5, 2), real(4, 5)),
        sample(real(2, 3, 2, 4, 6), real(2, 3, 2, 5, 6), real(2, 3, 2, 5, 6)),
    ],
}


def _scores(named: Mapping[str, Any]) -> torch.Tensor:
    """Return the scores `b H t s` of a call whose tensors are in the order `b h t d`."""
    query, key = named["query"], named["key"]
    shared = query.shape[1] // key.shape[1]
    made = query @ key.repeat_interleave(shared, 1).mT * query.shape[-1] ** -0.5
    mask = named.get("attn_bias", named.get("bias"))
    made = made if mask is None else made + mask
    if named.get("is_causal") or named.get("custom_mask_type"):
        made = made + torch.full(made.shape[-2:], -torch.inf, dtype=made.dtype).triu(1)
    return made


def _forward(op: str, named: dict[str, Any]) -> Any:
    scores = _scores(named)
    shared = named["query"].shape[1] // named["key"].shape[1]
    out = scores.softmax(-1) @ named["value"].repeat_interleave(shared, 1)
    rows = scores.logsumexp(-1)
    seed = torch.zeros((), dtype=torch.int64)
    if "efficient" in op:
        times = scores.shape[2]
        wanted = -times % 32 if named["compute_log_sumexp"] else -times
        rows = torch.nn.functional.pad(rows, (0, wanted))
        return out, rows, seed, seed
    seeds = torch.zeros(2, dtype=torch.uint64)
    if "cudnn" in op:
        return out, rows[..., None], None, None, scores.shape[2], scores.shape[3], seed, seed, None
    return out, rows, None, None, scores.shape[2], scores.shape[3], seeds, seed, out.new_empty(0)


def _backward(op: str, named: dict[str, Any]) -> Any:
    query, key, value = named["query"], named["key"], named["value"]
    outer = named.get("grad_out", named.get("grad_out_"))
    shared, times = query.shape[1] // key.shape[1], query.shape[2]
    rows = named["logsumexp"].reshape(*query.shape[:2], -1)[..., :times]
    chances = (_scores(named) - rows[..., None]).exp()
    wide_key, wide_value = (entry.repeat_interleave(shared, 1) for entry in (key, value))
    inner = (outer * named["out"]).sum(-1, keepdim=True)
    scores = chances * (outer @ wide_value.mT - inner)

    def summed(gradient: torch.Tensor) -> torch.Tensor:
        return gradient.unflatten(1, (key.shape[1], shared)).sum(2)

    scale = query.shape[-1] ** -0.5
    made = [
        scores @ wide_key * scale,
        summed(scores.mT @ query) * scale,
        summed(chances.mT @ outer),
    ]
    if "efficient" not in op:
        return tuple(made)
    wanted = named.get(
        "grad_input_mask", [True, True, True, named.get("bias_requires_grad", False)]
    )
    return tuple(
        entry if want else None for entry, want in zip([*made, scores], wanted, strict=True)
    )


def model(op: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run what an accelerator kernel computes."""
    names = [argument.name for argument in overload(op)._schema.arguments]
    named = {**dict(zip(names, args, strict=False)), **kwargs}
    turns = op.startswith(("aten._flash", "aten._efficient"))
    if turns:
        heads = ("query", "key", "value", "out", "grad_out", "grad_out_")
        named |= {name: named[name].transpose(1, 2) for name in heads if name in named}
    made = _backward(op, named) if "backward" in op else _forward(op, named)
    if not turns:
        return made
    count = 3 if "backward" in op else 1
    turned = [entry if entry is None else entry.transpose(1, 2) for entry in made[:count]]
    rest = made[count:]
    if op.startswith("aten._flash") and "forward" in op:
        rest = (rest[0], *rest[-3:])
    return (*turned, *rest)


def _turned(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.transpose(1, 2).contiguous() for tensor in tensors]


def _modelled() -> dict[str, list[Sample]]:
    """Return calls of the kernels that CPUs lack."""
    found: dict[str, list[Sample]] = {}

    def add(name: str, *args: Any) -> list[Any]:
        op = f"aten.{name}.default"
        found.setdefault(op, []).append(sample(*args))
        return list(model(op, args, {}))

    flash = "_scaled_dot_product_flash_attention"
    for tensors, causal in ((given(), False), (given(shared=2), False), (given(), True)):
        out, rows, *_, seeds, unused, _ = add(flash, *tensors, 0.0, causal)
        saved = [out, rows, None, None, 4, 5, 0.0, causal, seeds, unused]
        add(f"{flash}_backward", real(*out.shape), *tensors, *saved)
    efficient = "_scaled_dot_product_efficient_attention"
    for bias, wanted in ((None, False), (real(2, 3, 4, 5), True)):
        tensors = given()
        out, rows, seed, offset = add(efficient, *tensors, bias, True)
        saved = [bias, out, rows, seed, offset, 0.0, [True, True, True, wanted]]
        add(f"{efficient}_backward", real(*out.shape), *tensors, *saved)
    add(efficient, *given(), None, False)
    cudnn = "_scaled_dot_product_cudnn_attention"
    tensors = given()
    out, rows, *_, seed, offset, _ = add(cudnn, *tensors, None, True)
    saved = [out, rows, seed, offset, None, None, None, 4, 5, 0.0, False]
    add(f"{cudnn}_backward", real(*out.shape), *tensors, *saved)
    tensors = _turned(given(shared=2))
    out, rows, seeds, unused, _ = add(
        "_flash_attention_forward", *tensors, None, None, 4, 5, 0.0, False, False
    )
    saved = [out, rows, None, None, 4, 5, 0.0, False, seeds, unused]
    add("_flash_attention_backward", real(*out.shape), *tensors, *saved)
    tensors = _turned(given())
    out, rows, seed, offset, *_ = add(
        "_efficient_attention_forward", *tensors, None, None, None, 4, 5, 0.0, 0, True
    )
    saved = [None, out, None, None, 4, 5, rows, 0.0, seed, offset, 0, False]
    add("_efficient_attention_backward", real(*out.shape), *tensors, *saved)
    return found


MODELLED = _modelled()


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("op", CASES)
def test_every_claimed_cut_of_attention_gives_what_one_device_gives(op: str) -> None:
    check_rule(op, CASES[op], axis_sizes=(2, 3))


@pytest.mark.slow(but=5)
@pytest.mark.parametrize("op", MODELLED)
def test_every_claimed_cut_of_an_accelerator_kernel_gives_what_its_model_gives(op: str) -> None:
    check_rule(op, MODELLED[op], axis_sizes=(2, 3), execute=model)


def test_every_rule_of_attention_is_tested() -> None:
    assert {*CASES, *MODELLED} == set(RULES)


def _cuts(op: str, case: Sample) -> set[tuple[tuple[Sbp, ...], tuple[Sbp, ...]]]:
    return {(part.inputs, part.outputs) for part in legal_signatures(op, *case[0], **case[1])}


def test_attention_is_free_in_batch_heads_and_queries_and_linear_in_the_values() -> None:
    assert _cuts(CPU, CASES[CPU][0]) == {
        ((S(0), S(0), S(0)), (S(0), S(0))),
        ((S(1), S(1), S(1)), (S(1), S(1))),
        ((S(2), B, B), (S(2), S(2))),
        ((B, B, P), (P, B)),
        ((B, B, B), (B, B)),
    }


def test_gradients_of_attention_are_free_in_keys_too_and_partial_over_what_is_summed() -> None:
    assert _cuts(CPU_BACKWARD, CASES[CPU_BACKWARD][0]) == {
        ((S(0),) * 6, (S(0),) * 3),
        ((S(1),) * 6, (S(1),) * 3),
        ((S(2), S(2), B, B, S(2), S(2)), (S(2), P, P)),
        ((B, B, S(2), S(2), B, B), (P, S(2), S(2))),
        ((P, B, B, B, B, B), (P, P, P)),
        ((B, B, B, P, P, B), (P, P, B)),
        ((B,) * 6, (B,) * 3),
    }


def test_queries_that_share_a_head_of_keys_are_split_behind_the_heads() -> None:
    call, _ = call_of(CPU, given(heads=2, shared=3), {})

    found = [part.inputs for part in enumerate_signatures(call, (2, 3))]

    assert (NdSbp(S(1), S(1)), NdSbp(S(1), B), NdSbp(S(1), B)) in found


def test_one_head_of_keys_is_whole_beside_split_heads_of_queries() -> None:
    assert ((S(1), B, B), (S(1), S(1))) in _cuts(CPU, CASES[CPU][2])


def test_a_shard_of_causal_queries_is_given_its_mask_and_the_first_is_not() -> None:
    call = abstract_call(CPU, given(), {"is_causal": True})
    (part,) = (part for part in derive(call, 2) if part.label == "t")
    mesh = Placement.grid((2,))

    programs = [localize(call, combine([part]), mesh, rank) for rank in mesh.rank_list]

    assert [step.op for step in programs[0].calls] == [CPU]
    assert [step.op.split(".")[1] for step in programs[1].calls] == [
        "full",
        "triu",
        CPU.split(".")[1],
    ]
    assert programs[1].calls[1].args[1] == 3


def test_dropout_keeps_attention_whole_and_says_why() -> None:
    found = derivation(abstract_call(CPU, [*given(), 0.1], {}))

    assert {part.origin for part in found.legal} == {"all B", "linear in argument 2"}
    assert "a shard would drop other elements" in found.notation.why


def test_padded_sums_keep_queries_whole_unless_they_are_left_out() -> None:
    op = "aten._scaled_dot_product_efficient_attention.default"
    kept, left_out = (abstract_call(op, [*given(), None, flag], {}) for flag in (True, False))

    assert [any(part.label == "t" for part in derive(call, 2)) for call in (kept, left_out)] == [
        False,
        True,
    ]


def test_sequences_of_several_lengths_in_one_dim_are_whole() -> None:
    ends = torch.tensor([0, 3, 8], dtype=torch.int32)
    tokens = [real(8, 3, 4) for _ in range(3)]
    lengths = [ends, ends, 5, 5, 0.0, False, False]
    op = "aten._flash_attention_forward.default"
    made = [tokens[0], real(3, 8), ends, ends, ends]
    call, _ = describe(op, [*tokens, *lengths], {}, made)

    assert [part.origin for part in derive(call, 2)] == ["all B"]

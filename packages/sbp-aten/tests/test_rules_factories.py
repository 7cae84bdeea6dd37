"""Factories and random operators: verified by execution; what a shard is told."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from sbp_aten.rules import factories
from sbp_core.placement import Placement
from sbp_core.sbp import B, NdSbp, S
from sbp_core.signatures import legal_signatures, localize
from sbp_core.strategy import Signature
from sbp_torch.ops import arithmetic as _arithmetic  # noqa: F401 - registers sbp.constant
from sbp_torch.signatures.verification import abstract_call, verify
from sbp_torch.testing.signatures import Sample, sample

_draw = torch.Generator().manual_seed(13)


def real(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=_draw)


def scalar(value: float) -> torch.Tensor:
    return torch.tensor(value)


_SHAPED = (
    "cauchy.default exponential.default log_normal.default normal_functional.default "
    "rand_like.default randn_like.default random.default uniform.default"
)
_WINDOWS = [op for op in factories.RULES if "_window." in op]

CASES: dict[str, list[Sample]] = {
    "aten._efficientzerotensor.default": [sample([4, 5])],
    "aten.arange.default": [sample(7), sample(6, dtype=torch.float64), sample(2.5)],
    "aten.arange.start": [sample(3, 8), sample(0.1, 4.0)],
    "aten.arange.start_step": [sample(1, 12, 2), sample(9, 2, -3), sample(0, 1.5, 0.1)],
    "aten.empty.memory_format": [sample([4, 5])],
    "aten.empty_like.default": [sample(real(4, 5))],
    "aten.empty_permuted.default": [sample([4, 5], [1, 0])],
    "aten.empty_strided.default": [sample([4, 5], [1, 4]), sample([4, 5], [5, 1])],
    "aten.eye.default": [sample(5, dtype=torch.float64), sample(1)],
    "aten.eye.m": [sample(5, 3), sample(2, 7, dtype=torch.int64)],
    "aten.full.default": [sample([4, 5], 2.0), sample([], 1), sample([5], 0.0)],
    "aten.full_like.default": [sample(real(4, 5), 3.0), sample(real(4), 0)],
    "aten.linspace.Scalar_Tensor": [sample(0.0, scalar(3.0), 7)],
    "aten.linspace.Tensor_Scalar": [sample(scalar(0.1), 3.0, 7)],
    "aten.linspace.Tensor_Tensor": [sample(scalar(0.1), scalar(3.0), 7)],
    "aten.linspace.default": [sample(0.1, 3.0, 7), sample(0, 10, 5, dtype=torch.int64)],
    "aten.logspace.Scalar_Tensor": [sample(0.0, scalar(3.0), 7)],
    "aten.logspace.Tensor_Scalar": [sample(scalar(0.1), 3.0, 7)],
    "aten.logspace.Tensor_Tensor": [sample(scalar(0.1), scalar(3.0), 7)],
    "aten.logspace.default": [sample(0.1, 3.0, 7, 2.0)],
    "aten.new_empty.default": [sample(real(4), [3, 5])],
    "aten.new_empty_strided.default": [sample(real(4), [3, 5], [1, 3])],
    "aten.new_full.default": [sample(real(4), [3, 5], 2.0), sample(real(4), [3], 0)],
    "aten.new_ones.default": [sample(real(4, 2), [3, 5])],
    "aten.new_zeros.default": [sample(real(4), [3, 5])],
    "aten.ones.default": [sample([4, 5])],
    "aten.ones_like.default": [sample(real(4, 5)), sample(real())],
    "aten.range.default": [sample(0, 6)],
    "aten.range.step": [sample(0, 1.5, 0.1)],
    "aten.scalar_tensor.default": [sample(2.0), sample(0)],
    "aten.tril_indices.default": [sample(4, 5)],
    "aten.triu_indices.default": [sample(4, 5, 1)],
    "aten.zeros.default": [sample([4, 5], dtype=torch.float64)],
    "aten.zeros_like.default": [sample(real(4, 5))],
    **{op: [sample(7)] for op in _WINDOWS},
    "aten.hamming_window.periodic_alpha": [sample(7, True, 0.5)],
    "aten.hamming_window.periodic_alpha_beta": [sample(7, True, 0.5, 0.4)],
    "aten.kaiser_window.beta": [sample(7, True, 11.0)],
    **{op: [sample(7, False)] for op in _WINDOWS if op.endswith(".periodic")},
    "sbp.constant.default": [
        sample([float(n) for n in range(15)], [5, 3], dtype=torch.float64),
        sample([2.5], [], dtype=torch.float64),
    ],
}

RANDOM: dict[str, list[Sample]] = {
    **{f"aten.{name}": [sample(real(4, 5))] for name in _SHAPED.split()},
    "aten._sample_dirichlet.default": [sample(real(4, 5).abs() + 1)],
    "aten._standard_gamma.default": [sample(real(4, 5).abs() + 1)],
    "aten.bernoulli.Tensor": [sample(real(4, 5), torch.rand(4, 5))],
    "aten.bernoulli.default": [sample(torch.rand(4, 5))],
    "aten.bernoulli.p": [sample(real(4, 5), 0.3)],
    "aten.binomial.default": [sample(torch.full((4,), 9.0), torch.rand(4))],
    "aten.geometric.default": [sample(real(4, 5), 0.3)],
    "aten.multinomial.default": [sample(torch.rand(4, 5), 3)],
    "aten.native_dropout.default": [
        sample(real(4, 5), 0.3, True),
        sample(real(4, 5), 0.3, False),
        sample(real(4, 5), 1.0, True),
    ],
    "aten.normal.Tensor_Tensor": [sample(real(4, 5), real(4, 5).abs())],
    "aten.normal.Tensor_float": [sample(real(4, 5), 2.0)],
    "aten.normal.float_Tensor": [sample(1.0, real(4, 5).abs())],
    "aten.normal.float_float": [sample(1.0, 2.0, [4, 5])],
    "aten.poisson.default": [sample(real(4, 5).abs())],
    "aten.rand.default": [sample([4, 5])],
    "aten.randint.default": [sample(9, [4, 5])],
    "aten.randint.low": [sample(3, 9, [4, 5])],
    "aten.randint_like.Tensor": [sample(real(4, 5), torch.tensor(9))],
    "aten.randint_like.default": [sample(real(4, 5), 9)],
    "aten.randint_like.low_dtype": [sample(real(4, 5), 3, 9)],
    "aten.randn.default": [sample([4, 5])],
    "aten.random.from": [sample(real(4, 5), 3, 9)],
    "aten.random.to": [sample(real(4, 5), 9)],
    "aten.randperm.default": [sample(7)],
    "sbp.random_bernoulli.default": [
        sample([5, 7], 3, 1, 2, p=0.3),
        sample([5, 7], 3, 1, 2, dtype=torch.float64),
    ],
    "sbp.random_integers.default": [sample([13], 3, 1, 2, low=-3, high=90)],
    "sbp.random_normal.default": [
        sample([5, 7, 3], 3, 1, 2, mean=1.0, std=0.5),
        sample([5, 7], 3, 1, 2, dtype=torch.float64),
        sample([5, 2, 1], 1 << 40, 1, 2),
    ],
    "sbp.random_uniform.default": [
        sample([5, 7], 3, 1, 2, low=-1.0, high=3.0),
        sample([], 3, 1, 2),
        sample([2, 3, 5], 3, 1, 2, dtype=torch.bfloat16),
        sample([5, 7], 3, 1, 2, start=[2, 1], logical=[9, 11]),
    ],
}

#: They take a generator, which is no value of a graph, or exist for CUDA only.
NOT_RUN = {op for op in factories.RULES if op.endswith(("generator", "generator_dtype"))} | {
    "aten._fused_dropout.default"
}


@pytest.mark.slow(but=5)
@pytest.mark.parametrize("op", [*CASES, *RANDOM])
def test_every_claimed_signature_holds_when_it_is_run(op: str) -> None:
    for args, kwargs in {**CASES, **RANDOM}[op]:
        report = verify(op, *args, axis_sizes=(2, 3), isolated=False, **kwargs)

        assert report.ok, str(report)


def test_every_rule_is_run_by_these_tests() -> None:
    assert set(factories.RULES) - NOT_RUN <= {*CASES, *RANDOM}


def test_a_tensor_that_hands_over_its_dtype_only_may_be_cut_at_will() -> None:
    found = {str(entry) for entry in legal_signatures("aten.new_ones.default", (4, 2), [3])}

    assert found >= {"S(0) -> B", "S(1) -> B", "P -> B", "B -> S(0)", "B -> B"}


@pytest.mark.parametrize("op", ["aten.full.default", "aten.new_full.default"])
def test_only_zeros_are_a_sum_of_what_every_rank_makes(op: str) -> None:
    before: tuple[object, ...] = ((3,),) if "new" in op else ()

    filled = {str(entry) for entry in legal_signatures(op, *before, [4], 2.0)}
    zeros = {str(entry) for entry in legal_signatures(op, *before, [4], 0.0)}

    assert not any(text.endswith("-> P") for text in filled)
    assert any(text.endswith("-> P") for text in zeros)


def test_a_range_of_integers_starts_where_the_shard_starts() -> None:
    call = abstract_call("aten.arange.start_step", (1, 12, 2), {})
    signature = Signature((), (NdSbp(S(0)),))

    (made,) = localize(call, signature, Placement.grid((2,)), 1).calls

    assert (made.op, made.args) == ("aten.arange.start_step", (7, 13, 2))


def test_a_range_of_reals_is_cut_out_of_the_whole() -> None:
    call = abstract_call("aten.linspace.default", (0.0, 1.0, 7), {})
    signature = Signature((), (NdSbp(S(0)),))

    whole, cut = localize(call, signature, Placement.grid((2,)), 1).calls

    assert whole.args == (0.0, 1.0, 7)
    assert (cut.op, cut.args[1:]) == ("aten.slice.Tensor", (0, 4, 7))


def test_strides_of_a_shard_keep_their_order() -> None:
    call = abstract_call("aten.empty_strided.default", ([4, 6], [1, 4]), {})
    signature = Signature((), (NdSbp(S(0)),))

    (made,) = localize(call, signature, Placement.grid((2,)), 1).calls

    assert made.args == ((2, 6), (1, 2))


def test_dropout_in_training_passes_sums_under_one_mask() -> None:
    found = {
        str(entry) for entry in legal_signatures("aten.native_dropout.default", (4, 5), 0.5, True)
    }

    assert found == {"P -> P, B", 'P("max") -> P("max"), B', 'P("min") -> P("min"), B', "B -> B, B"}


@pytest.mark.parametrize("op", ["aten.rand.default", "aten.randn.default"])
def test_numbers_of_pytorch_stay_whole(op: str) -> None:
    assert [str(entry) for entry in legal_signatures(op, [4, 5])] == ["-> B"]


_Draw = Callable[..., torch.Tensor]


def drawn(name: str, **own: float) -> _Draw:
    operator = getattr(torch.ops.sbp, f"random_{name}").default

    def draw(*size: int, **given: object) -> torch.Tensor:
        return operator(list(size), 5, 1, 2, **own, **given)

    return draw


@pytest.mark.parametrize("mesh_shape", [(3,), (2, 3), (2, 3, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ["uniform", "normal"])
def test_every_mesh_draws_the_numbers_of_one_device(
    name: str, dtype: torch.dtype, mesh_shape: tuple[int, ...]
) -> None:
    logical = (7, 5, 13)
    whole = drawn(name)(*logical, dtype=dtype)
    call = abstract_call(f"sbp.random_{name}.default", (logical, 5, 1, 2), {"dtype": dtype})
    mesh = Placement.grid(mesh_shape)
    signature = Signature((), (NdSbp(*(S(2), S(0), S(2))[: len(mesh_shape)]),))

    for rank in mesh.rank_list:
        (local,) = localize(call, signature, mesh, rank).calls
        size, *_ = local.args
        start = local.kwargs["start"]

        found = drawn(name)(*size, start=start, logical=local.kwargs["logical"], dtype=dtype)

        cut = tuple(slice(a, a + n) for a, n in zip(start, size, strict=True))
        assert torch.equal(found, whole[cut])


def test_shards_of_their_own_streams_differ_and_equal_shards_agree() -> None:
    call = abstract_call("sbp.random_uniform.default", ([8, 4], 5, 1, 2), {"per_shard": True})
    mesh = Placement.grid((2, 2))
    signature = Signature((), (NdSbp(S(0), B),))

    made = []
    for rank in mesh.rank_list:
        (local,) = localize(call, signature, mesh, rank).calls
        stream = local.kwargs["stream"]
        made.append(drawn("uniform")(*local.args[0], per_shard=True, stream=stream))

    assert torch.equal(made[0], made[1])
    assert torch.equal(made[2], made[3])
    assert not torch.equal(made[0], made[2])

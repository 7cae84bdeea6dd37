"""Linear algebra and Fourier transforms under every split, against one device."""

from __future__ import annotations

import pytest
import torch

from sbp_aten.rules import linalg
from sbp_core.sbp import B, P, S
from sbp_core.signatures import legal_signatures, work_flop
from sbp_core.signatures.derivations import derivation
from sbp_torch.signatures.verification import abstract_call, call_of
from sbp_torch.testing.signatures import Sample, check_rule, sample

_draw = torch.Generator().manual_seed(29)


def real(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=_draw)


def complex_(*shape: int) -> torch.Tensor:
    return torch.complex(real(*shape), real(*shape))


def square(*shape: int) -> torch.Tensor:
    """Return well-conditioned matrices."""
    return real(*shape) + 4 * torch.eye(shape[-1], dtype=torch.float64)


def positive(*shape: int) -> torch.Tensor:
    """Return symmetric positive definite matrices."""
    made = square(*shape)
    return made @ made.mT


def lower(*shape: int) -> torch.Tensor:
    return torch.linalg.cholesky(positive(*shape))


def _lu(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    factors, pivots = torch.linalg.lu_factor(square(*shape))
    return factors, pivots


def _ldl(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    factors, pivots = torch.linalg.ldl_factor(positive(*shape))
    return factors, pivots


def _reflectors(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    factors, scales = torch.geqrf(real(*shape))
    return factors, scales


FACTORISATIONS: dict[str, list[Sample]] = {
    "aten._linalg_check_errors.default": [
        sample(torch.zeros(5, 2, dtype=torch.int32), "linalg.inv", is_matrix=False),
        sample(torch.zeros((), dtype=torch.int32), "linalg.inv", is_matrix=True),
    ],
    "aten._linalg_det.default": [sample(square(5, 3, 3)), sample(square(3, 3))],
    "aten._linalg_eigh.default": [
        sample(positive(5, 3, 3)),
        sample(positive(5, 3, 3), "U", False),
    ],
    "aten._linalg_eigvals.default": [sample(square(5, 3, 3))],
    "aten._linalg_slogdet.default": [sample(square(5, 3, 3))],
    "aten._linalg_svd.default": [
        sample(real(5, 4, 3), True),
        sample(real(5, 4, 3), False, False),
    ],
    "aten.block_diag.default": [
        sample([real(2, 5), real(3), real()]),
        sample([real(5, 3)]),
        sample([real(5)]),
    ],
    "aten.cholesky_inverse.default": [sample(lower(5, 3, 3))],
    "aten.geqrf.default": [sample(real(5, 4, 3))],
    "aten.linalg_cholesky_ex.default": [sample(positive(5, 2, 3, 3)), sample(positive(3, 3))],
    "aten.linalg_eig.default": [sample(square(5, 3, 3))],
    "aten.linalg_householder_product.default": [sample(*_reflectors(5, 4, 3))],
    "aten.linalg_inv_ex.default": [sample(square(5, 3, 3))],
    "aten.linalg_ldl_factor_ex.default": [sample(positive(5, 3, 3))],
    "aten.linalg_lu.default": [sample(real(5, 4, 3))],
    "aten.linalg_lu_factor_ex.default": [sample(real(5, 3, 4))],
    "aten.linalg_matrix_exp.default": [sample(real(5, 3, 3))],
    "aten.linalg_pinv.atol_rtol_tensor": [
        sample(real(5, 4, 3)),
        sample(real(5, 4, 3), atol=real(5).abs() / 9, rtol=torch.tensor(0.0)),
    ],
    "aten.linalg_qr.default": [sample(real(5, 4, 3), "complete"), sample(real(5, 4, 3), "r")],
    "aten.lu_unpack.default": [
        sample(*_lu(5, 3, 3)),
        sample(*_lu(5, 3, 3), False, True),
        sample(*_lu(5, 3, 3), True, False),
    ],
}

SOLVERS: dict[str, list[Sample]] = {
    "aten._linalg_solve_ex.default": [
        sample(square(5, 3, 3), real(5, 3, 7)),
        sample(square(3, 3), real(2, 7, 3), left=False),
        sample(square(5, 3, 3), real(5, 3)),
        sample(square(3, 3), real(3)),
    ],
    "aten.cholesky_solve.default": [sample(real(3, 7), lower(5, 3, 3))],
    "aten.linalg_ldl_solve.default": [sample(*_ldl(5, 3, 3), real(5, 3, 7))],
    "aten.linalg_lstsq.default": [
        sample(real(5, 4, 3), real(5, 4, 7)),
        sample(real(5, 4, 3), real(5, 4, 7), driver="gelsd"),
        sample(real(4, 3), real(4)),
    ],
    "aten.linalg_lu_solve.default": [
        sample(*_lu(5, 3, 3), real(5, 3, 7)),
        sample(*_lu(5, 3, 3), real(7, 3), left=False, adjoint=True),
    ],
    "aten.linalg_solve_triangular.default": [
        sample(lower(3, 3), real(5, 3, 7), upper=False),
        sample(lower(5, 3, 3), real(5, 7, 3), upper=False, left=False),
    ],
    "aten.ormqr.default": [
        sample(*_reflectors(5, 4, 3), real(5, 4, 7)),
        sample(*_reflectors(5, 4, 3), real(5, 7, 4), False, True),
    ],
}

DEPRECATED: dict[str, list[Sample]] = {
    "aten.cholesky.default": [sample(positive(5, 3, 3))],
    "aten.triangular_solve.default": [sample(real(5, 3, 7), lower(5, 3, 3), False)],
}

TRANSFORMS: dict[str, list[Sample]] = {
    "aten._fft_c2c.default": [
        sample(complex_(5, 4, 3), [1], 0, True),
        sample(complex_(5, 4, 3), [0, 2], 2, False),
    ],
    "aten._fft_c2r.default": [sample(complex_(5, 4, 3), [0, 2], 1, 5)],
    "aten._fft_r2c.default": [
        sample(real(5, 4, 3), [2], 0, True),
        sample(real(5, 4, 3), [0, 1], 1, False),
    ],
}

CASES = {**FACTORISATIONS, **SOLVERS, **DEPRECATED, **TRANSFORMS}


@pytest.mark.slow(but=5)
@pytest.mark.filterwarnings("ignore:.*deprecated.*:UserWarning")
@pytest.mark.parametrize("op", CASES)
def test_every_claimed_cut_gives_what_one_device_gives(op: str) -> None:
    check_rule(op, CASES[op], axis_sizes=(2, 7))


def test_every_rule_of_linear_algebra_and_transforms_is_tested() -> None:
    assert set(CASES) == {*linalg.RULES}


def test_a_factorisation_may_be_split_by_its_batch_only() -> None:
    found = {part.inputs for part in legal_signatures("aten.linalg_inv_ex.default", (5, 2, 3, 3))}

    assert found == {(S(0),), (S(1),), (B,)}


def test_right_hand_sides_are_free_and_the_solution_is_linear_in_them() -> None:
    args, kwargs = SOLVERS["aten.linalg_lu_solve.default"][0]

    found = {
        (part.inputs, part.outputs)
        for part in legal_signatures("aten.linalg_lu_solve.default", *args, **kwargs)
    }

    assert found == {
        ((S(0), S(0), S(0)), (S(0),)),
        ((B, B, S(2)), (S(2),)),
        ((B, B, P), (P,)),
        ((B, B, B), (B,)),
    }


def test_what_hangs_on_the_matrix_alone_is_whole_beside_split_right_hand_sides() -> None:
    args, kwargs = SOLVERS["aten._linalg_solve_ex.default"][0]

    found = legal_signatures("aten._linalg_solve_ex.default", *args, **kwargs)

    assert ((B, S(2)), (S(2), B, B, B)) in {(part.inputs, part.outputs) for part in found}
    assert ((B, P), (P, B, B, B)) in {(part.inputs, part.outputs) for part in found}


def test_residuals_keep_a_batch_whole_since_one_matrix_decides_whether_they_are_given() -> None:
    args, kwargs = SOLVERS["aten.linalg_lstsq.default"][1]
    call, _ = call_of("aten.linalg_lstsq.default", args, kwargs)

    rejected = [entry for entry in derivation(call).rejected if entry.inputs == (S(0), S(0))]

    assert [entry.reason.endswith("full rank") for entry in rejected] == [True]


def test_a_transform_names_the_reason_why_its_dims_are_whole() -> None:
    call = abstract_call("aten._fft_r2c.default", [(5, 4), [1], 0, True], {})

    reasons = [entry.reason for entry in derivation(call).rejected if entry.inputs == (S(1),)]

    assert reasons == [
        "aten._fft_r2c.default needs that dim whole: each coefficient is a sum over all elements"
    ]


def test_the_work_of_a_factorisation_is_cubic_and_that_of_a_solution_square() -> None:
    factors = abstract_call("aten.linalg_cholesky_ex.default", [(5, 6, 6)], {})
    solution = abstract_call("aten.cholesky_solve.default", [(5, 6, 7), (5, 6, 6)], {})

    assert work_flop(factors) == pytest.approx(5 * 6**3 / 3)
    assert work_flop(solution) == 2 * 5 * 6 * 6 * 7

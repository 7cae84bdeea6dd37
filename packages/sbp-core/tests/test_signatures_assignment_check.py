from __future__ import annotations

import pickle

import pytest

from sbp_core.errors import SbpValueError, SignatureError
from sbp_core.placement import Placement
from sbp_core.signatures import check_signature
from sbp_core.testing.example_calls import call, signature

MESH = Placement([[0, 1, 2], [3, 4, 5]], axes=("dp", "tp"))


MATMUL = call("aten.mm.default", {"x": (4, 6), "w": (6, 8)}, [(4, 8)])
GELU = call("aten.gelu.default", {"h": (4, 6)}, [(4, 6)], tags=["pointwise"])


def test_a_legal_signature_passes() -> None:
    check_signature(MATMUL, signature(["S(0), S(1)", "B, S(0)"], ["S(0), P"]), MESH)


def test_a_partial_value_may_not_reach_a_nonlinear_operator() -> None:
    with pytest.raises(SignatureError, match=r"cannot take P of 'h'") as caught:
        check_signature(GELU, signature(["S(0), P"], ["S(0), P"]), MESH)

    assert "box 'h' (S(0), P) -> (S(0), S(0)) before it: reduce-scatter" in str(caught.value)


def test_a_wrong_output_is_told_from_a_wrong_input() -> None:
    with pytest.raises(SignatureError, match=r"does not give S\(1\), S\(0\) -> B"):
        check_signature(MATMUL, signature(["S(1), B", "S(0), B"], ["B, B"]), MESH)


def test_a_signature_needs_an_entry_for_every_tensor() -> None:
    with pytest.raises(SignatureError, match="takes 2 tensors and gives 1"):
        check_signature(MATMUL, signature(["B, B"], ["B, B"]), MESH)


def test_an_sbp_has_to_fit_mesh_and_shape() -> None:
    with pytest.raises(SbpValueError, match="one entry for each mesh axis"):
        check_signature(GELU, signature(["B"], ["B"]), MESH)
    with pytest.raises(SbpValueError, match="does not have") as caught:
        check_signature(GELU, signature(["S(2), B"], ["S(2), B"]), MESH)
    assert caught.value.where[0] == "'h' of aten.gelu.default"


def test_the_refusal_travels_between_processes() -> None:
    with pytest.raises(SignatureError) as caught:
        check_signature(GELU, signature(["P, B"], ["P, B"]), MESH)

    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)

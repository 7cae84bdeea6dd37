from __future__ import annotations

from dataclasses import replace

import pytest

from sbp_core.errors import SignatureError
from sbp_core.graph.ir import Ref
from sbp_core.placement import Placement
from sbp_core.signatures import check_signature
from sbp_core.testing.example_calls import call, signature

MESH = Placement([[0, 1, 2], [3, 4, 5]], axes=("dp", "tp"))


VIEW = call("aten.view.default", {"mlp.w1": (4096, 11008)}, [(4096, 32, 344)])


def test_an_illegal_signature_names_tensor_axis_place_and_way_out() -> None:
    asked = signature(["B, S(1)"], ["B, S(1)"])

    with pytest.raises(SignatureError) as caught:
        check_signature(VIEW, asked, MESH)

    assert str(caught.value).splitlines() == [
        "cannot split dim 1 of 'mlp.w1' (shape (4096, 11008)) for aten.view.default to "
        "(4096, 32, 344) on mesh axis 'tp' of size 3",
        "  in model.py:7",
        "  accepted here: S(0) -> S(0) (split of label g0); B -> B (all B); P -> P (linear in "
        "argument 0)",
        "  not here: S(1) -> S(1): needs 32 to be divisible by 3; "
        "S(1) -> S(2): only the slowest factor of dim 1 may be split",
        "  to fix it: box 'mlp.w1' (B, S(1)) -> (B, S(0)) before it: all-to-all, 240.5 MB; "
        "it then gives (B, S(0))",
    ]


def test_a_split_of_what_an_operator_needs_whole_says_so() -> None:
    rows = replace(call("aten.cumsum.default", {"x": (9, 6)}, [(9, 6)]), args=(Ref("x"), 0))

    with pytest.raises(SignatureError, match=r"needs that dim whole"):
        check_signature(rows, signature(["S(0), B"], ["S(0), B"]), MESH)


def test_axes_that_are_legal_alone_may_be_refused_together() -> None:
    heads = call("aten.view.default", {"x": (8, 24)}, [(8, 6, 4)])
    mesh = Placement.grid((2, 2), axes=("a", "b"))

    check_signature(heads, signature(["S(1), S(0)"], ["S(1), S(0)"]), mesh)
    with pytest.raises(SignatureError, match="6 to be divisible by 4"):
        check_signature(heads, signature(["S(1), S(1)"], ["S(1), S(1)"]), mesh)

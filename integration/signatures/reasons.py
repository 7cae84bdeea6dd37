"""Reasons why discovered signatures are not claimed, if the notation cannot give one.

They are accidents of the values of a sample: a clamp that clamps nothing is linear. A reason
applies to the operators that it names, and only to calls and signatures that contain the given
texts. Reasons are as narrow as possible, because explained signatures are not examined any more.
"""

from __future__ import annotations

from dataclasses import dataclass

from sbp_aten.rules import FAMILIES


@dataclass(frozen=True, slots=True)
class _Accident:
    """The calls and signatures to which a reason applies.

    Args:
        names: Operators of ATen, with an overload unless it is `default`.
        call: Text that the shown call contains.
        signature: Text that the signature contains.
    """

    names: str
    call: str = ""
    signature: str = ""


_ACCIDENTS = {
    "that some summand is not zero says nothing of the sum": _Accident(
        "any any.dim any.dims", signature="P -> P"
    ),
    "a bool has two values, and any function of them is monotone": _Accident(
        (
            "acos asin atan2 atanh copysign.Tensor cos cosh digamma erfinv i0 ldexp.Tensor "
            "lgamma logit polygamma sin sinc special_airy_ai special_bessel_j0 "
            "special_bessel_j1 special_bessel_y0 special_bessel_y1 "
            "special_chebyshev_polynomial_t special_chebyshev_polynomial_u "
            "special_chebyshev_polynomial_v special_chebyshev_polynomial_w special_entr "
            "special_hermite_polynomial_h special_hermite_polynomial_he special_i0e "
            "special_i1e special_laguerre_polynomial_l special_legendre_polynomial_p "
            "special_modified_bessel_i0 special_ndtri special_shifted_chebyshev_polynomial_t "
            "special_shifted_chebyshev_polynomial_u special_shifted_chebyshev_polynomial_v "
            "special_shifted_chebyshev_polynomial_w special_spherical_bessel_j0 special_zeta "
            "tan angle signbit bitwise_xor.Scalar ge.Tensor gt.Tensor le.Tensor lt.Tensor "
            "native_dropout_backward mul.Tensor sum sum.dim_IntList where.self all all.dim "
            "any any.dim addr bitwise_and.Tensor bitwise_or.Tensor amin amax aminmax min max "
            "index_fill.int_Scalar _unsafe_masked_index _unsafe_masked_index_put_accumulate "
            "as_strided_scatter special_modified_bessel_k0 special_modified_bessel_k1 "
            "special_scaled_modified_bessel_k0 special_scaled_modified_bessel_k1"
        ),
        call="bool[",
    ),
    "no element of the sample is zero, infinite, equal or outside the bounds": _Accident(
        "eq.Scalar eq.Tensor ne.Scalar ne.Tensor heaviside isin.Tensor_Tensor isinf isnan "
        "isneginf isposinf logical_and logical_not logical_or logical_xor nan_to_num "
        "hardtanh floor_divide masked_fill.Scalar"
    ),
    "the number given makes it the identity, or sets low bits only": _Accident(
        "hardshrink hardshrink_backward softshrink softshrink_backward bitwise_or.Scalar"
    ),
    "x log y is 0 at x = 0 even where log y is no number, which parts of a sum are not": _Accident(
        "xlogy.Tensor special_xlog1py"
    ),
    "the logarithm of False is infinite, and so is any sum with it": _Accident(
        ("log log10 log2 log1p"), call="bool["
    ),
    "the neighbour of a number is that number within tolerance": _Accident("nextafter"),
    "bits that are shifted out make it wrap": _Accident("bitwise_left_shift.Tensor"),
    "whether a step grows with a gradient hangs on its coefficients": _Accident("_fused_sgd"),
    "all of the sample is true, or none of it, or its extremes are everywhere": _Accident(
        ("all any all.dim any.dim all.dims any.dims aminmax amin amax min max count_nonzero prod"),
        signature="-> B",
    ),
    "the fill is below, or above, all of the sample": _Accident(
        ("_unsafe_masked_index"), call="int64"
    ),
    "all of the target is written, or the fill is beyond all of it": _Accident(
        "index_fill.int_Scalar index_fill.int_Tensor as_strided_scatter"
    ),
    "of two elements the median is the smaller": _Accident(("median nanmedian"), call="[2]"),
    "a number beyond the threshold, where it is the identity": _Accident(("softplus"), call="[]"),
    "no reflection is given": _Accident(("linalg_householder_product"), call="[0]"),
    "one number is drawn, and happens to be the same": _Accident(("bernoulli"), call="[]"),
    "one element falls into one bin": _Accident(("histogram.bins_tensor"), call="[]"),
    "two windows a dim hold the same places whatever the random samples": _Accident(
        "fractional_max_pool2d fractional_max_pool3d"
    ),
    "windows side by side split the plane too, which is claimed instead": _Accident(
        "adaptive_max_pool2d_backward adaptive_max_pool3d_backward"
    ),
    "what a mask selects hangs on its data": _Accident(("index.Tensor"), call="bool["),
    "tolerances beside which nothing is small": _Accident(
        ("linalg_pinv.atol_rtol_tensor"), call="[]"
    ),
    "products of few integers happen to keep the order": _Accident(("mm bmm"), call="int64"),
    "places of the sample rise with its data": _Accident(("take"), call="int64"),
    "rounding to so many decimals is the identity within tolerance": _Accident("round.decimals"),
    "running statistics are written in place": _Accident(("native_batch_norm"), call=", True,"),
    "at this size no element is read twice": _Accident(
        "upsample_bilinear2d upsample_linear1d_backward upsample_bilinear2d_backward "
        "upsample_trilinear3d_backward"
    ),
    "the product of empty matrices is zero": _Accident(("addmm baddbmm addbmm addmv"), call="0]"),
    "what stays of the target is zero, or nothing stays": _Accident(
        ("slice_scatter select_scatter as_strided_scatter diagonal_scatter stack"), call="int64"
    ),
    "the number that is added is below the tolerance": _Accident(
        ("add.Scalar add.Tensor sub.Scalar sub.Tensor"), call="e-"
    ),
    "whether a summand is not zero says nothing of the sum": _Accident(
        ("_to_copy"), call="dtype=torch.bool"
    ),
    "a matrix of one element is linear in it": _Accident(
        ("_linalg_det lu_unpack linalg_solve_triangular"), call="1, 1]"
    ),
    "an argument without elements is as good partial as whole": _Accident(("cat stack"), call="[0"),
    "a piece without elements is as good whole as partial": _Accident(
        ("split_with_sizes split_with_sizes_copy"), call="0]"
    ),
    "nothing is added": _Accident(("scatter_add"), call="0]"),
    "the indices of the sample meet every place, or none twice": _Accident(
        (
            "scatter.src scatter.value scatter_reduce.two scatter_add index_add index_put put "
            "index_copy index_reduce embedding_dense_backward fractional_max_pool2d_backward "
            "fractional_max_pool3d_backward max_pool2d_with_indices_backward "
            "max_pool3d_with_indices_backward max_unpool2d max_unpool3d"
        ),
        call="int64",
    ),
    "nothing, or everything, is selected in the sample": _Accident(
        ("masked_select masked_scatter"), call="bool["
    ),
    "parts of narrow integers may wrap before they are widened": _Accident(
        ("_int_mm"), call="int8"
    ),
    "with one class a score is compared with nothing": _Accident(
        ("multilabel_margin_loss_forward multilabel_margin_loss_backward"), call="[]"
    ),
    "one element is unique": _Accident(("_unique _unique2 unique_consecutive"), call="[]"),
    "the power zero is one": _Accident(("pow.Tensor_Scalar"), call=", 0.0)"),
    "one step is its start": _Accident(("logspace.Tensor_Tensor"), call="int64[]"),
}

_FOREACH = "a signature cuts the tensors of one place, or all of them alike"


def accident_of(op: str, shown: str, signature: str) -> str:
    """Return why a signature of a shown call is not valid in general; empty if unknown."""
    if op in FAMILIES["foreach"].RULES:
        return _FOREACH
    for reason, where in _ACCIDENTS.items():
        ops = {
            f"aten.{name}" if "." in name else f"aten.{name}.default"
            for name in where.names.split()
        }
        if op in ops and where.call in shown and where.signature in signature:
            return reason
    return ""

"""Why signatures that execution discovers are not claimed, where the notation cannot say it.

Such are accidents of the values of a sample: a clamp that clamps nothing is linear.
"""

from __future__ import annotations

from sbp_core.signatures.rules import foreach

#: Reason -> operators of ATen, with an overload unless it is `default`.
_GROUPS = {
    "a bool has two values, and any function of them is monotone": (
        "acos asin atan2 atanh copysign.Tensor cos cosh digamma erfinv i0 ldexp.Tensor lgamma "
        "logit polygamma sin sinc special_airy_ai special_bessel_j0 special_bessel_j1 "
        "special_bessel_y0 special_bessel_y1 special_chebyshev_polynomial_t "
        "special_chebyshev_polynomial_u special_chebyshev_polynomial_v "
        "special_chebyshev_polynomial_w special_entr special_hermite_polynomial_h "
        "special_hermite_polynomial_he special_i0e special_i1e special_laguerre_polynomial_l "
        "special_legendre_polynomial_p special_modified_bessel_i0 special_ndtri "
        "special_shifted_chebyshev_polynomial_t special_shifted_chebyshev_polynomial_u "
        "special_shifted_chebyshev_polynomial_v special_shifted_chebyshev_polynomial_w "
        "special_spherical_bessel_j0 special_zeta tan angle signbit bitwise_xor.Scalar "
        "ge.Tensor gt.Tensor le.Tensor lt.Tensor native_dropout_backward"
    ),
    "only the values of the sample: no element is zero, infinite, equal or outside the bounds": (
        "eq.Scalar eq.Tensor ne.Scalar ne.Tensor heaviside isin.Tensor_Tensor isinf isnan "
        "isneginf isposinf logical_and logical_not logical_or logical_xor nan_to_num hardtanh "
        "floor_divide masked_fill.Scalar"
    ),
    "the number given makes it the identity, or sets low bits only": (
        "hardshrink hardshrink_backward softshrink softshrink_backward bitwise_or.Scalar"
    ),
    "x log y is 0 at x = 0 even where log y is no number, which parts of a sum are not": (
        "xlogy.Tensor special_xlog1py"
    ),
    "the logarithm of False is infinite, and so is any sum with it": ("log log10 log2 log1p"),
    "the neighbour of a number is that number within tolerance": ("nextafter"),
    "bits that are shifted out make it wrap": ("bitwise_left_shift.Tensor"),
    "in training the data is not read, so that it could be cut in any way": (
        "rrelu_with_noise_backward"
    ),
    "whether a step grows with a gradient hangs on its coefficients": ("_fused_sgd"),
}

#: Operator -> reason.
REASONS: dict[str, str] = {
    f"aten.{name}" if "." in name else f"aten.{name}.default": reason
    for reason, names in _GROUPS.items()
    for name in names.split()
} | dict.fromkeys(foreach.RULES, "a signature cuts the tensors of one place, or all of them alike")

#: Reason -> (operators, text that the shown call has to contain).
_ACCIDENTS = {
    "a bool has two values, and any function of them is monotone": (
        "mul.Tensor sum sum.dim_IntList where.self all all.dim any any.dim addr bitwise_and.Tensor "
        "bitwise_or.Tensor amin amax aminmax min max index_fill.int_Scalar "
        "_unsafe_masked_index _unsafe_masked_index_put_accumulate as_strided_scatter "
        "special_modified_bessel_k0 special_modified_bessel_k1 "
        "special_scaled_modified_bessel_k0 special_scaled_modified_bessel_k1",
        "bool[",
    ),
    "all of the sample is true, or none of it, or its extremes are everywhere": (
        "all any all.dim any.dim all.dims any.dims aminmax amin amax min max count_nonzero",
        "",
    ),
    "the fill is below, or above, all of the sample": ("_unsafe_masked_index", "int64"),
    "all of the target is written, or the fill is beyond all of it": (
        "index_fill.int_Scalar index_fill.int_Tensor as_strided_scatter",
        "",
    ),
    "of two elements the median is the smaller": ("median nanmedian", "[2]"),
    "a number beyond the threshold, where it is the identity": ("softplus", "[]"),
    "no reflection is given": ("linalg_householder_product", "[0]"),
    "one number is drawn, and happens to be the same": ("bernoulli", "[]"),
    "one element falls into one bin": ("histogram.bins_tensor", "[]"),
    "two windows a dim hold the same places whatever the random samples": (
        "fractional_max_pool2d fractional_max_pool3d",
        "",
    ),
    "the power zero is one, and one step is its start": (
        "pow.Tensor_Scalar logspace.Tensor_Tensor",
        "",
    ),
    "windows side by side split the plane too, which is claimed instead": (
        "adaptive_max_pool2d_backward adaptive_max_pool3d_backward",
        "",
    ),
    "what a mask selects hangs on its data": ("index.Tensor", "bool["),
    "tolerances beside which nothing is small": ("linalg_pinv.atol_rtol_tensor", "[]"),
    "products of few integers happen to keep the order": ("mm bmm", "int64"),
    "places of the sample rise with its data": ("take", "int64"),
    "rounding to so many decimals is the identity within tolerance": ("round.decimals", ""),
    "running statistics are written in place": ("native_batch_norm", ", True,"),
    "at this size no element is read twice": (
        "upsample_bilinear2d upsample_linear1d_backward upsample_bilinear2d_backward "
        "upsample_trilinear3d_backward",
        "",
    ),
    "the product of empty matrices is zero": ("addmm baddbmm addbmm addmv", "0]"),
    "what stays of the target is zero, or nothing stays": (
        "slice_scatter select_scatter as_strided_scatter diagonal_scatter stack",
        "int64",
    ),
    "the number that is added is below the tolerance": (
        "add.Scalar add.Tensor sub.Scalar sub.Tensor",
        "e-",
    ),
    "whether a summand is not zero says nothing of the sum": ("_to_copy", "dtype=torch.bool"),
    "a matrix of one element is linear in it": (
        "_linalg_det lu_unpack linalg_solve_triangular",
        "1, 1]",
    ),
    "an argument without elements is as good partial as whole": ("cat stack", "[0"),
    "a piece without elements is as good whole as partial": (
        "split_with_sizes split_with_sizes_copy",
        "0]",
    ),
    "nothing is added": ("scatter_add", "0]"),
    "the indices of the sample meet every place, or none twice": (
        "scatter.src scatter.value scatter_reduce.two scatter_add index_add index_put put "
        "index_copy index_reduce embedding_dense_backward fractional_max_pool2d_backward "
        "fractional_max_pool3d_backward max_pool2d_with_indices_backward "
        "max_pool3d_with_indices_backward max_unpool2d max_unpool3d",
        "int64",
    ),
    "nothing, or everything, is selected in the sample": ("masked_select masked_scatter", "bool["),
    "parts of narrow integers may wrap before they are widened": ("_int_mm", "int8"),
    "with one class a score is compared with nothing": (
        "multilabel_margin_loss_forward multilabel_margin_loss_backward",
        "[]",
    ),
    "one element is unique": ("_unique _unique2 unique_consecutive", "[]"),
}


def accident_of(op: str, shown: str) -> str:
    """Return why a signature of a shown call is none in general; empty if nothing is known."""
    for reason, (names, part) in _ACCIDENTS.items():
        ops = (f"aten.{name}" if "." in name else f"aten.{name}.default" for name in names.split())
        if op in ops and part in shown:
            return reason
    return ""

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

"""Which operators compute in low precision, which in float32, and which in what they are given.

Source: PyTorch 2.13, docs "Automatic Mixed Precision package", section "Autocast Op Reference" for
CUDA, and aten/src/ATen/autocast_mode.h (`AT_FORALL_LOWER_PRECISION_FP`, `AT_FORALL_FP32`,
`AT_FORALL_FP32_SET_OPT_DTYPE`), carried over from the operators that users call to those that a
step holds once it is captured, backward operators included. Two differences, both to the side of
float32: every reduction and every norm is in float32, and so is every operator not named here.
"""

from __future__ import annotations

#: Products: their time is what low precision saves, and they sum in float32 inside.
LOW = frozenset(
    {"mm", "bmm", "addmm", "addbmm", "baddbmm", "mv", "addmv", "addr"}
    | {"convolution", "convolution_backward", "_convolution", "_grouped_mm"}
    | {"mkldnn_convolution", "cudnn_convolution"}
    | {
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_flash_attention_for_cpu_backward",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_backward",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_efficient_attention_backward",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_cudnn_attention_backward",
    }
)

#: Outputs of those that are float32 in any case, by place: sums of powers that attention keeps.
FLOAT32_OUTPUTS = {
    "_scaled_dot_product_flash_attention_for_cpu": (1,),
    "_scaled_dot_product_flash_attention": (1,),
    "_scaled_dot_product_efficient_attention": (1,),
    "_scaled_dot_product_cudnn_attention": (1,),
}

#: Pointwise operators that lose too much: their results grow fast, or differences cancel in them.
FULL_POINTWISE = frozenset(
    {"acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p"}
    | {"reciprocal", "rsqrt", "sinh", "tan", "pow", "softplus", "softplus_backward"}
    | {"hinge_embedding_loss", "kl_div", "binary_cross_entropy", "log_sigmoid_forward"}
    | {"log_sigmoid_backward", "binary_cross_entropy_with_logits", "binary_cross_entropy_backward"}
    | {"smooth_l1_loss", "huber_loss", "mse_loss", "soft_margin_loss", "xlogy", "logaddexp"}
)

#: Operators that only move elements; like those that ATen tags as pointwise they compute in what
#: they are given, and in float32 if that differs.
MOVING = frozenset(
    {"view", "_unsafe_view", "reshape", "t", "transpose", "permute", "unsqueeze", "squeeze"}
    | {"expand", "slice", "select", "split", "split_with_sizes", "chunk", "unbind", "alias"}
    | {"detach", "clone", "cat", "stack", "repeat", "flip", "roll", "constant_pad_nd", "narrow"}
    | {"index", "index_select", "gather", "slice_backward", "select_backward", "max_pool2d"}
    | {"max_pool2d_with_indices", "max_pool2d_with_indices_backward", "tril", "triu"}
    | {"pixel_shuffle", "pixel_unshuffle", "diagonal", "unfold"}
)

#: Reductions that can be told to sum in float32 what is not.
DTYPE_ARGUMENT = frozenset({"sum", "mean"})

#: Factories that read of their argument only what it looks like.
LIKE = frozenset(
    {"ones_like", "zeros_like", "full_like", "empty_like", "rand_like", "randn_like"}
    | {"new_ones", "new_zeros", "new_full", "new_empty"}
)

"""Tensors that a step cannot have: sparse ones, and dtypes that an operator does not take together.

PyTorch runs a capture on tensors without data, for which its operators do not check all that they
check in the first step.
"""

from __future__ import annotations

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

from sbp_core.errors import CaptureError
from sbp_torch._torch_compat import OpOverload

_DENSE = "dense tensors, of torch.strided"

#: What takes tensors of one dtype, but for indices.
_OF_ONE_DTYPE = {
    *("aten::mm", "aten::bmm", "aten::addmm", "aten::baddbmm", "aten::addbmm", "aten::linear"),
    *("aten::mv", "aten::addmv", "aten::dot", "aten::vdot", "aten::convolution"),
    *("aten::index_put", "aten::index_add", "aten::index_copy", "aten::linalg_cross"),
    *("aten::binary_cross_entropy", "aten::nll_loss_forward", "aten::nll_loss2d_forward"),
    *("aten::grid_sampler_2d", "aten::grid_sampler_3d", "aten::_cdist_forward"),
}

#: What takes parameters of the dtype of its input; or of float32 if the input has fewer bits.
_OF_WIDER_PARAMETERS = {
    *("aten::native_layer_norm", "aten::native_group_norm", "aten::native_batch_norm"),
    *("aten::_native_batch_norm_legit", "aten::_native_batch_norm_legit_functional"),
}

#: Arguments that have a dtype of their own.
_INDICES = ("indices", "index", "target")

_CLASSES = (torch.int64, torch.uint8)


def check_dense(name: str, tensor: Tensor, *, of: str, todo: str) -> None:
    """See that a tensor is dense.

    Args:
        name: Of the tensor.
        tensor: Given.
        of: What it belongs to.
        todo: What to do if it is not.

    Raises:
        CaptureError: it is sparse, or of another layout.
    """
    if tensor.layout is not torch.strided:
        told = f"the {of}" if name == of else f"{name!r} of the {of}"
        raise CaptureError(f"{told} is of layout {tensor.layout}", accepted=_DENSE, todo=todo)


def check_call(node: fx.Node, where: str) -> None:
    """See that a captured call makes dense tensors, of dtypes that its kernel takes.

    Args:
        node: Of the call.
        where: Its line in the user's code.

    Raises:
        CaptureError: it does not.
    """
    for made in tree_leaves(node.meta.get("val")):
        if isinstance(made, Tensor) and made.layout is not torch.strided:
            raise CaptureError(
                f"{node.target} makes a tensor of layout {made.layout}",
                where=where,
                accepted=f"{_DENSE}; gradients, too",
                todo="leave out sparse=True of nn.Embedding and nn.EmbeddingBag: SGD and AdamW "
                "take the dense gradient; make other tensors dense: .to_dense()",
            )
    op = node.target
    kind = op._schema.name if isinstance(op, OpOverload) else ""
    if not isinstance(op, OpOverload) or kind not in _OF_ONE_DTYPE | _OF_WIDER_PARAMETERS:
        return
    given = dict(zip((one.name for one in op._schema.arguments), node.args, strict=False))
    dtypes = {
        name: tensor.dtype
        for name, value in given.items()
        if isinstance(value, fx.Node)
        for tensor in tree_leaves(value.meta.get("val"))
        if isinstance(tensor, Tensor)
    }
    target = dtypes.get("target")
    if "nll_loss" in kind and target is not None and target not in _CLASSES:
        raise _refusal(op, {"target": target}, where, "classes of dtype int64", ".long()")
    indices = _INDICES if kind != "aten::binary_cross_entropy" else ()
    taken = {name: dtype for name, dtype in dtypes.items() if name not in indices}
    first = next(iter(taken.values()), None)
    wider = kind in _OF_WIDER_PARAMETERS and first in (torch.bfloat16, torch.float16)
    if len(set(taken.values()) - ({torch.float32} if wider else set())) > 1:
        raise _refusal(op, taken, where, "tensors of one dtype", ".float()")


def _refusal(
    op: OpOverload, dtypes: dict[str, torch.dtype], where: str, accepted: str, remedy: str
) -> CaptureError:
    told = ", ".join(
        f"{name} of {str(dtype).removeprefix('torch.')}" for name, dtype in dtypes.items()
    )
    return CaptureError(
        f"{op} is called with {told}",
        where=where,
        accepted=accepted,
        todo=f"convert the entry of the batch, such as by {remedy}, or the model: model.to(dtype)",
    )

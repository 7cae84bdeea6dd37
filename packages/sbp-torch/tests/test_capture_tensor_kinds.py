"""Sparse tensors, and dtypes that an operator does not take: said at capture, as eager says it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from sbp_core.errors import CaptureError
from sbp_torch.graph_capture import capture, flatten_batch

_SPARSE = torch.eye(4).to_sparse()

#: Calls of a tensor that is converted to another dtype.
_CALLS: dict[str, Callable[[Tensor], Tensor]] = {
    "mm": lambda x: x @ torch.ones(4, 4),
    "addmm": lambda x: functional.linear(x, torch.ones(4, 4), torch.ones(4)),
    "bias": lambda x: functional.linear(torch.ones(4, 4), torch.ones(4, 4), x[0]),
    "bmm": lambda x: x[None] @ torch.ones(1, 4, 4),
    "mv": lambda x: x @ torch.ones(4),
    "conv": lambda x: functional.conv1d(x[None], torch.ones(4, 4, 3)),
    "layer norm": lambda x: functional.layer_norm(x, (4,), torch.ones(4), torch.zeros(4)),
    "layer norm without parameters": lambda x: functional.layer_norm(x, (4,)),
    "group norm": lambda x: functional.group_norm(x[None], 2, torch.ones(4), torch.zeros(4)),
    "index_put": lambda x: torch.zeros(4, 4).index_put((torch.tensor([0]),), x[:1]),
    "index_add": lambda x: torch.zeros(4, 4).index_add(0, torch.tensor([0]), x[:1]),
    "bce": lambda x: functional.binary_cross_entropy(torch.full((4, 4), 0.5), x.sigmoid()),
    "weights of classes": lambda x: functional.cross_entropy(
        torch.ones(4, 4), torch.zeros(4, dtype=torch.long), x[0]
    ),
    "mse": lambda x: functional.mse_loss(torch.ones(4, 4), x),
    "sum": lambda x: torch.ones(4, 4) + x,
    "where": lambda x: torch.where(x > 0, x, torch.ones(4, 4)),
    "cat": lambda x: torch.cat([x, torch.ones(4, 4)]),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", _CALLS)
def test_dtypes_are_refused_at_capture_if_and_only_if_eager_pytorch_refuses_them(
    name: str, dtype: torch.dtype
) -> None:
    model = nn.Linear(4, 4)

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return _CALLS[name](batch.to(dtype)).float().mean() + model(torch.ones(4, 4)).mean()

    try:
        loss(model, torch.rand(4, 4))
    except RuntimeError:
        with pytest.raises(CaptureError, match=r"test_capture_tensor_kinds.py:\d+"):
            capture(model, loss, torch.rand(4, 4))
    else:
        assert capture(model, loss, torch.rand(4, 4)).nodes


def test_a_batch_of_another_dtype_than_the_model_is_told_where_and_how_to_convert() -> None:
    with pytest.raises(CaptureError) as caught:
        capture(nn.Linear(4, 1), lambda m, b: m(b["x"]).mean(), {"x": torch.ones(2, 4).double()})

    assert "mat1 of float64, mat2 of float32" in caught.value.what
    assert ".float()" in caught.value.todo


@pytest.mark.parametrize("dtype", [torch.int32, torch.float32, torch.int64], ids=str)
def test_classes_are_of_int64(dtype: torch.dtype) -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        return functional.cross_entropy(model(batch["x"]), batch["y"])

    batch = {"x": torch.ones(2, 4), "y": torch.zeros(2, dtype=dtype)}
    if dtype is torch.int64:
        assert capture(nn.Linear(4, 3), loss, batch).nodes
        return
    with pytest.raises(CaptureError):
        capture(nn.Linear(4, 3), loss, batch)


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, "mkldnn"], ids=str)
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
def test_a_batch_that_is_not_dense_is_refused(layout: Any) -> None:
    dense = torch.eye(4)
    given = dense.to_mkldnn() if layout == "mkldnn" else dense.to_sparse(layout=layout)

    with pytest.raises(CaptureError, match=r"'x' of the batch is of layout (.|\n)*to_dense"):
        flatten_batch({"x": given})
    with pytest.raises(CaptureError, match="the batch is of layout"):
        flatten_batch(given)


def test_sparse_tensors_of_model_and_loss_are_named() -> None:
    model = nn.Linear(4, 1)
    with pytest.raises(CaptureError, match=r"the constant is of layout|a tensor is sparse"):
        capture(model, lambda m, b: torch.spmm(_SPARSE, m(b)).mean(), torch.ones(4, 4))
    model.register_buffer("adjacency", _SPARSE)
    with pytest.raises(CaptureError, match="'adjacency' of the model is of layout"):
        capture(model, lambda m, b: torch.spmm(m.adjacency, m(b)).mean(), torch.ones(4, 4))


@pytest.mark.parametrize("call", [torch.linalg.inv, torch.linalg.cholesky])
def test_an_inverse_that_looks_at_values_is_refused_and_one_that_does_not_runs(call: Any) -> None:
    model = nn.Linear(4, 4)
    checked = {
        torch.linalg.inv: torch.linalg.inv_ex,
        torch.linalg.cholesky: torch.linalg.cholesky_ex,
    }

    with pytest.raises(CaptureError, match=r"looks at values(.|\n)*solve_ex, inv_ex, cholesky_ex"):
        capture(model, lambda m, b: call(m.weight).mean(), torch.ones(4, 4))
    assert capture(model, lambda m, b: checked[call](m.weight)[0].mean(), torch.ones(4, 4)).nodes

"""Follow embeddings with `sparse=True`, whose gradients PyTorch keeps as rows and values.

A captured step has dense tensors only, so `sparse=True` is left out while forward runs, and noted.
The optimizer then gets a dense gradient. SGD and Adagrad compute the same from it. `SparseAdam`
updates only rows that were looked up, for which it gets their counts:

    table(indices), sparse=True     gradient [v, d], and counts [v, 1]: lookups of each row

The pass `update_rows` of sbp-aten makes updates of single rows of both.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sbp_core.errors import CaptureError
from sbp_torch._torch_patches import replaced
from sbp_torch.graph_capture.diagnostics import is_users, short
from sbp_torch.graph_capture.functional_updates import add_all
from sbp_torch.graph_capture.optimizer_clones import kind_of
from sbp_torch.optim.row_wise_adagrad import RowWiseAdagrad


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseLookup:
    """One call of an embedding with `sparse=True`.

    Args:
        weight: The table, as the program passed it.
        indices: The rows looked up, integers [...].
        padding: The row that gets no gradient; -1 for none.
        made: The operation that autograd has for the result.
        where: `file:line` of the user's code.
    """

    weight: Tensor
    indices: Tensor
    padding: int
    made: Any
    where: str


class SparseLookups:
    """The lookups of one run of a forward with `sparse=True`."""

    def __init__(self) -> None:
        self.calls: list[SparseLookup] = []

    @contextmanager
    def followed(self) -> Iterator[None]:
        """Look up without `sparse=True` inside the block, and note the calls that have it."""
        self.calls = []
        lookup, bag = torch.embedding, torch.embedding_bag

        def embedding(
            weight: Tensor,
            input: Tensor,  # noqa: A002 - torch's name
            padding_idx: int = -1,
            scale_grad_by_freq: bool = False,
            sparse: bool = False,
        ) -> Tensor:
            made = lookup(weight, input, padding_idx, scale_grad_by_freq, False)
            if sparse:
                self._note(weight, input, padding_idx, scale_grad_by_freq, made)
            return made

        def embedding_bag(
            weight: Tensor,
            indices: Tensor,
            offsets: Tensor,
            scale_grad_by_freq: bool = False,
            mode: int = 0,
            sparse: bool = False,
            per_sample_weights: Tensor | None = None,
            include_last_offset: bool = False,
            padding_idx: int | None = None,
        ) -> Any:
            # torch knows the overloads by position.
            rest = (per_sample_weights, include_last_offset, padding_idx)
            made = bag(weight, indices, offsets, scale_grad_by_freq, mode, False, *rest)
            if sparse:
                padding = -1 if padding_idx is None else padding_idx
                self._note(weight, indices, padding, scale_grad_by_freq, made[0])
            return made

        with replaced(torch, embedding=embedding, embedding_bag=embedding_bag):
            yield

    def _note(
        self, weight: Tensor, indices: Tensor, padding: int, scaled: bool, made: Tensor
    ) -> None:
        where = _users_line()
        if scaled:
            raise CaptureError(
                "an embedding has sparse=True and scale_grad_by_freq=True, which PyTorch's sparse "
                "gradients do not support",
                where=where,
                accepted="one of the two",
                todo="leave out one of them",
            )
        found = SparseLookup(
            weight=weight, indices=indices, padding=padding, made=made.grad_fn, where=where
        )
        self.calls.append(found)

    def of(self, leaves: Mapping[str, Tensor], loss: Tensor) -> dict[str, list[SparseLookup]]:
        """Return the parameters whose gradient would be sparse in PyTorch, with their lookups.

        A sum of a sparse and a dense gradient is dense. A lookup that the loss does not depend on,
        such as one for a metric or under `no_grad`, has no gradient.

        Args:
            leaves: The trained parameters by name.
            loss: What is differentiated.
        """
        found = {
            name: [call for call in self.calls if call.weight is leaf]
            for name, leaf in leaves.items()
        }
        found = {name: calls for name, calls in found.items() if calls}
        if not found:
            return {}
        names = {id(leaves[name]): name for name in found}
        lookups = {id(call.made) for call in self.calls}
        seen, left = set[Any](), [loss.grad_fn]
        while left:
            node = left.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            for source, _ in node.next_functions:
                name = names.get(id(getattr(source, "variable", None)))
                if name is not None and id(node) not in lookups:
                    found.pop(name, None)
                left.append(source)
        reached = {
            name: [call for call in calls if call.made is not None and call.made in seen]
            for name, calls in found.items()
        }
        return {name: calls for name, calls in reached.items() if calls}


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseGradient:
    """What PyTorch's sparse gradient of a table has, and the dense one lacks.

    Args:
        counts: How often each row was looked up, without padding, [v, 1].
        where: `file:line` of the first lookup.
    """

    counts: Tensor
    where: str

    @classmethod
    def of(cls, calls: Sequence[SparseLookup]) -> SparseGradient:
        """Return it for the lookups of one table; at least one."""
        count: Callable[..., Tensor] = torch.ops.aten.embedding_dense_backward.default
        parts = []
        for call in calls:
            ones = call.weight.new_ones((*call.indices.shape, 1))
            rows = call.weight.shape[0]
            parts.append(count(ones, call.indices, rows, call.padding, False))
        return cls(counts=add_all(parts), where=calls[0].where)


def check_sparse(
    optimizer: torch.optim.Optimizer,
    settings: Mapping[str, Any],
    name: str,
    gradient: SparseGradient | None,
) -> None:
    """Refuse sparse gradients where the optimizer refuses them in PyTorch, and dense ones alike.

    Args:
        optimizer: The optimizer.
        settings: Settings of the group of the parameter.
        name: The parameter.
        gradient: None if its gradient is dense.

    Raises:
        CaptureError: the optimizer does not take it.
    """
    kind = kind_of(optimizer)
    if gradient is None and kind is torch.optim.SparseAdam:
        raise CaptureError(
            f"SparseAdam takes sparse gradients, and that of {name!r} is dense",
            accepted="tables that are only looked up, with sparse=True",
            todo="give the embedding sparse=True; let Adam update other parameters, and combine "
            "both by sbp_torch.optim.CombinedOptimizer",
        )
    if gradient is None or kind is torch.optim.SparseAdam:
        return
    decay, eps = settings.get("weight_decay", 0.0), settings.get("eps", 1.0)
    if kind in _TAKE_SPARSE and not eps:
        raise CaptureError(
            f"{kind.__name__} with eps=0 cannot be followed on the sparse gradient of {name!r}: "
            "of a dense one, rows that were never looked up would become 0 / 0",
            where=gradient.where,
            accepted="eps > 0, such as 1e-10",
            todo="give the optimizer an eps above 0",
        )
    if kind not in _TAKE_SPARSE or decay:
        how = f"weight_decay={decay}" if kind in _TAKE_SPARSE else "an embedding with sparse=True"
        raise CaptureError(
            f"{kind.__name__} does not take the sparse gradient of {name!r}: {how}",
            where=gradient.where,
            accepted="SGD, Adagrad and RowWiseAdagrad without weight decay; SparseAdam",
            todo="leave out sparse=True of nn.Embedding and nn.EmbeddingBag: the gradient is dense "
            "then, and rows that are not looked up are skipped wherever the optimizer allows it",
        )


#: Optimizers that compute the same from sparse gradients as from dense ones.
_TAKE_SPARSE = (torch.optim.SGD, torch.optim.Adagrad, RowWiseAdagrad)


def _users_line() -> str:
    """Return `file:line` of the user's code that is running, or ""."""
    frame = sys._getframe(1)
    found: Any = frame
    while found is not None and not is_users(found.f_code):
        found = found.f_back
    return f"{short(found.f_code.co_filename)}:{found.f_lineno}" if found is not None else ""

"""Context managers that replace private parts of PyTorch for a while, mainly for graph capture.

Each entry names the versions it was tried on.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from inspect import signature
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch
from torch.fx.experimental import symbolic_shapes
from torch.nn.modules import transformer

_log = logging.getLogger(__name__)

#: Encoders for which a warning was given that their output differs at padded positions.
_TOLD: WeakSet[torch.nn.Module] = WeakSet()


@contextmanager
def replaced(owner: object, **values: Any) -> Iterator[None]:
    """Replace attributes of a module, class or object for a while."""
    before = {name: getattr(owner, name) for name in values}
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


def _grouped_product(
    left: torch.Tensor,
    right: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    from torch._meta_registrations import _create_grouped_mm_output_tensor

    made: torch.Tensor = _create_grouped_mm_output_tensor(  # type: ignore[no-untyped-call]
        left, right, offs, out_dtype
    )
    return made


@contextmanager
def grouped_products_of_any_dtype() -> Iterator[None]:
    """Let `_grouped_mm` take fake tensors of all dtypes that its kernels take.

    PyTorch's own fake implementation takes bfloat16 only. Tried on 2.11 and 2.13.
    """
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("_grouped_mm", _grouped_product, "Meta", allow_override=True)
        yield


@contextmanager
def unlogged_failures() -> Iterator[None]:
    """Keep PyTorch from logging the whole trace of an error that is raised. Tried on 2.13."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    with replaced(logger, disabled=True), warnings.catch_warnings():
        # PyTorch hides it itself, but not where warnings are errors.
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor")
        yield


class _FilesOfTorch:
    """Stands for the set of the names of PyTorch's files."""

    folder = f"{Path(torch.__file__).parent}{os.sep}"

    def __contains__(self, name: str) -> bool:
        return name.startswith(self.folder)


def frames_told_apart_by_folder() -> AbstractContextManager[None]:
    """Let PyTorch recognise its own stack frames by their folder when it reports a symbol's origin.

    Otherwise it lists its files, which imports `torch.export` and NetworkX: 0.5 s at each start.
    Tried on 2.13.
    """
    return replaced(symbolic_shapes, uninteresting_files=_FilesOfTorch)


def grad_scaling_refused(refusal: Callable[[], Exception]) -> AbstractContextManager[None]:
    """Let an enabled `GradScaler` raise an error when it is asked to scale. Tried on 2.13."""
    before = torch.amp.GradScaler.scale

    def scale(scaler: torch.amp.GradScaler, outputs: Any) -> Any:
        if scaler.is_enabled():
            raise refusal()
        return before(scaler, outputs)

    return replaced(torch.amp.GradScaler, scale=scale)


def distributions_unchecked() -> AbstractContextManager[None]:
    """Let `torch.distributions` accept parameters without reading their values. Tried on 2.13."""
    return replaced(torch.distributions.Distribution, _validate_args=False)


@contextmanager
def transformers_of_any_mask() -> Iterator[None]:
    """Let `nn.Transformer` and its layers take masks without reading their values. Tried on 2.13.

    They replace a causal mask by a faster kernel. Outside training they also read the padding mask,
    to skip padding. With the masks, results are the same except at padded positions, where
    `TransformerEncoder` would return zeros. A warning names this difference. `torch.compile`
    computes these positions in the same way, without a warning.
    """
    encode = transformer.TransformerEncoder.forward

    @wraps(encode)
    def forward(self: Any, src: Any, *args: Any, **named: Any) -> Any:
        given = signature(encode).bind(self, src, *args, **named).arguments
        is_padded = given.get("src_key_padding_mask") is not None and given.get("mask") is None
        leaves_out = is_padded and self.use_nested_tensor and not self.layers[0].training
        if leaves_out and self not in _TOLD:
            _TOLD.add(self)
            _log.warning(
                "without gradients, nn.TransformerEncoder may fill its output at padded positions "
                "with zeros; here it is computed, as under torch.compile: let the loss leave these "
                "positions out, or build the encoder with enable_nested_tensor=False"
            )
        return encode(self, src, *args, **named)

    def is_said_to_be_causal(mask: Any, is_causal: bool | None = None, size: Any = None) -> bool:
        return is_causal is True

    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with (
            replaced(transformer, _detect_is_causal_mask=is_said_to_be_causal),
            replaced(transformer.TransformerEncoder, forward=forward),
        ):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)

"""Operators that PyTorch's database never calls, or only on tiny shapes, with samples of our own.

`_OVERLOADS` are recorded themselves, even if PyTorch decomposes them; `_PROGRAMS` are traced.
`aten.atan2.out`, a core operator, is left out: it mutates its argument, and a captured step has no
such calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn import functional

from signatures.variants import Sample, Variant

_FLOATS = (torch.float32, torch.float64)
_FLOAT = (torch.float32,)
_NUMBERS = (torch.float32, torch.int64)
_INTEGERS = (torch.int64, torch.bool)


@dataclass(frozen=True, slots=True)
class _Draw:
    """Draws tensors of one dtype."""

    dtype: torch.dtype

    def __call__(self, *shape: int) -> torch.Tensor:
        """Return values that need a gradient if their dtype has any."""
        if self.dtype.is_floating_point:
            return torch.randn(shape, dtype=self.dtype).requires_grad_()
        if self.dtype == torch.bool:
            return torch.rand(shape) < 0.5
        return torch.randint(1, 9, shape, dtype=self.dtype)

    def plain(self, *shape: int) -> torch.Tensor:
        """Return values that need no gradient."""
        return self(*shape).detach()

    def positive(self, *shape: int) -> torch.Tensor:
        """Return positive values that need no gradient."""
        return self.plain(*shape).abs() + 0.1

    def index(self, high: int, *shape: int) -> torch.Tensor:
        """Return int64 values below `high`."""
        return torch.randint(high, shape)

    def mask(self, *shape: int) -> torch.Tensor:
        """Return bools."""
        return torch.rand(shape) < 0.5


#: Makes (args, kwargs) of each sample.
_Samples = Callable[[_Draw], list[tuple[tuple[Any, ...], dict[str, Any]]]]


def _args(*args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return args, kwargs


def _variant(
    name: str, run: Callable[..., Any], dtypes: tuple[torch.dtype, ...], make: _Samples,
    *, direct: bool,
) -> Variant:  # fmt: skip
    def samples(dtype: torch.dtype) -> Iterator[Sample]:
        for args, kwargs in make(_Draw(dtype)):
            yield Sample(args, kwargs)

    return Variant(name, run, dtypes, samples, direct)


def additions() -> list[Variant]:
    """Return our own variants, whose names begin with `+`."""
    made = []
    for op, (dtypes, make) in (_OVERLOADS | _fused()).items():
        packet, overload = op.split(".")
        run = getattr(getattr(torch.ops.aten, packet), overload)
        made.append(_variant(f"+{op}", run, dtypes, make, direct=True))
    for name, (run, dtypes, make) in _PROGRAMS.items():
        made.append(_variant(f"+{name}", run, dtypes, make, direct=False))
    return made


def _norm_samples(*flags: Any) -> _Samples:
    return lambda d: [_args(d(4, 6, 5), d(6), d(6), *flags)]


def _pads(dims: int) -> _Samples:
    sides = (1, 2, 2, 1, 1, 1)[: 2 * dims]
    return lambda d: [
        _args(d(2, 4, *(6, 5, 10)[:dims]), sides),
        _args(d(4, *(6, 5, 10)[:dims]), sides),
    ]


_OVERLOADS: dict[str, tuple[tuple[torch.dtype, ...], _Samples]] = {
    "_native_batch_norm_legit.no_stats": (_FLOATS, _norm_samples(True, 0.1, 1e-5)),
    "_native_batch_norm_legit_no_training.default": (
        _FLOATS,
        lambda d: [_args(d(4, 6, 5), d(6), d(6), d.plain(6), d.positive(6), 0.1, 1e-5)],
    ),
    "_native_batch_norm_legit_functional.default": (
        _FLOATS,
        lambda d: [_args(d(4, 6, 5), d(6), d(6), d.plain(6), d.positive(6), True, 0.1, 1e-5)],
    ),
    "_batch_norm_no_update.default": (
        _FLOATS,
        lambda d: [_args(d(4, 6, 5), d(6), d(6), d.plain(6), d.positive(6), 0.1, 1e-5)],
    ),
    "native_dropout.default": (
        _FLOATS,
        lambda d: [_args(d(4, 10), 0.5, True), _args(d(4, 10), 0.5, False)],
    ),
    "bitwise_and.Scalar": (_INTEGERS, lambda d: [_args(d(4, 10), 3), _args(d(5), 1)]),
    "bitwise_or.Scalar": (_INTEGERS, lambda d: [_args(d(4, 10), 3), _args(d(5), 1)]),
    "bitwise_xor.Scalar": (_INTEGERS, lambda d: [_args(d(4, 10), 3), _args(d(5), 1)]),
    "clamp.default": (
        _NUMBERS,
        lambda d: [
            _args(d(4, 10), -0.5, 0.5),
            _args(d(4, 10), -0.5),
            _args(d(4, 10), None, 0.5),
        ],
    ),
    "div.Scalar_mode": (
        _NUMBERS,
        lambda d: [
            _args(d(4, 10), 3, rounding_mode=None),
            _args(d(4, 10), 3, rounding_mode="floor"),
            _args(d(4, 10), -3, rounding_mode="trunc"),
        ],
    ),
    "fmod.Scalar": (_NUMBERS, lambda d: [_args(d(4, 10), 3)]),
    "randperm.default": ((torch.int64,), lambda _: [_args(10, device=torch.device("cpu"))]),
    "rand_like.default": (_FLOAT, lambda d: [_args(d(4, 10))]),
    "poisson.default": (_FLOAT, lambda d: [_args(d.positive(4, 10))]),
    "binomial.default": (
        _FLOAT,
        lambda d: [_args(d.positive(4, 10).floor(), torch.rand(4, 10))],
    ),
    "reflection_pad1d.default": (_FLOATS, _pads(1)),
    "reflection_pad2d.default": (_FLOATS, _pads(2)),
    "reflection_pad3d.default": (_FLOATS, _pads(3)),
    "replication_pad2d.default": (_FLOATS, _pads(2)),
    "replication_pad3d.default": (_FLOATS, _pads(3)),
    "upsample_nearest1d.vec": (_FLOAT, lambda d: [_args(d(2, 4, 5), [10], None)]),
    "upsample_nearest2d.vec": (
        _FLOAT,
        lambda d: [_args(d(2, 4, 5, 6), [10, 12], None), _args(d(2, 4, 5, 6), None, [2.0, 1.5])],
    ),
    "upsample_nearest3d.vec": (_FLOAT, lambda d: [_args(d(2, 4, 5, 6, 2), None, [2.0] * 3)]),
    "upsample_nearest2d.default": (_FLOAT, lambda d: [_args(d(2, 4, 5, 6), [10, 12])]),
    "upsample_nearest3d.default": (_FLOAT, lambda d: [_args(d(2, 4, 5, 6, 2), [10, 12, 4])]),
    "_upsample_nearest_exact2d.default": (_FLOAT, lambda d: [_args(d(2, 4, 5, 6), [10, 12])]),
    "_upsample_nearest_exact3d.default": (
        _FLOAT,
        lambda d: [_args(d(2, 4, 5, 6, 2), [10, 12, 4])],
    ),
    "_upsample_bicubic2d_aa.default": (
        _FLOAT,
        lambda d: [_args(d(2, 4, 5, 6), [10, 12], False)],
    ),
    "upsample_bilinear2d.vec": (
        _FLOAT,
        lambda d: [
            _args(d(2, 4, 5, 6), [10, 12], True, None),
            _args(d(2, 4, 5, 6), None, False, [2.0, 1.5]),
        ],
    ),
    "upsample_bicubic2d.vec": (_FLOAT, lambda d: [_args(d(2, 4, 5, 6), [10, 12], True, None)]),
    "upsample_trilinear3d.vec": (
        _FLOAT,
        lambda d: [_args(d(2, 4, 5, 6, 2), [10, 12, 4], True, None)],
    ),
    "upsample_linear1d.vec": (_FLOAT, lambda d: [_args(d(2, 4, 5), [10], True, None)]),
    "any.dims": (_FLOATS, lambda d: [_args(d(4, 6, 5), [0, 2]), _args(d(4, 6, 5), [1], True)]),
    "var.dim": (
        _FLOATS,
        lambda d: [_args(d(4, 6, 5), [1]), _args(d(4, 6, 5), [0, 2], False, True)],
    ),
    "var.default": (_FLOATS, lambda d: [_args(d(4, 6, 5))]),
    "std.dim": (_FLOATS, lambda d: [_args(d(4, 6, 5), [1])]),
    "adaptive_avg_pool1d.default": (
        _FLOAT,
        lambda d: [_args(d(2, 4, 10), [5]), _args(d(4, 10), [3])],
    ),
    "avg_pool1d.default": (_FLOAT, lambda d: [_args(d(2, 4, 10), [2], [2]), _args(d(4, 10), [3])]),
    "_fused_rms_norm.default": (
        _FLOAT,
        lambda d: [_args(d(4, 6, 10), [10], d(10), 1e-5), _args(d(4, 6, 10), [6, 10], None, 1e-5)],
    ),
    "_fused_rms_norm_backward.default": (
        _FLOAT,
        lambda d: [
            _args(
                d.plain(4, 6, 10),
                d.plain(4, 6, 10),
                [10],
                d.positive(4, 6, 1),
                d.plain(10),
                [True, True],
            )
        ],
    ),
    "_scaled_dot_product_flash_attention_for_cpu.default": (
        _FLOAT,
        lambda d: [
            _args(d(2, 4, 10, 8), d(2, 4, 10, 8), d(2, 4, 10, 8), 0.0, True),
            _args(d(2, 4, 6, 8), d(2, 4, 10, 8), d(2, 4, 10, 8)),
            _args(d(2, 4, 6, 8), d(2, 4, 10, 8), d(2, 4, 10, 8), attn_mask=d.plain(2, 4, 6, 10)),
            _args(d(2, 4, 6, 8), d(2, 4, 10, 8), d(2, 4, 10, 8), attn_mask=d.plain(6, 10)),
        ],
    ),
    "_scaled_dot_product_attention_math.default": (
        _FLOAT,
        lambda d: [
            _args(d(2, 4, 10, 8), d(2, 4, 10, 8), d(2, 4, 10, 8), None, 0.0, True),
            _args(d(2, 4, 6, 8), d(2, 4, 10, 8), d(2, 4, 10, 8), d.plain(6, 10)),
            _args(d(2, 4, 6, 8), d(2, 2, 10, 8), d(2, 2, 10, 8), enable_gqa=True),
        ],
    ),
    "_weight_norm_interface.default": (
        _FLOAT,
        lambda d: [_args(d(4, 6, 5), d(4, 1, 1), 0), _args(d(4, 6), d(1, 6), 1)],
    ),
    "_grouped_mm.default": (
        (torch.bfloat16,),
        lambda d: [
            _args(d(4, 8, 16), d(4, 16, 8)),
            _args(d(24, 16), d(3, 16, 8), torch.tensor([8, 16, 24], dtype=torch.int32)),
        ],
    ),
    "_unsafe_index.Tensor": (
        _NUMBERS,
        lambda d: [_args(d(6, 10), [d.index(6, 4)]), _args(d(6, 10), [None, d.index(10, 4)])],
    ),
    "_unsafe_index_put.default": (
        _NUMBERS,
        lambda d: [_args(d(6, 10), [d.index(6, 4)], d(4, 10), True)],
    ),
    "native_channel_shuffle.default": (_FLOAT, lambda d: [_args(d(2, 6, 4, 5), 3)]),
    "_int_mm.default": (
        (torch.int8,),
        lambda d: [_args(d.index(5, 20, 8).to(torch.int8), d.index(5, 8, 16).to(torch.int8))],
    ),
    "fake_quantize_per_tensor_affine_cachemask.default": (
        _FLOAT,
        lambda d: [_args(d(4, 10), 0.1, 0, -8, 8)],
    ),
    "embedding_renorm.default": (
        _FLOAT,
        lambda d: [_args(d.plain(10, 6), d.index(10, 4), 1.0, 2.0)],
    ),
    "softshrink.default": (_FLOAT, lambda d: [_args(d(4, 10))]),
    "linspace.default": (
        (torch.float32,),
        lambda _: [_args(0, 1, 10, device=torch.device("cpu"))],
    ),
}


def _lists(d: _Draw) -> tuple[list[torch.Tensor], ...]:
    """Return parameters, gradients, and positive state, three tensors each."""
    shapes = ((4, 6), (10,), (5, 2))
    make = (d.plain, d.plain, d.plain, d.positive, d.positive)
    return tuple([draw(*shape) for shape in shapes] for draw in make)


def _fused() -> dict[str, tuple[tuple[torch.dtype, ...], _Samples]]:
    """Return the fused optimizers, in their functional forms."""
    rates = {"lr": 0.1, "weight_decay": 0.01, "maximize": False}
    adam = {**rates, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8}

    def steps() -> list[torch.Tensor]:
        return [torch.tensor(3.0) for _ in range(3)]

    def adams(d: _Draw) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        values, gradients, mean, square, largest = _lists(d)
        return [
            _args(values, gradients, mean, square, [], steps(), amsgrad=False, **adam),
            _args(values, gradients, mean, square, largest, steps(), amsgrad=True, **adam),
        ]

    def sgd(d: _Draw) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        values, gradients, buffer, *_ = _lists(d)
        plain = {"momentum": 0.0, "dampening": 0.0, "nesterov": False, "is_first_step": False}
        return [
            _args(values, gradients, buffer, **rates, **{**plain, "momentum": 0.9}),
            _args(values, gradients, [], **rates, **plain),
        ]

    def adagrad(d: _Draw) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        values, gradients, _, square, _ = _lists(d)
        return [_args(values, gradients, square, steps(), lr_decay=0.01, eps=1e-8, **rates)]

    return {
        "_fused_adam.default": (_FLOAT, adams),
        "_fused_adamw.default": (_FLOAT, adams),
        "_fused_sgd.default": (_FLOAT, sgd),
        "_fused_adagrad.default": (_FLOAT, adagrad),
    }


def _run_module(module: torch.nn.Module, parameters: dict[str, torch.Tensor], *inputs: Any) -> Any:
    """Run a module with these parameters."""
    return torch.func.functional_call(module, parameters, inputs)


def _module(
    kind: Callable[..., torch.nn.Module], *args: Any, inputs: Callable[[_Draw], tuple[Any, ...]]
) -> _Samples:
    """Return the sample that runs a module of this kind on inputs."""

    def make(d: _Draw) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        module = kind(*args).to(d.dtype)
        parameters = {
            name: value.detach().clone().requires_grad_()
            for name, value in module.named_parameters()
        }
        return [_args(module, parameters, *inputs(d))]

    return make


def _bag(mode: str) -> _Samples:
    offsets = torch.tensor([0, 3, 4, 8])
    return lambda d: [
        _args(d.index(10, 4, 5), d(10, 6), mode=mode),
        _args(d.index(10, 12), d(10, 6), offsets, mode=mode),
    ]


def _one_hot(index: torch.Tensor, classes: int) -> torch.Tensor:
    return (index.unsqueeze(-1) == torch.arange(classes)).to(torch.int64)


def _mixture(
    tokens: torch.Tensor, router: torch.Tensor, experts: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Route each token to its two best experts, and weigh their outputs."""
    weights, chosen = torch.topk(torch.softmax(tokens @ router, -1), 2, -1)
    made = torch.einsum("td,edh->teh", tokens, experts)
    picked = made.gather(1, chosen.unsqueeze(-1).expand(-1, -1, made.shape[-1]))
    load = torch.zeros(router.shape[-1]).scatter_add(
        0, chosen.flatten(), weights.detach().flatten()
    )
    return (picked * weights.unsqueeze(-1)).sum(1), load


def _routed(d: _Draw) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    return [_args(d(10, 6), d(6, 4), d(4, 6, 5))]


_Program = tuple[Callable[..., Any], tuple[torch.dtype, ...], _Samples]

_PROGRAMS: dict[str, _Program] = {
    "conv2d grouped": (
        functional.conv2d,
        _FLOATS,
        lambda d: [_args(d(4, 6, 8, 8), d(10, 3, 3, 3), d(10), 1, 1, 1, 2)],
    ),
    "conv2d depthwise": (
        functional.conv2d,
        _FLOAT,
        lambda d: [_args(d(4, 6, 8, 8), d(6, 1, 3, 3), None, 2, 1, 1, 6)],
    ),
    "conv2d wide": (
        functional.conv2d,
        _FLOATS,
        lambda d: [_args(d(4, 6, 10, 10), d(10, 6, 3, 3), d(10), 1, 1)],
    ),
    "conv_transpose2d grouped": (
        functional.conv_transpose2d,
        _FLOAT,
        lambda d: [_args(d(4, 6, 5, 5), d(6, 5, 3, 3), d(10), 2, 1, 1, 2)],
    ),
    "embedding_bag sum": (functional.embedding_bag, _FLOAT, _bag("sum")),
    "embedding_bag mean": (functional.embedding_bag, _FLOAT, _bag("mean")),
    "embedding_bag max": (functional.embedding_bag, _FLOAT, _bag("max")),
    "one hot": (_one_hot, (torch.int64,), lambda d: [_args(d.index(5, 4, 6), 5)]),
    "mixture of experts": (_mixture, _FLOAT, _routed),
    "matmul of five dims": (
        torch.matmul,
        _FLOAT,
        lambda d: [_args(d(2, 4, 3, 5, 6), d(2, 4, 3, 6, 10))],
    ),
    "einsum": (partial(torch.einsum, "bhqd,bhkd->bhqk"), _FLOAT,
               lambda d: [_args(d(2, 4, 5, 6), d(2, 4, 10, 6))]),
    "lstm": (_run_module, _FLOAT, _module(torch.nn.LSTM, 6, 10, 2, inputs=lambda d: (d(5, 4, 6),))),
    "gru": (_run_module, _FLOAT, _module(torch.nn.GRU, 6, 10, inputs=lambda d: (d(5, 4, 6),))),
    "rnn": (_run_module, _FLOAT, _module(torch.nn.RNN, 6, 10, inputs=lambda d: (d(5, 4, 6),))),
    "lstm cell": (
        _run_module,
        _FLOAT,
        _module(torch.nn.LSTMCell, 6, 10, inputs=lambda d: (d(4, 6), (d(4, 10), d(4, 10)))),
    ),
    "gru cell": (
        _run_module,
        _FLOAT,
        _module(torch.nn.GRUCell, 6, 10, inputs=lambda d: (d(4, 6), d(4, 10))),
    ),
    "transformer layer": (
        _run_module,
        _FLOAT,
        _module(torch.nn.TransformerEncoderLayer, 8, 2, 16, 0.0, inputs=lambda d: (d(5, 4, 8),)),
    ),
    "rms_norm": (functional.rms_norm, _FLOAT, lambda d: [_args(d(4, 6, 10), [10], d(10))]),
    "cross entropy of logits": (
        functional.cross_entropy,
        _FLOAT,
        lambda d: [
            _args(d(20, 10), d.index(10, 20)),
            _args(d(4, 10, 6), d.index(10, 4, 6), reduction="sum"),
            _args(d(20, 10), d.index(10, 20), label_smoothing=0.1),
        ],
    ),
}  # fmt: skip

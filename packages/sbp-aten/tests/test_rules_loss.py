"""Losses: every rule by execution; means over uneven shards; classes split over ranks.

A mean of the means of unequal shards is no mean, and a shard without samples has none at all: that
is where PyTorch's DTensor answers NaN, or gradients that are too large by the number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.func import functionalize
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

from sbp_aten.rules.loss import RULES
from sbp_core.placement import Placement
from sbp_core.sbp import B, NdSbp, P, S, Sbp
from sbp_core.signatures import combine, derive, legal_signatures, localize
from sbp_torch.signatures.torch_call import run_program
from sbp_torch.signatures.verification import call_of, run_op, verify
from sbp_torch.testing.signatures import Sample, sample

_draw = torch.Generator().manual_seed(31)


NONE, MEAN, SUM = 0, 1, 2
REDUCTIONS = (NONE, MEAN, SUM)
IGNORED = 1


def real(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=_draw)


def chance(*shape: int) -> torch.Tensor:
    return torch.rand(shape, dtype=torch.float64, generator=_draw) * 0.8 + 0.1


def signs(*shape: int) -> torch.Tensor:
    return real(*shape).sign()


def classes(high: int, *shape: int) -> torch.Tensor:
    return torch.randint(high, shape, generator=_draw)


def pairs(make: Callable[..., torch.Tensor], *behind: object) -> list[Sample]:
    """Return calls of a loss of each element, with every reduction."""
    return [
        sample(make(*shape), make(*shape), reduction, *behind)
        for shape in ((5, 3), (2,), ())
        for reduction in REDUCTIONS
    ]


def gradients(make: Callable[..., torch.Tensor], *behind: object) -> list[Sample]:
    """Return calls of the backward operator of a loss of each element."""
    return [
        sample(real(*shape) if reduction == NONE else real(), *args, **kwargs)
        for shape in ((5, 3), (2,))
        for reduction in REDUCTIONS
        for args, kwargs in [sample(make(*shape), make(*shape), reduction, *behind)]
    ]


def entropies(*, backward: bool) -> list[Sample]:
    cases = []
    for reduction in REDUCTIONS:
        for weight in (None, chance(5, 3), chance(3)):
            gradient = [real(5, 3) if reduction == NONE else real()] if backward else []
            cases.append(sample(*gradient, chance(5, 3), chance(5, 3), weight, reduction))
    return cases


def margins(*, backward: bool) -> list[Sample]:
    cases = []
    for reduction in REDUCTIONS:
        for weight in (None, chance(3)):
            gradient = [real(5) if reduction == NONE else real()] if backward else []
            cases.append(sample(*gradient, real(5, 3), classes(3, 5), 1, 1.0, weight, reduction))
    single = [real()] if backward else []
    return [*cases, sample(*single, real(3), classes(3), 2, 0.5, None, MEAN)]


def multilabels(*, backward: bool) -> list[Sample]:
    cases = []
    for reduction in REDUCTIONS:
        scores, targets = real(5, 3), classes(4, 5, 3) - 1
        made, is_target = run_op(
            "aten.multilabel_margin_loss_forward.default", (scores, targets, reduction), {}
        )
        if backward:
            cases.append(sample(torch.randn_like(made), scores, targets, reduction, is_target))
        else:
            cases.append(sample(scores, targets, reduction))
    return cases


def likelihoods(op: str, *places: int, backward: bool) -> list[Sample]:
    cases = []
    for reduction in REDUCTIONS:
        for weight in (None, chance(4)):
            scores, targets = real(5, 4, *places), classes(4, 5, *places)
            args = (scores, targets, weight, reduction, IGNORED)
            made, total = run_op(op, args, {})
            gradient = torch.randn_like(made)
            cases.append(sample(gradient, *args, total) if backward else sample(*args))
    return cases


def one_likelihood(*, backward: bool) -> list[Sample]:
    """Return calls without a batch, with targets of another dtype, and with everything ignored."""
    cases = []
    for scores, targets, reduction in (
        (real(4), classes(4), NONE),
        (real(4), classes(4), MEAN),
        (real(2, 3), classes(3, 2).to(torch.uint8), MEAN),
        (real(2, 3), torch.full((2,), IGNORED), MEAN),
    ):
        args = (scores, targets, chance(scores.shape[-1]), reduction, IGNORED)
        made, total = run_op("aten.nll_loss_forward.default", args, {})
        cases.append(sample(torch.randn_like(made), *args, total) if backward else sample(*args))
    return cases


def alignment(*, backward: bool, tensors: bool, in_row: bool = False) -> Sample:
    """Return CTC of 5 samples and 6 times. All lengths are the longest: then no output is left
    undefined."""
    scores = real(6, 5, 4).log_softmax(-1)
    targets = classes(3, 5, 2) + 1
    lengths: list[Any] = [[6] * 5, [2] * 5]
    if tensors:
        lengths = [torch.tensor(entry) for entry in lengths]
    args = (scores, targets.flatten() if in_row else targets, *lengths)
    if not backward:
        return sample(*args, 0, False)
    op = f"aten._ctc_loss.{'Tensor' if tensors else 'default'}"
    made, alpha = run_op(op, (*args, 0, False), {})
    return sample(torch.randn_like(made), *args, made, alpha, 0, False)


CASES: dict[str, list[Sample]] = {
    "aten._ctc_loss.Tensor": [
        alignment(backward=False, tensors=True, in_row=in_row) for in_row in (False, True)
    ],
    "aten._ctc_loss.default": [
        alignment(backward=False, tensors=False, in_row=in_row) for in_row in (False, True)
    ],
    "aten._ctc_loss_backward.Tensor": [
        alignment(backward=True, tensors=True, in_row=in_row) for in_row in (False, True)
    ],
    "aten._ctc_loss_backward.default": [
        alignment(backward=True, tensors=False, in_row=in_row) for in_row in (False, True)
    ],
    "aten.binary_cross_entropy.default": entropies(backward=False),
    "aten.binary_cross_entropy_backward.default": entropies(backward=True),
    "aten.binary_cross_entropy_with_logits.default": [
        sample(real(5, 3), chance(5, 3), chance(5, 3), chance(3), NONE),
        sample(real(5, 3), chance(5, 3), None, chance(3)),
        sample(real(5, 3), chance(5, 3), chance(5, 3), None, SUM),
    ],
    "aten.huber_loss.default": pairs(real),
    "aten.huber_loss_backward.default": gradients(real, 0.7),
    "aten.mse_loss.default": [*pairs(real), sample(real(5, 1), real(3))],
    "aten.mse_loss_backward.default": [
        *gradients(real),
        sample(real(), real(5, 1), real(3), MEAN),
        sample(real(), real(3), real(5, 1), MEAN),
        sample(real(), self=real(5, 3), target=real(5, 3), reduction=MEAN),
    ],
    "aten.multi_margin_loss.default": margins(backward=False),
    "aten.multi_margin_loss_backward.default": margins(backward=True),
    "aten.multilabel_margin_loss_backward.default": multilabels(backward=True),
    "aten.multilabel_margin_loss_forward.default": [
        *multilabels(backward=False),
        sample(real(), classes(1), MEAN),
    ],
    "aten.nll_loss2d_backward.default": likelihoods(
        "aten.nll_loss2d_forward.default", 2, 1, backward=True
    ),
    "aten.nll_loss2d_forward.default": likelihoods(
        "aten.nll_loss2d_forward.default", 2, 1, backward=False
    ),
    "aten.nll_loss_backward.default": [
        *likelihoods("aten.nll_loss_forward.default", backward=True),
        *one_likelihood(backward=True),
    ],
    "aten.nll_loss_forward.default": [
        *likelihoods("aten.nll_loss_forward.default", backward=False),
        *one_likelihood(backward=False),
    ],
    "aten.smooth_l1_loss.default": [*pairs(real), sample(real(5, 3), real(3), MEAN, 0.5)],
    "aten.smooth_l1_loss_backward.default": gradients(real, 0.5),
    "aten.soft_margin_loss.default": pairs(signs),
    "aten.soft_margin_loss_backward.default": gradients(signs),
}


def test_every_rule_has_a_case():
    covered = set(CASES)

    assert covered == set(RULES)


@pytest.mark.slow(but=2)
@pytest.mark.parametrize("op", sorted(CASES))
def test_execution_confirms_every_signature(op: str):
    reports = [verify(op, *args, isolated=False, **kwargs) for args, kwargs in CASES[op]]

    assert all(report.ok for report in reports), "\n".join(map(str, reports))


def ranks(
    op: str, args: tuple[Any, ...], num_ranks: int, inputs: tuple[Sbp, ...]
) -> tuple[list[tuple[torch.Tensor, ...]], tuple[Sbp, ...]]:
    """Run a call on every rank; return what each makes, and what the outputs are."""
    call, tensors = call_of(op, args, {})
    (chosen,) = [entry for entry in derive(call, num_ranks) if entry.inputs == inputs]
    signature, mesh = combine([chosen]), Placement.grid((num_ranks,))
    made = []
    for rank in range(num_ranks):
        shards = [
            tensor.tensor_split(num_ranks, entry.dim)[rank] if isinstance(entry, S) else tensor
            for tensor, entry in zip(tensors, inputs, strict=True)
        ]
        program = localize(call, signature, mesh, rank)
        made.append(run_program(program, dict(zip(call.tensor_names, shards, strict=True)), run_op))
    return made, chosen.outputs


#: Loss -> (what it is, operator, arguments behind the pair or behind `reduction`, inputs).
MEANS: dict[str, tuple[Callable[..., torch.Tensor], tuple[Any, ...], tuple[Any, ...], Any]] = {
    "mse_loss": (functional.mse_loss, (), (), real),
    "smooth_l1_loss": (functional.smooth_l1_loss, (), (1.0,), real),
    "huber_loss": (functional.huber_loss, (), (1.0,), real),
    "soft_margin_loss": (functional.soft_margin_loss, (), (), signs),
    "binary_cross_entropy": (functional.binary_cross_entropy, (None,), (), chance),
}


@pytest.mark.parametrize("rows", [5, 2])
@pytest.mark.parametrize("name", sorted(MEANS))
def test_the_mean_loss_of_uneven_shards_is_that_of_one_device(name: str, rows: int):
    function, before, behind, make = MEANS[name]
    x, target = make(rows, 3), make(rows, 3)

    made, outputs = ranks(
        f"aten.{name}.default", (x, target, *before, MEAN, *behind), 3, (S(0), S(0))
    )

    parts = [part for (part,) in made]
    assert outputs == (P,)
    assert not any(part.isnan() for part in parts)
    torch.testing.assert_close(torch.stack(parts).sum(), function(x, target))


@pytest.mark.parametrize("rows", [5, 2])
@pytest.mark.parametrize("name", sorted(MEANS))
def test_the_gradient_of_a_mean_loss_on_uneven_shards_is_that_of_one_device(name: str, rows: int):
    function, before, behind, make = MEANS[name]
    x, target = make(rows, 3).requires_grad_(), make(rows, 3)
    (expected,) = torch.autograd.grad(function(x, target), x)
    one = torch.ones((), dtype=torch.float64)
    args = (one, x.detach(), target, *before, MEAN, *behind)

    made, outputs = ranks(f"aten.{name}_backward.default", args, 3, (B, S(0), S(0)))

    assert outputs == (S(0),)
    torch.testing.assert_close(torch.cat([part for (part,) in made]), expected)


class Checked(torch.fx.Interpreter):
    """Verifies every operator on the values that it meets; counts those that rows may be split of.

    `rows` is the number of rows, which no other dim has.
    """

    def __init__(self, graph: torch.fx.GraphModule, rows: int) -> None:
        super().__init__(graph)
        self.rows = rows
        self.whole: list[str] = []

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if not isinstance(target, torch._ops.OpOverload):
            return super().call_function(target, args, kwargs)
        report = verify(str(target), *args, isolated=False, **kwargs)
        assert report.ok, str(report)
        made = super().call_function(target, args, kwargs)
        tensors = [entry for entry in (*args, made) if isinstance(entry, torch.Tensor)]
        split = NdSbp(S(0))
        claims = [(*claim.signature.inputs, *claim.signature.outputs) for claim in report.claimed]
        if any(entry.shape[:1] == (self.rows,) for entry in tensors) and not any(
            split in claim for claim in claims
        ):
            self.whole.append(str(target))
        return made


#: Losses that ATen has no operator for (or only for some): (loss, first argument, second).
PIECES: dict[str, tuple[Callable[..., torch.Tensor], Any, Any]] = {
    "bce": (functional.binary_cross_entropy, chance, chance),
    "bce_with_logits": (functional.binary_cross_entropy_with_logits, real, chance),
    "cosine_embedding": (
        lambda x, y: functional.cosine_embedding_loss(x, y, torch.ones(5, dtype=x.dtype)),
        real,
        real,
    ),
    "huber": (functional.huber_loss, real, real),
    "kl_div": (lambda x, y: functional.kl_div(x, y, reduction="batchmean"), real, chance),
    "l1": (functional.l1_loss, real, real),
    "mse": (functional.mse_loss, real, real),
    "nll_sum": (
        lambda x, y: functional.nll_loss(x, y[:, 0].mul(3).long(), reduction="sum"),
        real,
        chance,
    ),
    "poisson": (functional.poisson_nll_loss, real, chance),
    "smooth_l1": (functional.smooth_l1_loss, real, real),
    "soft_margin": (functional.soft_margin_loss, real, signs),
}


@pytest.mark.slow(but=2)
@pytest.mark.parametrize("name", sorted(PIECES))
def test_every_operator_of_a_loss_and_its_gradient_can_split_the_batch(name: str):
    function, make_x, make_y = PIECES[name]

    def step(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x = x.detach().requires_grad_()
        value = function(x, y)
        return value, *torch.autograd.grad(value, x)

    pair = make_x(5, 3), make_y(5, 3)
    graph = make_fx(functionalize(make_fx(step)(*pair), remove="mutations"))(*pair)
    checked = Checked(graph, rows=5)

    made = checked.run(*pair)

    assert not checked.whole
    torch.testing.assert_close(made, step(*pair))


def legal(op: str, *args: Any, **kwargs: Any) -> set[str]:
    return {str(entry) for entry in legal_signatures(op, *args, **kwargs)}


def test_a_summed_likelihood_splits_samples_and_classes():
    found = legal("aten.nll_loss_forward.default", (6, 4), classes(4, 6), None, SUM, -100)

    assert found == {
        "S(0), S(0) -> P, P",
        "S(1), B -> P, B",
        "P, B -> P, B",
        "B, B -> B, B",
    }


def test_a_mean_likelihood_needs_all_samples_but_not_all_classes():
    found = legal("aten.nll_loss_forward.default", (6, 4), classes(4, 6), None, MEAN, -100)

    assert found == {"S(1), B -> P, B", "P, B -> P, B", "B, B -> B, B"}


def test_the_gradient_of_a_mean_likelihood_splits_samples_and_classes():
    args = ((), (6, 4), classes(4, 6), None, MEAN, -100, ())

    found = legal("aten.nll_loss_backward.default", *args)

    assert {"B, S(0), S(0), B -> S(0)", "B, S(1), B, B -> S(1)", "P, B, B, B -> P"} <= found
    assert "B, B, B, P -> B" not in found


def test_the_gradient_of_a_summed_likelihood_does_not_read_the_total_weight():
    args = ((), (6, 4), classes(4, 6), None, SUM, -100, ())

    found = legal("aten.nll_loss_backward.default", *args)

    assert "B, B, B, P -> B" in found


def test_cross_entropy_of_a_vocabulary_split_over_more_ranks_than_classes_is_that_of_one_device():
    scores, targets, weight = real(7, 2), classes(2, 7), chance(2)
    expected = functional.nll_loss(scores, targets, weight)

    made, outputs = ranks(
        "aten.nll_loss_forward.default",
        (scores, targets, weight, MEAN, -100),
        3,
        (S(1), B, B),
    )

    assert outputs == (P, B)
    torch.testing.assert_close(torch.stack([value for value, _ in made]).sum(), expected)


@pytest.mark.parametrize("in_row", [False, True])
def test_alignments_of_targets_of_several_lengths_split_the_batch(in_row: bool):
    scores, lengths = real(6, 5, 4).log_softmax(-1), [3, 1, 2, 1, 2]
    targets = classes(3, 5, 3) + 1
    row = torch.cat([entry[:length] for entry, length in zip(targets, lengths, strict=True)])
    times = [6, 6, 5, 4, 6]
    args = (scores, row if in_row else targets, times, lengths, 0, False)
    expected, alpha = run_op("aten._ctc_loss.default", args, {})

    made, outputs = ranks("aten._ctc_loss.default", args, 3, (S(1), B) if in_row else (S(1), S(0)))

    assert outputs == (S(0), S(0))
    torch.testing.assert_close(torch.cat([value for value, _ in made]), expected)
    assert [tuple(part.shape) for _, part in made] == [(2, *alpha.shape[1:])] * 2 + [
        (1, *alpha.shape[1:])
    ]
